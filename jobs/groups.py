"""Groups: a request with lists of values makes one job per combination, all or none, tied by `group_id`.

A retry of a member takes its place: a group has as many members as there are combinations, whatever was retried.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from rest_framework.serializers import ValidationError

from gpus.rest import ApiError, body, flattened
from jobs import limits, submit, verbs
from jobs.exceptions import Conflict
from jobs.kind import JobKind
from jobs.models import FINAL, WAITING, Job, JobGroup
from jobs.people import Person
from jobs.submit import Plan

#: Jobs of one group, at most: what people look through, and what one answer holds.
MAX_JOBS = 200
NAME_LENGTH = 120
Values = Mapping[str, Any]


# What is asked for --------------------------------------------------------------------------------------
def swept(kind: JobKind, data: Any) -> dict[str, list[Any]]:
    """The parameters of a request that hold a list of values to try; empty for a single job."""
    if not isinstance(data, Mapping):
        return {}
    return {name: data[name] for name in kind.sweep if isinstance(data.get(name), list)}


def combinations(values: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Every choice of one value per parameter, the last one running fastest. Raises `ValidationError`."""
    if empty := {name: ["At least one value is expected."] for name, found in values.items() if not found}:
        raise ValidationError(empty)
    count = prod(len(found) for found in values.values())
    if count > MAX_JOBS:
        counts = " × ".join(f"{len(found)} of {name}" for name, found in values.items())
        sentence = (
            f"These values make {count} jobs ({counts}); a group has at most {MAX_JOBS}. Leave some out."
        )
        raise ValidationError({next(iter(values)): [sentence]})
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def words(chosen: Values) -> str:
    """`k 16, lr 0.001`: what tells a member from the others."""
    return ", ".join(f"{name} {value_words(value)}" for name, value in chosen.items())


def value_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(part) for part in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value)


# Checking -----------------------------------------------------------------------------------------------
def check(user: Person, kind_name: str, data: Values) -> list[Plan]:
    """A plan for every combination. Raises the refusal of the first bad one, which is named in it."""
    kind = submit.get_kind(kind_name)
    plans, refusals = [], []
    for chosen in combinations(swept(kind, data)):
        try:
            plans.append(submit.check(user, kind_name, {**data, **chosen}))
        except (ValidationError, ApiError) as refusal:
            refusals.append((chosen, refusal))
    if refusals:
        raise of_all(refusals, plans)
    refuse_twins(plans, list(swept(kind, data)))
    return plans


def appraise(user: Person, kind_name: str, data: Values) -> dict[str, Any]:
    """Of a request that may be half filled: how many jobs, the combination that needs the most memory, and the seconds
    of all together (`None` unless every one is known). Raises `ValidationError` for too many."""
    chosen_by, estimates = combinations(swept(submit.get_kind(kind_name), data)), []
    for chosen in chosen_by:
        with suppress(ValidationError, ApiError):
            estimate = submit.check(user, kind_name, {**data, **chosen}).estimate
            estimates.append((chosen, estimate))
    known = [(chosen, estimate) for chosen, estimate in estimates if estimate]
    largest = max(known, key=lambda pair: pair[1].memory_bytes or 0, default=(chosen_by[0], None))[0]
    seconds = [estimate.seconds for _, estimate in known if estimate.seconds is not None]
    return {
        "count": len(chosen_by),
        "largest": largest,
        "words": words(largest),
        "seconds": sum(seconds) if len(seconds) == len(chosen_by) else None,
    }


def of_all(refusals: Sequence[tuple[Values, Exception]], plans: list[Plan]) -> Exception:
    """The first refusal with its combination; as it stands where it is the same for every one."""
    chosen, first = refusals[0]
    if not plans and all(body(other) == body(first) for _, other in refusals):
        return first
    return named(first, f"With {words(chosen)}")


def named(refusal: Exception, which: str) -> Exception:
    if isinstance(refusal, ApiError):
        return ApiError(refusal.status_code, refusal.code, f"{which}: {refusal.detail}", **refusal.extra)
    assert isinstance(refusal, ValidationError)
    return ValidationError(
        {field: [f"{which}: {text}" for text in texts] for field, texts in flattened(refusal.detail)}
    )


def refuse_twins(plans: list[Plan], names: list[str]) -> None:
    """A value that is named twice, however it is spelled, would make the same job twice."""
    counts = Counter(json.dumps(plan.params, sort_keys=True) for plan in plans)
    for plan in plans:
        if counts[json.dumps(plan.params, sort_keys=True)] > 1:
            sentence = f"{words({name: plan.params[name] for name in names})}: named twice."
            raise ValidationError({names[0]: [sentence]})


# Queueing -----------------------------------------------------------------------------------------------
def submit_once(user: Person, kind_name: str, data: Values) -> tuple[JobGroup, bool]:
    """Queue the group, or find the one that the same `idempotency_key` made; whether it is new.

    The key stands on the first job, so that jobs and groups share one set of keys.
    """
    first, new = submit.once(user, kind_name, data, lambda **key: create(user, kind_name, data, **key)[0])
    return JobGroup.objects.get(pk=str(first.group_id)), new


def create(user: Person, kind_name: str, data: Values, **key: Any) -> list[Job]:
    """One job per combination, in one transaction: all are queued, or none is."""
    plans, names = check(user, kind_name, data), list(swept(submit.get_kind(kind_name), data))
    row: dict[str, Any] = {
        "kind": kind_name,
        "name": plans[0].common.get("name") or plans[0].kind.label,
        "owner_id": user.pk,
        "swept": {name: distinct(plan.params[name] for plan in plans) for name in names},
    }
    with transaction.atomic():
        limits.refuse_too_many(user, len(plans))
        group = JobGroup.objects.create(**row)
        jobs = [
            submit.create(
                user, plan, group_id=group.pk, name=name_of(group, plan.params), **(key if n == 0 else {})
            )
            for n, plan in enumerate(plans)
        ]
        transaction.on_commit(lambda: submit.announce(jobs))
    return jobs


def distinct(values: Any) -> list[Any]:
    """Without repetitions, in order; values may be dictionaries."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def name_of(group: JobGroup, params: Values) -> str:
    """The group's name and the member's own values; the values are never cut."""
    own = f" · {words({name: params[name] for name in group.swept})}"[:NAME_LENGTH]
    return group.name[: NAME_LENGTH - len(own)] + own


# A group that exists ------------------------------------------------------------------------------------
def members(group: JobGroup, jobs: QuerySet[Job] | None = None) -> QuerySet[Job]:
    """Of `jobs`, those of the group in the order of the combinations; of one that was retried, the retry."""
    jobs = Job.objects.all() if jobs is None else jobs
    return jobs.filter(group_id=group.pk, retries=None).order_by("queued_at", "pk")


def cancel(group: JobGroup, user: Person) -> None:
    """End every member that has not ended. Those that wait go first: a card that is given back starts none of them."""
    unfinished = list(members(group).exclude(status__in=FINAL))
    if not unfinished:
        raise Conflict("Every job of the group has ended already.")
    for job in sorted(unfinished, key=lambda job: job.status not in WAITING):
        with suppress(Conflict):  # it ended meanwhile
            verbs.cancel(job, user)
