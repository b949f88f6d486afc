"""Files and folders that are complete or absent, whatever is killed in between.

A new file is written beside its final name, flushed to the disk, renamed, and the folder that holds it is
flushed too (the order that `rename(2)` needs to survive a power cut). Temporary names start with `.tmp-`, so
that a reader who lists a folder can tell them from results.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TEMPORARY = ".tmp-"


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it becomes `path` at the end, or nothing does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; it becomes `path` (which it replaces) at the end, or nothing does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=path.parent))
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            _flush(file)
        _flush(temporary)
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, complete or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as one safetensors file, complete or not at all; they are copied to the CPU,
    contiguous.
    """
    with whole_file(path) as temporary:
        save_file(cpu_tensors(tensors), temporary, metadata=dict(metadata or {}))


def cpu_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors as safetensors wants them: on the CPU, contiguous, detached."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def bring(source: Path, target: Path, *, names: Iterable[str] = ("*",), copy: bool = False) -> None:
    """Give the files of `source` whose names match a second name under `target`, or copies where `copy`.

    A second name costs no space, and is for folders that nobody writes into again (our own, the Hugging Face
    cache). Links in `source` are followed: the target holds real files. Other file systems get copies anyway.
    """
    for file in sorted(source.rglob("*")):
        wanted = any(fnmatch.fnmatchcase(file.name, name) for name in names)
        if wanted and file.is_file() and not file.name.startswith(TEMPORARY):
            _bring_one(file.resolve(), target / file.relative_to(source), copy)


def remove(folder: Path) -> None:
    """Delete a folder of our own that is no longer needed, if it is there: at once, so that no half of it is found."""
    leaving = folder.with_name(TEMPORARY + folder.name)
    shutil.rmtree(leaving, ignore_errors=True)  # of an attempt that ended here
    with suppress(FileNotFoundError):
        os.replace(folder, leaving)
    shutil.rmtree(leaving, ignore_errors=True)


def digest(paths: list[Path]) -> str:
    """SHA-256 over names and contents of `paths`, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        with path.open("rb") as file:
            total.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _bring_one(source: Path, target: Path, copy: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without second names
            copy = True
    if copy:
        shutil.copy2(source, target)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
