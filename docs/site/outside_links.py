"""A mkdocs hook: links to files outside of `docs/`, which a site does not have, become the paths of these files."""

import posixpath
import re


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    def path_only(match: re.Match) -> str:
        text, link = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link.partition("#")[0]))
        if path.startswith("docs/"):
            return match.group()
        return text if path in text else f"{text} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)", path_only, markdown)
