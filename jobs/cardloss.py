"""A card that is lost while a job runs on it: the agent hears it from the driver, the work from CUDA."""

from __future__ import annotations

import time
from dataclasses import dataclass

from django.db.models import Q

from gpus.models import Gpu
from gpus.timing import scaled
from jobs.models import Attempt
from jobs.patience import patiently

#: From a card's last answer until its row says that it is lost: two beats of the agent, and its write.
NOTICE_SECONDS = 6.0
GONE = Q(lost_at__isnull=False) | Q(removed_at__isnull=False)


@dataclass(frozen=True)
class Loss:
    """What was lost, in a sentence, and the reason of a failure that comes of it."""

    sentence: str
    reason: str = "card_lost"


def of_card(attempt: Attempt) -> Loss | None:
    """What became of the first card of the attempt that is gone; None while all are there."""
    gpu = Gpu.objects.filter(GONE, pk__in=attempt.gpu_uuids).order_by("index").first()
    if gpu is None:
        return None
    why = gpu.error or ("it was taken out" if gpu.removed_at else "the driver stopped answering for it")
    return Loss(f"Card {gpu.index} ({gpu.name}, {gpu.uuid}) was lost while the job ran: {why}")


def of_driver(attempt: Attempt) -> Loss | None:
    """The driver of the attempt's host, once its agent says that it is away. Work that still computes goes on."""
    cards = Gpu.objects.filter(pk__in=attempt.gpu_uuids, simulated=False).exclude(host__backend_error="")
    gpu = cards.select_related("host").first()
    if gpu is None:
        return None
    return Loss(f"The driver was lost while the job ran: {gpu.host.backend_error}", "driver_unavailable")


def behind(attempt: Attempt, error: str) -> Loss | None:
    """The loss that a work has just failed by: where CUDA failed, the agent is given the time to see why."""
    by_cuda = "CUDA" in error
    deadline = time.monotonic() + (scaled(NOTICE_SECONDS) if by_cuda else 0)
    while True:
        loss = patiently(lambda: of_card(attempt) or (of_driver(attempt) if by_cuda else None))
        if loss or time.monotonic() >= deadline:
            return loss
        time.sleep(scaled(0.5))
