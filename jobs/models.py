"""Jobs, their attempts, the leases they hold, the artifacts they make. The job row is the truth.

    held ⇄ queued ─grant─▶ starting ─claim, card verified─▶ running ─▶ succeeded | failed
              ▲               │                                │
              └── re-queue ───┴── hand-over to a card ─────────┤▶ paused ─resume─▶ queued
    refused: queued, starting, or before the first report       └▶ cancelled: from every state not final

Every move is `Job.move`: a conditional update on (status, attempt). "Someone was first" is a normal answer.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterable
from typing import Any

from django.conf import settings
from django.db import models, transaction
from django.db.models import Case, F, Q, Value, When
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Concat
from django.utils import timezone

from jobs import messages, registry


def uuid7() -> uuid.UUID:
    """A time-ordered id (RFC 9562, version 7): rows of one moment lie together in the index."""
    milliseconds = time.time_ns() // 1_000_000
    value = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    return uuid.UUID(int=value)


class Status(models.TextChoices):
    HELD = "held"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"


FINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.REFUSED, Status.CANCELLED})
#: States in which an attempt is open: processes may exist, leases are held.
ACTIVE = frozenset({Status.STARTING, Status.RUNNING})
#: States without an attempt that are not final; the API may end such a job by itself.
WAITING = frozenset({Status.HELD, Status.QUEUED, Status.PAUSED})


#: Where a queued job stands that waits for resources alone, such as `batch GPU-…`, `interactive auto` or `batch cpu`;
#: null for all others, so that the index on it is the queue (`jobs.lines`).
LINE = Case(
    When(
        ~Q(status=Status.QUEUED) | Q(waits_on__isnull=False) | Q(cancel_requested_at__isnull=False), then=None
    ),
    default=Concat(
        Case(When(interactive=True, then=Value("interactive ")), default=Value("batch ")),
        Case(
            When(needs_card=False, then=Value("cpu")),
            When(device="cpu", then=Value("cpu-whole")),
            default=F("gpu_wanted"),
        ),
    ),
)


class Job(models.Model):
    """One piece of work of one kind. `gpu_request` is what was asked for and never changes;
    `gpu_wanted` is the request in force (set by resume); `gpu_uuids` are the cards of the latest attempt.
    `needs_card`, `device` and `estimate` are those of the stage that the job is in."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    kind = models.CharField(max_length=60, choices=registry.choices, db_index=True)
    name = models.CharField(max_length=120, blank=True)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="jobs")
    status = models.CharField(max_length=12, choices=Status.choices, default=Status.QUEUED)
    priority = models.IntegerField(default=0)
    params = models.JSONField(default=dict)
    device = models.CharField(max_length=8, default="cuda", help_text="cuda, or cpu for work without a card")
    simulated = models.BooleanField(default=False)
    stalled = models.BooleanField(default=False)
    interactive = models.BooleanField(default=False)
    needs_card = models.BooleanField(default=True)
    # New columns have defaults of the database's own: keepers of the version before still write rows.
    stage = models.CharField(
        max_length=40,
        blank=True,
        default="",
        db_default="",
        help_text="Empty at first; then the stage that was handed over to a card",
    )
    time_limit_seconds = models.PositiveIntegerField(
        null=True, help_text="Of running, over all attempts; waits and pauses do not count"
    )

    gpu_request = models.CharField(max_length=4000, default="auto")
    gpu_wanted = models.CharField(max_length=4000, default="auto")
    gpu_uuid = models.CharField(max_length=100, null=True, db_index=True)  # noqa: DJ001 (null, never "")
    gpu_uuids = models.JSONField(default=list)
    host = models.ForeignKey("gpus.Host", null=True, on_delete=models.SET_NULL, related_name="jobs")
    attempt = models.PositiveIntegerField(default=0, help_text="Number of the latest attempt: the fence")

    estimate = models.JSONField(null=True)
    need_bytes = models.GeneratedField(
        expression=Cast(KT("estimate__memory_bytes"), models.BigIntegerField()),
        output_field=models.BigIntegerField(null=True),
        db_persist=True,
    )
    progress = models.JSONField(default=dict)
    waiting_for = models.JSONField(
        null=True, help_text="Why it did not start when it was last asked; `jobs.places.tell` says why now"
    )
    waits_on = models.ForeignKey(
        "self",
        null=True,
        on_delete=models.SET_NULL,
        related_name="awaited_by",
        help_text="A job of `after` or of its inputs that has not ended: until then it stands in no line",
    )
    line = models.GeneratedField(
        expression=LINE, output_field=models.CharField(max_length=4020, null=True), db_persist=True
    )
    result = models.JSONField(null=True)
    failure_reason = models.CharField(max_length=40, blank=True)
    error = models.TextField(blank=True)
    hint = models.TextField(blank=True)
    traceback = models.TextField(blank=True)
    peak_memory_bytes = models.BigIntegerField(null=True)

    after = models.ManyToManyField(
        "self",
        symmetrical=False,
        blank=True,
        related_name="followed_by",
        help_text="Starts when these succeeded",
    )
    idempotency_key = models.CharField(max_length=200, null=True)  # noqa: DJ001 (null, never "")
    request_digest = models.CharField(
        max_length=64, blank=True, help_text="SHA-256 of the body with that key"
    )
    retry_of = models.ForeignKey("self", null=True, on_delete=models.SET_NULL, related_name="retries")
    retry_from = models.CharField(max_length=12, blank=True, help_text="checkpoint or start")
    group_id = models.UUIDField(null=True, help_text="The `JobGroup`; a retry stays in it")
    cancel_requested_at = models.DateTimeField(null=True)
    pause_requested_at = models.DateTimeField(null=True)
    queued_at = models.DateTimeField(default=timezone.now)
    not_before = models.DateTimeField(
        null=True, help_text="After a launch that never came up: when to try again"
    )
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-queued_at"]
        indexes = [
            models.Index(fields=["-queued_at"], name="newest_jobs"),
            models.Index(fields=["status", "-queued_at"], name="newest_of_status"),
            models.Index(fields=["status", "-priority", "queued_at"], name="next_of_status"),
            models.Index(fields=["status", "waits_on"], name="waiting_for_another"),
            # Narrower than any by state or kind, so that a filtered list looks for the last of a group by it.
            models.Index(fields=["group_id", "id"], name="members_of_a_group"),
            # The queue by lines. Not a partial one: SQLite would pass it by for a parameter.
            models.Index(fields=["line", "-priority", "queued_at", "need_bytes"], name="lines_of_the_queue"),
            models.Index(
                fields=["kind", "-finished_at"],
                name="jobs_to_learn_from",
                condition=Q(status=Status.SUCCEEDED),
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["owner", "idempotency_key"], name="one_job_per_idempotency_key")
        ]

    def __str__(self) -> str:
        return self.name or f"{self.kind} {self.id.hex[-6:]}"

    @property
    def final(self) -> bool:
        return self.status in FINAL

    def move(self, sources: Iterable[str], to: str, **values: Any) -> bool:
        """From one of `sources` to `to`, if the row still is there under this attempt; False if someone
        was first. `values` are written in the same update; the instance follows when it succeeds."""
        if to in FINAL:
            values |= {"finished_at": timezone.now(), "waiting_for": None}
        if to != Status.RUNNING:
            values["stalled"] = False
        here = Job.objects.filter(pk=self.pk, status__in=list(sources), attempt=self.attempt)
        with transaction.atomic():
            moved = here.update(status=to, **values)
            if moved:
                self.status = to
                for name, value in values.items():
                    setattr(self, name, value)
                messages.tell_of(self)  # written with the state: neither is there without the other
        return bool(moved)

    def update_fenced(self, **values: Any) -> bool:
        """Write to the running job, if this attempt still holds it."""
        return bool(Job.objects.filter(pk=self.pk, attempt=self.attempt, status__in=ACTIVE).update(**values))


class JobGroup(models.Model):
    """A sweep: one job per combination of the values in `swept`. Its jobs carry its id as `group_id`."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    kind = models.CharField(max_length=60, choices=registry.choices)
    name = models.CharField(max_length=120)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="job_groups")
    swept = models.JSONField(help_text="Parameter → the values to try, as they were checked")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name


class JobTemplate(models.Model):
    """Parameters of a kind kept under a name, its owner's unless shared. Any may be missing, and one that may be
    swept may hold a list."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    kind = models.CharField(max_length=60, choices=registry.choices)
    name = models.CharField(max_length=120)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="job_templates"
    )
    params = models.JSONField(default=dict)
    shared = models.BooleanField(default=False)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["kind", "name"]
        constraints = [
            models.UniqueConstraint(fields=["kind", "owner", "name"], name="one_template_per_name")
        ]

    def __str__(self) -> str:
        return self.name


class Outcome(models.TextChoices):
    ENDED = "ended"
    HANDED_OVER = "handed_over"
    LOST = "lost"
    NEVER_STARTED = "never_started"


class Attempt(models.Model):
    """One run of a job, made by the grant. Processes are named by pid, start ticks and boot id."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    host = models.ForeignKey("gpus.Host", on_delete=models.CASCADE)
    boot_id = models.CharField(max_length=36)
    gpu_uuids = models.JSONField(default=list)
    gpu_names = models.JSONField(default=list)
    reported_gpu_uuids = models.JSONField(null=True, help_text="The cards that the work itself found")
    keeper_pid = models.PositiveIntegerField(null=True)
    keeper_start = models.BigIntegerField(null=True, help_text="start ticks, field 22 of /proc/<pid>/stat")
    work_pid = models.PositiveIntegerField(null=True)
    work_start = models.BigIntegerField(null=True)
    session_id = models.PositiveIntegerField(null=True)
    members = models.JSONField(default=list, help_text="[pid, start ticks] of descendants seen")
    seen_ticks = models.BigIntegerField(
        null=True, help_text="The last heartbeat in clock ticks since boot: a member was alive then"
    )
    token_hash = models.CharField(max_length=64, blank=True)
    start_checkpoint = models.CharField(max_length=120, blank=True)
    granted_at = models.DateTimeField(default=timezone.now)
    claimed_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True, help_text="When its work had found its card and began")
    ran_seconds = models.FloatField(
        default=0, db_default=0.0, help_text="Of running, on the keeper's own clock"
    )
    heartbeat_at = models.DateTimeField(null=True)
    silent_seconds = models.FloatField(
        null=True,
        help_text="Since the last heartbeat, counted by other hosts; null: its keeper would not stop by itself",
    )
    ended_at = models.DateTimeField(null=True)
    outcome = models.CharField(max_length=16, choices=Outcome.choices, blank=True)
    counted = models.BooleanField(
        default=False,
        db_default=False,
        help_text="A loss that may be the job's own fault: three in a row end it",
    )
    detail = models.TextField(blank=True, help_text="Why it ended so, in a sentence")
    exit_status = models.IntegerField(null=True, help_text="Exit code, or minus the signal")
    peak_memory_bytes = models.BigIntegerField(null=True)

    class Meta:
        ordering = ["job", "number"]
        constraints = [models.UniqueConstraint(fields=["job", "number"], name="one_attempt_per_number")]

    def __str__(self) -> str:
        return f"{self.job} #{self.number}"

    def claim(self, pid: int, start: int, boot_id: str) -> bool:
        """Become the keeper of this attempt: open, without a keeper, no cancel requested. Once only.

        The job's row is locked first. A join in the update's filter would become a sub-select, which
        PostgreSQL does not look at again after waiting for another claim.
        """
        now, startable = timezone.now(), Job.objects.filter(status=Status.STARTING, cancel_requested_at=None)
        with transaction.atomic():
            if not startable.select_for_update().filter(pk=self.job_id, attempt=self.number).exists():
                return False
            mine = {"keeper_pid": pid, "keeper_start": start, "session_id": pid, "boot_id": boot_id}
            free = Attempt.objects.filter(pk=self.pk, keeper_pid=None, ended_at=None)
            return bool(free.update(**mine, claimed_at=now, heartbeat_at=now))

    def end(self, outcome: str, **values: Any) -> bool:
        """Close the attempt once; False if someone was first."""
        return bool(
            Attempt.objects.filter(pk=self.pk, ended_at=None).update(
                ended_at=timezone.now(), outcome=outcome, **values
            )
        )


class Lease(models.Model):
    """This attempt holds this slot of this resource (`gpu:<uuid>` or `cpu:<host>`).

    active ─attempt ends─▶ releasing ─processes gone, memory back─▶ ended; after 30 s ▶ quarantined ▶ ended
    """

    class State(models.TextChoices):
        ACTIVE = "active"
        RELEASING = "releasing"
        QUARANTINED = "quarantined"
        ENDED = "ended"

    resource = models.CharField(max_length=120, db_index=True)
    job_class = models.CharField(max_length=12, default="batch")  # batch | interactive
    slot = models.PositiveIntegerField()
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="leases")
    estimate_bytes = models.BigIntegerField(null=True)
    observed_bytes = models.BigIntegerField(null=True)
    state = models.CharField(max_length=12, choices=State.choices, default=State.ACTIVE)
    created_at = models.DateTimeField(default=timezone.now)
    releasing_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            # The database is the judge of who holds a slot.
            models.UniqueConstraint(
                fields=["resource", "job_class", "slot"],
                condition=Q(ended_at=None),
                name="one_lease_per_slot",
            )
        ]

    def __str__(self) -> str:
        return f"{self.resource} {self.job_class} {self.slot}"


class Artifact(models.Model):
    """A named result on disk, `artifacts/<type>/<id>/`, that other jobs take as input."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    type = models.CharField(max_length=20, db_index=True)
    name = models.CharField(max_length=160)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="artifacts")
    job = models.ForeignKey(Job, null=True, on_delete=models.SET_NULL, related_name="artifacts")
    shared = models.BooleanField(default=False)
    manifest = models.JSONField(default=dict)
    size_bytes = models.BigIntegerField(default=0)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(fields=["type", "owner", "name"], name="one_artifact_per_name")
        ]

    def __str__(self) -> str:
        return self.name


class JobInput(models.Model):
    """What a job takes: an artifact, or another job that will make one."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="inputs")
    parameter = models.CharField(max_length=60)
    artifact = models.ForeignKey(Artifact, null=True, on_delete=models.PROTECT, related_name="uses")
    source_job = models.ForeignKey(Job, null=True, on_delete=models.PROTECT, related_name="followers")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "parameter"], name="one_input_per_parameter")]

    def __str__(self) -> str:
        return f"{self.job}: {self.parameter}"


class JobMetric(models.Model):
    """One point of one curve. Written again after a resume, a step keeps its newest value."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="metrics")
    name = models.CharField(max_length=40)
    step = models.BigIntegerField()
    value = models.FloatField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["job", "name", "step"], name="one_value_per_step")]

    def __str__(self) -> str:
        return f"{self.name}[{self.step}]"


class JobEvent(models.Model):
    """The story of a job, line by line: who moved it, when, why."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    event = models.CharField(max_length=40)
    detail = models.TextField(blank=True)
    attempt = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["at", "id"]

    def __str__(self) -> str:
        return f"{self.event} {self.detail}"


class Message(models.Model):
    """Something to tell the outside, written in the transaction of what it tells.

    due ─delivered─▶ sent; ─refused─▶ due later, less and less often; after a day ▶ given up
    """

    class Channel(models.TextChoices):
        WEBHOOK = "webhook"
        EMAIL = "email"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    channel = models.CharField(max_length=10, choices=Channel.choices)
    event = models.CharField(max_length=40)
    address = models.EmailField(blank=True, help_text="Of a mail")
    payload = models.JSONField()
    created_at = models.DateTimeField(default=timezone.now)
    due_at = models.DateTimeField(null=True, default=timezone.now, help_text="Empty: nothing is to be done")
    tries = models.PositiveIntegerField(default=0)
    last_error = models.TextField(blank=True)
    sent_at = models.DateTimeField(null=True)
    given_up_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["created_at"]
        indexes = [
            models.Index(fields=["due_at"], name="messages_to_send", condition=Q(due_at__isnull=False))
        ]

    def __str__(self) -> str:
        return f"{self.event} by {self.channel}"


class MailChoice(models.Model):
    """When somebody wants a mail about the end of a job; without a row: when it failed."""

    class When(models.TextChoices):
        FAILURE = "failure", "when a job fails, is refused or held"
        ALWAYS = "always", "at every end of a job"
        NEVER = "never", "never"

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="mail_choice"
    )
    when = models.CharField(max_length=10, choices=When.choices, default=When.FAILURE)

    def __str__(self) -> str:
        return f"{self.user}: {self.when}"


class HubToken(models.Model):
    """A user's Hugging Face token, encrypted (`jobs.hub_token`). Nothing shows more of it than when it was set."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    ciphertext = models.TextField()
    set_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.user}: set {self.set_at:%Y-%m-%d}"


class WatchdogEvent(models.Model):
    """What was found on a card (or held for one) that no open attempt accounts for, and what became of it: one row per
    finding, updated as it moves.

    leftover: found ─grace─▶ term ─10 s─▶ kill ─5 s─▶ failed; from each of them ▶ gone
    the others, and in report mode all: found ▶ reported ▶ gone
    """

    class Finding(models.TextChoices):
        LEFTOVER = "leftover"  # a process of an ended attempt: the only finding that is ever signalled
        LEASE = "lease"  # a lease in quarantine: its card's memory has not come back
        GHOST = "ghost"  # memory or load of a card that lists nobody for it
        FOREIGN = "foreign"  # a process that is none of ours
        UNKNOWN = "unknown"  # a process of which nothing can be proven

    class State(models.TextChoices):
        FOUND = "found"
        TERM = "term"
        KILL = "kill"
        FAILED = "failed"
        REPORTED = "reported"
        GONE = "gone"

    host = models.ForeignKey("gpus.Host", on_delete=models.CASCADE)
    finding = models.CharField(max_length=12, choices=Finding.choices)
    state = models.CharField(max_length=12, choices=State.choices, default=State.FOUND)
    gpu_uuid = models.CharField(max_length=100, blank=True, help_text="Empty for a job without a card")
    pid = models.PositiveIntegerField(null=True)
    start_ticks = models.BigIntegerField(
        null=True, help_text="Start of the process, in clock ticks since boot"
    )
    name = models.CharField(max_length=200, blank=True)
    user = models.CharField(max_length=100, blank=True)
    attempt = models.ForeignKey(Attempt, null=True, on_delete=models.SET_NULL, related_name="watchdog_events")
    proof = models.CharField(max_length=12, blank=True, help_text="recorded, descendant, session or token")
    reason = models.TextField(blank=True)
    outcome = models.TextField(blank=True, help_text="What became of it, in a sentence")
    memory_before_bytes = models.BigIntegerField(
        null=True, help_text="Held when it was last seen unsignalled"
    )
    memory_after_bytes = models.BigIntegerField(
        null=True, help_text="Held in the reading that closed the row"
    )
    found_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)
    due_at = models.DateTimeField(null=True, help_text="When the next step of the ladder is due")
    term_at = models.DateTimeField(null=True)
    kill_at = models.DateTimeField(null=True)
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-found_at", "-id"]
        indexes = [
            models.Index(fields=["host"], name="open_watchdog_events", condition=Q(closed_at=None)),
            models.Index(fields=["-found_at", "-id"], name="newest_watchdog_events"),
        ]

    def __str__(self) -> str:
        return f"{self.finding} {self.pid or self.gpu_uuid}"

    @property
    def freed_bytes(self) -> int | None:
        """What came back; `None` where the driver does not say, or as long as it is there."""
        if self.memory_before_bytes is None or self.memory_after_bytes is None:
            return None
        return max(0, self.memory_before_bytes - self.memory_after_bytes)
