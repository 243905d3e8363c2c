"""HTTP replies of the data plane: ranges of files, and errors as JSON with a status each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send


class DataPlaneError(RuntimeError):
    """A folder could not be listed or fetched."""


class NotHeld(DataPlaneError):
    """A host does not serve this folder or file, or no longer."""


class OtherIncarnation(DataPlaneError):
    """A host was restarted, or replaced in the meantime: what it held or sent is void."""


class Unreachable(DataPlaneError):
    """A host refuses connections, or is silent."""


class Damaged(DataPlaneError):
    """Bytes are incomplete or differ from their checksum."""


class Refused(DataPlaneError):
    """A host refused a request for another reason, such as a wrong key."""


INCARNATION: Final = "x-areal-lab-incarnation"
"""Header of requests and replies: which incarnation of the host's agent is meant, or replies."""
CHECKSUM: Final = "x-areal-lab-checksum"
"""Header of requests and replies: xxh3_128 of the whole file, in hexadecimal digits."""
STATUS: Final[dict[type[DataPlaneError], int]] = {
    Refused: 400,
    NotHeld: 404,
    OtherIncarnation: 409,
    Damaged: 422,
}
"""HTTP status of each error."""

_CHUNK_BYTES: Final = 4 << 20
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")


class UnsatisfiableRange(ValueError):
    """The range of a request is not in the bytes."""


def read_range_header(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """First byte and the byte after the last one; None without a range that we understand.

    Several ranges, and other units, are answered with all bytes, as the standard allows.

    Raises:
        UnsatisfiableRange: it begins behind the end.
    """
    match = _RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size_bytes - int(last)), size_bytes
    else:
        start, end = int(first), min(int(last) + 1, size_bytes) if last else size_bytes
    if start >= end:
        raise UnsatisfiableRange(f"bytes {header} of {size_bytes:,} bytes")
    return start, end


class RangeReply(Response):
    """Bytes, or the range of them that was asked for."""

    def __init__(
        self,
        read: Callable[[int, int], memoryview],
        size_bytes: int,
        *,
        checksum: str,
        kept: ExitStack,
        stall_s: float,
    ) -> None:
        """Prepare a reply.

        Args:
            read: bytes `[start, end)`; may wait for a disk.
            checksum: of all bytes.
            kept: closed at the end of the reply, sent or not.
            stall_s: longest time in which the other side takes no chunk.
        """
        super().__init__()
        self._read = read
        self._size_bytes = size_bytes
        self._checksum = checksum
        self._kept = kept
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        del receive
        with self._kept:
            header = dict(scope["headers"]).get(b"range", b"").decode("latin-1")
            try:
                found = read_range_header(header, self._size_bytes)
            except UnsatisfiableRange as error:
                await send(_start(416, {"content-range": f"bytes */{self._size_bytes}"}))
                await send({"type": "http.response.body", "body": str(error).encode()})
                return
            start, end = found or (0, self._size_bytes)
            headers = {
                "accept-ranges": "bytes",
                "content-length": str(end - start),
                "content-type": "application/octet-stream",
                CHECKSUM: self._checksum,
            }
            if found:
                headers["content-range"] = f"bytes {start}-{end - 1}/{self._size_bytes}"
            await send(_start(206 if found else 200, headers))
            await self._send_body(start, 0 if scope["method"] == "HEAD" else end, send)

    async def _send_body(self, start: int, end: int, send: Send) -> None:
        while True:
            stop = min(start + _CHUNK_BYTES, max(end, start))
            body = await asyncio.to_thread(self._read, start, stop)
            # A receiver that is cut off would keep the file open.
            async with asyncio.timeout(self._stall_s):
                more = stop < end
                await send({"type": "http.response.body", "body": body, "more_body": more})
            start = stop
            if not more:
                return


def error_reply(error: DataPlaneError) -> JSONResponse:
    """An error, with its status."""
    return JSONResponse({"error": {"message": str(error)}}, STATUS.get(type(error), 500))


async def on_error(_request: object, error: Exception) -> Response:
    """Starlette's handler of errors of the data plane."""
    assert isinstance(error, DataPlaneError)
    return error_reply(error)


async def on_unknown(_request: object, error: Exception) -> Response:
    """Starlette's handler of unknown paths and methods."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": {"message": error.detail}}, error.status_code)


def _start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
