"""What people may do to artifacts: rename, share, delete. For their owner and for staff."""

from __future__ import annotations

import shutil

from django.db import IntegrityError, transaction
from django.db.models import ProtectedError, QuerySet
from rest_framework import serializers

from gpus.rest import ApiError
from jobs import paths
from jobs.artifacts import visible
from jobs.models import FINAL, Artifact
from jobs.people import Person, is_staff
from jobs.serializers import ArtifactSerializer


def changeable(user: Person) -> QuerySet[Artifact]:
    """One's own; for staff all."""
    return visible(user) if is_staff(user) else Artifact.objects.filter(owner_id=user.pk)


def taken(type: str) -> serializers.ValidationError:
    return serializers.ValidationError({"name": [f"There is a {type} of this name already."]})


def change(changed: ArtifactSerializer) -> None:
    """Save a new name or `shared`; the database is the judge of names."""
    artifact: Artifact = changed.instance  # type: ignore[assignment]  # always made with one
    try:
        with transaction.atomic():
            changed.save()
    except IntegrityError:
        raise taken(artifact.type) from None


def in_use(artifact: Artifact) -> str:
    """Why it cannot be deleted now; empty when it can."""
    uses = artifact.uses.exclude(job__status__in=FINAL).select_related("job")
    users = sorted({str(use.job) for use in uses})
    return f"Used by {', '.join(users)}; wait for it or cancel it." if users else ""


def delete(artifact: Artifact) -> None:
    """Row first, then files: no job ever finds a row whose files are gone. 409 while something uses it."""
    folder = paths.artifact_folder(artifact)
    with transaction.atomic():
        if sentence := in_use(artifact):
            raise ApiError(409, "in_use", sentence)
        artifact.uses.filter(job__status__in=FINAL).update(artifact=None)
        try:
            artifact.delete()
        except ProtectedError:
            raise ApiError(409, "in_use", "A job that was just queued uses it.") from None
    shutil.rmtree(folder, ignore_errors=True)
