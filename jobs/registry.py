"""Finds the kinds: every module in `jobs/kinds/` with a class `Kind`. Nothing is listed by hand."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from django.conf import settings

import jobs.kinds

if TYPE_CHECKING:
    from jobs.kind import JobKind


@cache
def names() -> tuple[str, ...]:
    """Names of all kinds, those of `MISTUDIO_KIND_PATHS` included."""
    jobs.kinds.__path__.extend(str(folder) for folder in settings.MISTUDIO_KIND_PATHS)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(jobs.kinds.__path__)))


@cache
def get(name: str) -> JobKind:
    """The kind of this name; `KeyError` when there is none."""
    if name not in names():
        raise KeyError(name)
    return importlib.import_module(f"jobs.kinds.{name}").Kind()


def all_kinds() -> dict[str, JobKind]:
    """Every kind by name, in the order of the stages."""
    from jobs.kind import STAGES

    found = {name: get(name) for name in names()}
    return dict(sorted(found.items(), key=lambda item: (STAGES.index(item[1].stage), item[0])))


def choices() -> list[tuple[str, str]]:
    """Choices of `Job.kind`, as a callable so that a new kind makes no migration."""
    return [(name, kind.label) for name, kind in all_kinds().items()]
