"""From a request to a queued row: the one way in for REST, forms and commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.core.validators import RegexValidator
from django.db import IntegrityError, transaction
from rest_framework import serializers

from gpus import choice
from gpus.rest import ApiError
from jobs import chains, estimates, events, limits, paths, registry, tasks
from jobs.artifacts import Resolved, as_input, resolve_all
from jobs.exceptions import Conflict, JobRejected
from jobs.kind import Estimate, Input, JobKind
from jobs.models import Job, JobEvent, JobInput, Status
from jobs.people import Person, is_staff
from jobs.waits import for_job

#: Names stand in terminals, logs and mails, which obey some of these.
NO_CONTROL_CHARACTERS = RegexValidator(
    r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z", "A name is one line without control characters."
)


class SubmitFields(serializers.Serializer):
    """The fields that every kind takes beside its own parameters."""

    gpu = serializers.JSONField(
        required=False,
        allow_null=True,
        help_text="auto (default), an index of gpu-list, or a card's UUID. A named card is never swapped.",
    )
    name = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=120,
        validators=[NO_CONTROL_CHARACTERS],
        help_text="A name for the job.",
    )
    priority = serializers.IntegerField(
        required=False, default=0, min_value=-100, max_value=100, help_text="Above 0 is for staff."
    )
    after = serializers.ListField(
        child=serializers.UUIDField(),
        required=False,
        max_length=100,
        help_text="Ids of jobs that must have succeeded first.",
    )
    time_limit_seconds = serializers.IntegerField(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=2**31 - 1,
        help_text="Ends the job `failed`, `timeout` after so many seconds of running; waits and pauses do not count, "
        "and its checkpoint is kept.",
    )
    hold = serializers.BooleanField(
        required=False, default=False, help_text="Keep the job held until it is released."
    )
    idempotency_key = serializers.CharField(
        required=False,
        allow_null=True,
        max_length=200,
        help_text="A name for this request: sent again, it answers with the same job instead of a second one.",
    )


@dataclass(frozen=True)
class Plan:
    """A request that was found good: everything the row needs."""

    kind_name: str
    kind: JobKind
    params: dict[str, Any]
    common: Mapping[str, Any]
    gpu_request: str
    needs_card: bool
    resolved: list[Resolved]
    estimate: Estimate | None
    after: list[Job]
    stage: str = ""
    on_card: Estimate | None = None  # of the widest stage with a card, where that is known already


def submit(user: Person, kind_name: str, data: Mapping[str, Any], *, stage: str = "", **fields: Any) -> Job:
    """Queue a job, at a later `stage` where it goes on from another's checkpoint. Raises `ValidationError` or
    `ApiError` before anything is written.

    `fields` go into the row as they are (`retry_of`, `retry_from`, `priority`).
    """
    plan = check(user, kind_name, data, stage)
    with transaction.atomic():
        limits.refuse_too_many(user)
        job = create(user, plan, **fields)
        transaction.on_commit(lambda: announce([job]))
    return job


def submit_once(user: Person, kind_name: str, data: Mapping[str, Any]) -> tuple[Job, bool]:
    """Queue a job, or find the one that the same `idempotency_key` made; whether it is new."""
    return once(user, kind_name, data, lambda **key: submit(user, kind_name, data, **key))


def once(user: Person, kind_name: str, data: Mapping[str, Any], make: Callable[..., Job]) -> tuple[Job, bool]:
    """What `make` queues, which takes the key's fields for the row; or what it queued for the same key before.

    Raises `Conflict` when the key was used for another request.
    """
    key = data.get("idempotency_key") if isinstance(data, Mapping) else None
    if key is None:
        return make(), True
    if not isinstance(key, str) or not key:
        raise serializers.ValidationError({"idempotency_key": ["A text of 1 to 200 characters is expected."]})
    digest = request_digest(kind_name, data)
    if earlier := _earlier(user, key, digest):
        return earlier, False
    try:
        with transaction.atomic():
            return make(idempotency_key=key, request_digest=digest), True
    except (IntegrityError, ApiError):  # the same request came twice at once, and may have filled the queue
        again = _earlier(user, key, digest)
        if again is None:
            raise
        return again, False


def request_digest(kind_name: str, data: Mapping[str, Any]) -> str:
    """SHA-256 of the kind and the body, whatever the order of its keys."""
    return hashlib.sha256(json.dumps([kind_name, data], sort_keys=True, default=str).encode()).hexdigest()


def _earlier(user: Person, key: str, digest: str) -> Job | None:
    job = Job.objects.filter(owner_id=user.pk, idempotency_key=key).first()
    if job is not None and job.request_digest != digest:
        raise Conflict(f"The idempotency key {key!r} belongs to another request, job {job.pk}.")
    return job


def check(user: Person, kind_name: str, data: Mapping[str, Any], stage: str = "") -> Plan:
    """Everything that can be known before queueing."""
    kind = get_kind(kind_name)
    if not isinstance(data, Mapping):
        raise serializers.ValidationError({"non_field_errors": ["A JSON object is expected."]})
    own, common = _validated(kind, data)
    needs_card = kind.takes_card(own, stage)
    later = () if stage else kind.card_stages(own)
    gpu_request = choice.parse(data.get("gpu"), max_gpus=kind.max_gpus, needs_card=needs_card or bool(later))
    _check_priority(user, common["priority"])
    after = _after(user, common.get("after", []))
    resolved = resolve_all(kind, own, user)
    existing = {r.parameter: as_input(r.artifact) for r in resolved if r.artifact is not None}
    _check_inputs(kind, own, existing)
    estimate = estimates.estimate_resolved(kind, own, resolved, stage)
    stages = [estimates.estimate_resolved(kind, own, resolved, name) for name in later]
    on_cards = [found for found in ([estimate] if needs_card else []) + stages if found]
    on_card = max(on_cards, key=lambda found: found.memory_bytes or 0, default=None)
    estimates.refuse_too_large(on_card.memory_bytes if on_card else None, gpu_request)
    return Plan(
        kind_name,
        kind,
        plain(own),
        common,
        gpu_request,
        needs_card,
        resolved,
        estimate,
        after,
        stage,
        on_card,
    )


def _check_inputs(kind: JobKind, params: Mapping[str, Any], inputs: Mapping[str, Input]) -> None:
    """What the kind refuses is a 400 here: nothing is queued yet."""
    try:
        kind.check(params, inputs)
    except JobRejected as error:
        hint = {"hint": error.hint} if error.hint else {}
        raise ApiError(400, error.reason, str(error), **hint) from error


def get_kind(name: str) -> JobKind:
    try:
        return registry.get(name)
    except KeyError:
        known = ", ".join(registry.all_kinds())
        raise ApiError(404, "unknown_kind", f"There is no kind {name!r}. There are: {known}.") from None


def _validated(kind: JobKind, data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kind's parameters and the common fields; errors of both at once, unknown names included."""
    own, common = kind.Params(data=data), SubmitFields(data=data)
    good = own.is_valid() & common.is_valid()
    known = set(own.fields) | set(common.fields)
    unknown = {
        name: [f"There is no parameter of this name. There are: {', '.join(sorted(known))}."]
        for name in data
        if name not in known
    }
    if not good or unknown:
        raise serializers.ValidationError(dict(own.errors) | dict(common.errors) | unknown)
    return own.validated_data, common.validated_data


def _check_priority(user: Person, priority: int) -> None:
    if priority > 0 and not is_staff(user):
        raise serializers.ValidationError({"priority": ["A priority above 0 is for staff."]})


def _after(user: Person, ids: list[UUID]) -> list[Job]:
    """The jobs to wait for, each the user's own (or anybody's, for staff) and still able to succeed; for one that was
    retried, its retry."""
    if not ids:
        return []
    mine = (
        Job.objects.filter(pk__in=ids) if is_staff(user) else Job.objects.filter(pk__in=ids, owner_id=user.pk)
    )
    found = {job.pk: chains.newest(job) for job in mine}
    wrong = [f"No job {wanted} of yours." for wanted in ids if wanted not in found]
    wrong += [
        f"Job {job} ended {job.status}; it will not succeed any more."
        for job in found.values()
        if job.final and job.status != Status.SUCCEEDED
    ]
    if wrong:
        raise serializers.ValidationError({"after": wrong})
    return list(found.values())


def plain(value: Any) -> Any:
    """Validated data as JSON stores it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def create(user: Person, plan: Plan, **fields: Any) -> Job:
    """The row of a plan, with what it waits for; `fields` go into it as they are."""
    row: dict[str, Any] = {
        "kind": plan.kind_name,
        "name": plan.common.get("name", ""),
        "owner_id": user.pk,
        "priority": plan.common["priority"],
        "params": plan.params,
        "device": choice.device(needs_card=plan.needs_card),
        "interactive": plan.kind.interactive,
        "needs_card": plan.needs_card,
        "stage": plan.stage,
        "time_limit_seconds": plan.common.get("time_limit_seconds"),
        "gpu_request": plan.gpu_request,
        "gpu_wanted": plan.gpu_request,
        "estimate": plan.estimate.as_dict() if plan.estimate else None,
        "status": Status.HELD if plan.common["hold"] else Status.QUEUED,
    }
    job = Job.objects.create(**row | first_wait(plan) | fields)
    job.after.set(plan.after)
    JobInput.objects.bulk_create([resolved.row(job) for resolved in plan.resolved])
    JobEvent.objects.create(job=job, event="submitted", detail=f"gpu: {plan.gpu_request}")
    return job


def first_wait(plan: Plan) -> dict[str, Any]:
    """The first of the jobs that this one comes after: until that ends it stands in no line."""
    sources = [item.job for item in plan.resolved if item.artifact is None]
    before = [("after", job) for job in plan.after if job.status != Status.SUCCEEDED]
    for reason, job in before + [("input", job) for job in sources if job is not None]:
        return {"waits_on": job, "waiting_for": for_job(reason, job).beginning()}
    return {}


def announce(jobs: Iterable[Job]) -> None:
    """Tell of new jobs, once they can be found; one bell is enough for all of them."""
    for job in jobs:
        events.created(job)
        with suppress(OSError):  # a full disk is said where the job starts, and the row has it all
            paths.write_json(paths.job_folder(job) / "params.json", {"kind": job.kind, "params": job.params})
    tasks.ring_dispatch()
