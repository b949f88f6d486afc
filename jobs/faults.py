"""Named points at which a test may end the process, as a power cut would: `FAULT=<point>`.

With `FAULT_ONCE=<file>` the point strikes only once: the file marks it as done.
"""

from __future__ import annotations

import os


def point(name: str) -> None:
    if os.environ.get("FAULT") != name:
        return
    marker = os.environ.get("FAULT_ONCE")
    if marker:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os._exit(137)
