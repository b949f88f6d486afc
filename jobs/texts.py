"""The text that kinds read: which files a request names, and what is refused before anything is queued.

For parameters `corpus` (`jobs.fields.CorpusField`), `field` and `split`. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from rest_framework import serializers

from jobs import estimates, extras
from jobs.fields import HUB_DATA, is_path
from jobs.interp import sizes
from jobs.interp.documents import Documents, files_of, needs_pyarrow
from jobs.interp.errors import NoField, Unusable
from jobs.interp.paths import inside
from jobs.interp.readers import DataFile
from jobs.kind import Context, Input

if TYPE_CHECKING:
    from jobs.interp.corpora import Corpus


def errors(
    params: Mapping[str, Any], inputs: Mapping[str, Input], model: Input | None
) -> dict[str, list[str]]:
    """What the files themselves say at a first look. Raises the 400 `missing_extra`."""
    if HUB_DATA.match(params.get("corpus", "")):  # Parquet files
        extras.require("tables")
    if not (files := files_named(params, inputs)):
        return {}
    if needs_pyarrow(files):
        extras.require("tables")
    documents = Documents(files, params.get("field", "text"))
    try:
        documents.first()
        return tokenizer_errors(documents.tokenizer_sha256, model)
    except Unusable as error:
        return {"field" if isinstance(error, NoField) else "corpus": [str(error)]}


def tokenizer_errors(made_with: str, model: Input | None) -> dict[str, list[str]]:
    """Tokens mean nothing to a model of another tokenizer."""
    own = model.manifest.get("tokenizer_sha256") if model else None
    if model is None or not own or made_with in ("", own):
        return {}
    sentence = f"Its tokens come from the tokenizer {made_with[:12]}…; {model.name} has {own[:12]}…."
    return {"corpus": [sentence]}


def files_named(params: Mapping[str, Any], inputs: Mapping[str, Input]) -> list[DataFile]:
    """The files of the corpus; none where it is built in, on the Hub, or not made yet.

    Rows of jobs may be older than a parameter: what they lack has its default.
    """
    if is_path(path := params.get("corpus", "")):
        return files_at(path, params.get("split", "train"))
    given = inputs.get("corpus")
    return [DataFile(given.path / name, name) for name in given.manifest["files"]] if given else []


def files_at(path: str, split: str) -> list[DataFile]:
    """The files at `path`, or a `ValidationError` that says which folders jobs may read and what is there."""
    roots = settings.MISTUDIO_IMPORT_ROOTS
    try:
        inside(path, roots)
        found = files_of(Path(path).expanduser(), split)
        # Each by itself: a folder may hold links that lead elsewhere.
        return [replace(file, path=inside(str(file.path), roots)) for file in found]
    except Unusable as error:
        raise serializers.ValidationError({"corpus": [str(error)]}) from error


def opened(params: Mapping[str, Any], context: Context) -> Corpus:
    """The documents: built in, of files that people named, of the Hub (as the job's owner), or of an artifact."""
    from jobs.interp import corpora, hub_data

    inputs = context.inputs

    if found := HUB_DATA.match(params["corpus"]):
        tables, commit = hub_data.tables(
            found[1],
            found[2],
            params["split"],
            hub_data.Access(context.hub_token(), context.should_stop, require_room),
        )
        return corpora.of_files(tables, f"{found[1]}@{commit[:12]}", params["field"])
    if not (files := files_named(params, inputs)):
        return corpora.open_corpus(params["corpus"])
    given = inputs.get("corpus")
    return corpora.of_files(files, given.name if given else Path(params["corpus"]).name, params["field"])


def require_room(folder: Path, size: int, name: str) -> None:
    """Before a file of the Hub is fetched into `folder`. Raises `JobRejected` (`disk_full`)."""
    estimates.refuse_short_disk(estimates.nearest(folder), size, f"{name} of the data set needs")


def memory_bytes(corpus: str) -> int:
    """What reading takes: the built-in text lies in memory, files are read piece by piece."""
    return sizes.CORPUS_BYTES if corpus == "english" else sizes.READER_BYTES
