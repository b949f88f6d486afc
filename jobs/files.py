"""Files of jobs and artifacts over HTTP: inside their folder only, streamed, with Range.

Under ASGI `FileResponse` reads a file whole into memory; an asynchronous iterator does not.
"""

from __future__ import annotations

import asyncio
import mimetypes
import re
from collections.abc import AsyncIterator
from pathlib import Path

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse

CHUNK = 1 << 20
#: Twenty digits are more than any file has bytes, and few enough for a number.
RANGE = re.compile(r"^bytes=([0-9]{0,20})-([0-9]{0,20})$")


def inside(root: Path, name: str) -> Path:
    """The file of this name below `root`; 404 for what is not there or leads outside."""
    try:
        path = (root / name).resolve()
        found = path.is_relative_to(root.resolve()) and path.is_file()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # no file can have this name: too long, a NUL, links in a ring
        found = False
    if not found:
        raise Http404
    return path


def listing(root: Path) -> list[dict[str, object]]:
    """Every file below `root`: relative name and size."""
    if not root.is_dir():
        return []
    found = sorted(p for p in root.rglob("*") if p.is_file() and not p.name.startswith("."))
    return [{"path": str(p.relative_to(root)), "size_bytes": p.stat().st_size} for p in found]


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """First and last byte of a Range header; None when it asks for nothing there is."""
    match = RANGE.match(header)
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return (max(0, size - int(last)), size - 1) if int(last) else None
    end = min(int(last), size - 1) if last else size - 1
    return (int(first), end) if int(first) <= end else None


def stream(request: HttpRequest, path: Path) -> HttpResponse | StreamingHttpResponse:
    size, status = path.stat().st_size, 200
    first, last = 0, size - 1
    if header := request.headers.get("Range"):
        asked = byte_range(header, size)
        if asked is None:
            return unsatisfiable(size)
        (first, last), status = asked, 206
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    response = StreamingHttpResponse(pieces(path, first, last + 1), status=status, content_type=kind)
    response["Content-Length"] = str(last + 1 - first)
    response["Accept-Ranges"] = "bytes"
    # Never shown as a page of this site, whatever it contains.
    response["Content-Disposition"] = f'attachment; filename="{path.name}"'
    if status == 206:
        response["Content-Range"] = f"bytes {first}-{last}/{size}"
    return response


def unsatisfiable(size: int) -> JsonResponse:
    said = {
        "code": "range_not_satisfiable",
        "detail": f"The file has {size} bytes, and none of those asked for.",
    }
    return JsonResponse(said, status=416, headers={"Content-Range": f"bytes */{size}"})


async def pieces(path: Path, start: int, end: int) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        file.seek(start)
        while start < end and (piece := await asyncio.to_thread(file.read, min(CHUNK, end - start))):
            start += len(piece)
            yield piece
