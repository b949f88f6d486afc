"""The work process: the card it sees, and what an exception means for its job."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from django.contrib.auth.models import User

from gpus.models import Gpu
from jobs import dispatch, work
from jobs.exceptions import JobRejected
from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.models import Job, Status
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
    with pytest.raises(work.CardMismatch, match="the process sees GPU-ffffffff"):
        work.verify_card(granted, attempt_of(granted))


ENDS: list[tuple[BaseException, bool, str, str]] = [
    (JobRejected("no"), False, Status.REFUSED, "rejected"),
    (JobRejected("no"), True, Status.FAILED, "rejected"),
    (JobRejected("extra", reason="missing_extra"), False, Status.REFUSED, "missing_extra"),
    (Unusable("40 tokens, limit 32"), False, Status.REFUSED, "rejected"),
    (NonFinite("loss is NaN at step 3"), True, Status.FAILED, "non_finite"),
    (MemoryError(), True, Status.FAILED, "out_of_memory"),
    (OSError(errno.ENOSPC, "No space left"), True, Status.FAILED, "disk_full"),
    (work.CardMismatch("other"), False, Status.FAILED, "card_mismatch"),
    (RuntimeError("broke"), False, Status.FAILED, "error"),
    (Stopped(), True, Status.CANCELLED, ""),
]


@pytest.mark.parametrize(("error", "reported", "status", "reason"), ENDS)
def test_it_says_what_an_exception_means(
    granted: Job, error: BaseException, reported: bool, status: str, reason: str
) -> None:
    end = work.end_of(granted, error, reported=reported)
    assert (end.status, end.failure_reason) == (status, reason)
    assert bool(end.error) == (status != Status.CANCELLED)


def test_it_pauses_when_pause_was_asked_for(granted: Job) -> None:
    Job.objects.filter(pk=granted.pk).update(pause_requested_at=granted.queued_at)
    assert work.end_of(granted, Stopped(), reported=True).status == Status.PAUSED
    Job.objects.filter(pk=granted.pk).update(cancel_requested_at=granted.queued_at)
    assert work.end_of(granted, Stopped(), reported=True).status == Status.CANCELLED


def test_it_keeps_no_path_and_no_secret_in_the_provenance(granted: Job, settings: Any) -> None:
    text = str(work.provenance(granted, 1.0))
    assert str(settings.MISTUDIO_HOME) not in text
    assert settings.SECRET_KEY not in text
