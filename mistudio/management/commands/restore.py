"""`manage.py restore BACKUP`: while nothing runs; what was there before is kept aside."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from jobs import paths
from jobs.maintenance import running
from jobs.models import Artifact
from mistudio import databases, home, restore
from mistudio.telling import Progress


class Command(BaseCommand):
    help = "Put a backup back. Refuses while services or jobs run, and keeps what was there before aside."
    requires_system_checks = []  # its database may be the very thing that is broken

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("backup", help="what `manage.py backup` has written: a .tar or a folder")

    def handle(self, *args: Any, **options: Any) -> None:
        line = Progress(self.stdout)
        source = Path(options["backup"]).expanduser().absolute()
        if not source.exists():
            raise CommandError(f"There is no {source}.")
        with home.alone(settings.MISTUDIO_HOME):
            try:
                aside = restore.restore(source, line.say)
            except (restore.Refused, *databases.FAULTS) as error:
                raise CommandError(str(error)) from error
        line.done(f"Restored from {source}. What was here before is in {aside}: remove it when all is well.")
        missing = sum(not paths.artifact_folder(artifact).is_dir() for artifact in Artifact.objects.all())
        if missing:
            self.stdout.write(f"{missing} artifacts have no files here: the backup was made without them.")
        if count := running().count():
            self.stdout.write(
                f"{count} jobs ran then; they are queued again from their checkpoints at the next start."
            )
