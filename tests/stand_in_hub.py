"""A stand-in for the Hugging Face Hub on this machine, which the real client talks to."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub.utils.sha import git_hash


TOKEN = "hf_of_the_tests"
PATH = re.compile(r"/(?P<repository>[^/]+/[^/]+)/(?P<what>revision|tree|resolve)/(?P<revision>[^/]+)/?(?P<file>.*)")


class StandInHub:
    """Serves the folders of `repositories`, by owner/name, and notes in `requests` what is asked: (method, file,
    range).

    Attributes:
        gated: repositories whose files are for `TOKEN` only.
        revisions: what there is besides "main".
        cut: bytes after which the next transfer of a file that is longer breaks off; None for no break.
        failing: files, as owner/name/file, whose content gives an internal error.
        told: SHA-256 of files that are listed in place of their own.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.revisions = {"main"}
        self.cut: int | None = None
        self.failing: set[str] = set()
        self.told: dict[str, str] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: set[str | None] = set()

    def downloaded(self) -> list[str]:
        """Files whose content was asked for, as owner/name/file."""
        return sorted({file for method, file, _ in self.requests if method == "GET" and file})

    @contextmanager
    def running(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator["StandInHub"]:
        """Start it, and make it the Hub of this process with `cache` as the home of the client."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                hub.answer(self)

            def do_GET(self):
                hub.answer(self)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        constants, endpoint = huggingface_hub.constants, f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "ENDPOINT": endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": endpoint + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HOME": str(cache),
            "HF_HUB_CACHE": str(cache / "hub"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        # A proxy of the environment does not know this machine.
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            huggingface_hub.close_session()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path.removeprefix("/api/models")
        match = PATH.fullmatch(path)
        assert match, path
        repository, what, revision, file = map(unquote, match.group("repository", "what", "revision", "file"))
        authorization = request.headers.get("Authorization")
        self.tokens.add(authorization and authorization.removeprefix("Bearer "))
        folder = self.repositories.get(repository)
        if folder is None:
            return self.refuse(request, 401, "RepoNotFound")
        commits = {hashlib.sha1(f"{repository} {name}".encode()).hexdigest(): name for name in self.revisions}
        commit = next((commit for commit, name in commits.items() if revision in (commit, name)), None)
        if commit is None:
            return self.refuse(request, 404, "RevisionNotFound")
        files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
        if what == "revision":
            siblings = [{"rfilename": name, "size": p.stat().st_size} for name, p in files.items()]
            return self.reply_json(request, {"id": repository, "sha": commit, "siblings": siblings})
        if what == "tree":
            return self.reply_json(request, [self.entry(name, p.read_bytes()) for name, p in files.items()])
        byte_range = request.headers.get("Range")
        self.requests.append((request.command, f"{repository}/{file}", byte_range))
        if repository in self.gated and authorization != f"Bearer {TOKEN}":
            return self.refuse(request, 403 if authorization else 401, "GatedRepo")
        if file not in files:
            return self.refuse(request, 404, "EntryNotFound")
        if request.command == "GET" and f"{repository}/{file}" in self.failing:
            return self.refuse(request, 500, "InternalError")
        content = files[file].read_bytes()
        first = int(byte_range.removeprefix("bytes=").partition("-")[0]) if byte_range else 0
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if byte_range:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        body = content[first:]
        self.head(request, 206 if byte_range else 200, len(body), headers)
        if request.command == "GET":
            if self.cut is not None and len(body) > self.cut:
                body, self.cut, request.close_connection = body[: self.cut], None, True
            request.wfile.write(body)
        return None

    def entry(self, name: str, content: bytes) -> dict:
        """A file as the Hub lists it: large ones by their SHA-256, others by git's hash."""
        found = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
        sha256 = self.told.get(name, hashlib.sha256(content).hexdigest())
        lfs = {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 1}}
        return found | lfs if name.endswith(".safetensors") else found

    def reply_json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        body = json.dumps(value).encode()
        self.head(request, 200, len(body), {"Content-Type": "application/json"})
        request.wfile.write(body)

    def refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        self.head(request, status, 0, {"X-Error-Code": code})

    def head(self, request: BaseHTTPRequestHandler, status: int, length: int, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            request.send_header(name, value)
        request.end_headers()
