"""Templates: parameters under a name, one's own or shared."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from gpus.models import Gpu
from jobs.models import Artifact, Job, JobInput, JobTemplate
from tests.conftest import client_of

pytestmark = pytest.mark.django_db
URL = "/api/v1/templates/"


def keep(user: User, **body: Any) -> Any:
    return client_of(user).post(URL, {"kind": "rehearsal", "name": "small"} | body, format="json")


def test_it_keeps_what_was_given_and_leaves_the_rest_open(alice: User) -> None:
    answer = keep(alice, kind="sae_training", params={"k": ["8", 16], "lr": "1e-3"})
    assert answer.status_code == 201, answer.data
    assert answer.data["params"] == {"k": [8, 16], "lr": 0.001}
    assert (answer.data["owner"], answer.data["shared"]) == ("alice", False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"params": {"steps": -1}}, "params.steps"),
        ({"params": {"steps": [1, -1]}}, "params.steps"),
        ({"params": {"memory_mib": [1, 2]}}, "params.memory_mib"),
        ({"params": {"stepz": 1}}, "params.stepz"),
        ({"params": {"gpu": 0}}, "params.gpu"),
        ({"name": ""}, "name"),
        ({"name": "x" * 121}, "name"),
        ({"params": [1]}, "params"),
        ({"job": "01a230f0-8b46-7f80-88fa-2029d5db044a"}, "job"),
    ],
)
def test_it_refuses_what_no_job_could_have(alice: User, body: dict[str, Any], field: str) -> None:
    answer = keep(alice, **body)
    assert (answer.status_code, list(answer.data["errors"])) == (400, [field])
    assert not JobTemplate.objects.exists()


def test_an_unknown_kind_is_told(alice: User) -> None:
    assert keep(alice, kind="no_such_kind").data["code"] == "unknown_kind"
    answer = client_of(alice).post(URL, {"name": "small"}, format="json")
    assert list(answer.data["errors"]) == ["kind"]


def test_a_name_is_ones_own_and_used_once(alice: User, bob: User) -> None:
    assert [keep(user).status_code for user in (alice, bob)] == [201, 201]
    again = keep(alice, params={"steps": 9})
    assert (again.status_code, list(again.data["errors"])) == (400, ["name"])
    assert keep(alice, kind="model_download").status_code == 201


def test_it_takes_them_from_a_job_with_the_artifacts_that_it_used(alice: User, bob: User) -> None:
    made = Artifact.objects.create(type="capture", name="a", owner=alice)
    job = Job.objects.create(kind="rehearsal", owner=alice, params={"steps": 7, "source": "job:1"})
    JobInput.objects.create(job=job, parameter="source", artifact=made)
    answer = client_of(alice).post(URL, {"name": "again", "job": str(job.pk)}, format="json")
    assert (answer.data["kind"], answer.data["params"]) == (
        "rehearsal",
        {"steps": 7, "source": str(made.pk)},
    )
    his = client_of(bob).post(URL, {"name": "again", "job": str(job.pk)}, format="json")
    assert (his.status_code, list(his.data["errors"])) == (400, ["job"])


def test_others_see_what_is_shared_and_delete_nothing(alice: User, bob: User, staff: User) -> None:
    mine, shared = keep(alice).data, keep(alice, name="for all", shared=True).data
    seen = client_of(bob).get(URL).data["results"]
    assert [row["name"] for row in seen] == ["for all"]
    assert client_of(alice).get(f"{URL}?kind=model_download").data["count"] == 0
    for template in (mine, shared):
        assert client_of(bob).delete(f"{URL}{template['id']}/").status_code == 404
    assert client_of(staff).delete(f"{URL}{shared['id']}/").status_code == 204
    assert client_of(alice).delete(f"{URL}{mine['id']}/").status_code == 204
    assert not JobTemplate.objects.exists()


def test_a_form_begins_with_a_template(alice: User, bob: User, three_cards: list[Gpu]) -> None:
    from tests.monitor.test_forms import signed_in

    template = keep(alice, params={"steps": [5, 6]}).data["id"]
    page = f"/new/rehearsal/?template={template}"
    assert 'value="5, 6"' in signed_in(alice).get(page).content.decode()
    assert 'value="5, 6"' not in signed_in(bob).get(page).content.decode()
    JobTemplate.objects.update(shared=True)
    assert 'value="5, 6"' in signed_in(bob).get(page).content.decode()
