"""Libraries that only some parameters need: whether they are here, and the command that brings them. No torch."""

from __future__ import annotations

from importlib.util import find_spec

from jobs.interp.errors import MissingExtra

#: By extra: what is imported, and for what.
EXTRAS = {
    "quant": ("bitsandbytes", "Quantized weights (int8, nf4)"),
    "tables": ("pyarrow", "Parquet and Arrow files"),
}


def command_of(extra: str) -> str:
    return f"python3 scripts/setup.py --{extra}"


def require(extra: str) -> None:
    """Raises `MissingExtra` with the command unless the extra's library is installed. Imports nothing."""
    library, purpose = EXTRAS[extra]
    if find_spec(library) is None:
        command = command_of(extra)
        raise MissingExtra(
            f"{purpose} need {library}, which is not installed on this host. Install it in miStudio's folder with "
            f"`{command}`, then start miStudio again.",
            hint=command,
        )
