"""`manage.py maintenance begin|end|status`: drain one host or all of them, and say when work on it is safe."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from gpus.models import Host, Maintenance
from jobs import maintenance
from mistudio.telling import Progress
from mistudio.winding_down import LOOK_SECONDS, host_named, until_nothing_runs, where
from monitor import operator

PAUSE_SECONDS = 60.0


class Command(BaseCommand):
    help = (
        "Drain: no new job starts, until `end`. `begin` waits until nothing runs; Ctrl-C leaves it in force."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("act", choices=["begin", "end", "status"])
        parser.add_argument("--host", help="one host; default: all")
        parser.add_argument("--note", default="", help="for people: why, or for how long")
        parser.add_argument("--pause", action="store_true", help="begin: pause what runs; `end` resumes it")
        parser.add_argument(
            "--wait", type=float, metavar="SECONDS", help="how long to wait; default: until it is safe"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        host = host_named(options["host"])
        {"begin": self.begin, "end": self.end, "status": self.status}[options["act"]](host, options)

    def begin(self, host: Host | None, options: dict[str, Any]) -> None:
        operator_account = operator.account()
        begun = maintenance.begin(host, operator_account, options["note"][:200])
        self.stdout.write(f"{capital(begun.sentence)}. Queued jobs keep their places.")
        if options["pause"]:
            asked = maintenance.pause(begun, operator_account)
            self.stdout.write(f"Asked to pause: {len(asked)} jobs. `manage.py maintenance end` resumes them.")
        try:
            self.tell_when_safe(host, options["wait"])
        except KeyboardInterrupt:
            self.stdout.write("\nNo longer waiting. The maintenance stays in force.")
            raise SystemExit(130) from None

    def tell_when_safe(self, host: Host | None, limit: float | None) -> None:
        left = until_nothing_runs(host, self.stdout, limit)
        if left:
            for job in left:
                self.stdout.write(f"still runs: {where(job)}")
            raise CommandError(
                "Not safe yet. New jobs do not start; `manage.py maintenance status` tells more."
            )
        if cards := maintenance.held_cards(host):
            raise CommandError(f"Not safe yet. No job runs, but {cards} cards wait for memory to come back.")
        self.stdout.write("It is safe: nothing runs, and nothing starts.")

    def end(self, host: Host | None, options: dict[str, Any]) -> None:
        begun = Maintenance.in_force().filter(host=host).first()
        if begun is None:
            others = "; ".join(one.sentence for one in Maintenance.in_force())
            raise CommandError(f"No maintenance of {host or 'all hosts'} is in force. {others}".strip())
        maintenance.end(begun)
        self.stdout.write("Jobs start again.")
        if begun.paused:
            self.resume(begun, options["wait"] or PAUSE_SECONDS)

    def resume(self, begun: Maintenance, limit: float) -> None:
        """One that is still writing its checkpoint is waited for: resumed half-way, it would count as lost."""
        line, began, count = Progress(self.stdout), time.monotonic(), 0
        while True:
            found = maintenance.resume(begun, operator.account())
            count += len(found.jobs)
            if not found.pausing or time.monotonic() - began > limit:
                break
            line.say(f"{len(found.pausing)} still pause")
            time.sleep(LOOK_SECONDS)
        line.done(f"Resumed: {count} of the {len(begun.paused)} jobs that it asked to pause.")
        for job in found.pausing:
            self.stdout.write(f"still pauses, resume it by hand: {where(job)}")
        for job, why in found.refused:
            self.stdout.write(f"stays paused: {where(job)}. {why}")
        if others := len(begun.paused) - count - len(found.pausing) - len(found.refused):
            self.stdout.write(f"{others} had ended, or were resumed before.")

    def status(self, host: Host | None, options: dict[str, Any]) -> None:
        """Exit status 0 only while it is safe."""
        in_force = [one for one in Maintenance.in_force() if host is None or one.host in (None, host)]
        for one in in_force:
            self.stdout.write(f"{capital(one.sentence)}.")
        running, cards = list(maintenance.running(host)), maintenance.held_cards(host)
        for job in running:
            self.stdout.write(f"runs: {where(job)}")
        if cards:
            self.stdout.write(f"{cards} cards wait for memory to come back.")
        covered = host is not None or any(one.host is None for one in in_force)
        if not in_force or not covered or running or cards:
            self.stdout.write("No maintenance is in force." if not in_force else "Not safe yet.")
            raise SystemExit(1)
        self.stdout.write("It is safe: nothing runs, and nothing starts.")


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
