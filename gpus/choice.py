"""The `gpu` field: parse it, turn it into UUIDs, or refuse with a reason (contract, section 2).

Indexes are for people: they become the card's UUID here, at submit, and nothing below ever sees one.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from typing import Any, NoReturn

from django.conf import settings

from gpus import owners
from gpus.backends import driver_present
from gpus.models import Gpu
from gpus.readings import is_instance, is_split, names_of
from gpus.rest import ApiError
from gpus.shapes import finite

_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
FULL_UUID = re.compile(rf"(?:GPU|MIG)-{_HEX}|MIG-GPU-{_HEX}/[0-9]+/[0-9]+", re.IGNORECASE)
INDEX = re.compile(r"0|[1-9][0-9]*")
AUTO = re.compile(r"auto(?::([1-9][0-9]*))?", re.IGNORECASE)


def parse(value: Any, *, max_gpus: int, needs_card: bool) -> str:
    """What to store as `gpu_request`: `auto`, `auto:N`, or UUIDs joined by commas. Raises `ApiError` 400."""
    known = KnownCards()
    count = auto_count(value)
    if count is None:
        return ",".join(gpu.uuid for gpu in known.named(value, max_gpus))
    if count > max(1, max_gpus):
        too_many(value, max_gpus)
    if count > 1 and count > known.most_on_one_host():
        known.unknown(value, f"{count} cards were asked for; no host has that many.")
    if needs_card:
        require_driver(known)
    return "auto" if count == 1 else f"auto:{count}"


def wanted(request: str) -> list[str] | int:
    """A stored request for dispatch: the UUIDs, or how many cards `auto` may choose."""
    count = auto_count(request)
    return request.split(",") if count is None else count


def auto_count(value: Any) -> int | None:
    """1 for nothing, `null` and `auto`, N for `auto:N`, `None` for everything else."""
    if value is None:
        return 1
    match = AUTO.fullmatch(value.strip()) if isinstance(value, str) else None
    return int((match[1] or "1")[:9]) if match else None


# Known cards ------------------------------------------------------------------------------------------


class KnownCards:
    """The cards as the database knows them at this moment, and the refusals that list them."""

    def __init__(self, host: str | None = None) -> None:
        rows = Gpu.objects.select_related("host").order_by("host__name", "index")
        self.all = list(rows if host is None else rows.filter(host__name=host))
        self.present = [gpu for gpu in self.all if gpu.removed_at is None]

    @cached_property
    def hosts(self) -> list[str]:
        return sorted({gpu.host.name for gpu in self.present})

    @cached_property
    def by_uuid(self) -> dict[str, Gpu]:
        return {name.casefold(): gpu for gpu in self.all for name in names_of(gpu.uuid, gpu.info)}

    def most_on_one_host(self) -> int:
        return max(Counter(gpu.host.name for gpu in self.present if gpu.selectable).values(), default=0)

    def named(self, value: Any, max_gpus: int) -> list[Gpu]:
        """The cards that `value` names, each able to take a job."""
        raws = value if isinstance(value, list) else [value]
        if not raws:
            invalid(value, "an empty list names no card")
        cards = [self.find(raw) for raw in raws]
        if len({gpu.uuid for gpu in cards}) < len(cards):
            invalid(value, "the list names a card twice")
        self._check_together(value, cards, max_gpus)
        for gpu in cards:
            check_available(gpu, self.listed())
        return cards

    def _check_together(self, value: Any, cards: list[Gpu], max_gpus: int) -> None:
        if len(cards) > max(1, max_gpus):
            too_many(value, max_gpus)
        if len(cards) > 1 and any(is_instance(gpu.uuid) for gpu in cards):
            too_many(value, 1, "A process cannot use several MIG instances, nor one beside a card.")
        if len({gpu.host_id for gpu in cards}) > 1:
            invalid(value, "the cards of one job must be in one host")

    def find(self, raw: Any) -> Gpu:
        """The card that an index or a UUID names, removed ones included; `ApiError` 400 if there is none."""
        text = as_text(raw)
        if text.casefold() in self.by_uuid:
            return self.by_uuid[text.casefold()]
        if FULL_UUID.fullmatch(text):
            self.unknown(raw, "No card has this UUID.")
        host, slash, index = text.rpartition("/")
        if not INDEX.fullmatch(index) or (slash and not host):
            invalid(raw)
        return self._by_index(raw, host, index)

    def _by_index(self, raw: Any, host: str, index: str) -> Gpu:
        if host and host not in self.hosts:
            self.unknown(raw, "No host of this name has cards.")
        if not host and len(self.hosts) > 1:
            self.ambiguous(raw)
        found = [
            gpu for gpu in self.present if str(gpu.index) == index and (not host or gpu.host.name == host)
        ]
        return found[0] if found else self.unknown(raw, "No card has this index.")

    # Refusals that list the cards

    def listed(self) -> list[dict[str, Any]]:
        return [
            {"gpu_id": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "host": gpu.host.name}
            for gpu in self.present
        ]

    def unknown(self, raw: Any, why: str) -> NoReturn:
        names = "; ".join(f"{gpu.index}: {gpu.name} {gpu.uuid}" for gpu in self.present) or "none"
        detail = f"{why} Known cards: {names}."
        raise ApiError(400, "unknown_gpu", detail, gpu=shown(raw), available=self.listed())

    def ambiguous(self, raw: Any) -> NoReturn:
        detail = "Several hosts have cards, so an index alone names none; use a UUID or host/index."
        raise ApiError(400, "ambiguous_gpu", detail, gpu=shown(raw), available=self.listed())


def as_text(raw: Any) -> str:
    """An index or a name as text; what can be neither is refused. `bool` first: to Python, `True` is an int."""
    if isinstance(raw, bool) or not isinstance(raw, int | str) or (isinstance(raw, int) and raw < 0):
        invalid(raw)
    # Python does not print integers of thousands of digits; no host has a billion cards.
    return raw.strip() if isinstance(raw, str) else str(min(raw, 10**9))


def shown(raw: Any) -> Any:
    """What was asked for, as it came when it is short."""
    return finite(raw) if len(repr(raw)) <= 200 else repr(raw)[:200] + "…"


def invalid(raw: Any, why: str = "it is neither “auto”, nor an index, nor a full UUID") -> NoReturn:
    hint = "Use “auto”, an index of gpu-list such as 0, or a card's full UUID."
    raise ApiError(400, "invalid_gpu", f"gpu is not valid: {why}.", gpu=shown(raw), hint=hint)


def too_many(raw: Any, max_gpus: int, why: str = "") -> NoReturn:
    detail = why or f"This kind of job uses at most {max(1, max_gpus)} card{'s' if max_gpus > 1 else ''}."
    raise ApiError(400, "too_many_gpus", detail, gpu=shown(raw), max_gpus=max(1, max_gpus))


# Cards that cannot take a job ---------------------------------------------------------------------------


def check_available(gpu: Gpu, known: list[dict[str, Any]]) -> None:
    """400 for a card that no job may name now. A stale card or a silent host is no reason: the job waits."""
    if not gpu.simulated and gpu.host.backend_error:
        driver_unavailable(gpu.host.backend_error)
    hold = owners.holds().get(gpu.uuid, owners.NOTHING)
    checks: list[tuple[bool, str, str]] = [
        (gpu.removed_at is not None, "removed", "is no longer in its host"),
        (
            gpu.lost_at is not None,
            "lost",
            "was lost: " + (gpu.error or "the driver stopped answering for it"),
        ),
        (is_split(gpu.info), "mig_parent", "is split into MIG instances; name one of those"),
        (not gpu.enabled, "disabled", "was switched off by staff"),
        (hold["quarantined"], "quarantined", "is closed until the memory of an ended job has come back"),
        (not gpu.selectable, "not_selectable", "is not among MISTUDIO_VISIBLE_GPUS of its host"),
    ]
    for holds, reason, sentence in checks:
        if holds:
            raise ApiError(
                400,
                "gpu_not_available",
                f"Card {gpu.index} ({gpu.uuid}) {sentence}.",
                gpu=gpu.uuid,
                reason=reason,
                available=known,
            )


# Machines without cards ---------------------------------------------------------------------------------


def cpu_allowed(known: KnownCards | None = None) -> bool:
    """Whether kinds that want a card run on the CPU: no driver, no card ever, and the settings allow it."""
    cards = (known or KnownCards()).all
    return (
        settings.MISTUDIO_ALLOW_CPU
        and settings.MISTUDIO_GPU_BACKEND != "simulated"
        and not driver_present()
        and not any(gpu.removed_at is None or not gpu.simulated for gpu in cards)
    )


def device(*, needs_card: bool) -> str:
    """What a job's mathematics runs on: a card (`cuda`), or the CPU where it needs none or there can be none."""
    return "cuda" if needs_card and not cpu_allowed() else "cpu"


def require_driver(known: KnownCards) -> None:
    """`auto` needs a card that may come: here or had once, a driver that may recover, or the CPU instead."""
    may_come = settings.MISTUDIO_GPU_BACKEND == "simulated" or driver_present()
    if known.present or may_come or any(not gpu.simulated for gpu in known.all) or cpu_allowed(known):
        return
    driver_unavailable("There is no NVIDIA driver on this machine and no host has a card.")


def driver_unavailable(why: str) -> NoReturn:
    hint = "Install the NVIDIA driver (nvidia-smi must list the cards), or set MISTUDIO_ALLOW_CPU=on."
    raise ApiError(400, "driver_unavailable", why, hint=hint)
