"""What reaches Gradio: the addresses that the page and clients use, and bodies and uploads of bounded size."""

import asyncio
import re
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse


# Everything else of Gradio is closed: it fetches the URLs that a client names, keeps without limit what components
# send, or belongs to features that the page does not have.
OPEN = re.compile(
    r"/(config/?|theme\.css|favicon\.ico|robots\.txt|manifest\.json|login/?|logout|(static|assets|svelte)/.+)?"
    r"|/gradio_api/(info/?|openapi\.json|startup-events|theme\.css|app_id/?|user/?|token/?|login_check/?"
    r"|(run|api|call)/.+|queue/(join|data|status)|cancel|reset/?|heartbeat/[^/]+"
    r"|upload|upload_progress|file=(?!https?:).+)"
)
UPLOAD = "/gradio_api/upload"
# Bytes of a body, and of the files of one upload, which may take as long to arrive.
MAX_BODY, MAX_UPLOAD = 2**20, 2**25
BODY_SECONDS = 60
# Bytes of all files that are kept, uploads and results; older files make room for newer ones.
MAX_KEPT = 2**29
# Seconds between two looks for too many results.
PAUSE = 10.0


class Gate:
    """ASGI middleware: refuses other addresses and too large bodies, and deletes the oldest files before an upload
    that would not fit, and when there are too many results.

    Args:
        folder: where Gradio keeps files.
    """

    def __init__(self, app, folder: Path):
        self.app, self.folder, self.arriving, self.next_look = app, folder, 0, 0.0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not OPEN.fullmatch(scope["path"]):
            await _answer(404, "the demo has no such address")(scope, receive, send)
        elif scope["path"] == UPLOAD:
            await self._upload(scope, receive, send)
        else:
            now = asyncio.get_running_loop().time()
            if scope["method"] == "POST" and now >= self.next_look:
                self.next_look = now + PAUSE
                await self._make_room()
            await self.app(scope, _bounded(receive, MAX_BODY), send)

    async def _make_room(self):
        await asyncio.to_thread(make_room, self.folder, MAX_KEPT - self.arriving)

    async def _upload(self, scope, receive, send):
        length = int(dict(scope["headers"]).get(b"content-length", MAX_UPLOAD))
        if length > MAX_UPLOAD:
            await _answer(413, f"the files are larger than {MAX_UPLOAD} bytes: send fewer")(scope, receive, send)
            return
        bounded, begun = _bounded(receive, length), False

        async def receive_file():
            nonlocal begun
            # Gradio asks for the body once it has checked the password.
            if not begun:
                if self.arriving + length > MAX_KEPT // 2:
                    raise HTTPException(503, "many files are being uploaded: try again later")
                begun = True
                self.arriving += length
                await self._make_room()
            return await bounded()

        try:
            await self.app(scope, receive_file, send)
        finally:
            self.arriving -= length * begun


def make_room(folder: Path, size: int) -> None:
    """Delete the oldest files of a folder until all of them together have at most `size` bytes."""
    files = []
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        except FileNotFoundError:
            continue
    total = sum(each for _, each, _ in files)
    for _, each, path in sorted(files):
        if total <= size:
            break
        path.unlink(missing_ok=True)
        total -= each


def _bounded(receive, most: int):
    """A `receive` whose body ends with an error after `most` bytes or `BODY_SECONDS`."""
    received, complete, until = 0, False, asyncio.get_running_loop().time() + BODY_SECONDS

    async def bounded():
        nonlocal received, complete
        if complete:
            # Waits for the end of the connection.
            return await receive()
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS} seconds") from error
        received += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if received > most:
            raise HTTPException(413, f"the body is larger than {most} bytes: send less")
        return message

    return bounded


def _answer(status: int, message: str) -> JSONResponse:
    return JSONResponse({"detail": message}, status)
