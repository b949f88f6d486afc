"""What a person is told while pip works: the file it fetches and how far it is, not what is there already."""

import re
import sys
import time
from collections import deque
from typing import Deque, Iterable

# Where lines stay (a log, a pipe), a long download says this often that it goes on.
QUIET_SECONDS = 10.0
# A file below this size is there before one has read its name.
SMALL_BYTES = 20 * 1000**2


class Voice:
    """Reads pip's lines; `tail` keeps the last ones for the case that pip fails."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.tail: Deque[str] = deque(maxlen=15)
        self.file, self.said_at = "", 0.0

    def listen(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.hear(line.rstrip())
        self.clear()

    def hear(self, line: str) -> None:
        progress = re.match(r"Progress (\d+) of (\d+)$", line)
        if progress:
            self.progress(int(progress.group(1)), int(progress.group(2)))
            return
        if line.startswith("WARNING: "):
            self.warn(line)
            return
        self.tail.append(line)
        words = line.split()
        if words[:1] == ["Downloading"] and len(words) > 1:
            self.file, self.said_at = words[1].split("?")[0].rsplit("/", 1)[-1], 0.0
            self.passing(f"fetching {self.file}")
        elif line.startswith("Installing collected packages: "):
            self.clear()
            print(f"      packages to install: {line.count(',') + 1}", flush=True)

    def progress(self, done: int, size: int) -> None:
        if self.live:
            self.passing(f"fetching {self.file}: {done / 1e6:.0f} of {size / 1e6:.0f} MB")
        elif size > SMALL_BYTES and time.monotonic() - self.said_at >= QUIET_SECONDS:
            self.said_at = time.monotonic()
            print(f"      fetching {self.file}, {size / 1e6:.0f} MB: {100 * done // size} %", flush=True)

    def warn(self, line: str) -> None:
        """Of pip's warnings the ones about the network: they say why nothing seems to happen."""
        if "etrying" in line:
            self.clear()
            print(f"      {line}", flush=True)

    def passing(self, text: str) -> None:
        """A line that the next one overwrites; said on a terminal only."""
        if self.live:
            print(f"\r\x1b[K      {text[:90]}", end="", flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)
