"""`manage.py submit KIND`: queue a job from a shell, by the same way and with the same sentences as REST.

Standard output gets the job's id (of a sweep all of them, one a line) and nothing else; what a person reads goes to
standard error.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import close_old_connections
from rest_framework.exceptions import APIException

from gpus import rest
from jobs import groups, serializers, submit
from jobs.exceptions import Conflict
from jobs.models import Job, Status
from monitor import operator
from monitor.lines import AWAY, AWAY_ERRORS, Pace, progress_line
from monitor.signin import base_url

LOOK_SECONDS = 0.5


class Command(BaseCommand):
    help = "Queue a job; with --wait follow it to its end. Exit code 0: queued; with --wait: succeeded."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("kind", help="such as sae_training; an unknown one lists all")
        parser.add_argument(
            "--gpu",
            action="append",
            help="auto (default), an index of gpu-list, or a UUID; repeated for several cards",
        )
        parser.add_argument("--name", help="a name for the job")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a parameter; the value is JSON, or a text as it stands",
        )
        parser.add_argument(
            "--json", metavar="FILE", help="parameters as a JSON object; - reads standard input"
        )
        parser.add_argument("--user", default=operator.NAME, help="whose job it is; default: the operator")
        parser.add_argument("--wait", action="store_true", help="show its progress until it has ended")

    def handle(self, *args: Any, **options: Any) -> None:
        jobs = queue(person(options["user"]), options["kind"], body(options))
        for job in jobs:
            self.stdout.write(str(job.pk))
            self.tell(f"{job} {job.status} on {job.gpu_request}: {base_url().rstrip('/')}/jobs/{job.pk}/")
        self.stdout.flush()
        if options["wait"]:
            self.follow(jobs)

    def tell(self, line: str) -> None:
        self.stderr.write(line, style_func=str)
        self.stderr.flush()

    def follow(self, jobs: list[Job]) -> None:
        """Until all have ended. Ctrl-C ends the following, never a job."""
        try:
            ended = [self.until_the_end(job) for job in jobs]
        except KeyboardInterrupt:
            self.tell(f"\nNo longer followed; {' '.join(str(job.pk) for job in jobs)} goes on.")
            raise SystemExit(130) from None
        bad = [how_it_ended(job) for job in ended if job["status"] != Status.SUCCEEDED]
        if bad:
            raise CommandError("\n".join(bad))
        self.tell(f"succeeded after {sum(job['duration_s'] for job in ended):.1f} s")

    def until_the_end(self, job: Job) -> dict[str, Any]:
        line, pace = Line(self.stderr), Pace()
        try:
            while True:
                shown = look(job)
                if shown is None:
                    line.show(AWAY, AWAY)
                elif job.final:
                    return shown
                else:
                    rate = pace.rate(shown["progress"], time.monotonic())
                    line.show(progress_line(shown, rate), job.status)
                time.sleep(LOOK_SECONDS)
        finally:
            line.clear()


def look(job: Job) -> dict[str, Any] | None:
    """The job as it is now; nothing while the database is away, which ends no job, and no following either."""
    try:
        job.refresh_from_db()
        return serializers.full(job)
    except AWAY_ERRORS:
        close_old_connections()
        return None


class Line:
    """One line that is written again and again; without a terminal, one line per state."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.live, self.state = stream, sys.stderr.isatty(), ""

    def show(self, text: str, state: str) -> None:
        if self.live:  # a line that wraps could not be taken back
            self.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}")
        elif state != self.state:
            self.write(text + "\n")
        self.state = state

    def clear(self) -> None:
        if self.live:
            self.write("\r\033[K")

    def write(self, text: str) -> None:
        self.stream.write(text, style_func=str, ending="")
        self.stream.flush()


def person(name: str) -> Any:
    user = get_user_model().objects.filter(username=name, is_active=True).first()
    if user is None:
        raise CommandError(f"There is no active user {name!r}.")
    return user


def how_it_ended(job: dict[str, Any]) -> str:
    told = f"Job {job['id']} ended {job['status']}. {job['error']} {job['hint']}"
    return told.strip()


def queue(user: Any, kind: str, data: dict[str, Any]) -> list[Job]:
    """The job, or those of a sweep."""
    try:
        rest.check(data)
        if groups.swept(submit.get_kind(kind), data):
            return list(groups.members(groups.submit_once(user, kind, data)[0]))
        return [submit.submit_once(user, kind, data)[0]]
    except Conflict as conflict:
        raise CommandError(str(conflict)) from None
    except APIException as error:
        raise CommandError(sentences(rest.body(error))) from None


def sentences(refusal: dict[str, Any]) -> str:
    """The error envelope for a terminal: a line per field, and the hint."""
    errors = refusal.get("errors") or {}
    lines = [f"{field}: {message}" for field, messages in errors.items() for message in messages]
    return "\n".join([*(lines or [refusal["detail"]]), *([refusal["hint"]] if "hint" in refusal else [])])


def body(options: dict[str, Any]) -> dict[str, Any]:
    """The body that REST would get."""
    data = read_json(options["json"]) if options["json"] else {}
    data |= dict(pair(text) for text in options["set"])
    if options["gpu"]:
        data["gpu"] = options["gpu"] if len(options["gpu"]) > 1 else options["gpu"][0]
    if options["name"] is not None:
        data["name"] = options["name"]
    return data


def read_json(name: str) -> dict[str, Any]:
    try:
        data = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"No JSON can be read from {name}: {error}") from None
    if not isinstance(data, dict):
        raise CommandError(f"{name} holds no JSON object.")
    return data


def pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not key or not sign:
        raise CommandError(f"--set takes KEY=VALUE, not {text!r}.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
