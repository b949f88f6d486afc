"""Jobs of hosts that went silent: others take them over once their keepers have stopped themselves (`jobs.contact`).

The silence is counted by the database's clock, from round to round of whichever host comes first, and not over gaps in
which no round could write: then a heartbeat could not, either.
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import F, QuerySet
from django.db.models.functions import Now

from gpus.models import Host, Pulse
from gpus.timing import scaled
from jobs.contact import TAKEOVER, fence_seconds
from jobs.models import Attempt

ROUND = "takeover"
#: Between two rounds that vouch for the time between them: three of recovery's periods.
GAP_SECONDS = 30.0


def silent_too_long(host: Host) -> QuerySet[Attempt]:
    """One round, on `host`: claimed attempts of other hosts whose keepers must have ended their work by now."""
    elsewhere = Attempt.objects.filter(ended_at=None).exclude(keeper_pid=None).exclude(host=host)
    if step := vouched_seconds():
        elsewhere.filter(silent_seconds__isnull=False).update(silent_seconds=F("silent_seconds") + step)
    over = elsewhere.filter(silent_seconds__gte=TAKEOVER * fence_seconds())
    return over.select_related("job__owner", "host")


def vouched_seconds() -> float:
    """Seconds since the round before, whoever made it; 0 after a gap."""
    with transaction.atomic():
        Pulse.objects.get_or_create(name=ROUND, defaults={"at": Now()})
        last = Pulse.objects.select_for_update().annotate(now=Now()).get(name=ROUND)
        Pulse.objects.filter(name=ROUND).update(at=Now())
    step = (last.now - last.at).total_seconds()
    return step if 0 < step <= scaled(GAP_SECONDS) else 0.0
