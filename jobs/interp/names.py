"""Names of artifacts as parameters take them (`jobs.fields.REFERENCE`), whatever they are made of. Plain Python."""

from __future__ import annotations

import re


def slug(words: str) -> str:
    """The same in letters, digits, dots, dashes and underscores, with nothing that a path or a reference would mean."""
    return re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9._-]+", "-", words)).strip("-._")
