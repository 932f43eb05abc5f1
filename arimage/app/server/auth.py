"""Access to the server and the demo: tokens, passwords, and requests from pages of other sites."""

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware

from .errors import error_response


# Characters of a file of tokens.
MAX_TOKENS = 2**20
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
# What the paths of the server's routes begin with.
OWN_PATHS = ("v1", "health", "metrics", "pictures", "openapi.json")


def check_tokens(host: str, token_file: Path | None, no_auth: bool) -> tuple[str, ...]:
    """The tokens of which clients of the server must send one, from the lines of a file or from ARIMAGE_TOKEN; without
    any, everybody may use it.

    Raises:
        ValueError: if the file cannot be read, if it holds no token or one that is not printable ASCII, or if there is
            none although other machines can reach `host`.
    """
    try:
        if token_file is None:
            text = os.environ.get("ARIMAGE_TOKEN")
        else:
            # A pipe may hold it, and a device has no end.
            with token_file.open() as file:
                text = file.read(MAX_TOKENS)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--token-file {token_file} cannot be read ({error}): write a line of printable ASCII per token"
        ) from error
    if text is not None:
        tokens = tuple(line.strip() for line in text.strip().split("\n"))
        if not all(token and token.isascii() and token.isprintable() for token in tokens):
            source = "ARIMAGE_TOKEN" if token_file is None else f"--token-file {token_file}"
            raise ValueError(f"{source} holds no token: write a line of printable ASCII per token")
        return tokens
    if not is_local(host) and not no_auth:
        raise ValueError(
            f"other machines can reach --host {host}, and no token is set: give --token-file, set ARIMAGE_TOKEN, or "
            "give --no-auth"
        )
    return ()


def check_password(host: str, auth: str | None) -> tuple[str, str] | None:
    """The user and password that the demo asks for, from "user:password"; None lets everybody in.

    Raises:
        ValueError: if `auth` has another form, or if it is None although other machines can reach `host`.
    """
    if auth is not None:
        user, _, password = auth.partition(":")
        if not (user and password):
            raise ValueError("--auth is not of the form user:password: give both, with a colon between them")
        return user, password
    if not is_local(host):
        raise ValueError(f"other machines can reach --host {host}, and no password is set: give --auth user:password")
    return None


def check_addresses(base_url: str | None, allow_origin: Sequence[str], root_path: str = "") -> None:
    """Refuse a base URL, an origin or a root path of another form.

    Raises:
        ValueError: with the option that is wrong.
    """
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url is {base_url}: give an address that begins with https:// or http://")
    for origin in allow_origin:
        if not re.fullmatch(r"https?://[^/*\s]+", origin):
            raise ValueError(f"--allow-origin is {origin}: give scheme and host, as in https://chat.example.org")
    if root_path and not re.fullmatch(r"(/[\w.~-]+)+", root_path, re.ASCII):
        raise ValueError(f"--root-path is {root_path}: give a path that begins with / and ends without, as in /images")
    if root_path and root_path.split("/")[1] in OWN_PATHS:
        raise ValueError(
            f"--root-path is {root_path}, where the server has routes of its own: give the path in front of them, as "
            "in /images for /images/v1/models, or leave it out"
        )


def is_local(host: str) -> bool:
    """Whether only programs on this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class SameSite:
    """Refuses requests to another host, and those that a page of another site sends through the browser of its
    visitor.

    Args:
        hosts: the host names of this site, as in `LOCAL_HOSTS`.
        allow_origin: other sites that may send requests.
    """

    def __init__(self, app, hosts: list[str], allow_origin: Sequence[str] = ()):
        self.app, self.hosts, self.allow_origin = app, hosts, allow_origin

    async def __call__(self, scope, receive, send):
        app = self.app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if _without_port(headers.get("host", "")) not in self.hosts:
                names = "localhost, 127.0.0.1 or the host of --base-url, or set a token"
                app = error_response(f"the request is for another host: send it to {names}", 400)
            elif self._is_foreign(scope["method"], headers):
                message = "a page of another site sent this request: open the page of this server itself"
                app = error_response(message, 403)
        await app(scope, receive, send)

    def _is_foreign(self, method: str, headers: Headers) -> bool:
        if headers.get("origin") in self.allow_origin:
            return False
        if "origin" in headers and _host_of(headers["origin"]) not in self.hosts:
            return True
        # Another site may link to a page, and show an image whose URL it has.
        shown = method == "GET" and headers.get("sec-fetch-dest") in ("document", "image")
        return headers.get("sec-fetch-site") == "cross-site" and not shown


def local_only(host: str, base_url: str | None = None, allow_origin: Sequence[str] = ()) -> list[Middleware]:
    """Middleware that protects a loopback server without a token from the pages open in a browser, which could send it
    requests, also under a host name of their own (DNS rebinding).

    Args:
        host: the interface on which the server listens. If other machines can reach it, its names are unknown and the
            list is empty.
        base_url: the public URL of the server.
        allow_origin: other sites whose pages may send requests.
    """
    if not is_local(host):
        return []
    hosts = [*LOCAL_HOSTS, f"[{host}]" if ":" in host.strip("[]") else host]
    if base_url is not None:
        hosts.append(_host_of(base_url))
    return [Middleware(SameSite, hosts=hosts, allow_origin=allow_origin)]


def _host_of(url: str) -> str:
    """The host of a URL without the port; an IPv6 address keeps its brackets."""
    return _without_port(url.partition("://")[2].partition("/")[0])


def _without_port(host: str) -> str:
    return re.sub(r":\d+$", "", host).lower()
