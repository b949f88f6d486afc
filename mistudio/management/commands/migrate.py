"""`manage.py migrate`: Django's, after a backup of a database that holds data and is about to be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.core.management.commands import migrate
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from mistudio import backup, databases
from mistudio.telling import Progress
from monitor import operator


class Command(migrate.Command):
    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--no-backup", action="store_false", dest="backup", help="change the tables without a backup"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        made = self.back_up() if self.changes_data(options) else None
        try:
            super().handle(*args, **options)
        except Exception as error:
            if made is None:
                raise
            raise CommandError(
                f"The tables could not be changed: {type(error).__name__}: {error}\n"
                f"The database as it was before is in {made}. Go back to the version before, "
                f"or repair the cause and start again; `manage.py restore {made}` puts it back."
            ) from error

    def changes_data(self, options: dict[str, Any]) -> bool:
        looks = options["plan"] or options["check_unapplied"] or options["prune"]
        if looks or not options["backup"] or options["database"] != "default" or operator.in_test_run():
            return False
        executor = MigrationExecutor(connections["default"])
        waiting = executor.migration_plan(executor.loader.graph.leaf_nodes())
        return bool(executor.loader.applied_migrations and (waiting or options["app_label"]))

    def back_up(self) -> Path:
        line = Progress(self.stdout)
        try:
            made = backup.before_upgrade(line.say)
        except (backup.Refused, *databases.FAULTS) as error:
            raise CommandError(
                f"No backup, so the tables are left as they are: {error} (--no-backup goes on without one)"
            ) from error
        line.done(f"The tables are about to change; the database as it is now is in {made}")
        return made
