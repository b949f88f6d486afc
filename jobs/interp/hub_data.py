"""A data set of the Hugging Face Hub: its Parquet files, each fetched when its turn comes, and none of its programs.

`HF_ENDPOINT`, `HF_TOKEN` and the cache are the library's own. The revision is pinned to its commit first. Where a data
set has no Parquet of its own, the Hub's conversion (`refs/convert/parquet`) is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from jobs.interp.documents import of_split
from jobs.interp.errors import Unusable
from jobs.interp.readers import DataFile

CONVERTED = "refs/convert/parquet"


def tables(repository: str, revision: str | None, split: str) -> tuple[list[DataFile], str]:
    """The Parquet files of a split, in order and not fetched yet, and the commit that they are of.

    `split` may begin with a configuration (`en/train`). Raises `Unusable` in words when the data set is missing, gated
    or unreachable, or holds no Parquet file of that split, or several configurations of it.
    """
    with asking(repository):
        info = _info(repository, revision)
        sizes = _sizes(info)
        if not sizes and revision is None:
            info = _info(repository, CONVERTED)
            sizes = _sizes(info)
    if not sizes:
        raise Unusable(f"{repository} has no Parquet files, which are all that is read of a data set.")
    names = of_split(sorted(sizes), split, repository)
    _require_one_configuration(names, split, repository)
    return [_file(repository, name, info.sha, sizes[name]) for name in names], info.sha


def _info(repository: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi

    return HfApi().dataset_info(repository, revision=revision, files_metadata=True)


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


def _file(repository: str, name: str, commit: str, size: int) -> DataFile:
    return DataFile(Path(name), Path(name).name, size, partial(_fetched, repository, name, commit))


def _fetched(repository: str, name: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    with asking(repository):
        return Path(hf_hub_download(repository, name, repo_type="dataset", revision=commit))


@contextmanager
def asking(repository: str) -> Iterator[None]:
    """The Hub's refusals in words."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        words = "is gated: accept its terms on its page, and set HF_TOKEN to a token of that account."
        raise Unusable(f"{repository} {words}") from error
    except RevisionNotFoundError as error:
        raise Unusable(
            f"{repository} has no such revision, or no Parquet files that could be read."
        ) from error
    except RepositoryNotFoundError as error:
        raise Unusable(
            f"{repository} does not exist, or it is private and HF_TOKEN does not open it."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        words = f"The Hugging Face Hub could not be asked about {repository}: {type(error).__name__}."
        raise Unusable(words) from error
