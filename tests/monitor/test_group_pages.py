"""The page of a group, its line in the list, and what a job's page says of its neighbours."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from gpus.models import Gpu
from jobs import groups
from jobs.models import Job, JobGroup, JobInput, JobMetric, Status
from monitor import figures, joblist
from tests.monitor.test_pages import page_of, text_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def group(alice: User) -> JobGroup:
    """Four trainings: two ended, one runs, one failed."""
    group = JobGroup.objects.create(
        kind="sae_training", name="small ones", owner=alice, swept={"k": [8, 16, 32, 64]}
    )
    ends: list[dict[str, Any]] = [
        {"status": Status.SUCCEEDED, "result": {"fvu": 0.3, "l0": 8, "ce_recovered": 0.8}},
        {"status": Status.SUCCEEDED, "result": {"fvu": 0.2, "l0": 16, "ce_recovered": 0.7}},
        {"status": Status.RUNNING, "progress": {"fraction": 0.5}},
        {"status": Status.FAILED, "error": "The loss was not finite."},
    ]
    for k, end in zip(group.swept["k"], ends, strict=True):
        job = Job.objects.create(
            kind="sae_training", name=f"k {k}", owner=alice, params={"k": k}, group_id=group.pk, **end
        )
        JobMetric.objects.bulk_create(
            [JobMetric(job=job, name="fvu", step=step, value=1 - step / 1000) for step in range(0, 400, k)]
        )
    return group


def rows_of(page: str) -> list[str]:
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    return [re.sub(r"\s+", " ", text_of(row)).strip() for row in body.split("</tr>")[:-1]]


# The page -----------------------------------------------------------------------------------------------
def test_the_table_has_values_results_and_the_best(group: JobGroup, alice: User) -> None:
    page = page_of(alice, f"/groups/{group.pk}/")
    assert "2 of 4 done · 1 failed · 1 running" in text_of(page)
    rows = rows_of(page)
    assert rows[0] == "k 8 succeeded 8 0.3 8 0.8 ★ –"
    assert rows[1] == "k 16 succeeded 16 0.2 ★ 16 0.7 –"
    assert rows[2].startswith("k 32 running 50 % 32 0.616 –")
    assert rows[3].startswith("k 64 The loss was not finite. failed 64")
    assert '<progress max="1" value="0.875"' in page


def test_curves_of_all_members(group: JobGroup, alice: User) -> None:
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    found = client.get(f"/groups/{group.pk}/points/?metric=fvu").json()["curves"]
    assert [len(curve[0]) for curve in found.values()] == [50, 25, 13, 7]
    assert client.get(f"/groups/{group.pk}/points/?metric=none%00").json()["curves"] == {}


def test_many_curves_are_thinned_together(group: JobGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "OVERLAID_POINTS", 80)
    curves = figures.overlaid(groups.members(group), "fvu")
    assert max(len(steps) for steps, _ in curves.values()) <= 51
    assert [steps[-1] for steps, _ in curves.values()] == [392, 384, 384, 384]


def test_questions_do_not_grow_with_the_members(group: JobGroup, alice: User) -> None:
    client = Client()
    client.force_login(alice, backend="django.contrib.auth.backends.ModelBackend")
    address = f"/groups/{group.pk}/parts/"
    client.get(address)
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as asked:
            client.get(address)
        counts.append(len(asked))
        for k in range(6):
            Job.objects.create(kind="sae_training", owner=alice, params={"k": k}, group_id=group.pk)
    assert counts[0] == counts[1] < 12


# The list -----------------------------------------------------------------------------------------------
def test_a_group_is_one_line(group: JobGroup, alice: User, bob: User) -> None:
    Job.objects.create(kind="rehearsal", name="alone", owner=alice)
    page = page_of(alice, "/jobs/rows/")
    assert page.count("<tr id=") == 2
    assert "small ones 4 jobs Train SAE alice – failed 2 of 4 done · 1 failed · 1 running" in text_of(page)
    assert f'href="/groups/{group.pk}/"' in page
    assert f'href="/groups/{group.pk}/"' not in page_of(bob, "/jobs/rows/")
    assert page_of(alice, "/jobs/rows/?status=running").count("<tr id=") == 1
    assert page_of(alice, "/jobs/rows/?status=paused").count("<tr id=") == 0


def test_its_line_names_the_cards_that_it_waits_for(
    group: JobGroup, alice: User, three_cards: list[Gpu]
) -> None:
    groups.members(group).filter(status=Status.RUNNING).update(
        status=Status.QUEUED, gpu_wanted=three_cards[2].uuid
    )
    assert "small ones 4 jobs Train SAE alice 2 failed" in text_of(page_of(alice, "/jobs/rows/"))


def test_its_jobs_are_asked_for(group: JobGroup, alice: User) -> None:
    assert page_of(alice, f"/jobs/rows/?group={group.pk}").count('<tr id="job-') == 4
    assert page_of(alice, f"/jobs/rows/?groups={group.pk},nonsense").count('<tr id="group-') == 1
    assert page_of(alice, "/jobs/rows/?group=nonsense").count("<tr id=") == 0


def test_a_page_counts_lines_not_jobs(group: JobGroup, alice: User) -> None:
    for number in range(50):
        at = timezone.now() - timedelta(hours=1 + number)
        Job.objects.create(kind="rehearsal", name=f"job {number}", owner=alice, queued_at=at)
    first = page_of(alice, "/jobs/rows/")
    assert first.count("<tr id=") == 50
    assert page_of(alice, re.search(r'hx-get="([^"]+)"', first)[1]).count("<tr id=") == 1


# A job and its neighbours -------------------------------------------------------------------------------
def test_a_finalize_is_not_called_a_retry(group: JobGroup, alice: User) -> None:
    failed = groups.members(group).last()
    end = Job.objects.create(kind="sae_training", name="end", owner=alice, stage="finalize", retry_of=failed)
    assert "finalizes k 64" in text_of(page_of(alice, f"/jobs/{end.pk}/"))
    assert "finalized as end queued" in text_of(page_of(alice, f"/jobs/{failed.pk}/"))


def test_a_job_names_its_group_retries_and_chain(group: JobGroup, alice: User) -> None:
    failed = groups.members(group).last()
    waiting = Job.objects.create(
        kind="rehearsal", name="next", owner=alice, status=Status.HELD, failure_reason="input_failed"
    )
    JobInput.objects.create(job=waiting, parameter="source", source_job=failed)
    later = Job.objects.create(kind="rehearsal", name="report", owner=alice)
    later.after.add(waiting)
    text = text_of(page_of(alice, f"/jobs/{waiting.pk}/"))
    assert "waits for k 64 failed makes its source then report queued comes after" in text
    assert "Retry k 64" in text
    assert "Release" not in text
    assert "in the group small ones , 2 of 4 done" in text_of(page_of(alice, f"/jobs/{failed.pk}/"))
    again = Job.objects.create(
        kind="sae_training", name="k 64", owner=alice, retry_of=failed, group_id=group.pk
    )
    assert "retried as k 64 queued" in text_of(page_of(alice, f"/jobs/{failed.pk}/"))
    assert again in groups.members(group)


def test_a_filtered_list_finds_the_last_of_a_group_by_its_group(alice: User) -> None:
    """By the state, each line of a queue of ten thousand would read all of them: 20 s a page."""
    for chosen in ({"status": "queued"}, {"kind": "rehearsal"}, {"mine": "1"}):
        jobs = joblist.filtered(alice, dict.fromkeys(joblist.FILTERS, "") | chosen)
        assert "members_of_a_group" in joblist.one_per_group(jobs).explain()
