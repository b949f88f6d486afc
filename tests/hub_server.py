"""A small Hugging Face hub of our own: real HTTP on two ports, the hub and the storage that it redirects to.

It speaks what `huggingface_hub` asks of the real one: the listing of a revision with sizes and digests, `resolve` with
ETag and `X-Repo-Commit`, redirects to signed addresses elsewhere, byte ranges, gates, and every way to say no. Bodies
can be cut, slowed and held. What was sent is counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

SIGNATURE = "X-Amz-Signature=5ec2e7"
PIECE = 2**16


@dataclass
class Repository:
    """`files` by name; those that end in `.safetensors` lie in the storage. `gated`: tokens that were let in."""

    name: str
    files: dict[str, Path]
    commit: str = "c0ffee00" * 5
    refs: tuple[str, ...] = ("main",)
    gated: set[str] | None = None
    private: set[str] | None = None


@dataclass
class Sent:
    """One answer with a body: from which byte on, and how many went out."""

    name: str
    start: int
    count: int = 0
    authorization: str | None = None


@dataclass
class Hub:
    """Start with `with`. Faults are set while it runs."""

    repositories: list[Repository] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)  # each ends one body of the storage after so many bytes
    bytes_per_second: float = float("inf")
    held: threading.Event | None = None  # bodies stop half-way until it is set
    ranges: bool = True
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # given instead, one per request
    names_only: bool = False  # a mirror that lists no sizes and no digests
    damage: int = 0  # so many bodies have one wrong byte
    sent: list[Sent] = field(default_factory=list)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Authorization

    def __enter__(self) -> Hub:
        self.servers = [Server(self, Front), Server(self, Storage)]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        if self.held:
            self.held.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].server_port}"

    @property
    def storage(self) -> str:
        return f"http://127.0.0.1:{self.servers[1].server_port}"

    def served(self, name: str) -> int:
        return sum(sent.count for sent in self.sent if sent.name == name)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub, handler: type[BaseHTTPRequestHandler]) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), handler)

    def handle_error(self, *args: object) -> None:
        """Clients that leave are what is tested here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    @property
    def hub(self) -> Hub:
        return self.server.hub

    @property
    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def refuse(self, status: int, **headers: str) -> None:
        self.reply(status, b"", {name.replace("_", "-"): value for name, value in headers.items()})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def stream(self, path: Path, headers: dict[str, str], *, faulty: bool) -> None:
        """The file, or the range asked for, with the faults that are set."""
        size, hub = path.stat().st_size, self.hub
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start = int(asked[1]) if asked and hub.ranges else 0
        partial = bool(asked) and hub.ranges
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        for name, value in {"Content-Length": str(size - start), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = Sent(path.name, start, authorization=self.headers.get("Authorization"))
        hub.sent.append(sent)
        limit = hub.cuts.pop(0) if faulty and hub.cuts else None
        with suppress(OSError):
            for whole in self.pieces(path, start, faulty=faulty):
                piece = whole if limit is None else whole[: limit - sent.count]
                self.wfile.write(piece)
                sent.count += len(piece)
                if sent.count == limit:
                    self.close_connection = True
                    return

    def pieces(self, path: Path, start: int, *, faulty: bool) -> Iterator[bytes]:
        hub, size = self.hub, path.stat().st_size
        spoiled = faulty and hub.damage > 0
        hub.damage -= spoiled
        with path.open("rb") as file:
            file.seek(start)
            while piece := file.read(PIECE):
                yield bytes([piece[0] ^ 1]) + piece[1:] if spoiled else piece
                spoiled = False
                if faulty and hub.held and file.tell() * 2 > size:
                    hub.held.wait()
                if faulty and hub.bytes_per_second < float("inf"):
                    time.sleep(len(piece) / hub.bytes_per_second)


class Front(Handler):
    """`/api/models/…`, `/{owner}/{name}/resolve/…`, and the same of data sets."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/agent-harnesses":  # the library's own question, about what it tells of itself
            return self.refuse(404)
        self.hub.asked.append((self.command, path, self.headers.get("Authorization")))
        if self.hub.answers:
            status, headers = self.hub.answers.pop(0)
            return self.reply(status, b"", headers)
        listing = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)/revision/(.+)", path)
        file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = listing or file
        repository = self.find(found[1]) if found else None
        if repository is None or found is None:
            return self.refuse(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if found[2] not in (*repository.refs, repository.commit):
            return self.refuse(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        return self.listing(repository) if listing else self.file(repository, found[3])

    def find(self, name: str) -> Repository | None:
        for repository in self.hub.repositories:
            if repository.name == name:
                hidden = repository.private is not None and self.token not in repository.private
                return None if hidden else repository
        return None

    def listing(self, repository: Repository) -> None:
        told = {"id": repository.name, "sha": repository.commit, "private": False, "tags": [], "downloads": 0}
        siblings = [
            {"rfilename": name} if self.hub.names_only else described(name, path)
            for name, path in repository.files.items()
        ]
        body = json.dumps(told | {"siblings": siblings}).encode()
        self.reply(200, body, {"Content-Type": "application/json"})

    def file(self, repository: Repository, name: str) -> None:
        if repository.gated is not None and self.token not in repository.gated:
            said = f"Access to model {repository.name} is restricted."
            return self.refuse(403 if self.token else 401, X_Error_Code="GatedRepo", X_Error_Message=said)
        if name not in repository.files:
            return self.refuse(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
        path, headers = repository.files[name], {"X-Repo-Commit": repository.commit}
        if not name.endswith(".safetensors"):
            return self.stream(path, headers | {"ETag": f'"{git_digest(path)}"'}, faulty=False)
        place = {"Location": f"{self.hub.storage}{path}?{SIGNATURE}"}
        linked = {"X-Linked-ETag": f'"{sha256(path)}"', "X-Linked-Size": str(path.stat().st_size)}
        return self.reply(302, b"", headers | place | linked)


class Storage(Handler):
    """Where large files lie: another origin, addresses with a signature, no tokens."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.query != SIGNATURE:
            return self.refuse(403)
        return self.stream(Path(unquote(parts.path)), {"ETag": '"of-the-storage"'}, faulty=True)


def described(name: str, path: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"rfilename": name, "size": path.stat().st_size, "blobId": git_digest(path)}
    if name.endswith(".safetensors"):
        told["lfs"] = {"size": told["size"], "sha256": sha256(path), "pointerSize": 134}
    return told


def point_at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What `HF_ENDPOINT` would do to a process that has not begun yet."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


DIGESTS: dict[tuple[Path, int, str], str] = {}


def sha256(path: Path) -> str:
    return _digest(path, "sha256", b"")


def git_digest(path: Path) -> str:
    return _digest(path, "sha1", f"blob {path.stat().st_size}\0".encode())


def _digest(path: Path, name: str, begin: bytes) -> str:
    key = (path, path.stat().st_mtime_ns, name)
    if key not in DIGESTS:
        digest = hashlib.new(name, begin)
        with path.open("rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
        DIGESTS[key] = digest.hexdigest()
    return DIGESTS[key]
