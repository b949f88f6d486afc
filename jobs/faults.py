"""Named points at which a test may end the process, as a power cut would.

`FAULT=<point>` strikes every time; `FAULT=@<file>` strikes once at the point that the file names, and removes it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def point(name: str) -> None:
    fault = os.environ.get("FAULT", "")
    if fault == name or (fault.startswith("@") and _take(Path(fault[1:]), name)):
        os.kill(os.getpid(), signal.SIGKILL)


def _take(file: Path, name: str) -> bool:
    """Whether the file names this point and we are the first to remove it."""
    try:
        if file.read_text().strip() != name:
            return False
        file.unlink()
        return True
    except FileNotFoundError:
        return False
