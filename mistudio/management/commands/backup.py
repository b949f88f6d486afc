"""`manage.py backup TARGET [--with-files]`: while everything runs."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from mistudio import backup, databases
from mistudio.telling import Progress


class Command(BaseCommand):
    help = "Copy the database, and with --with-files the results, while everything runs."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "target",
            help="a .tar to write, or a folder to make; an existing folder gets a .tar named by the time",
        )
        parser.add_argument(
            "--with-files",
            action="store_true",
            help="artifacts and jobs too; hard links in a folder on the same disk",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        target, began, line = (
            Path(options["target"]).expanduser().absolute(),
            time.monotonic(),
            Progress(self.stdout),
        )
        if target.is_dir():
            target /= backup.default_name()
        try:
            backup.make(target, with_files=options["with_files"], say=line.say)
        except (backup.Refused, *databases.FAULTS) as error:
            raise CommandError(str(error)) from error
        line.done(
            f"{target} ({time.monotonic() - began:.1f} s); put it back with `manage.py restore {target}`"
        )
