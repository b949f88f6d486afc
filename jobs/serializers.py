"""The job and artifact shapes of contract section 4: the same names in REST, WebSocket and pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from jobs import places
from jobs.models import Artifact, Attempt, Job, JobEvent, JobGroup, JobTemplate, WatchdogEvent
from jobs.people import Person, is_staff

#: What only the owner and staff may see of a job.
PRIVATE = ("params", "result", "error", "hint", "inputs", "artifacts")

#: What anybody may know of a wait; the rest is what dispatch remembers from one look to the next.
WAITING_FOR = ("reason", "detail", "gpu_uuid", "job_id", "since", "eta_seconds")


def may_see(job: Job | JobGroup, user: Person | None) -> bool:
    return user is not None and (job.owner_id == user.pk or is_staff(user))


class AttemptSerializer(serializers.ModelSerializer[Attempt]):
    host = serializers.CharField(source="host.name")

    class Meta:
        model = Attempt
        fields = [
            "number", "host", "gpu_uuids", "gpu_names", "reported_gpu_uuids", "keeper_pid", "work_pid",
            "start_checkpoint", "granted_at", "claimed_at", "started_at", "heartbeat_at", "ended_at",
            "ran_seconds", "outcome", "detail", "exit_status", "peak_memory_bytes",
        ]  # fmt: skip


@lru_cache
def _of_attempt() -> AttemptSerializer:
    return AttemptSerializer()


class JobEventSerializer(serializers.ModelSerializer[JobEvent]):
    class Meta:
        model = JobEvent
        fields = ["at", "event", "detail", "attempt"]


class WatchdogEventSerializer(serializers.ModelSerializer[WatchdogEvent]):
    """What stood on a card, and what was done about it; the same in REST and in frames."""

    host = serializers.CharField(source="host.name", read_only=True)
    job_id = serializers.UUIDField(source="attempt.job_id", default=None, read_only=True)
    attempt = serializers.IntegerField(source="attempt.number", default=None, read_only=True)
    freed_bytes = serializers.IntegerField(allow_null=True, read_only=True)

    class Meta:
        model = WatchdogEvent
        fields = [
            "id", "host", "gpu_uuid", "finding", "state", "reason", "outcome", "proof", "pid", "start_ticks", "name",
            "user", "job_id", "attempt", "memory_before_bytes", "memory_after_bytes", "freed_bytes", "found_at",
            "seen_at", "due_at", "term_at", "kill_at", "closed_at",
        ]  # fmt: skip


class ManyJobs(serializers.ListSerializer[Any]):
    def to_representation(self, jobs: Any) -> Any:
        """A page of jobs; why those wait that are queued is asked for all of them together."""
        page = list(jobs)
        places.tell(page)
        return super().to_representation(page)


class JobSerializer(serializers.ModelSerializer[Job]):
    """A job; others than its owner and staff get the reduced form (private fields null)."""

    owner = serializers.CharField(source="owner.username")
    host = serializers.CharField(source="host.name", default=None)
    gpu_names = serializers.SerializerMethodField()
    progress = serializers.SerializerMethodField()
    waiting_for = serializers.SerializerMethodField()
    inputs = serializers.SerializerMethodField()
    artifacts = serializers.SerializerMethodField()
    attempts = serializers.SerializerMethodField()
    after: serializers.Field[Any, Any, Any, Any] = serializers.PrimaryKeyRelatedField(
        many=True, read_only=True, pk_field=serializers.UUIDField()
    )
    retry_of = serializers.UUIDField(source="retry_of_id", allow_null=True)
    duration_s = serializers.SerializerMethodField()

    class Meta:
        model = Job
        list_serializer_class = ManyJobs
        fields = [
            "id", "kind", "name", "owner", "status", "stalled", "failure_reason", "error", "hint", "gpu_request",
            "gpu_wanted", "gpu_uuid", "gpu_uuids", "gpu_names", "host", "device", "simulated", "params", "estimate",
            "progress", "waiting_for", "result", "artifacts", "inputs", "after", "time_limit_seconds", "priority",
            "attempt", "attempts",
            "retry_of", "group_id", "cancel_requested_at", "queued_at", "started_at", "finished_at", "duration_s",
            "peak_memory_bytes",
        ]  # fmt: skip

    @extend_schema_field({"type": "array", "items": {"type": "string"}})
    def get_gpu_names(self, job: Job) -> list[str]:
        latest = _latest(job)
        return latest.gpu_names if latest else []

    @extend_schema_field({"type": "object"})
    def get_progress(self, job: Job) -> dict[str, Any]:
        return job.progress

    @extend_schema_field({"type": "object", "nullable": True})
    def get_waiting_for(self, job: Job) -> dict[str, Any] | None:
        told = job.waiting_for
        return {name: told.get(name) for name in WAITING_FOR} if told else None

    @extend_schema_field({"type": "array", "items": {"type": "object"}})
    def get_inputs(self, job: Job) -> list[dict[str, Any]]:
        return [
            {
                "parameter": row.parameter,
                "artifact": str(row.artifact_id) if row.artifact_id else None,
                "name": row.artifact.name if row.artifact else None,
                "job": str(row.source_job_id) if row.source_job_id else None,
            }
            for row in job.inputs.all()
        ]

    @extend_schema_field({"type": "array", "items": {"type": "object"}})
    def get_artifacts(self, job: Job) -> list[dict[str, Any]]:
        made = job.artifacts.all() if job.attempt else ()
        return [{"id": str(a.pk), "type": a.type, "name": a.name} for a in made]

    @extend_schema_field(AttemptSerializer(many=True))
    def get_attempts(self, job: Job) -> list[dict[str, Any]]:
        return [_of_attempt().to_representation(attempt) for attempt in _attempts(job)]

    @extend_schema_field({"type": "number", "nullable": True})
    def get_duration_s(self, job: Job) -> float | None:
        if job.started_at is None or job.finished_at is None:
            return None
        return round((job.finished_at - job.started_at).total_seconds(), 3)

    def to_representation(self, job: Job) -> dict[str, Any]:
        if self.parent is None and not self.context.get("as_stored"):
            places.tell([job])
        data = super().to_representation(job)
        user = job.owner if self.context.get("as_stored") else self.context.get("user")
        return data if may_see(job, user) else without_private(data)


def _attempts(job: Job) -> Iterable[Attempt]:
    """None of a job that never started, without asking: dispatch tells of many such."""
    return job.attempts.all() if job.attempt else ()


def _latest(job: Job) -> Attempt | None:
    """Over the prefetched rows, where there are any."""
    return max(_attempts(job), key=lambda attempt: attempt.number, default=None)


def without_private(data: dict[str, Any]) -> dict[str, Any]:
    """Kind, name, owner, card, state and progress remain; messages and parameters do not."""
    hidden = data | dict.fromkeys(PRIVATE)
    hidden["progress"] = (data["progress"] or {}) | {"message": None, "metrics": None}
    hidden["waiting_for"] = data["waiting_for"] and data["waiting_for"] | {"detail": None}
    hidden["attempts"] = []
    return hidden


def full(job: Job) -> dict[str, Any]:
    """The job as its owner sees it, as plain JSON values; why it waits as dispatch last wrote it down."""
    return dict(_as_stored().to_representation(job))


@lru_cache
def _as_stored() -> JobSerializer:
    """Made once: a serializer's forty fields take longer to build than a job to write down."""
    return JobSerializer(context={"as_stored": True})


def reduced(job: Job) -> dict[str, Any]:
    return without_private(full(job))


class ArtifactSerializer(serializers.ModelSerializer[Artifact]):
    owner = serializers.CharField(source="owner.username", read_only=True)
    job = serializers.UUIDField(source="job_id", read_only=True, allow_null=True)

    class Meta:
        model = Artifact
        fields = ["id", "type", "name", "owner", "job", "shared", "manifest", "size_bytes", "created_at"]
        read_only_fields = ["id", "type", "manifest", "size_bytes", "created_at"]


class GroupSerializer(serializers.ModelSerializer[JobGroup]):
    """A sweep with its jobs, in the order of the combinations; of one that was retried, the retry."""

    group_id = serializers.UUIDField(source="id", read_only=True)
    owner = serializers.CharField(source="owner.username", read_only=True)
    swept = serializers.DictField(child=serializers.ListField(), help_text="Parameter → the values tried.")
    count = serializers.SerializerMethodField()
    states = serializers.SerializerMethodField()
    jobs = serializers.SerializerMethodField()

    class Meta:
        model = JobGroup
        fields = ["group_id", "kind", "name", "owner", "created_at", "swept", "count", "states", "jobs"]

    @extend_schema_field({"type": "integer"})
    def get_count(self, group: JobGroup) -> int:
        return len(self.context["members"])

    @extend_schema_field({"type": "object", "additionalProperties": {"type": "integer"}})
    def get_states(self, group: JobGroup) -> dict[str, int]:
        return dict(Counter(job.status for job in self.context["members"]))

    @extend_schema_field(JobSerializer(many=True))
    def get_jobs(self, group: JobGroup) -> list[dict[str, Any]]:
        return list(JobSerializer(self.context["members"], many=True, context=self.context).data)


class TemplateSerializer(serializers.ModelSerializer[JobTemplate]):
    """What `templates/` takes and answers; `job` instead of `kind` and `params` takes them from that job."""

    kind = serializers.CharField(required=False, max_length=60)
    name = serializers.CharField(max_length=120)
    owner = serializers.CharField(source="owner.username", read_only=True)
    params = serializers.DictField(required=False)
    job = serializers.UUIDField(required=False, write_only=True)

    class Meta:
        model = JobTemplate
        fields = ["id", "kind", "name", "owner", "params", "shared", "created_at", "job"]
        read_only_fields = ["id", "created_at"]

    def validate(self, data: dict[str, Any]) -> dict[str, Any]:
        if "job" not in data and "kind" not in data:
            raise serializers.ValidationError({"kind": ["A kind with params is expected, or a job."]})
        return data
