"""A small world with one of everything, owned by alice, so that every address has something to answer about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client

from gpus.models import Gpu
from jobs import paths
from jobs.models import Artifact, Job, JobEvent, JobGroup, JobMetric, JobTemplate, Status
from monitor.models import ApiToken
from monitor.signin import BACKEND
from tests.monitor.conftest import token_for

#: Stands in every private field of alice's things: no stranger's answer may contain it.
SECRET = "the-secret-of-alice"


@dataclass(frozen=True)
class World:
    owner: User
    job: Job
    artifact: Artifact
    token: ApiToken
    card: Gpu
    group: JobGroup
    template: JobTemplate

    def values(self, **others: Any) -> dict[str, Any]:
        """What stands at the placeholders of an address."""
        return {
            "id": self.job.pk,
            "job_id": self.job.pk,
            "artifact_id": self.artifact.pk,
            "group_id": self.group.pk,
            "template_id": self.template.pk,
            "uuid": self.card.uuid,
            "kind": "rehearsal",
            "kind_name": "rehearsal",
            "path": "hello.txt",
        } | others

    def id_for(self, address: str) -> Any:
        """The `{id}` of an address: of the thing that it is about."""
        things = {"artifacts": self.artifact.pk, "tokens": self.token.public_id, "groups": self.group.pk}
        things |= {"templates": self.template.pk}
        return next((pk for name, pk in things.items() if f"/{name}/" in address), self.job.pk)


@pytest.fixture
def world(alice: User, three_cards: list[Gpu], settings: Any, tmp_path: Path) -> World:
    settings.MISTUDIO_HOME = tmp_path
    job = a_job(alice)
    artifact = Artifact.objects.create(
        type="sae", name="small", owner=alice, job=job, manifest={"note": SECRET}
    )
    for folder in (paths.job_folder(job), paths.artifact_folder(artifact)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hello.txt").write_text(SECRET)
    token_for(alice)
    template = JobTemplate.objects.create(
        kind="rehearsal", name="mine", owner=alice, params={"journal": SECRET}
    )
    group = JobGroup.objects.create(
        kind="rehearsal", name="a sweep", owner=alice, swept={"journal": [SECRET]}
    )
    return World(alice, job, artifact, ApiToken.objects.get(), three_cards[0], group, template)


def a_job(owner: User) -> Job:
    """One that failed: it has a result, an error, curves and events, and may be retried."""
    told = {
        "params": {"steps": 3, "journal": SECRET},
        "result": {"note": SECRET},
        "error": SECRET,
        "hint": SECRET,
    }
    progress = {"fraction": 0.5, "message": SECRET, "metrics": {"loss": 1.0}}
    job = Job.objects.create(
        kind="rehearsal", owner=owner, status=Status.FAILED, failure_reason="error", progress=progress, **told
    )
    JobMetric.objects.bulk_create([JobMetric(job=job, name="loss", step=n, value=1 / n) for n in (1, 2, 3)])
    JobEvent.objects.create(job=job, event="submitted", detail=SECRET)
    paths.log_file(job).parent.mkdir(parents=True, exist_ok=True)
    paths.log_file(job).write_text(SECRET)
    return job


def browser(user: User | None) -> Client:
    """Signed in by session. A fault of the server is an answer here, as it is for people."""
    client = Client(raise_request_exception=False)
    if user is not None:
        client.force_login(user, backend=BACKEND)
    return client


@contextmanager
def undone() -> Iterator[None]:
    """What is asked inside leaves no row behind: the next request meets the same world."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)
