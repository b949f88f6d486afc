"""Templates: parameters of a kind kept under a name, to begin a form or a request with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from rest_framework.serializers import ValidationError

from jobs import registry, submit
from jobs.fields import ArtifactField
from jobs.kind import JobKind
from jobs.models import Job, JobTemplate
from jobs.people import Person, is_staff

NAME_LENGTH = 120


def visible(user: Person) -> QuerySet[JobTemplate]:
    """One's own, and what others share."""
    return JobTemplate.objects.filter(Q(owner_id=user.pk) | Q(shared=True)).select_related("owner")


def changeable(user: Person) -> QuerySet[JobTemplate]:
    return JobTemplate.objects.all() if is_staff(user) else JobTemplate.objects.filter(owner_id=user.pk)


def save(user: Person, kind_name: str, name: str, params: Mapping[str, Any], *, shared: bool) -> JobTemplate:
    """Keep `params` under a name that is new. Raises `ValidationError` for values that no job could have."""
    if not 0 < len(name) <= NAME_LENGTH:
        raise ValidationError({"name": [f"A name of 1 to {NAME_LENGTH} characters is expected."]})
    kept = checked(submit.get_kind(kind_name), params)
    row: dict[str, Any] = {"kind": kind_name, "name": name, "owner_id": user.pk, "params": kept}
    try:
        with transaction.atomic():
            return JobTemplate.objects.create(**row, shared=shared)
    except IntegrityError:
        raise ValidationError({"name": [f"You have a template {name!r} of this kind already."]}) from None


def checked(kind: JobKind, params: Mapping[str, Any]) -> dict[str, Any]:
    """Each value by itself: a template may leave parameters open, so what they are together is the submit's."""
    fields, kept, errors = kind.Params().fields, {}, {}
    for name, value in params.items():
        try:
            if name not in fields:
                raise ValidationError("There is no parameter of this name.")
            many = name in kind.sweep and isinstance(value, list)
            kept[name] = [own(fields[name], item) for item in value] if many else own(fields[name], value)
        except ValidationError as error:
            errors[f"params.{name}"] = error.detail
    if errors:
        raise ValidationError(errors)
    return kept


def own(field: Any, value: Any) -> Any:
    return submit.plain(field.run_validation(value))


def params_of(job: Job) -> dict[str, Any]:
    """The parameters that make the job again: inputs by the artifacts that they became, not by who was to make them."""
    made = {row.parameter: str(row.artifact_id) for row in job.inputs.all() if row.artifact_id}
    fields = registry.get(job.kind).Params().fields
    return job.params | {name: pk for name, pk in made.items() if isinstance(fields.get(name), ArtifactField)}
