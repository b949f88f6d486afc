"""Beat with a pulse: a beat that runs and yet sends nothing is found out by its silence."""

from __future__ import annotations

import time
from typing import Any

from django.db import close_old_connections
from django_celery_beat.schedulers import DatabaseScheduler

from gpus.models import Pulse
from gpus.timing import scaled

PULSE_SECONDS = 5.0


class Scheduler(DatabaseScheduler):
    """Leaves a pulse when a message has gone out, at most every 5 s."""

    pulse_at = float("-inf")

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        sent = super().apply_async(*args, **kwargs)
        if time.monotonic() - self.pulse_at >= scaled(PULSE_SECONDS):
            close_old_connections()
            Pulse.beat("beat")
            self.pulse_at = time.monotonic()
        return sent
