"""What a card's page shows: its facts and values, what runs and ran there, its story, and what staff may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Q

from gpus import shapes
from gpus.models import Gpu, GpuEvent
from jobs.models import ACTIVE, WAITING, Job, Status
from jobs.people import is_staff
from monitor import board, curves, joblist
from monitor.artifactpage import Fact
from monitor.templatetags.show import DASH, ago, size

JOBS_SHOWN = 10
EVENTS_SHOWN = 20
NAMES_SHOWN = 3
#: Field of `metrics`, label, unit, and how it is written (as `data-as` of live.js has it).
LIVE = (
    ("utilization_gpu_percent", "utilization", "%", ""),
    ("memory_used_bytes", "memory used", "GiB", "gib"),
    ("memory_free_bytes", "memory free", "GiB", "gib"),
    ("temperature_celsius", "temperature", "°C", ""),
    ("power_draw_watts", "power", "W", ""),
    ("power_limit_watts", "power limit", "W", ""),
    ("fan_percent", "fan", "%", ""),
    ("clock_sm_mhz", "SM clock", "MHz", ""),
    ("clock_memory_mhz", "memory clock", "MHz", ""),
    ("utilization_memory_percent", "memory controller", "%", ""),
    ("memory_reserved_bytes", "driver's own", "GiB", "gib"),
    ("ecc_errors_uncorrected", "ECC errors", "", ""),
    ("performance_state", "state", "", "text"),
    ("throttle_reasons", "slowed by", "", "list"),
)


def context(
    gpu: Gpu, user: User, typed: Mapping[str, Any] | None = None, errors: Any = None
) -> dict[str, Any]:
    """`typed` and `errors`: a form that was refused, to be shown again as it was sent."""
    gpus = board.gpu_map()
    [card] = board.cards_of([gpu])
    staff = is_staff(user)
    return {
        "gpu": gpu,
        "gpus": gpus,
        "card": card,
        "facts": list(facts(gpu, card["info"])),
        "live": list(live(card["metrics"], said=bool(gpu.reading) and gpu.lost_at is None)),
        "instances": [one for one in gpus.values() if one.info.get("mig_parent") == gpu.uuid],
        "parent": gpus.get(gpu.info.get("mig_parent") or ""),
        "processes": board.rows_of([card]),
        "unlisted": board.unlisted([card]),
        "events": list(GpuEvent.objects.filter(uuid=gpu.uuid).order_by("-at", "-id")[:EVENTS_SHOWN]),
        "windows": curves.WINDOWS,
        "none": "No job has run on it yet.",
        "staff": staff,
        "typed": typed or {name: getattr(gpu, name) for name in ("note", "max_jobs", "interactive_slots")},
        "errors": errors or {},
        "consequences": consequences(gpu, card) if staff else [],
        **joblist.page(user, {"card": gpu.uuid}, JOBS_SHOWN, together=False),
    }


# Facts --------------------------------------------------------------------------------------------------
def facts(gpu: Gpu, info: shapes.Info) -> Iterator[Fact]:
    """What stays the same while it is in its slot; what nobody knows is a dash."""
    yield Fact("UUID", info["uuid"], code=True)
    yield Fact("host", f"{info['host']}, card {info['gpu_id']} in PCI order")
    yield Fact("PCI address", info["pci_bus_id"] or DASH, code=bool(info["pci_bus_id"]))
    yield Fact("PCIe link", link(gpu.reading))
    yield Fact("driver", info["driver_version"] or DASH)
    yield Fact("CUDA of the driver", info["cuda_version"] or DASH)
    yield Fact("compute capability", info["compute_capability"] or DASH)
    yield Fact(
        "memory", size(info["memory_total_bytes"]) + (", the host's own" if info["unified_memory"] else "")
    )
    yield Fact("compute mode", info["compute_mode"] or DASH)
    yield Fact("MIG", mig(info))
    yield Fact("takes at once", takes(info))
    yield Fact("first seen", ago(info["first_seen_at"]))
    yield Fact("last seen", ago(info["last_seen_at"]))


def link(reading: Mapping[str, Any]) -> str:
    generation, width = reading.get("pcie_generation"), reading.get("pcie_width")
    return f"generation {generation or DASH} × {width or DASH}" if generation or width else DASH


def mig(info: shapes.Info) -> str:
    if info["mig_parent"]:
        return "an instance of another card"
    return DASH if info["mig_mode"] is None else "split into instances" if info["mig_mode"] else "off"


def takes(info: shapes.Info) -> str:
    if not info["selectable"]:
        return "nothing: not among MISTUDIO_VISIBLE_GPUS"
    return f"{count(info['max_jobs'], 'job')} and {info['interactive_slots']} interactive"


def live(metrics: shapes.Metrics, said: bool) -> Iterator[dict[str, Any]]:
    """Every value with its unit; where the card does not say one, why. `said`: whether it says anything now."""
    missing, values = metrics["missing"], dict(metrics) if said else {}
    for name, label, unit, written in LIVE:
        yield {
            "name": name,
            "label": label,
            "unit": unit,
            "as": written,
            "value": values.get(name),
            "missing": missing.get(name, ""),
        }


# Draining -----------------------------------------------------------------------------------------------
def consequences(gpu: Gpu, card: board.Card) -> list[str]:
    """What switching the card off does to the jobs that there are, or what switching it on again does."""
    if not gpu.enabled:
        return [
            "It takes the next job that fits. Jobs that were refused meanwhile are not queued again by themselves."
        ]
    running = [str(job) for job in card["jobs"]]
    asking = jobs_that_name(gpu)
    return [
        line
        for line in (
            goes_on(running),
            refused([str(job) for job in asking if job.status == Status.QUEUED]),
            later([str(job) for job in asking if job.status != Status.QUEUED]),
            "Jobs that ask for auto go to other cards, or wait. A new job that names this card is refused.",
        )
        if line
    ]


def jobs_that_name(gpu: Gpu) -> list[Job]:
    """Jobs without a card yet, or that would come back to this one, whose request names it."""
    named = Job.objects.filter(status__in=WAITING - ACTIVE).filter(Q(gpu_wanted__contains=gpu.uuid))
    return list(named.order_by("-priority", "queued_at"))


def goes_on(names: list[str]) -> str:
    if not names:
        return "Nothing runs on it now."
    return f"{count(len(names), 'job')} {'goes' if len(names) == 1 else 'go'} on to the end: {listed(names)}."


def refused(names: list[str]) -> str:
    who = f"{count(len(names), 'queued job')} that named this card"
    return f"{who} {are(names)} refused: {listed(names)}. Nothing is moved by itself." if names else ""


def later(names: list[str]) -> str:
    who = f"{count(len(names), 'held or paused job')} that named it"
    when = "when released or resumed before it is open again"
    return f"{who} {are(names)} refused {when}: {listed(names)}." if names else ""


def are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def listed(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
