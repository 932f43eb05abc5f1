"""A mkdocs hook: links are written for the repository. A link to the page of a family leads to its place on the site,
and one to a file that the site does not have becomes the path of the file."""

import posixpath
import re

from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: Page, **kwargs) -> str:
    here = page.file.src_uri
    # Pages from outside of `docs/` are written with links from where they are.
    written_in = posixpath.dirname(page.meta.get("source", posixpath.join("docs", here)))

    def on_site(match: re.Match) -> str:
        text, link = match.groups()
        target, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(written_in, target))
        if "://" in link or not target:
            return match.group()
        family = re.fullmatch(r"arimage/pipelines/(\w+)/README\.md", path)
        if family:
            path = f"docs/models/{family[1]}.md"
        if not path.startswith("docs/"):
            return text if path in text else f"{text} (`{path}`)"
        moved = posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(here) or ".")
        return f"[{text}]({moved}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", on_site, markdown)
