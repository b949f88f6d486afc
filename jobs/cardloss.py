"""A card that is lost while a job runs on it: the agent hears it from the driver, the work from CUDA."""

from __future__ import annotations

import time

from django.db.models import Q

from gpus.models import Gpu
from gpus.timing import scaled
from jobs.models import Attempt
from jobs.patience import patiently

#: From a card's last answer until its row says that it is lost: two beats of the agent, and its write.
NOTICE_SECONDS = 6.0
GONE = Q(lost_at__isnull=False) | Q(removed_at__isnull=False)


def sentence(attempt: Attempt) -> str:
    """What became of the first card of the attempt that is gone; empty while all are there."""
    gpu = Gpu.objects.filter(GONE, pk__in=attempt.gpu_uuids).order_by("index").first()
    if gpu is None:
        return ""
    why = gpu.error or ("it was taken out" if gpu.removed_at else "the driver stopped answering for it")
    return f"Card {gpu.index} ({gpu.name}, {gpu.uuid}) was lost while the job ran: {why}"


def behind(attempt: Attempt, error: str) -> str:
    """The same for a work that has just failed: where CUDA failed, the agent is given the time to see why."""
    deadline = time.monotonic() + (scaled(NOTICE_SECONDS) if "CUDA" in error else 0)
    while not (found := patiently(lambda: sentence(attempt))) and time.monotonic() < deadline:
        time.sleep(scaled(0.5))
    return found
