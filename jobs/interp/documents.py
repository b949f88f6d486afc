"""The documents of a corpus that lies in files: which files, one after the other. Plain Python, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.interp.errors import Unusable
from jobs.interp.readers import DataFile, Document, pieces, size_of

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
#: Forms of data files, the one that a folder is read by first.
FORMS = (".parquet", ".arrow", ".jsonl", ".json", ".safetensors", ".txt")
NEEDS_PYARROW = (".parquet", ".arrow")
#: A folder with more files is no corpus, but somebody's whole disk.
MOST_FILES = 20_000


class Documents:
    """The documents of files, in order, to be gone through as often as one likes.

    `share` is how much of them the newest going-through has read, 0 to 1. Raises `Unusable` with the file's name
    where one cannot be read, or holds something else in `field`.
    """

    def __init__(self, files: Sequence[DataFile], field: str = "text") -> None:
        self.files, self.field, self.share = tuple(files), field, 0.0

    def __iter__(self) -> Iterator[Document]:
        sizes = [max(1, size_of(file)) for file in self.files]
        for number, file in enumerate(self.files):
            before = sum(sizes[:number])
            for share, document in pieces(file, self.field):
                self.share = (before + share * sizes[number]) / sum(sizes)
                yield document
        self.share = 1.0

    @property
    def tokenizer_sha256(self) -> str:
        """The digest that the files name, or empty; those still to be fetched are not asked. Raises `Unusable` where
        they name several."""
        found = {file.tokenizer_sha256 for file in self.files if file.fetch is None}
        if len(found) > 1:
            raise Unusable(f"The files under {self.files[0].name} come from different tokenizers.")
        return found.pop() if found else ""

    def first(self) -> Document:
        """The first document: says at once what is wrong with the files. Raises `Unusable` when there is none."""
        for document in self:
            return document
        raise Unusable(f"{self.files[0].name} holds no text.")


def files_of(path: Path, split: str = "train") -> list[DataFile]:
    """The data files at `path`: itself, or in a folder those of a split, in the order of their names.

    A folder is one that `datasets.save_to_disk` wrote, or any tree of files of one form whose names say their split
    (`train-00000.parquet`, `train/a.jsonl`) or no split at all. Raises `Unusable` with what is there instead.
    """
    if not path.is_dir():
        return [DataFile(path, path.name)]
    if splits := _named(path / "dataset_dict.json", lambda told: told["splits"]):
        if split not in splits:
            raise Unusable(f"{path.name} has no split {split!r}; it has {', '.join(splits)}.")
        path = path / split
    if names := _named(path / "state.json", lambda told: [file["filename"] for file in told["_data_files"]]):
        return [DataFile(path / name, name) for name in (Path(name).name for name in names)]
    names = []
    for file in path.rglob("*"):
        names += [str(file.relative_to(path))] if file.is_file() else []
        if len(names) > MOST_FILES:
            raise Unusable(
                f"{path.name} holds more than {MOST_FILES} files; name a folder of the corpus alone."
            )
    names.sort()
    return [DataFile(path / name, Path(name).name) for name in of_split(names, split, path.name)]


def _named(file: Path, names: Callable[[Any], Any]) -> list[str]:
    """The `names` in a file of a saved data set; none where there is no such file, or it is something else's."""
    try:
        found = names(json.loads(file.read_text()))
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    sound = isinstance(found, list) and all(isinstance(name, str) and name.isprintable() for name in found)
    return found if sound else []


def of_split(names: Sequence[str], split: str, where: str) -> list[str]:
    """Those of the files `names` that belong to `split`. Raises `Unusable` naming the splits that there are."""
    names = [name for name in names if not any(part.startswith(".") for part in Path(name).parts)]
    for form in FORMS:
        if found := [name for name in names if name.lower().endswith(form)]:
            break
    else:
        raise Unusable(f"{where} holds no Parquet, Arrow, JSON Lines, safetensors or text file.")
    if wanted := [name for name in found if _names_split(name, split)]:
        return wanted
    others = [other for other in SPLITS if any(_names_split(name, other) for name in found)]
    if others:
        raise Unusable(f"{where} has no split {split!r}; it has {', '.join(others)}.")
    return found


def needs_pyarrow(files: Iterable[DataFile]) -> bool:
    return any(file.form in NEEDS_PYARROW for file in files)


def as_bytes(document: Document) -> bytes:
    """What a digest over documents is taken of: text as UTF-8, others as JSON; a zero byte ends each."""
    text = document if isinstance(document, str) else json.dumps(document, sort_keys=True)
    return text.encode() + b"\0"


def is_conversation(document: Document) -> bool:
    return isinstance(document, list) and isinstance(document[0], dict)


def _names_split(name: str, split: str) -> bool:
    return re.search(rf"(^|[/_.-]){re.escape(split)}([/_.-]|$)", name) is not None
