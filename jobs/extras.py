"""Packages that some parameters need and that a site installs when it wants them: which, and how."""

from __future__ import annotations

import importlib.util

from gpus.rest import ApiError

#: Name and version by which miStudio was tried.
EXTRAS = {"pyarrow": "26.0.1"}


def require(package: str, what: str) -> None:
    """Raises the 400 `missing_extra`, with the line that installs it, unless `package` is there for `what`."""
    if importlib.util.find_spec(package) is None:
        line = f".venv/bin/python -m pip install {package}=={EXTRAS[package]}"
        raise ApiError(
            400,
            "missing_extra",
            f"{what} needs the package {package}, which is not installed here.",
            hint=f"On the host: {line}",
            package=package,
        )
