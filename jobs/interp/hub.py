"""Fetch a model from the Hugging Face Hub: safetensors weights, tokenizer, configuration, nothing else.

`HF_ENDPOINT`, `HF_TOKEN` and the cache are the library's own. The revision is pinned to its commit first, so
that what is recorded is what was fetched.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.interp.errors import Stopped, Unusable
from jobs.interp.models import MODEL_FILES


@dataclass(frozen=True)
class Snapshot:
    """A fetched repository: its folder in the cache (of links) and the commit."""

    folder: Path
    commit: str


def fetch(
    repository: str,
    revision: str | None = None,
    *,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Snapshot:
    """The repository's model files in the cache. `on_progress(bytes_done, bytes_total)` after each file.

    Raises `Unusable` in words when the repository is missing, gated, unreachable or holds pickled weights
    only;
    `Stopped` between files.
    """
    from huggingface_hub import hf_hub_download

    info = _info(repository, revision)
    files = _wanted(repository, info.siblings)
    done, total = 0, sum(file.size or 0 for file in files)
    folder = Path()
    for file in files:
        if should_stop():
            raise Stopped("The download was stopped; fetched files stay in the cache.")
        path = Path(hf_hub_download(repository, file.rfilename, revision=info.sha))
        folder = path.parents[file.rfilename.count("/")]
        done += file.size or 0
        on_progress(done, total)
    return Snapshot(folder, info.sha)


def _info(repository: str, revision: str | None) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return HfApi().model_info(repository, revision=revision, files_metadata=True)
    except GatedRepoError as error:
        raise Unusable(
            f"{repository} is gated: accept its terms on its page, and set HF_TOKEN to a token of that "
            "account."
        ) from error
    except RevisionNotFoundError as error:
        raise Unusable(f"{repository} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise Unusable(
            f"{repository} does not exist, or it is private and HF_TOKEN does not open it."
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise Unusable(
            f"The Hugging Face Hub could not be asked about {repository}: {type(error).__name__}."
        ) from error


def _wanted(repository: str, siblings: list[Any]) -> list[Any]:
    # Weights in subfolders are other forms (onnx, original) of those at the top.
    found = [
        file for file in siblings if any(fnmatch.fnmatchcase(file.rfilename, name) for name in MODEL_FILES)
    ]
    found = [file for file in found if "/" not in file.rfilename]
    names = {file.rfilename for file in found}
    if not any(name.endswith(".safetensors") for name in names):
        raise Unusable(
            f"{repository} has no safetensors weights. Pickled ones can run code when they are opened, "
            "and are refused."
        )
    if "config.json" not in names:
        raise Unusable(f"{repository} has no config.json: it is not a transformers model.")
    return found
