"""Where jobs and artifacts lie under `$MISTUDIO_HOME` (contract, section 9)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings

if TYPE_CHECKING:
    from jobs.models import Artifact, Job


def job_folder(job: Job) -> Path:
    return settings.MISTUDIO_HOME / "jobs" / str(job.pk)


def log_file(job: Job) -> Path:
    return job_folder(job) / "job.log"


def checkpoints(job: Job) -> Path:
    return job_folder(job) / "checkpoints"


def staging(job: Job, attempt: int) -> Path:
    return settings.MISTUDIO_HOME / ".staging" / f"{job.pk}-{attempt}"


def artifact_folder(artifact: Artifact) -> Path:
    return settings.MISTUDIO_HOME / "artifacts" / artifact.type / str(artifact.pk)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush all files and folders below, and the folder's own entry."""
    for path in [folder.parent, folder, *folder.rglob("*")]:
        if not path.is_symlink():
            sync_folder(path)


def write_json(path: Path, content: Any) -> None:
    """Write, fsync and rename, so that the name never holds half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(content, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def size_of(folder: Path) -> int:
    """Bytes of the files below; files linked from elsewhere count once here, too."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
