"""Runs the server on a port until it is told to stop."""

import ipaddress
import os
import threading
from pathlib import Path

import uvicorn

from .engine import Engine
from .server import build_server


class _Server(uvicorn.Server):
    """Gives requests up when it is told to stop, and then ends like a program that is done."""

    def __init__(self, config: uvicorn.Config, engine: Engine):
        super().__init__(config)
        self._engine = engine

    def handle_exit(self, sig: int, frame) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        # It waits for the running pass, which a signal handler must not.
        threading.Thread(target=self._engine.close).start()


def check_access(host: str, token_file: Path | None, no_auth: bool) -> str | None:
    """The token that clients must send, from a file or from ARIMAGE_TOKEN; None lets everybody in.

    Raises:
        ValueError: if the token is empty or not printable ASCII, or if there is none though others than this machine reach
            the server.
    """
    token = os.environ.get("ARIMAGE_TOKEN") if token_file is None else token_file.read_text()
    if token is not None:
        token = token.strip()
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError(f"{token_file or 'ARIMAGE_TOKEN'} holds no token: put in a line of printable ASCII")
        return token
    local = host == "localhost" or _is_loopback(host)
    if not local and not no_auth:
        raise ValueError(
            f"--host {host} lets others in, and there is no token: give --token-file, set ARIMAGE_TOKEN, or say --no-auth"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_forever(engine: Engine, host: str, port: int, token: str | None, base_url: str | None) -> None:
    """Serve until SIGINT or SIGTERM, which gives waiting requests up and closes the engine."""
    config = uvicorn.Config(
        build_server(engine, token=token, base_url=base_url), host=host, port=port, server_header=False
    )
    try:
        _Server(config, engine).run()
    finally:
        engine.close()
