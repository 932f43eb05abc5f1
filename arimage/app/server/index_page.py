"""The page of the server at /, for people who open its address in a browser."""

from collections.abc import Mapping
from html import escape

from ... import __version__


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>arimage</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 40rem; padding: 0 1rem; }}
pre {{ overflow-x: auto; }}
</style>
<h1>arimage {version}</h1>
<p>This server generates images with autoregressive models. Any client of the OpenAI Images API can use it. Its base
URL is the address of this page, followed by <code>/v1</code>.</p> <h2>Models</h2> <ul>{models}</ul> <h2>More</h2> <ul>
<li><a href="v1/models">v1/models</a>: sizes, decodings and defaults of the models</li> <li><a
href="openapi.json">openapi.json</a>: the routes and their fields</li> <li><a href="health">health</a> and <a
href="metrics">metrics</a>: for monitoring</li> </ul> <p>An image from a shell (<code>docs/server.md</code> explains
every field):</p> <pre>curl -s {address}/v1/images/generations -H 'Content-Type: application/json' \\
  -d '{{"model": "{first}", "prompt": "a red heart", "response_format": "url"}}'</pre>
</html>
"""


def home_page(names: Mapping[str, str], address: str) -> str:
    """The page.

    Args:
        names: the model of each name that clients may use.
        address: the URL of the server, without a slash at the end.
    """
    models = "".join(
        f"<li><code>{escape(name)}</code>{'' if name == model else f', which is {escape(model)}'}</li>"
        for name, model in names.items()
    )
    return PAGE.format(version=__version__, models=models, address=escape(address), first=escape(next(iter(names))))
