"""Files of jobs and artifacts, a piece at a time: REST streams them whole, an agent reads text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from gpus.rest import ApiError
from jobs import api, files, paths
from monitor.mcp.arguments import Piece


def piece_of(root: Path, query: Any) -> dict[str, Any]:
    """Bytes `offset … next_offset` of a text file below `root`, for those who may read the folder."""
    asked = Piece(data=query)
    asked.is_valid(raise_exception=True)
    name, offset, limit = (asked.validated_data[key] for key in ("path", "offset", "limit"))
    path = files.inside(root, name)
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(min(offset, size))
        raw = file.read(limit)
    return {"path": name, "size_bytes": size, "offset": min(offset, size), **as_text(raw, min(offset, size))}


def as_text(raw: bytes, offset: int) -> dict[str, Any]:
    """The text and where it goes on; a character that was cut in two is left for the next piece."""
    if b"\0" in raw:
        raise ApiError(
            400, "not_text", "This file is not text; fetch it from REST, where files are streamed."
        )
    whole = raw.decode("utf-8", errors="ignore").encode()
    cut = raw[len(whole) :] if raw.startswith(whole) and len(raw) - len(whole) < 4 else b""
    kept = raw[: len(raw) - len(cut)] or raw
    return {"text": kept.decode("utf-8", errors="replace"), "next_offset": offset + len(kept)}


class JobFilePiece(api.OneJob):
    def get(self, request: Request, id: str) -> Response:
        return Response(piece_of(paths.job_folder(self.job()), request.query_params))


class ArtifactFilePiece(api.OneArtifact):
    def get(self, request: Request, id: str) -> Response:
        return Response(piece_of(self.folder(), request.query_params))
