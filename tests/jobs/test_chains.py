"""Chains of jobs: what waits, what a broken link says and does, and how its retry mends the chain."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User

from gpus.models import Gpu
from jobs import chains, dispatch, verbs, waits
from jobs.exceptions import Conflict
from jobs.models import Artifact, Job, Status
from monitor import topics
from tests.conftest import client_of
from tests.jobs.test_engine import keep_checkpoint
from tests.jobs.test_queue import queries_of, queue_up
from tests.jobs.test_states import make_job

pytestmark = pytest.mark.django_db


class Chain:
    """Three jobs in a row: `second` takes what `first` makes, `third` comes after `second`."""

    def __init__(self, user: User) -> None:
        self.client = client_of(user)
        self.first = self.submit(name="extraction")
        self.second = self.submit(name="training", source=f"job:{self.first}")
        self.third = self.submit(name="report", after=[self.second])

    def submit(self, **body: Any) -> str:
        answer = self.client.post("/api/v1/jobs/rehearsal/", body, format="json")
        assert answer.status_code == 201, answer.data
        return answer.data["id"]

    def ends(self, job: str, status: str, **values: Any) -> None:
        Job.objects.filter(pk=job).update(status=status, **values)
        if status == Status.SUCCEEDED:
            owner = Job.objects.get(pk=job).owner
            Artifact.objects.create(type="capture", name=job, job_id=job, owner=owner)
        dispatch.schedule()

    def press(self, job: str, verb: str, **body: Any) -> Any:
        answer = self.client.post(f"/api/v1/jobs/{job}/{verb}/", body, format="json")
        dispatch.schedule()
        return answer

    def see(self, job: str) -> dict[str, Any]:
        return self.client.get(f"/api/v1/jobs/{job}/").data


@pytest.fixture
def chain(alice: User, three_cards: list[Gpu]) -> Chain:
    made = Chain(alice)
    assert dispatch.schedule() == 1  # the first alone
    return made


def test_links_wait_for_each_other_and_go_on(chain: Chain) -> None:
    assert (
        chain.see(chain.second)["waiting_for"]["reason"],
        chain.see(chain.second)["waiting_for"]["job_id"],
    ) == (
        "input",
        chain.first,
    )
    assert chain.see(chain.third)["waiting_for"]["reason"] == "after"
    chain.ends(chain.first, Status.SUCCEEDED)
    assert chain.see(chain.second)["status"] == "starting"
    assert chain.see(chain.third)["status"] == "queued"
    chain.ends(chain.second, Status.SUCCEEDED)
    assert chain.see(chain.third)["status"] == "starting"


def test_a_link_is_told_of_in_frames(chain: Chain) -> None:
    """Its ids are texts: a snapshot with another kind of value closed the sockets of every open page."""
    frames = topics.snapshot("jobs", Job.objects.get(pk=chain.third).owner)
    told = {frame["data"]["id"]: frame["data"] for frame in json.loads(json.dumps(frames))}
    assert told[chain.third]["after"] == [chain.second]


def test_a_broken_link_holds_the_rest_with_a_sentence(chain: Chain) -> None:
    chain.ends(chain.first, Status.FAILED, error="CUDA ran out of memory.\nlong story")
    held = chain.see(chain.second)
    assert (held["status"], held["failure_reason"]) == ("held", "input_failed")
    assert held["error"] == (
        f"Its input source was to come from extraction, which ended failed (job {chain.first}): "
        "CUDA ran out of memory."
    )
    assert held["hint"].startswith("Retry that job")
    assert chain.see(chain.third)["status"] == "queued"


def test_a_retry_mends_the_chain(chain: Chain) -> None:
    chain.ends(chain.first, Status.FAILED)
    again = chain.press(chain.first, "retry").data["id"]
    mended = chain.see(chain.second)
    assert (mended["status"], mended["error"], mended["failure_reason"], mended["hint"]) == (
        "queued",
        "",
        "",
        "",
    )
    assert mended["waiting_for"]["job_id"] == again
    chain.ends(again, Status.SUCCEEDED)
    assert chain.see(chain.second)["status"] == "starting"
    assert chain.see(chain.second)["inputs"][0]["name"] == again


def test_a_retry_that_fails_too_holds_again_and_its_retry_mends(chain: Chain) -> None:
    chain.ends(chain.first, Status.FAILED)
    again = chain.press(chain.first, "retry").data["id"]
    chain.ends(again, Status.FAILED)
    assert again in chain.see(chain.second)["error"]
    third = chain.press(again, "retry").data["id"]
    assert chain.see(chain.second)["waiting_for"]["job_id"] == third


def test_what_a_person_holds_stays_held(chain: Chain) -> None:
    chain.press(chain.second, "hold")
    chain.ends(chain.first, Status.FAILED)
    again = chain.press(chain.first, "retry").data["id"]
    assert chain.see(chain.second)["status"] == "held"
    assert chain.see(chain.second)["inputs"][0]["job"] == again


def test_release_starts_what_only_came_after(chain: Chain) -> None:
    chain.ends(chain.first, Status.SUCCEEDED)
    chain.ends(chain.second, Status.FAILED)
    assert chain.see(chain.third)["hint"].endswith("start it all the same.")
    assert chain.press(chain.third, "release").status_code == 202
    assert chain.see(chain.third)["status"] == "starting"
    assert chain.see(chain.third)["after"] == []


def test_release_cannot_make_an_input(chain: Chain) -> None:
    chain.ends(chain.first, Status.CANCELLED)
    answer = chain.press(chain.second, "release")
    assert (answer.status_code, answer.data["code"]) == (409, "conflict")
    assert chain.first in answer.data["detail"]
    assert chain.see(chain.second)["status"] == "held"


def test_a_job_that_was_retried_is_named_by_either_id(chain: Chain) -> None:
    chain.ends(chain.first, Status.FAILED)
    again = chain.press(chain.first, "retry").data["id"]
    late = chain.submit(source=f"job:{chain.first}", after=[chain.first])
    assert chain.see(late)["inputs"][0]["job"] == again
    assert chain.see(late)["after"] == [again]


def test_a_retry_still_waits_for_what_it_waited_for(chain: Chain) -> None:
    chain.press(chain.third, "cancel")
    again = chain.press(chain.third, "retry").data
    assert again["after"] == [chain.second]


def test_whoever_waits_for_a_paused_job_waits_for_what_finalizes_it(chain: Chain) -> None:
    """The paused one has not ended: nothing else would ever call its followers up."""
    chain.ends(chain.first, Status.PAUSED)
    keep_checkpoint(Job.objects.get(pk=chain.first))
    made = chain.press(chain.first, "finalize").data["id"]
    assert chain.see(chain.second)["waiting_for"]["job_id"] == made
    chain.ends(made, Status.SUCCEEDED)
    assert chain.see(chain.second)["status"] == "starting"


def test_what_was_held_while_it_waited_still_says_for_what(chain: Chain) -> None:
    chain.press(chain.second, "hold")
    chain.press(chain.second, "release")
    assert chain.see(chain.second)["waiting_for"]["job_id"] == chain.first
    assert not Job.objects.filter(pk=chain.second, line__isnull=False).exists()


def test_a_release_that_comes_too_late_drops_no_link(chain: Chain) -> None:
    chain.ends(chain.first, Status.SUCCEEDED)
    chain.ends(chain.second, Status.FAILED)
    held = Job.objects.get(pk=chain.third)
    chain.press(chain.third, "cancel")
    with pytest.raises(Conflict):
        verbs.release(held, held.owner)
    assert held.after.exists()


def test_a_retry_costs_the_same_however_many_wait_for_it(chain: Chain) -> None:
    old = Job.objects.get(pk=chain.first)
    costs = []
    for count in (2, 30):
        again = make_job(old.owner)
        followers = queue_up(
            old.owner, count, waits_on=old, waiting_for=waits.for_job("after", old).beginning()
        )
        old.followed_by.add(*followers)
        costs.append(queries_of(lambda again=again: chains.take_over(old, again)))  # type: ignore[misc]
        assert again.followed_by.count() == again.awaited_by.count() - (count == 2) >= count
    assert costs[0] == costs[1]
