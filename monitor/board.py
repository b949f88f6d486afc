"""What the Monitor shows, put together from the rows: cards, who holds them, what starts next, the hosts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from django.contrib.auth.models import User

from gpus import owners, shapes
from gpus.models import Gpu, Host, Maintenance
from jobs import lines, ownership, places
from jobs.models import ACTIVE, Job, Status
from jobs.serializers import may_see
from monitor import curves, glance, words, workers

#: From so many cards on, a card is a line and its charts are opened one by one.
LINES_FROM = 9
QUEUE_LENGTH = 12
PROCESSES_SHOWN = 20

Card = dict[str, Any]


def gpu_map() -> dict[str, Gpu]:
    """Every known card by UUID, in the order of `gpu-list`."""
    return {gpu.uuid: gpu for gpu in Gpu.objects.select_related("host")}


def present(gpus: Iterable[Gpu]) -> list[Gpu]:
    """The cards that the pages show: those that were taken out are left to the record of their jobs."""
    return [gpu for gpu in gpus if gpu.removed_at is None]


def metrics_of(gpu: Gpu) -> shapes.Metrics:
    return shapes.metrics(gpu.index, gpu.uuid, {} if gpu.lost_at else gpu.reading, gpu.sampled_at)


def aggregate() -> shapes.Aggregate:
    return shapes.aggregate([metrics_of(gpu) for gpu in present(Gpu.objects.all())])


def monitor(user: User) -> dict[str, Any]:
    """The context of the Monitor and of its parts."""
    gpus = gpu_map()
    hosts = list(Host.objects.order_by("name"))
    cards = cards_of(present(gpus.values()))
    waiting = queue(user, gpus)
    running = workers.context(hosts)
    return {
        "gpus": gpus,
        "cards": cards,
        "lines": len(cards) >= LINES_FROM,
        "aggregate": shapes.aggregate([card["metrics"] for card in cards]),
        "hosts": hosts,
        "notices": notices(cards, hosts),
        "queue": waiting,
        "workers": running,
        "glance": glance.context(cards, waiting, running["silent"]),
        "about": about(cards, hosts),
        "windows": curves.WINDOWS,
        **processes_on(cards),
    }


def cards_of(gpus: Iterable[Gpu]) -> list[Card]:
    """Each with its readings, its jobs and processes, and what is to be said of it."""
    holds, active, judge = owners.holds(), active_jobs(), Judge()
    return [card_of(gpu, holds.get(gpu.uuid, owners.NOTHING), active, judge) for gpu in gpus]


def card_of(gpu: Gpu, hold: owners.Hold, active: dict[str, Job], judge: Judge) -> Card:
    info, processes = shapes.info(gpu, hold), judge.processes_of(gpu)
    outside = outside_of(processes)
    return {
        "info": info,
        "metrics": metrics_of(gpu),
        "jobs": [active[job_id] for job_id in hold["jobs"] if job_id in active],
        "processes": processes,
        "lists": gpu.processes_at is not None,
        "trouble": info["health"] in words.TROUBLE,
        "state": words.state_of_card(info, outside),
        "says": words.card_says(gpu, info, outside, bool(judge.maintained & {None, gpu.host_id})),
    }


def active_jobs() -> dict[str, Job]:
    jobs = Job.objects.filter(status__in=ACTIVE).select_related("owner")
    return {str(job.pk): job for job in jobs}


class Judge:
    """Whose the processes are, and which hosts are maintained; asks once per host, however many cards it has."""

    def __init__(self) -> None:
        self.known: dict[str, ownership.Known] = {}
        self.maintained = set(Maintenance.in_force().values_list("host", flat=True))  # None: all of them

    def processes_of(self, gpu: Gpu) -> list[shapes.Process]:
        if not gpu.processes:
            return []
        name = gpu.host.name
        if name not in self.known:
            self.known[name] = ownership.known_members(name)
        whose = ownership.owners_among(gpu.processes, name, self.known[name])
        pairs = zip(gpu.processes, whose, strict=True)
        return shapes.by_memory(shapes.process(gpu.uuid, entry, owner) for entry, owner in pairs)


def processes_on(cards: list[Card]) -> dict[str, Any]:
    """Those of all cards in one list, and how many do not fit into it."""
    rows = rows_of(cards)
    return {
        "processes": rows[:PROCESSES_SHOWN],
        "processes_more": max(0, len(rows) - PROCESSES_SHOWN),
        "unlisted": unlisted(cards),
    }


def unlisted(cards: list[Card]) -> list[int]:
    """Cards in order whose driver does not say which processes they have."""
    return [card["info"]["gpu_id"] for card in cards if not (card["lists"] or card["trouble"])]


def rows_of(cards: list[Card]) -> list[dict[str, Any]]:
    """Every process with its job, largest first."""
    listed = shapes.by_memory(process for card in cards for process in card["processes"])
    named = {str(job.pk): job for card in cards for job in card["jobs"]}
    return [{"process": process, "job": named.get(process["job_id"] or "")} for process in listed]


def outside_of(processes: list[shapes.Process]) -> int:
    """Bytes that programs of others hold, as far as the driver tells."""
    return sum(p["memory_used_bytes"] or 0 for p in processes if p["owner"] in ("foreign", "unknown"))


def notices(cards: list[Card], hosts: list[Host]) -> list[dict[str, Any]]:
    """What needs a person, each in a sentence."""
    found = [words.silent_agent(host) for host in hosts if not host.agent_alive()]
    found += [words.no_cards(host) for host in hosts if host.backend_error]
    silent = {host.name for host in hosts if not host.agent_alive()}
    found += [words.lost_card(card["info"]) for card in cards if needs_notice(card["info"], silent)]
    return found


def needs_notice(info: shapes.Info, silent: set[str]) -> bool:
    """One sentence per silent host is enough; its cards need none of their own."""
    return info["health"] in ("lost", "quarantined") and info["host"] not in silent


def queue(user: User, gpus: dict[str, Gpu]) -> dict[str, Any]:
    """The jobs that start, and those that wait in the order in which they are asked, each with why not now."""
    known = Job.objects.select_related("owner").order_by(*lines.ORDER)
    states = [known.filter(status=status) for status in (Status.STARTING, Status.QUEUED)]
    jobs = list(chain.from_iterable(jobs[:QUEUE_LENGTH] for jobs in states))[:QUEUE_LENGTH]
    places.tell(jobs)
    before = words.forerunners(jobs)
    rows = [{"job": job, "why": words.why_waiting(job, gpus, before, may_see(job, user))} for job in jobs]
    return {"rows": rows, "more": max(0, sum(jobs.count() for jobs in states) - len(rows))}


def about(cards: list[Card], hosts: list[Host]) -> list[str]:
    """Host names, driver, CUDA: the line beside the heading."""
    parts = [", ".join(host.name for host in hosts)]
    for label, key in (("driver", "driver_version"), ("CUDA", "cuda_version")):
        versions = sorted({card["info"][key] for card in cards if card["info"][key]})
        if versions:
            parts.append(f"{label} {', '.join(versions)}")
    if any(card["info"]["simulated"] for card in cards):
        parts.append("simulated cards")
    return [part for part in parts if part]
