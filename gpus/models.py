"""Hosts and cards as the agents last saw them, and the tables of their history.

A card's UUID is its identity; its index is for people.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db import models
from django.utils import timezone

from gpus.timing import AGENT_SILENT_SECONDS, WORKER_SILENT_SECONDS, scaled, stale_seconds


def within(moment: datetime | None, seconds: float) -> bool:
    """Whether `moment` lies less than `seconds` in the past."""
    return moment is not None and timezone.now() - moment < timedelta(seconds=seconds)


class Host(models.Model):
    """A machine with an agent and a worker. `reading` is its CPU, memory, disks and network rates."""

    name = models.CharField(max_length=100, unique=True)
    boot_id = models.CharField(max_length=36, blank=True)
    agent_seen_at = models.DateTimeField(null=True)
    worker_seen_at = models.DateTimeField(null=True)
    reading = models.JSONField(default=dict)
    backend_error = models.TextField(blank=True, help_text="Why no cards can be read, with the repair.")

    def __str__(self) -> str:
        return self.name

    def agent_alive(self) -> bool:
        return within(self.agent_seen_at, scaled(AGENT_SILENT_SECONDS))

    def worker_alive(self) -> bool:
        return within(self.worker_seen_at, scaled(WORKER_SILENT_SECONDS))


class Gpu(models.Model):
    """A card. `info`, `reading` and `processes` are the shapes of `gpus.readings`, as last sampled."""

    uuid = models.CharField(max_length=100, primary_key=True)
    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="gpus")
    index = models.PositiveIntegerField(help_text="Position in PCI order, for people.")
    name = models.CharField(max_length=100)
    memory_total_bytes = models.BigIntegerField(null=True)
    info = models.JSONField(default=dict)
    reading = models.JSONField(default=dict)
    sampled_at = models.DateTimeField(null=True)
    processes = models.JSONField(default=list)
    processes_at = models.DateTimeField(null=True)
    error = models.TextField(blank=True)

    simulated = models.BooleanField(default=False)
    selectable = models.BooleanField(default=True)
    enabled = models.BooleanField(default=True)
    max_jobs = models.PositiveIntegerField(default=1)
    interactive_slots = models.PositiveIntegerField(default=1)
    note = models.CharField(max_length=200, blank=True)
    lost_at = models.DateTimeField(null=True)
    removed_at = models.DateTimeField(null=True)
    first_seen_at = models.DateTimeField(auto_now_add=True)
    last_seen_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["host__name", "index"]

    def __str__(self) -> str:
        return f"{self.index} · {self.name} · {self.uuid}"

    @property
    def resource(self) -> str:
        """The name under which leases hold this card."""
        return f"gpu:{self.uuid}"

    def fresh(self) -> bool:
        return within(self.sampled_at, stale_seconds())

    def health(self, *, held: bool = False, quarantined: bool = False) -> tuple[str, str]:
        """The first word that holds, and its detail; `held` says that jobs still run on the card."""
        checks: list[tuple[bool, str, Any]] = [
            (not self.host.agent_alive(), "host_lost", "the agent of this host is silent"),
            (self.removed_at is not None, "removed", "the card is no longer in this host"),
            (self.lost_at is not None, "lost", self.error or "the driver stopped answering for this card"),
            (not self.fresh(), "stale", "no reading for longer than three samples"),
            (quarantined, "quarantined", "memory of an ended job has not come back"),
            (not self.enabled and held, "draining", "takes no new jobs; the running ones go on"),
            (not self.enabled, "disabled", "switched off by staff"),
        ]
        return next(((word, detail) for holds, word, detail in checks if holds), ("ok", ""))


class GpuEvent(models.Model):
    """Something that happened to a card: added, removed, lost, recovered, changed by staff."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    host = models.ForeignKey(Host, on_delete=models.CASCADE)
    uuid = models.CharField(max_length=100)
    event = models.CharField(max_length=40)
    detail = models.TextField(blank=True)

    class Meta:
        ordering = ["-at"]

    def __str__(self) -> str:
        return f"{self.event} {self.uuid}"


class Maintenance(models.Model):
    """No new job starts, on one host or on all of them, until it ends. Ended ones stay as the record."""

    host = models.ForeignKey(
        Host, null=True, on_delete=models.CASCADE, related_name="+", help_text="Empty: all hosts"
    )
    by = models.CharField(max_length=150)
    note = models.CharField(max_length=200, blank=True)
    began_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True)
    paused = models.JSONField(default=dict, help_text="The jobs that it asked to pause: id to attempt")

    class Meta:
        ordering = ["began_at"]

    def __str__(self) -> str:
        return f"maintenance of {self.host or 'all hosts'}"

    @classmethod
    def in_force(cls) -> models.QuerySet[Maintenance]:
        return cls.objects.filter(ended_at=None).select_related("host")

    @classmethod
    def of(cls, host: Host) -> Maintenance | None:
        """What keeps this host from starting jobs now."""
        return cls.in_force().filter(models.Q(host=None) | models.Q(host=host)).first()

    @property
    def sentence(self) -> str:
        where = f"on {self.host}" if self.host else "on any host"
        since = f"since {self.began_at:%H:%M} UTC by {self.by}"
        return f"maintenance {since}{f' ({self.note})' if self.note else ''}: no job starts {where} until it ends"


class Pulse(models.Model):
    """A sign of life of a part that has no row of its own: beat, a queue's canary, the watchdog."""

    name = models.CharField(max_length=100, primary_key=True)
    at = models.DateTimeField()

    def __str__(self) -> str:
        return self.name

    @classmethod
    def beat(cls, name: str) -> None:
        cls.objects.update_or_create(name=name, defaults={"at": timezone.now()})


# The history: every reading for 48 hours, minutes for 35 days, hours for two years --------------------------
#
# A row's key says card and time (`gpus.samples.key`), so that one card's window is one range of one b-tree, and what is
# old is one range too. Values are integers of the stated fraction of their unit; NULL where the card did not say.


class KeyField(models.BigIntegerField):
    """A 64-bit key, spelled so that SQLite makes it the row's own number: no second b-tree."""

    def db_type(self, connection: object) -> str | None:
        sqlite = getattr(connection, "vendor", "") == "sqlite"
        return "integer" if sqlite else super().db_type(connection)  # type: ignore[arg-type]


class GpuSeries(models.Model):
    """A card's place in the history tables. It outlives the card's own row, as the history does.

    Everything before `minutes_to` is in the minutes and everything before `hours_to` in the hours, exactly; a late
    reading sets both back. Before `raw_from` readings were pruned, and none is taken any more. All in milliseconds.
    """

    uuid = models.CharField(max_length=100, unique=True)
    minutes_to = models.BigIntegerField(default=0)
    hours_to = models.BigIntegerField(default=0)
    raw_from = models.BigIntegerField(default=0)

    class Meta:
        verbose_name_plural = "gpu series"

    def __str__(self) -> str:
        return f"{self.pk} · {self.uuid}"


class GpuSample(models.Model):
    """One reading."""

    id = KeyField(primary_key=True)
    utilization_gpu_permille = models.IntegerField(null=True)
    memory_used_bytes = models.BigIntegerField(null=True)
    temperature_decicelsius = models.IntegerField(null=True)
    power_draw_deciwatts = models.IntegerField(null=True)

    def __str__(self) -> str:
        return str(self.pk)


class Rollup(models.Model):
    """The readings of a period, keyed by its start. Sum and count instead of a mean: means of means would drift."""

    id = KeyField(primary_key=True)
    utilization_gpu_permille_min = models.IntegerField(null=True)
    utilization_gpu_permille_sum = models.BigIntegerField(null=True)
    utilization_gpu_permille_max = models.IntegerField(null=True)
    utilization_gpu_permille_count = models.IntegerField(default=0)
    memory_used_bytes_min = models.BigIntegerField(null=True)
    memory_used_bytes_sum = models.BigIntegerField(null=True)
    memory_used_bytes_max = models.BigIntegerField(null=True)
    memory_used_bytes_count = models.IntegerField(default=0)
    temperature_decicelsius_min = models.IntegerField(null=True)
    temperature_decicelsius_sum = models.BigIntegerField(null=True)
    temperature_decicelsius_max = models.IntegerField(null=True)
    temperature_decicelsius_count = models.IntegerField(default=0)
    power_draw_deciwatts_min = models.IntegerField(null=True)
    power_draw_deciwatts_sum = models.BigIntegerField(null=True)
    power_draw_deciwatts_max = models.IntegerField(null=True)
    power_draw_deciwatts_count = models.IntegerField(default=0)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return str(self.pk)


class GpuMinute(Rollup):
    """One minute of readings."""


class GpuHour(Rollup):
    """One hour of readings."""
