"""A data set of the Hugging Face Hub: its Parquet files, each fetched when its turn comes, and none of its programs.

`HF_ENDPOINT` and the cache are the library's own; a token is sent only where the job has one. The revision is pinned to
its commit first. Where a data set has no Parquet of its own, the Hub's conversion (`refs/convert/parquet`) is read.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.interp import aside
from jobs.interp.documents import of_split
from jobs.interp.errors import Unusable
from jobs.interp.readers import DataFile
from jobs.interp.repository import bearer, in_words

CONVERTED = "refs/convert/parquet"
PLACE_IN_HUB = "datasets/"
#: A question that takes longer is given up.
SECONDS = 10.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFull(Unusable):
    """The cache has no room for the rest of a file."""

    reason = "disk_full"
    hint = "Free some space on the disk of the cache (HF_HOME), then retry."


@dataclass(frozen=True)
class Access:
    """For whom the Hub is asked. `token` as `hub.Fetch` takes it; `require_room(folder, bytes, name)` may refuse."""

    token: str | bool = field(default=False, repr=False)
    should_stop: Callable[[], bool] = lambda: False
    require_room: Callable[[Path, int, str], None] = lambda *_: None


@dataclass(frozen=True)
class Dataset:
    """One repository, as one user sees it."""

    repository: str
    access: Access

    def info(self, revision: str | None) -> Any:
        from huggingface_hub import HfApi

        token = bearer(self.access.token)
        with self.asking(revision):
            return HfApi().dataset_info(
                self.repository, revision=revision, files_metadata=True, timeout=SECONDS, token=token
            )

    def require_access(self, name: str, commit: str) -> None:
        """A gated data set is listed for everybody, and another user's job may have left its files in the cache."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(
            self.repository, name, repo_type="dataset", revision=commit, endpoint=constants.ENDPOINT
        )
        with self.asking(commit):
            get_hf_file_metadata(url, token=bearer(self.access.token))

    @contextmanager
    def asking(self, revision: str | None) -> Iterator[None]:
        """The Hub's refusals in words."""
        from httpx2 import TransportError
        from huggingface_hub.errors import HfHubHTTPError

        with in_words(self.repository, revision or "main", self.access.token, prefix=PLACE_IN_HUB):
            try:
                yield
            except HfHubHTTPError as error:  # an OSError, too
                if error.response.status_code in (408, 429) or error.response.status_code >= 500:
                    raise self._silent(f"it answers {error.response.status_code}") from error
                raise
            except (TransportError, OSError) as error:
                if isinstance(error, OSError) and error.errno in FULL:
                    raise DiskFull(
                        f"{self.repository} could not be fetched: the disk of the cache is full."
                    ) from error
                raise self._silent(type(error).__name__) from error

    def _silent(self, why: str) -> Unusable:
        return Unusable(f"The Hugging Face Hub could not be asked about {self.repository}: {why}.")


@dataclass(frozen=True)
class Table:
    """A Parquet file of a data set at a commit, and its bytes."""

    dataset: Dataset
    name: str
    commit: str
    size: int

    def fetch(self) -> Path:
        """The file on this machine. Raises `Stopped` within a fraction of a second; the library ends by itself."""
        self._require_room()
        return Path(aside.call(self._download, threading.Event(), self.dataset.access.should_stop))

    def _require_room(self) -> None:
        from huggingface_hub import constants, try_to_load_from_cache

        here = try_to_load_from_cache(
            self.dataset.repository, self.name, revision=self.commit, repo_type="dataset"
        )
        if not isinstance(here, str):
            self.dataset.access.require_room(Path(constants.HF_HUB_CACHE), self.size, self.name)

    def _download(self) -> str:
        from huggingface_hub import hf_hub_download

        with self.dataset.asking(self.commit):
            return hf_hub_download(
                self.dataset.repository,
                self.name,
                repo_type="dataset",
                revision=self.commit,
                token=bearer(self.dataset.access.token),
            )


def tables(
    repository: str, revision: str | None, split: str, access: Access | None = None
) -> tuple[list[DataFile], str]:
    """The Parquet files of a split, in order and not fetched yet, and the commit that they are of.

    `split` may begin with a configuration (`en/train`). Raises `Unusable` in words when the data set is missing, gated
    or unreachable, or holds no Parquet file of that split, or several configurations of it.
    """
    dataset = Dataset(repository, access or Access())
    info = dataset.info(revision)
    sizes = _sizes(info)
    if not sizes and revision is None:
        info = _converted(dataset)
        sizes = _sizes(info) if info else {}
    if not sizes:
        raise Unusable(f"{repository} has no Parquet files, which are all that is read of a data set.")
    names = of_split(sorted(sizes), split, repository)
    _require_one_configuration(names, split, repository)
    dataset.require_access(names[0], info.sha)
    return [_file(Table(dataset, name, info.sha, sizes[name])) for name in names], info.sha


def _converted(dataset: Dataset) -> Any:
    """What the Hub says of its conversion; None where it made none."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return dataset.info(CONVERTED)
    except Unusable as error:
        if isinstance(error.__cause__, RevisionNotFoundError):
            return None
        raise


def _sizes(info: Any) -> dict[str, int]:
    return {file.rfilename: file.size or 0 for file in info.siblings if file.rfilename.endswith(".parquet")}


def _require_one_configuration(names: list[str], split: str, repository: str) -> None:
    """Files in several folders that each hold the split are several texts, or one in several languages."""
    folders = sorted({name.rpartition("/")[0].removesuffix(split).strip("/") for name in names})
    if len(folders) > 1:
        listed = ", ".join(folders[:20])
        raise Unusable(
            f"{repository} has several configurations: {listed}. Name one, as split {folders[0]}/{split}."
        )


def _file(table: Table) -> DataFile:
    return DataFile(Path(table.name), Path(table.name).name, table.size, table.fetch)
