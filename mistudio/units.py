"""The unit files of `deploy/systemd/`, filled in for this installation."""

from __future__ import annotations

import getpass
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from mistudio.supervisor import procfile

TEMPLATES = settings.BASE_DIR / "deploy" / "systemd"
BROKER = "mistudio-broker.service"


@dataclass(frozen=True)
class Installation:
    """Who runs it, from where, with what."""

    user: str
    home: Path
    environment: Path
    port: int = 8000
    own_broker: bool = False  # a REDIS_URL is set: no private one

    @classmethod
    def here(cls) -> Installation:
        """This data folder, its owner, and the `.env` beside the source."""
        owner = settings.MISTUDIO_HOME.owner() if settings.MISTUDIO_HOME.exists() else getpass.getuser()
        return cls(owner, settings.MISTUDIO_HOME, settings.BASE_DIR / ".env")


def files(of: Installation) -> dict[str, str]:
    """Each unit's name and text."""
    texts = {path.name: path.read_text() for path in sorted(TEMPLATES.iterdir())}
    if of.own_broker:
        del texts[BROKER]
    commands = procfile(settings.BASE_DIR / "Procfile", command_values(of))
    return {name: filled(text, of, commands.get(part_of(name), [])) for name, text in texts.items()}


def part_of(name: str) -> str:
    """`mistudio-worker-cpu.service` → `worker-cpu`, the name in the Procfile."""
    return name.removeprefix("mistudio-").removesuffix(".service")


def command_values(of: Installation) -> dict[str, str]:
    return {
        "PORT": str(of.port),
        "MISTUDIO_BIND": settings.MISTUDIO_BIND,
        "MISTUDIO_HOST_NAME": settings.MISTUDIO_HOST_NAME,
        "PROXY_HEADERS": "--proxy-headers" if settings.MISTUDIO_PUBLIC_URL else "",
    }


def filled(text: str, of: Installation, command: list[str]) -> str:
    values = {
        "@USER@": of.user,
        "@SOURCE@": escaped(str(settings.BASE_DIR)),
        "@HOME@": in_quotes(str(of.home)),
        "@ENVIRONMENT@": escaped(str(of.environment)),
        "@PYTHON@": quoted(sys.executable),
        "@COMMAND@": " ".join(quoted(word) for word in command),
        "@BROKER@": "" if of.own_broker else f" {BROKER}",
        "@WANTS_BROKER@": "" if of.own_broker else f" {BROKER}",
    }
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def escaped(text: str) -> str:
    """In a unit, `%` begins a specifier."""
    return text.replace("%", "%%")


def in_quotes(text: str) -> str:
    """What stands between `"` and `"`, where systemd knows backslashes."""
    return escaped(text).replace("\\", "\\\\").replace('"', '\\"')


def quoted(word: str) -> str:
    """One word of a command line; `$` would begin a variable there."""
    word = in_quotes(word).replace("$", "$$")
    return f'"{word}"' if shlex.quote(word) != word else word
