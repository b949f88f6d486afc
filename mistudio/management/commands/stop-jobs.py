"""`manage.py stop-jobs --pause|--cancel`: end or pause all that runs, and say what did not."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from jobs import maintenance, verbs
from jobs.exceptions import Conflict
from jobs.models import Job
from mistudio.winding_down import host_named, until_nothing_runs, where
from monitor import operator


class Command(BaseCommand):
    help = (
        "Pause or cancel all running jobs. Queued ones start on the cards that come free, "
        "unless `manage.py maintenance begin` came first."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        how = parser.add_mutually_exclusive_group(required=True)
        how.add_argument("--pause", action="store_true", help="they keep a checkpoint and can be resumed")
        how.add_argument("--cancel", action="store_true", help="they end; SIGKILL after 30 s")
        parser.add_argument("--host", help="one host; default: all")
        parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="default: 60")

    def handle(self, *args: Any, **options: Any) -> None:
        host, verb = host_named(options["host"]), verbs.pause if options["pause"] else verbs.cancel
        asked = {job.pk: job.attempt for job in maintenance.running(host) if self.ask(verb, job)}
        left = until_nothing_runs(
            host, self.stdout, options["wait"], lambda job: asked.get(job.pk) == job.attempt
        )
        for job in left:
            self.stdout.write(f"did not end: {where(job)}")
        if left:
            raise CommandError(f"{len(left)} of {len(asked)} jobs still run after {options['wait']:.0f} s.")
        self.stdout.write(f"{len(asked)} jobs {'paused' if options['pause'] else 'cancelled'} or ended.")

    def ask(self, verb: Any, job: Job) -> bool:
        try:
            verb(job, operator.account())
        except Conflict:
            return False
        self.stdout.write(f"asked: {where(job)}")
        return True
