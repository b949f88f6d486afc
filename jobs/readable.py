"""The package that Parquet and Arrow files are read with, which a site installs when it wants it."""

from __future__ import annotations

import importlib.util

from gpus.rest import ApiError

#: The version that miStudio was tried with.
PYARROW = "26.0.1"


def require_pyarrow(what: str) -> None:
    """Raises the 400 `missing_extra`, with the line that installs it, unless pyarrow is there for `what`."""
    if importlib.util.find_spec("pyarrow") is None:
        raise ApiError(
            400,
            "missing_extra",
            f"{what} needs the package pyarrow, which is not installed here.",
            hint=f"On the host: .venv/bin/python -m pip install pyarrow=={PYARROW}",
        )
