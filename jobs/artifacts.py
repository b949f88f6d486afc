"""Artifacts as people and jobs name them: by id, by name, by `owner/name`, or as `job:<id>`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet
from rest_framework import serializers

from jobs import paths
from jobs.exceptions import JobRejected
from jobs.fields import ArtifactField
from jobs.kind import Input, JobKind
from jobs.models import FINAL, Artifact, Job, JobInput, Status
from jobs.people import Person, is_staff

#: Models and corpora are for everybody on the host; other results are their owner's unless shared.
ALWAYS_SHARED = ("model", "corpus")


def visible(user: Person) -> QuerySet[Artifact]:
    if is_staff(user):
        return Artifact.objects.all()
    return Artifact.objects.filter(Q(owner_id=user.pk) | Q(shared=True) | Q(type__in=ALWAYS_SHARED))


def as_input(artifact: Artifact) -> Input:
    return Input(
        id=str(artifact.pk),
        type=artifact.type,
        name=artifact.name,
        path=paths.artifact_folder(artifact),
        manifest=artifact.manifest,
    )


@dataclass(frozen=True)
class Resolved:
    """What a reference names: an artifact that exists, or the job that will make it."""

    parameter: str
    artifact: Artifact | None = None
    job: Job | None = None

    def row(self, job: Job) -> JobInput:
        return JobInput(job=job, parameter=self.parameter, artifact=self.artifact, source_job=self.job)


def references(kind: JobKind) -> dict[str, ArtifactField]:
    """The parameters of a kind that take artifacts."""
    return {name: f for name, f in kind.Params().fields.items() if isinstance(f, ArtifactField)}


def named(kind: JobKind, params: Mapping[str, Any]) -> dict[str, ArtifactField]:
    """Those of them that name one here."""
    fields = references(kind).items()
    return {name: f for name, f in fields if params.get(name) and f.names_artifact(params[name])}


def resolve_all(kind: JobKind, params: Mapping[str, Any], user: Person) -> list[Resolved]:
    """Find what every reference names, as `user` may see it; field errors for what does not exist."""
    found, errors = [], {}
    for name, field in named(kind, params).items():
        try:
            found.append(resolve(params[name], field.types, user, parameter=name))
        except serializers.ValidationError as error:
            errors[name] = error.detail
    if errors:
        raise serializers.ValidationError(errors)
    return found


def resolve(reference: str, types: tuple[str, ...], user: Person, parameter: str = "") -> Resolved:
    if reference.startswith("job:"):
        return _job(reference.removeprefix("job:"), types, user, parameter)
    candidates = visible(user).filter(type__in=types)
    artifact = _by_id(candidates, reference) or _by_name(candidates, reference, user)
    if artifact is None:
        names = ", ".join(candidates.values_list("name", flat=True)[:8]) or "none yet"
        raise serializers.ValidationError(f"No {' or '.join(types)} named {reference!r}. There are: {names}.")
    return Resolved(parameter, artifact=artifact)


def _by_id(candidates: QuerySet[Artifact], reference: str) -> Artifact | None:
    try:
        return candidates.filter(pk=uuid.UUID(reference)).first()
    except ValueError:
        return None


def _by_name(candidates: QuerySet[Artifact], reference: str, user: Person) -> Artifact | None:
    """One's own first, then `owner/name`, then what is shared by everybody under a plain name."""
    own = candidates.filter(name=reference, owner_id=user.pk).first()
    owner, slash, name = reference.partition("/")
    named = candidates.filter(name=name, owner__username=owner).first() if slash else None
    return own or named or _only(candidates.filter(name=reference, type__in=ALWAYS_SHARED))


def _only(candidates: QuerySet[Artifact]) -> Artifact | None:
    """The one there is. Of several nobody can know which was meant: a stranger's could pass for the known one."""
    found = list(candidates.select_related("owner")[:2])
    if len(found) > 1:
        names = " or ".join(f"{artifact.owner}/{artifact.name}" for artifact in found)
        raise serializers.ValidationError(f"Several people have one of this name: say {names}.")
    return found[0] if found else None


def _job(identity: str, types: tuple[str, ...], user: Person, parameter: str) -> Resolved:
    from jobs import chains, registry

    job = _visible_job(identity, user)
    if job is None:
        raise serializers.ValidationError(f"No job {identity} of yours.")
    job = chains.newest(job)
    made = registry.get(job.kind).makes
    if not set(types) & set(made):
        raise serializers.ValidationError(f"Job {job} makes {' and '.join(made)}, not {' or '.join(types)}.")
    if job.status == Status.SUCCEEDED:
        artifact = job.artifacts.filter(type__in=types).first()
        if artifact is None:
            raise serializers.ValidationError(f"What job {job} made is not here any more.")
        return Resolved(parameter, artifact=artifact)
    if job.status in FINAL:
        raise serializers.ValidationError(f"Job {job} ended {job.status}; it will make nothing.")
    return Resolved(parameter, job=job)


def _visible_job(identity: str, user: Person) -> Job | None:
    try:
        jobs = Job.objects.filter(pk=uuid.UUID(identity))
    except ValueError:
        return None
    return jobs.first() if is_staff(user) else jobs.filter(owner_id=user.pk).first()


def settle_inputs(job: Job) -> bool:
    """Turn inputs whose jobs have ended into their artifacts; True when every input exists."""
    from jobs import registry

    fields = references(registry.get(job.kind))
    for waiting in job.inputs.filter(artifact=None).select_related("source_job"):
        types = fields[waiting.parameter].types
        source = waiting.source_job
        waiting.artifact = source.artifacts.filter(type__in=types).first() if source else None
        if waiting.artifact is None:
            if source is None or source.status == Status.SUCCEEDED:
                raise JobRejected(
                    f"Its input {waiting.parameter} is not here any more.", reason="input_failed"
                )
            return False
        waiting.save(update_fields=["artifact"])
    return True
