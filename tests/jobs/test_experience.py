"""What earlier jobs took makes the next estimate better: per kind, sort of device and size."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus.models import Gpu
from jobs import estimates, peaks, registry
from jobs.experience import MARGIN, line
from jobs.interp.sizes import CUDA_BYTES
from jobs.kind import Estimate
from jobs.memory import GIB, MIB
from jobs.models import Job, Status
from tests.conftest import client_of
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db
BASE = estimates.WORK_BASE_BYTES


def done(owner: User, peak: float, gib: float = 4, seconds: float = 60, **fields: Any) -> Job:
    """A job that succeeded: a formula of so many GiB, a peak of so many times that."""
    formula = int(gib * GIB)
    now = timezone.now()
    told = {"memory_bytes": formula, "breakdown": {"buffers": formula}, "work": 100.0}
    return make_job(
        owner,
        **{"status": Status.SUCCEEDED, "simulated": True, "attempt": 1, "estimate": told} | fields,
        peak_memory_bytes=int(peak * formula),
        started_at=now - timedelta(seconds=seconds),
        finished_at=now,
    )


def asked(gib: float = 4) -> Estimate:
    kind = registry.get("rehearsal")
    return estimates.estimate(kind, {"estimate_mib": int(gib * 1024) - 160, "on_card": True}, {})


def test_one_job_that_took_more_raises_the_next_estimate_above_it(
    alice: User, three_cards: list[Gpu]
) -> None:
    assert (asked().memory_bytes, asked().basis) == (4 * GIB, "formula")
    done(alice, peak=1.5)
    found = asked()
    assert found.memory_bytes == pytest.approx(4 * GIB * 1.5 * MARGIN, rel=1e-6)
    assert found.basis == "measured on 1 job"
    assert sum(found.breakdown.values()) == 4 * GIB  # the formula stays in sight


def test_the_largest_of_many_counts_and_never_less_than_it(alice: User, three_cards: list[Gpu]) -> None:
    for peak in (0.5, 1.2, 0.9):
        done(alice, peak=peak)
    assert (asked().memory_bytes or 0) >= 1.2 * 4 * GIB
    assert asked().basis == "measured on 3 jobs"


def test_it_is_lowered_only_when_enough_took_less_and_not_far(alice: User, three_cards: list[Gpu]) -> None:
    for count in range(5):
        assert asked().memory_bytes == 4 * GIB, count
        done(alice, peak=0.8)
    assert asked().memory_bytes == pytest.approx(4 * GIB * 0.8 * MARGIN, rel=1e-6)
    Job.objects.update(peak_memory_bytes=1)
    assert asked().memory_bytes == pytest.approx(4 * GIB * 0.7, rel=1e-6)


def test_other_kinds_sizes_and_sorts_of_device_say_nothing(alice: User, three_cards: list[Gpu]) -> None:
    done(alice, peak=2, kind="sae_training")
    done(alice, peak=2, gib=12)
    done(alice, peak=2, simulated=False)
    done(alice, peak=2, simulated=False, device="cpu")
    done(alice, peak=2, status=Status.FAILED)
    assert asked().memory_bytes == 4 * GIB


def test_what_simulated_cards_measured_never_corrects_a_real_one(
    alice: User, three_cards: list[Gpu], settings: Any
) -> None:
    done(alice, peak=2)
    settings.MISTUDIO_GPU_BACKEND = "nvml"
    settings.MISTUDIO_ALLOW_CPU = False
    assert asked().memory_bytes == 4 * GIB
    done(alice, peak=1.1, simulated=False)
    assert asked().memory_bytes == pytest.approx(4 * GIB * 1.1 * MARGIN, rel=1e-6)


def test_seconds_follow_the_middle_of_the_last_rates(
    alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Estimate.of({"buffers": 4 * GIB - BASE}, work=300.0)
    monkeypatch.setattr(type(registry.get("rehearsal")), "estimate", lambda *args: own)
    assert asked().seconds is None
    for seconds in (60, 600, 50):
        done(alice, peak=1, seconds=seconds)
    done(alice, peak=1, seconds=9000, attempt=2)  # waited somewhere in between
    assert asked().seconds == 180.0


def test_what_every_job_takes_is_not_multiplied_with_the_work() -> None:
    """60 s of evaluation after each training: a small one takes about a minute, a hundred times as much two."""
    took = [(100.0, 61.0), (110.0, 59.0), (1000.0, 66.0), (2000.0, 74.0), (100.0, 300.0), (5000.0, 91.0)]
    start, rate = line(took)
    assert (start, rate) == (pytest.approx(60, abs=2), pytest.approx(0.006, abs=0.001))
    assert line([(100.0, 60.0), (110.0, 50.0)]) == (0.0, pytest.approx((0.6 + 50 / 110) / 2))
    assert line([(100.0, 60.0), (1000.0, 50.0)]) == (0.0, pytest.approx((0.6 + 0.05) / 2))


def test_the_form_says_what_it_goes_by(alice: User, three_cards: list[Gpu]) -> None:
    done(alice, peak=1.5)
    answer = client_of(alice).post(
        "/api/v1/system/gpu-fit/", {"kind": "rehearsal", "params": {"estimate_mib": 4 * 1024 - 160}}
    )
    assert answer.data["estimate"]["basis"] == "measured on 1 job"
    assert answer.data["cards"][0]["need_bytes"] == answer.data["estimate"]["memory_bytes"]


# On a real card -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("listed", "beside"), [(1500 * MIB, 500 * MIB), (None, CUDA_BYTES)])
def test_a_work_tells_its_allocators_peak_and_the_context_beside_it(
    monkeypatch: pytest.MonkeyPatch, listed: int | None, beside: int
) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        memory_reserved=lambda n: 1000 * MIB,
        max_memory_reserved=lambda n: 3000 * MIB,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    entry = {"pid": peaks.os.getpid(), "memory_used_bytes": listed}
    monkeypatch.setattr("gpus.agent_client.fresh", lambda uuid: {"processes": [entry]})
    assert peaks.on_cards(["GPU-x"]) == 3000 * MIB + beside
