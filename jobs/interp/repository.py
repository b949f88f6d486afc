"""What a repository on a Hugging Face hub holds, and which of its files make a model. Plain Python, no torch.

One form of the weights is taken: safetensors at the top of the repository, as `transformers` would choose them. What
the hub refuses is said in a sentence each, with the remedy.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.interp.errors import Unusable

#: Files that a model folder consists of. Programs and pickles are not among them.
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "chat_template*",
)
#: Files of which a tokenizer has at least one.
TOKENIZERS = ("tokenizer*", "vocab.*", "spiece.model")
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
#: Commits and digests, which name files in the cache; empty where a mirror does not tell.
PLAIN = re.compile(r"(?:[0-9A-Za-z][0-9A-Za-z._-]*)?")
#: Where a user puts a token.
PLACE = "on your page here (/me/)"


class Closed(Unusable):
    """Another token may open it."""


@dataclass(frozen=True)
class RemoteFile:
    """`etag`: SHA-256 of a large file, git's SHA-1 of a small one; the hub's own name for its content."""

    name: str
    size: int
    etag: str

    def __post_init__(self) -> None:
        require_plain(self.etag)


@dataclass(frozen=True)
class Listing:
    """The files of one commit, those of a model only."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def named(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)

    def only(self, names: Iterable[str]) -> Listing:
        kept = set(names)
        return Listing(self.repository, self.commit, tuple(file for file in self.files if file.name in kept))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Listing:
        files = tuple(RemoteFile(**file) for file in value["files"])
        return cls(value["repository"], value["commit"], files)


def require_plain(name: str) -> None:
    """Raises `Unusable` for what a hub names and no file of the cache may be called."""
    if not PLAIN.fullmatch(name):
        raise Unusable(f"The hub names something {name[:80]!r}, which is no commit and no digest.")


def look(repository: str, revision: str, token: str | bool = False, timeout: float = 10.0) -> Listing:
    """The model's files at the commit that `revision` (a branch, tag or commit) is now; one request.

    `token`: one of the asking user, or False to go without. Raises `Unusable` in words; `httpx2.TransportError` when
    the hub cannot be reached and `HfHubHTTPError` when it has no time (429, 5xx), which may pass.
    """
    from huggingface_hub import HfApi

    with in_words(repository, revision, token):
        info = HfApi().model_info(
            repository, revision=revision, files_metadata=True, token=token, timeout=timeout
        )
    require_plain(info.sha or "")
    listing = Listing(repository, info.sha or revision, tuple(_model_files(info.siblings or [])))
    return model_of(listing)


def belongs(name: str) -> bool:
    """Whether a model folder takes a file of this name; what lies in subfolders are other forms (onnx, original)."""
    return "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in MODEL_FILES)


def makes_a_model(names: Iterable[str]) -> bool:
    """Whether weights, a configuration and a tokenizer are among them."""
    found = list(names)
    return all(
        any(fnmatch.fnmatchcase(name, pattern) for name in found for pattern in patterns)
        for patterns in (("*.safetensors",), (CONFIG,), TOKENIZERS)
    )


def bearer(token: str | bool) -> str | bool:
    """What is sent: a user's token; for True this host's own (`HF_TOKEN`, `hf auth login`), if there is one."""
    from huggingface_hub import get_token

    return (get_token() or False) if token is True else token


def _model_files(siblings: Iterable[Any]) -> Iterator[RemoteFile]:
    for sibling in siblings:
        if belongs(sibling.rfilename):
            etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            yield RemoteFile(sibling.rfilename, sibling.size or 0, etag or "")


def model_of(listing: Listing) -> Listing:
    """The listing with one form of the weights. Raises `Unusable` for what is no model."""
    names = [file.name for file in listing.files]
    if not any(name.endswith(".safetensors") for name in names):
        raise Unusable(
            f"{listing.repository} has no safetensors weights. Pickled ones can run code when they are opened, "
            "and are refused."
        )
    if CONFIG not in names:
        raise Unusable(f"{listing.repository} has no config.json: it is not a transformers model.")
    weights = [name for name in names if name.endswith(".safetensors")]
    taken = _weights(listing.repository, weights, indexed=INDEX in names)
    rest = [name for name in names if name not in weights and not (taken == [SINGLE] and name == INDEX)]
    return listing.only(rest + taken)


def _weights(repository: str, names: list[str], *, indexed: bool) -> list[str]:
    """As transformers chooses: the single file, else the shards of the index. Which shards, the index itself says."""
    if SINGLE in names:
        return [SINGLE]
    if indexed:
        return [name for name in names if SHARD.fullmatch(name)] or names
    raise Unusable(
        f"{repository} has {', '.join(names[:3])}, but neither {SINGLE} nor {INDEX}: transformers would not find "
        "its weights."
    )


def shards_of(listing: Listing, index: Path) -> Listing:
    """The listing with exactly the weights that its index names. Raises `Unusable` when one of them is missing."""
    shards = set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(shards - {file.name for file in listing.files})
    if missing:
        raise Unusable(
            f"{listing.repository} is incomplete: its index names {len(shards)} files of weights, and "
            f"{len(missing)} are not there, {missing[0]} the first."
        )
    others = {file.name for file in listing.files if not file.name.endswith(".safetensors")}
    return listing.only(shards | others)


@contextmanager
def in_words(repository: str, revision: str, token: str | bool, *, prefix: str = "") -> Iterator[None]:
    """What a hub answers for good, as a sentence with the remedy; what may pass rises as it is.

    `prefix`: of the repository's page, `datasets/` for a data set.
    """
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    page = f"{constants.ENDPOINT}/{prefix}{repository}"
    try:
        yield
    except hub.GatedRepoError as error:
        raise Closed(_gated(repository, page, token)) from error
    except hub.DisabledRepoError as error:
        raise Unusable(f"{repository} was disabled by the hub; {page} may say why.") from error
    except hub.RevisionNotFoundError as error:
        raise Unusable(
            f"{repository} has no branch, tag or commit {revision!r}; {page}/refs lists what it has."
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise Closed(_missing(repository, token)) from error
    except hub.EntryNotFoundError as error:
        raise Unusable(f"{repository} lists a file that the hub does not have; tell its owners.") from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 429 or status >= 500 or status == 408:
            raise
        raise Closed(_refused(repository, status, token)) from error
    except hub.HFValidationError as error:
        raise Unusable(f"{repository!r} is not how a repository is called.") from error


def _gated(repository: str, page: str, token: str | bool) -> str:
    if token:
        return (
            f"{repository} is gated, and the account of the token has no access to it. Open {page} with that account, "
            "accept the terms, and retry once the owners have said yes."
        )
    return (
        f"{repository} is gated: open {page} with your Hugging Face account, accept the terms, and put a token of "
        f"that account {PLACE}."
    )


def _missing(repository: str, token: str | bool) -> str:
    if token:
        return f"{repository} does not exist, or it is private and the account of the token may not see it."
    return (
        f"{repository} does not exist, or it is private: then put a token of an account that sees it {PLACE}."
    )


def _refused(repository: str, status: int, token: str | bool) -> str:
    if status == 401 and token:
        return f"The hub does not know the token (it may be revoked or expired); put a new one {PLACE}."
    if status == 401:
        return f"The hub shows {repository} only to those who are signed in; put a token {PLACE}."
    if status == 403 and token:
        return f"The token may not read {repository} (403); give it the right to read it, or put another one {PLACE}."
    return f"The hub answers {status} to {repository}."
