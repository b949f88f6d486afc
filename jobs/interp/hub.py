"""Fetch a model from a Hugging Face hub: safetensors weights, tokenizer, configuration, nothing else.

`HF_ENDPOINT`, `HF_HUB_OFFLINE` and the cache (`HF_HOME`) are the library's own, and what lies in that cache afterwards
is what the library would have put there. Bytes go by plain HTTP with ranges, which resumes to the byte, and not
through Xet, which would begin anew. The revision is pinned to its commit first: what is recorded is what was fetched.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from jobs.interp import aside
from jobs.interp.errors import Unusable
from jobs.interp.repository import (
    CONFIG,
    INDEX,
    Listing,
    RemoteFile,
    bearer,
    belongs,
    in_words,
    look,
    makes_a_model,
    model_of,
    shards_of,
)
from jobs.interp.transfer import QUESTION_TRIES, Pauses, Transfer, Unreachable, passing

#: Files that come side by side.
AT_ONCE = 4
COMMIT = re.compile(r"[0-9a-f]{40}")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Snapshot:
    """A fetched repository: a folder of links into the cache, and the commit."""

    folder: Path
    commit: str


@dataclass
class Fetch:
    """One repository at one revision, for one user. `listing`: what an earlier attempt had pinned, if there was one.

    `token`: a user's, True for this host's own (`HF_TOKEN`, `hf auth login`), False to go without. Raises `Unusable` in
    words, `Stopped` within a fraction of a second.
    """

    repository: str
    revision: str = "main"
    token: str | bool = field(default=False, repr=False)
    listing: Listing | None = None
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self.stop = threading.Event()
        self.token = bearer(self.token)

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.repository, repo_type="model")

    def plan(self) -> Listing:
        """Which files, at which commit; those that decide about the rest (configuration, index) are here then."""
        listing = self.listing or self._ask()
        deciding = [file for file in listing.files if file.name in (CONFIG, INDEX)]
        self._bring(listing, deciding, lambda *_: None)
        self._refuse_own_code(listing)
        if listing.named(INDEX):
            listing = shards_of(listing, self._pointer(listing, INDEX))
        self.listing = listing
        return listing

    def missing(self) -> int:
        """Bytes that are still to come."""
        assert self.listing is not None
        return sum(t.file.size - t.done for t in self._transfers(self.listing, self.listing.files))

    def fetch(self, on_progress: Progress = lambda *_: None) -> Snapshot:
        """All files of the plan in the cache. `on_progress(bytes_done, bytes_total, message)`, ten times a second."""
        listing = self.listing or self.plan()
        self._bring(listing, listing.files, on_progress)
        self._note_revision(listing)
        return Snapshot(self._view(listing), listing.commit)

    # Asking -------------------------------------------------------------------------------------------

    def _ask(self) -> Listing:
        """What the hub says; what the cache has where that must do (`HF_HUB_OFFLINE`) or may (commits never change)."""
        from huggingface_hub import constants

        if constants.is_offline_mode():
            return self._cached() or self._refuse_offline()
        try:
            return aside.call(self._ask_patiently, self.stop, self.should_stop)
        except Unreachable:
            cached = self._cached() if COMMIT.fullmatch(self.revision) else None
            if cached is None:
                raise
            return cached

    def _cached(self) -> Listing | None:
        """The snapshot that the cache has of the revision; None for parts of one that other programs have fetched."""
        note = self.folder / "refs" / self.revision
        commit = note.read_text().strip() if note.is_file() else self.revision
        folder = self.folder / "snapshots" / commit
        found = [path for path in sorted(folder.glob("*")) if path.is_file() and belongs(path.name)]
        if not makes_a_model(path.name for path in found):
            return None
        files = tuple(RemoteFile(path.name, path.stat().st_size, path.resolve().name) for path in found)
        return model_of(Listing(self.repository, commit, files))

    def _refuse_offline(self) -> NoReturn:
        raise Unusable(
            f"This host is offline (HF_HUB_OFFLINE), and its cache has no {self.revision} of {self.repository}. Fetch "
            "it where there is a network and bring the cache (HF_HOME) here, or name a folder in MISTUDIO_IMPORT_ROOTS."
        )

    def _ask_patiently(self) -> Listing:
        pauses = Pauses(self.stop, QUESTION_TRIES)
        while True:
            try:
                listing = self._with_etags(look(self.repository, self.revision, self.token))
                self._require_access(listing)
                return listing
            except passing() as error:
                pauses.after(error, self.repository)

    def _with_etags(self, listing: Listing) -> Listing:
        """Mirrors may list names alone; the header of each file then tells its size and digest."""
        files = tuple(file if file.etag else self._head(listing, file) for file in listing.files)
        return replace(listing, files=files)

    def _require_access(self, listing: Listing) -> None:
        """A gated repository is listed for everybody, and another user's download may have left it in the cache."""
        self._head(listing, RemoteFile(CONFIG, 0, ""))

    def _head(self, listing: Listing, file: RemoteFile) -> RemoteFile:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.repository, file.name, revision=listing.commit, endpoint=constants.ENDPOINT)
        with in_words(self.repository, self.revision, self.token):
            told = get_hf_file_metadata(url, token=self.token)
        if told.size is None or not told.etag:
            raise Unusable(
                f"{constants.ENDPOINT} tells neither size nor ETag of {file.name}; it is no usable mirror."
            )
        return RemoteFile(file.name, told.size, told.etag)

    def _refuse_own_code(self, listing: Listing) -> None:
        if "auto_map" in json.loads(self._pointer(listing, CONFIG).read_text()):
            raise Unusable(f"{self.repository} needs program code of its own, which is never run.")

    # Bringing -----------------------------------------------------------------------------------------

    def _bring(self, listing: Listing, files: Any, on_progress: Progress) -> None:
        transfers = self._transfers(listing, files)
        total = sum(file.size for file in files)

        def tell() -> None:
            message = next((transfer.message for transfer in transfers if transfer.message), "")
            on_progress(sum(transfer.done for transfer in transfers), total, message)

        todo = [transfer.run for transfer in transfers if not transfer.complete]
        aside.Aside(todo, min(AT_ONCE, len(todo)), self.stop).join(self.should_stop, tell)
        for transfer in transfers:
            _link(transfer.blob, self._pointer(listing, transfer.file.name))
        on_progress(total, total, "")

    def _transfers(self, listing: Listing, files: Any) -> list[Transfer]:
        blobs = self.folder / "blobs"
        return [
            Transfer(self.repository, listing.commit, file, blobs / file.etag, self.token, self.stop)
            for file in files
        ]

    # The cache ----------------------------------------------------------------------------------------

    def _snapshot(self, listing: Listing) -> Path:
        return self.folder / "snapshots" / listing.commit

    def _view(self, listing: Listing) -> Path:
        """The plan's files and no others: other programs may have fetched more of the commit, other weights too."""
        folder = self.folder / "mistudio" / listing.commit
        for file in listing.files:
            _link(self.folder / "blobs" / file.etag, folder / file.name)
        for path in folder.iterdir():
            if listing.named(path.name) is None:
                path.unlink(missing_ok=True)
        return folder

    def _pointer(self, listing: Listing, name: str) -> Path:
        return self._snapshot(listing) / name

    def _note_revision(self, listing: Listing) -> None:
        """As the library does, so that an offline host knows the commit of a branch."""
        if self.revision != listing.commit:
            note = self.folder / "refs" / self.revision
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(listing.commit)


def _link(blob: Path, pointer: Path) -> None:
    """A relative link in the snapshot's folder, as the library makes them."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    if not pointer.exists():
        pointer.unlink(missing_ok=True)  # one that leads nowhere
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:  # another job was first
            pass
