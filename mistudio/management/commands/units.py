"""`manage.py units [FOLDER]`: unit files for systemd, filled in for this installation."""

from __future__ import annotations

import dataclasses
import os
import pwd
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from mistudio import units


class Command(BaseCommand):
    help = "Write the unit files of this installation into a folder, or show them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "folder", nargs="?", help="such as /etc/systemd/system; without it they are shown"
        )
        parser.add_argument("--user", help="the ordinary user that runs it; default: the data folder's owner")
        parser.add_argument("--home", help="the data folder; default: MISTUDIO_HOME")
        parser.add_argument("--environment", help="file with the settings; default: .env beside manage.py")
        parser.add_argument("--port", type=int, default=int(os.environ.get("PORT") or 8000))

    def handle(self, *args: Any, **options: Any) -> None:
        wanted = {name: options[name] for name in ("user", "port") if options[name]}
        wanted |= {name: Path(options[name]).absolute() for name in ("home", "environment") if options[name]}
        of = dataclasses.replace(
            units.Installation.here(), own_broker=bool(os.environ.get("REDIS_URL")), **wanted
        )
        self.look_at(of)
        for name, text in units.files(of).items():
            self.write(Path(options["folder"]) / name, text) if options["folder"] else self.stdout.write(
                f"# {name}\n{text}"
            )
        if options["folder"]:
            self.stdout.write("Then: systemctl daemon-reload && systemctl enable --now mistudio.target")

    def look_at(self, of: units.Installation) -> None:
        try:
            uid = pwd.getpwnam(of.user).pw_uid
        except KeyError:
            raise CommandError(
                f"There is no user {of.user!r}. Make one: useradd --system --create-home {of.user}"
            ) from None
        if uid == 0:
            raise CommandError("Jobs must not run as root: name an ordinary user with --user.")
        if not of.environment.exists():
            self.stderr.write(
                f"{of.environment} does not exist; all settings have their defaults until it does."
            )
        if of.home != settings.MISTUDIO_HOME:
            self.stderr.write(
                f"Host name, address and REDIS_URL are those of this shell, the data folder is {of.home}."
            )

    def write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text)
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
        self.stdout.write(str(path))
