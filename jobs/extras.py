"""Libraries that only some parameters need, as kinds ask for them in `check`: a refusal with the command that installs
them. Nothing is imported to find out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.exceptions import JobRejected
from jobs.interp import extras
from jobs.interp.errors import MissingExtra


def require(extra: str) -> None:
    """Raises `JobRejected` (`missing_extra`, at the submit a 400) unless the extra's library is installed."""
    try:
        extras.require(extra)
    except MissingExtra as error:
        raise JobRejected.of(error) from error


def require_for(model: Mapping[str, Any]) -> None:
    """The same for what the manifest of a model says that it takes to run it."""
    if model.get("quantization"):
        require("quant")
