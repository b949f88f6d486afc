"""`manage.py top`: cards and jobs in a terminal, as `nvitop` shows them; read from the database alone."""

from __future__ import annotations

import io
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from typing import Any

from django.core.management.base import BaseCommand
from django.db import close_old_connections
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpus.models import Gpu, Host
from gpus.timing import sample_seconds
from jobs.models import Job
from monitor import board, operator
from monitor.lines import AWAY, AWAY_ERRORS, bar
from monitor.templatetags import show

#: The colours of the pages' badges, as a terminal has them.
COLOURS = {"busy": "cyan", "good": "green", "warn": "yellow", "bad": "red"}
#: Where no terminal says how wide it is: wide enough for every column.
PLAIN_WIDTH = 140


class Command(BaseCommand):
    help = "Show cards, their jobs and the queue, again every two seconds. Ctrl-C ends it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="print it once and end")
        parser.add_argument("--seconds", type=float, default=sample_seconds(), help="between two looks")

    def handle(self, *args: Any, **options: Any) -> None:
        console = Console()
        if options["once"] or not console.is_terminal:
            self.stdout.write(plain(picture()))
            return
        try:
            self.live(console, max(0.2, options["seconds"]))
        except KeyboardInterrupt:
            pass

    def live(self, console: Console, seconds: float) -> None:
        with Live(picture_or_why(), console=console, screen=True, auto_refresh=False) as screen:
            while True:
                time.sleep(seconds)
                close_old_connections()
                screen.update(picture_or_why(), refresh=True)


def plain(shown: Group) -> str:
    text = io.StringIO()
    Console(file=text, width=PLAIN_WIDTH).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def picture_or_why() -> Group | Text:
    try:
        return picture()
    except AWAY_ERRORS:
        return Text(AWAY, style="red")


def picture() -> Group:
    gpus = board.gpu_map()
    cards = board.cards_of(board.present(gpus.values()))
    waiting = board.queue(operator.account(), gpus)
    tables = (cards_table(cards), jobs_table(cards), queue_table(waiting, gpus))
    return Group(*hosts(), *(part for table in tables for part in (Text(), table)))


def hosts() -> Iterable[Text]:
    """One line per host: what it says of itself, and whether its agent still does."""
    for host in Host.objects.order_by("name"):
        cpu, memory = (host.reading.get(part) or {} for part in ("cpu", "memory"))
        said = f"{host.name}  CPU {show.whole(cpu.get('percent'))} %  memory {show.whole(memory.get('percent'))} %"
        silent = "" if host.agent_alive() else f"  agent silent, last heard {show.ago(host.agent_seen_at)}"
        yield Text(said).append(silent, style="red")


def empty_table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=column != "why")
    return made


def add(table: Table, *cells: str | Text, style: str = "") -> None:
    """A row of texts as they are: in the name of a job, `[/x]` is no markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)


def cards_table(cards: list[board.Card]) -> Table:
    numbers = ("util", "memory GiB", "temp", "power W")
    made = empty_table("Cards", "#", "name", "state", *numbers, "", right=("#", *numbers))
    for card in cards:
        info, metrics, state = card["info"], card["metrics"], card["state"]
        used, total = metrics["memory_used_bytes"], info["memory_total_bytes"]
        add(
            made,
            str(info["gpu_id"]),
            show.short_name(info["name"]),
            Text(state["text"], style=COLOURS.get(state["tone"], "")),
            f"{show.whole(metrics['utilization_gpu_percent'])} %",
            f"{show.gib(used)} / {show.gib(total)}",
            f"{show.whole(metrics['temperature_celsius'])} °C",
            f"{show.whole(metrics['power_draw_watts'])} / {show.whole(metrics['power_limit_watts'])}",
            bar(used / total) if used is not None and total else "",
            style="dim" if metrics["stale"] else "",
        )
    return made


def jobs_table(cards: list[board.Card]) -> Table:
    made = empty_table(
        "Running", "card", "job", "kind", "owner", "stage", "done", "left", right=("card", "done", "left")
    )
    for job, numbers in running(cards):
        progress = job.progress or {}
        add(
            made,
            numbers,
            f"{show.short_id(job.pk)} {job.name}",
            job.kind,
            str(job.owner),
            progress.get("stage") or job.status,
            show.percent(progress.get("fraction")),
            show.duration(progress.get("eta_seconds")),
        )
    return made


def running(cards: list[board.Card]) -> Iterable[tuple[Job, str]]:
    """Every job that runs with the numbers of its cards; those without a card last."""
    jobs = board.active_jobs()
    on: dict[str, list[str]] = {job_id: [] for job_id in jobs}
    for card in cards:
        for job in card["jobs"]:
            on.setdefault(str(job.pk), []).append(str(card["info"]["gpu_id"]))
    ordered = sorted(jobs, key=lambda job_id: (not on[job_id], on[job_id], job_id))
    return [(jobs[job_id], ",".join(on[job_id]) or "CPU") for job_id in ordered]


def queue_table(waiting: dict[str, Any], gpus: Mapping[str, Gpu]) -> Table:
    more = f", and {waiting['more']} more" if waiting["more"] else ""
    made = empty_table(f"Waiting{more}", "asks for", "job", "kind", "owner", "why")
    for row in waiting["rows"]:
        job = row["job"]
        add(
            made,
            asked(job.gpu_wanted, gpus),
            f"{show.short_id(job.pk)} {job.name}",
            job.kind,
            str(job.owner),
            row["why"]["text"],
        )
    return made


def asked(request: str, gpus: Mapping[str, Gpu]) -> str:
    """`auto`, or the numbers of the cards as the table of the cards has them; the UUID of one that is gone."""
    if request.startswith("auto"):
        return request
    return ",".join(
        str(gpus[uuid].index) if uuid in gpus else show.short_uuid(uuid) for uuid in request.split(",")
    )
