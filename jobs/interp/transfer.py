"""One file from a Hugging Face hub into its cache: gone on with after any end, checked by its digest, alone.

`huggingface_hub` 2 throws the part of a file away that had arrived when a download ends early. Here it stays beside the
blob as `<etag>.mistudio.incomplete` (a name that `hf cache prune` knows) and is gone on with by byte range, in this
process or another, by this job or another.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.interp.errors import Stopped, Unusable
from jobs.interp.repository import RemoteFile, in_words

logger = logging.getLogger(__name__)

#: Waits between tries that bring no byte double from the first to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
#: So many such tries in a row give up: a question after 8 s, a body, of which hours may have passed, after 7 min.
QUESTION_TRIES, BODY_TRIES = 5, 20
#: A hub that asks for a longer pause (429) is not waited for.
PATIENCE_SECONDS = 300.0
READ_BYTES = 2**20
PARTIAL = ".mistudio.incomplete"


class Unreachable(Unusable):
    """The hub did not answer, or has no time now."""


class Broken(Exception):
    """The body is not what was asked for; the next try may do better."""


class Pauses:
    """Waits between tries, and gives up; `message` says what is waited for."""

    def __init__(self, stop: threading.Event, tries: int) -> None:
        self.stop, self.tries, self.failures, self.message = stop, tries, 0, ""

    def arrived(self) -> None:
        self.failures, self.message = 0, ""

    def after(self, error: Exception, what: str) -> None:
        """Wait as long as the error asks for. Raises `Unusable` when it is not worth more, `Stopped` in between."""
        self.failures += 1
        asked = _seconds_asked(error)
        seconds = asked if asked is not None else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self.failures - 1))
        if seconds > PATIENCE_SECONDS or self.failures >= self.tries:
            raise Unreachable(_given_up(error, what, asked, self.failures)) from error
        # Not the error itself: addresses of the storage are signed.
        logger.info("%s: %s; going on in %.1f s", what, _status(error) or type(error).__name__, seconds)
        self.message = f"the connection broke; going on in {seconds:.0f} s"
        if asked is not None:
            self.message = f"the hub asks for a pause of {asked:.0f} s"
        if self.stop.wait(seconds):
            raise Stopped


def _seconds_asked(error: Exception) -> float | None:
    """What a 429 or 503 asks for (`Retry-After` in seconds, or the hub's own `RateLimit`)."""
    from huggingface_hub.utils._http import parse_ratelimit_headers

    headers = getattr(getattr(error, "response", None), "headers", {})
    if headers.get("Retry-After", "").isdigit():
        return float(headers["Retry-After"])
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds) if limit and limit.remaining == 0 else None


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _given_up(error: Exception, what: str, asked: float | None, tries: int) -> str:
    from huggingface_hub import constants

    status = _status(error)
    kept = "What has arrived is kept; a retry goes on from there."
    if status == 429:
        when = f"in {asked:.0f} s" if asked is not None else "in a few minutes"
        return f"The hub has had too many requests from here (429) and asks to come back {when}. {kept}"
    if status is not None:
        return f"The hub answers {status} to {what}, {tries} times in a row. {kept}"
    if isinstance(error, Broken):
        return f"{error} {kept}"
    return (
        f"{constants.ENDPOINT} (HF_ENDPOINT) could not be reached for {what}: {type(error).__name__}, {tries} times in "
        f"a row. {kept} A host without network takes a model folder by its path, or from the cache."
    )


class Transfer:
    """`done` bytes of `file.size` are on the disk; `run` brings the rest, or raises what a person can read."""

    def __init__(
        self,
        repository: str,
        commit: str,
        file: RemoteFile,
        blob: Path,
        token: str | bool,
        stop: threading.Event,
    ) -> None:
        self.repository, self.commit, self.file, self.blob, self.token = repository, commit, file, blob, token
        self.partial = blob.with_name(blob.name + PARTIAL)
        self.pauses = Pauses(stop, BODY_TRIES)
        self.stop = stop
        self.done = self._there()

    @property
    def message(self) -> str:
        return self.pauses.message

    @property
    def complete(self) -> bool:
        return self.blob.exists() and self.blob.stat().st_size == self.file.size

    def _there(self) -> int:
        if self.complete:
            return self.file.size
        return min(self.file.size, self.partial.stat().st_size) if self.partial.exists() else 0

    def run(self) -> None:
        """Bring what is missing; waits while another process brings the same file."""
        with self._alone():
            if self.complete:
                self.done = self.file.size
                return
            for last in (False, True):
                if self._bring() == self.file.etag or len(self.file.etag) not in (40, 64):
                    break
                self.partial.unlink(missing_ok=True)
                if last:
                    raise Unusable(
                        f"{self.file.name} arrived damaged twice: its digest is not {self.file.etag}."
                    )
            self._settle()

    def _settle(self) -> None:
        """Some file systems lock nobody out: then another wrote the same bytes, and may be first."""
        try:
            os.replace(self.partial, self.blob)
        except FileNotFoundError:
            if not self.complete:
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The library's own lock of this blob, so that other programs keep off, too."""
        from filelock import Timeout
        from huggingface_hub.utils._fixes import WeakFileLock

        lock = self.blob.parents[2] / ".locks" / self.blob.parents[1].name / f"{self.blob.name}.lock"
        for folder in (lock.parent, self.blob.parent):
            folder.mkdir(parents=True, exist_ok=True)
        while True:
            if self.stop.is_set():
                raise Stopped
            try:
                with WeakFileLock(lock, timeout=0.3):
                    self.pauses.message = ""
                    yield
                    return
            except Timeout:
                self.pauses.message = "another download fetches the same file"
                self.done = max(self.done, self._there())

    def _bring(self) -> str:
        """The digest of the whole file, once all of it is in `partial`."""
        with open(os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as out:
            if os.fstat(out.fileno()).st_size > self.file.size:
                out.truncate(0)
            digest = _digest_of(self.file)
            at = self._read_back(out, digest)
            while at < self.file.size:
                try:
                    for chunk in self._body(at):
                        _write(out, chunk)
                        digest.update(chunk)
                        at += len(chunk)
                        self.done = max(self.done, at)
                except passing() as error:
                    self.pauses.after(error, f"{self.repository} {self.file.name}")
            os.fsync(out.fileno())
        return str(digest.hexdigest())

    def _read_back(self, out: Any, digest: Any) -> int:
        """What had arrived before, into the digest; the bytes, after which `out` stands."""
        at, self.pauses.message = 0, "reading what had arrived before"
        while chunk := out.read(READ_BYTES):
            self._go_on()
            digest.update(chunk)
            at += len(chunk)
        self.pauses.message = ""
        return at

    def _body(self, at: int) -> Iterator[bytes]:
        """The bytes from `at` on, as they arrive; a server without ranges sends the first ones for nothing."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import hf_hub_url
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import get_session, hf_raise_for_status

        url = hf_hub_url(self.repository, self.file.name, revision=self.commit, endpoint=constants.ENDPOINT)
        headers = build_hf_headers(token=self.token) | {
            "Accept-Encoding": "identity",
            "Range": f"bytes={at}-",
        }
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        # A redirect to another host loses the token on the way (httpx), as it must.
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            with in_words(self.repository, self.commit, self.token):
                hf_raise_for_status(response)
            skip = at if response.status_code == 200 else self._require_range(response, at)
            for chunk in response.iter_bytes():
                self._go_on()
                self.pauses.arrived()
                kept, skip = chunk[skip:], max(0, skip - len(chunk))
                at += len(kept)
                if at > self.file.size:
                    raise Broken(
                        f"{self.file.name} is longer than the {self.file.size} bytes that the hub lists."
                    )
                if kept:
                    yield kept
        if at < self.file.size:
            raise Broken(f"{self.file.name} ended after {at} of {self.file.size} bytes.")

    def _require_range(self, response: Any, at: int) -> int:
        told = response.headers.get("Content-Range", "")
        if told != f"bytes {at}-{self.file.size - 1}/{self.file.size}":
            raise Broken(f"{self.file.name}: asked for the bytes from {at}, the answer is “{told}”.")
        return 0

    def _go_on(self) -> None:
        if self.stop.is_set():
            raise Stopped


def _write(out: Any, chunk: bytes) -> None:
    """All of it, at once: what the kernel has is not lost when this process is killed."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[out.write(rest) :]


def _digest_of(file: RemoteFile) -> Any:
    """The function that a hub names contents by: SHA-256 for large files, git's blob hash for small ones."""
    if len(file.etag) == 40:
        return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    return hashlib.sha256()


def passing() -> tuple[type[Exception], ...]:
    """Errors after which another try is worthwhile."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    return (httpx2.TransportError, HfHubHTTPError, Broken)
