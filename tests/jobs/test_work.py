"""The work process: the card it sees, and what an exception means for its job."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from rest_framework.serializers import ValidationError

from gpus.models import Gpu
from jobs import dispatch, remedies, work
from jobs.context import WorkContext
from jobs.exceptions import JobRejected
from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.models import Job, JobMetric, Status
from tests.jobs.test_states import attempt_of, make_job


@pytest.fixture
def granted(alice: User, three_cards: list[Gpu]) -> Job:
    job = make_job(alice, gpu_request=three_cards[1].uuid, gpu_wanted=three_cards[1].uuid)
    dispatch.schedule()
    job.refresh_from_db()
    return job


def test_it_tells_the_work_cuda_0_whatever_the_card_g23(
    granted: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(granted)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    work.set_environment(attempt, "token")
    import os

    assert os.environ["CUDA_VISIBLE_DEVICES"] == granted.gpu_uuid  # a UUID, never an index
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setattr(work, "_cuda_uuids", lambda: [granted.gpu_uuid])
    assert work.verify_card(granted, attempt) == "cuda:0"
    attempt.refresh_from_db()
    assert attempt.reported_gpu_uuids == [granted.gpu_uuid]


def test_it_ends_before_anything_else_on_another_card(granted: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_cuda_uuids", lambda: ["GPU-ffffffff-0000-0000-0000-000000000000"])
    with pytest.raises(remedies.CardMismatch, match="the process sees GPU-ffffffff"):
        work.verify_card(granted, attempt_of(granted))


ENDS: list[tuple[BaseException, bool, str, str]] = [
    (JobRejected("no"), False, Status.REFUSED, "rejected"),
    (JobRejected("no"), True, Status.FAILED, "rejected"),
    (JobRejected("extra", reason="missing_extra"), False, Status.REFUSED, "missing_extra"),
    (Unusable("40 tokens, limit 32"), False, Status.REFUSED, "rejected"),
    (NonFinite("loss is NaN at step 3"), True, Status.FAILED, "non_finite"),
    (MemoryError(), True, Status.FAILED, "out_of_memory"),
    (OSError(errno.ENOSPC, "No space left"), True, Status.FAILED, "disk_full"),
    (remedies.CardMismatch("other"), False, Status.FAILED, "card_mismatch"),
    (RuntimeError("broke"), False, Status.FAILED, "error"),
    (ValidationError({"site": ["no such site"]}), False, Status.REFUSED, "invalid_input"),
]


@pytest.mark.parametrize(("error", "reported", "status", "reason"), ENDS)
def test_it_says_what_an_exception_means(
    granted: Job, error: BaseException, reported: bool, status: str, reason: str
) -> None:
    end = work.end_of(granted, error, reported=reported)
    assert end is not None
    assert (end.status, end.failure_reason) == (status, reason)
    assert end.error


def ended(job: Job) -> str:
    end = work.end_of(job, Stopped(), reported=True)
    assert end is not None
    return end.status


def test_it_stops_as_it_was_asked_to(granted: Job) -> None:
    """A signal that nobody of ours sent is a loss, not a cancel: there is no end to write."""
    assert work.end_of(granted, Stopped(), reported=True) is None
    Job.objects.filter(pk=granted.pk).update(pause_requested_at=granted.queued_at)
    assert ended(granted) == Status.PAUSED
    Job.objects.filter(pk=granted.pk).update(cancel_requested_at=granted.queued_at)
    assert ended(granted) == Status.CANCELLED


def test_what_it_knew_when_it_failed_is_kept(granted: Job) -> None:
    """Within the five seconds after which progress is stored by itself."""
    context = WorkContext(granted, attempt_of(granted), "cpu", False)
    for step in range(3):
        context.report(step + 1, 10, "steps")
        context.metric(step, loss=1.0)
    work.last_words(context)
    granted.refresh_from_db()
    assert granted.progress["done"] == 3
    assert JobMetric.objects.filter(job=granted).count() == 3


def test_it_keeps_no_path_and_no_secret_in_the_provenance(granted: Job, settings: Any) -> None:
    granted.params = {"corpus": f"{settings.MISTUDIO_HOME}/import/plays.txt", "sites": [{"block": 1}]}
    context = WorkContext(granted, attempt_of(granted), "cpu", False)
    record = work.provenance(context, 1.0)
    assert record["params"] == {"corpus": "plays.txt", "sites": [{"block": 1}]}
    assert record["card_names"] == ["Card 24 GiB"]
    assert str(settings.MISTUDIO_HOME) not in str(record)
    assert settings.SECRET_KEY not in str(record)


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ("MIG-C6D4F1EF-42e4-5de3-91c7-45d71c87eb3f", "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
        ("GPU-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "GPU-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
        ("MIG-00000000-42e4-5de3-91c7-45d71c87eb3f", "GPU-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"),
    ],
)
def test_it_spells_what_cuda_sees_as_the_driver_does_g12(
    named: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA tells sixteen bytes, of a card as of an instance."""
    import torch

    told = SimpleNamespace(uuid="c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: told)
    assert work._cuda_uuids() == [seen]
