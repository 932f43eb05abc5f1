"""The routes that generate nothing: models, images by their URL, a page for browsers, and monitoring."""

from html import escape

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, JSONResponse, Response

from .... import __version__
from ..errors import error_response
from ..metrics import exposition
from ..middleware import PICTURES
from ..state import State, authorised
from .schemas import describe_model


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
<p>This server generates images with autoregressive models. Any client of OpenAI's APIs of images can use it. Its base
URL is the address of this page, followed by <code>/v1</code>.</p>
<h2>Models</h2>
<ul>{models}</ul>
<h2>More</h2>
<ul>
<li><a href="{address}/v1/models">v1/models</a>: sizes, decodings and defaults of the models</li>
<li><a href="{address}/openapi.json">openapi.json</a>: the routes and their fields</li>
<li><a href="{address}/health">health</a> and <a href="{address}/metrics">metrics</a>: for monitoring</li>
</ul>
<p>An image from a shell (<code>docs/server_reference.md</code> explains every field):</p>
<pre>curl -s {address}/v1/images/generations -H 'Content-Type: application/json' \\
  -d '{{"model": "{first}", "prompt": "a red heart", "response_format": "url"}}'</pre>
</html>
"""

# Health checks, and browsers that show an image, send no token.
public = APIRouter()
router = APIRouter(dependencies=[Depends(authorised)])


@public.get(PICTURES + "{name}")
async def picture(name: str, state: State) -> Response:
    """An image whose URL was asked for."""
    found = state.pictures.get(name)
    if found is None:
        return error_response("this image does not exist or has expired: generate it again", 404)
    return Response(found[0], media_type=found[1], headers={"Cache-Control": "private, max-age=3600"})


@public.get("/health")
async def health(state: State) -> Response:
    """200 while requests are accepted; 503 while the server drains, and after the engine was closed or has failed."""
    status = "closed" if not state.backend.alive else "draining" if state.draining else "ok"
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/v1/models")
async def models(state: State) -> dict:
    """The models of this server and their abilities."""
    known = state.models
    described = [
        describe_model(name, model, known[model], state.started)
        for name, model in state.names.items()
        # An adapter may be unloaded meanwhile.
        if model in known
    ]
    return {"object": "list", "data": described}


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> dict:
    """The abilities of one model."""
    known = state.models
    found = state.model_of(name, known)
    return describe_model(name, found, known[found], state.started)


@router.get("/", include_in_schema=False)
async def home(http: HTTPRequest, state: State) -> Response:
    """The page of the server for people who open its address in a browser."""
    models = "".join(
        f"<li><code>{escape(name)}</code>{'' if name == model else f', which is {escape(model)}'}</li>"
        for name, model in state.names.items()
    )
    address, first = escape(state.root_of(http)), escape(next(iter(state.names)))
    return HTMLResponse(PAGE.format(version=__version__, models=models, address=address, first=first))


@router.get("/metrics")
async def prometheus(state: State) -> Response:
    """Metrics for Prometheus."""
    text = exposition([*state.metrics.registry.collect(), *await state.backend.collect()])
    return Response(text, media_type=CONTENT_TYPE_LATEST)
