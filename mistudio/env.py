"""Readers for settings from the environment: parse, or refuse at start with a sentence."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit

from django.core.exceptions import ImproperlyConfigured

T = TypeVar("T")
UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "MB": 10**6, "GB": 10**9}
YES, NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def text(name: str, default: str = "") -> str:
    return os.environ.get(name, "").strip() or default


def parsed(name: str, parse: Callable[[str], T], default: T, expects: str) -> T:
    """The value of `name` through `parse`, or `default` when unset; refuses what does not parse."""
    raw = text(name)
    if not raw:
        return default
    try:
        return parse(raw)
    except ValueError:
        raise ImproperlyConfigured(f"{name}={raw!r}: expected {expects}.") from None


def _boolean(raw: str) -> bool:
    if raw.lower() in YES | NO:
        return raw.lower() in YES
    raise ValueError(raw)


def boolean(name: str, default: bool) -> bool:
    return parsed(name, _boolean, default, "on or off")


def integer(name: str, default: int, minimum: int = 0) -> int:
    def parse(raw: str) -> int:
        if int(raw) < minimum:
            raise ValueError(raw)
        return int(raw)

    return parsed(name, parse, default, f"a whole number, {minimum} or more")


def limit(name: str) -> int | None:
    """A number of things that is allowed; `None`, when unset, for as many as there may be."""
    return integer(name, 1, minimum=1) if text(name) else None


def number(name: str, default: float, minimum: float = 0.0) -> float:
    def parse(raw: str) -> float:
        if not minimum <= float(raw) < float("inf"):
            raise ValueError(raw)
        return float(raw)

    return parsed(name, parse, default, f"a number, {minimum} or more")


def choice(name: str, options: tuple[str, ...], default: str) -> str:
    def parse(raw: str) -> str:
        if raw not in options:
            raise ValueError(raw)
        return raw

    return parsed(name, parse, default, "one of " + ", ".join(options))


def url(name: str, schemes: tuple[str, ...], expects: str) -> SplitResult | None:
    """An address with a host; `None` when unset. It may hold a secret, so that the refusal does not repeat it."""
    raw = text(name)
    if not raw:
        return None
    try:
        parts = urlsplit(raw)
        good = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ImproperlyConfigured(f"{name}: expected {expects}.")
    return parts


def folder(name: str, default: Path) -> Path:
    return parsed(name, lambda raw: Path(raw).expanduser().resolve(), default.resolve(), "a folder")


def paths(name: str, default: list[Path]) -> list[Path]:
    return parsed(
        name, lambda raw: [Path(p).expanduser().resolve() for p in raw.split(":") if p], default, "folders"
    )


def words(name: str) -> list[str] | None:
    """A comma-separated list; `None` when unset, so that "unset" and "empty" stay apart."""
    return None if name not in os.environ else [w.strip() for w in os.environ[name].split(",") if w.strip()]


def parse_size(raw: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|[MG]B)\s*", raw, re.IGNORECASE)
    if not match or not float(match[1]):
        raise ValueError(raw)
    return int(float(match[1]) * UNITS[match[2].upper()])


def sizes(name: str) -> list[int]:
    """Memory sizes in bytes, such as `24GiB,80GiB`."""
    return parsed(
        name, lambda raw: [parse_size(part) for part in raw.split(",")], [], "sizes such as 24GiB,24GiB,80GiB"
    )
