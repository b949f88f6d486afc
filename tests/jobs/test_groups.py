"""Sweeps: one job per combination, all or none, tied by their group; and who may see and cancel them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from gpus.models import Gpu
from jobs import groups, registry
from jobs.models import Job, JobGroup, Status
from tests.conftest import client_of
from tests.jobs.test_queue import queries_of

pytestmark = pytest.mark.django_db
SWEEP = {"steps": [1, 2, 3], "seconds_per_step": [0.1, 0.2], "name": "short ones"}


@pytest.fixture
def post(alice: User, three_cards: list[Gpu]) -> Any:
    client = client_of(alice)
    return lambda kind="rehearsal", **body: client.post(f"/api/v1/jobs/{kind}/", body, format="json")


def ends(group: str, **values: Any) -> None:
    Job.objects.filter(group_id=group).update(**values)


# What is made -------------------------------------------------------------------------------------------
def test_every_combination_is_a_job_with_its_own_values_and_name(post: Any, three_cards: list[Gpu]) -> None:
    answer = post(**SWEEP, gpu=1)
    assert answer.status_code == 201, answer.data
    assert (answer.data["count"], answer.data["states"]) == (6, {"queued": 6})
    assert answer.data["swept"] == {"steps": [1, 2, 3], "seconds_per_step": [0.1, 0.2]}
    made = [(job["params"]["steps"], job["params"]["seconds_per_step"]) for job in answer.data["jobs"]]
    assert made == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2), (3, 0.1), (3, 0.2)]
    assert answer.data["jobs"][3]["name"] == "short ones · steps 2, seconds_per_step 0.2"
    assert {job["group_id"] for job in answer.data["jobs"]} == {answer.data["group_id"]}
    assert {job["gpu_request"] for job in answer.data["jobs"]} == {three_cards[1].uuid}


def test_a_list_of_one_value_is_a_group_of_one(post: Any) -> None:
    assert post(steps=[4]).data["count"] == 1


def test_a_name_that_is_long_loses_its_end_and_not_the_values(post: Any) -> None:
    name = post(steps=[1, 2], name="x" * 120).data["jobs"][1]["name"]
    assert (len(name), name[-11:]) == (120, "x · steps 2")


# What is refused ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "field", "sentence"),
    [
        ({"steps": [1, -2]}, "steps", "With steps -2: Ensure this value"),
        ({"steps": [1, "many"]}, "steps", "With steps many: A valid integer"),
        ({"steps": []}, "steps", "At least one value"),
        ({"steps": [1, 2, 1]}, "steps", "steps 1: named twice"),
        ({"steps": [1, "1"]}, "steps", "steps 1: named twice"),
        ({"steps": list(range(201))}, "steps", "make 201 jobs (201 of steps); a group has at most 200"),
        ({"steps": list(range(20)), "seconds_per_step": [0.1 * n for n in range(11)]}, "steps", "220 jobs"),
        ({"steps": [1, 2], "memory_mib": [1, 2]}, "memory_mib", "A valid integer"),
        ({"steps": [1, 2], "stepz": 3}, "stepz", "There is no parameter"),
        ({"steps": [1, 2], "priority": 5}, "priority", "is for staff"),
        ({"steps": [[1], 2]}, "steps", "With steps [1]: A valid integer"),
    ],
)
def test_one_bad_combination_queues_none(post: Any, body: dict[str, Any], field: str, sentence: str) -> None:
    answer = post(**body)
    assert (answer.status_code, answer.data["code"]) == (400, "invalid")
    assert sentence in answer.data["errors"][field][0]
    assert not Job.objects.exists()
    assert not JobGroup.objects.exists()


def test_what_is_wrong_with_all_of_them_is_said_once_and_without_values(post: Any) -> None:
    answer = post("sae_training", activations="nothing", d_sae=64, k=[1, 2])
    assert answer.data["errors"]["activations"][0].startswith("No activations named")


def test_what_no_card_can_hold_is_named(post: Any) -> None:
    answer = post(estimate_mib=[1, 30 * 1024])
    assert (answer.status_code, answer.data["code"]) == (400, "model_too_large")
    assert answer.data["detail"].startswith("With estimate_mib 30720: ")
    assert not Job.objects.exists()


def test_a_fault_half_way_leaves_nothing(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from jobs import submit

    real, made = submit.create, []

    def breaks(*args: Any, **fields: Any) -> Job:
        made.append(real(*args, **fields))
        if len(made) == 4:
            raise RuntimeError("the disk of the database is full")
        return made[-1]

    monkeypatch.setattr(submit, "create", breaks)
    with pytest.raises(RuntimeError):
        post(**SWEEP)
    assert len(made) == 4
    assert not Job.objects.exists()


def test_a_combination_costs_four_queries_to_check(alice: User, three_cards: list[Gpu]) -> None:
    costs = [
        queries_of(lambda n=n: groups.check(alice, "rehearsal", {"steps": list(range(n))}))  # type: ignore[misc]
        for n in (2, 22)
    ]
    assert costs[1] - costs[0] <= 4 * 20


# Once ---------------------------------------------------------------------------------------------------
def test_the_same_key_answers_with_the_same_group(post: Any) -> None:
    first, again = post(**SWEEP, idempotency_key="a"), post(**SWEEP, idempotency_key="a")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.data["group_id"] == again.data["group_id"]
    assert [job["id"] for job in first.data["jobs"]] == [job["id"] for job in again.data["jobs"]]
    assert Job.objects.count() == 6


@pytest.mark.parametrize("other", [{"steps": [1, 2]}, {"steps": 1}])
def test_the_key_of_a_group_is_nobody_elses(post: Any, other: dict[str, Any]) -> None:
    post(**SWEEP, idempotency_key="a")
    assert post(**other, idempotency_key="a").status_code == 409
    assert Job.objects.count() == 6


# Afterwards ---------------------------------------------------------------------------------------------
def test_a_retry_takes_the_place_of_its_job(post: Any, alice: User) -> None:
    group = post(steps=[1, 2]).data
    Job.objects.filter(pk=group["jobs"][1]["id"]).update(status=Status.FAILED)
    again = client_of(alice).post(f"/api/v1/jobs/{group['jobs'][1]['id']}/retry/").data
    shown = client_of(alice).get(f"/api/v1/groups/{group['group_id']}/").data
    assert again["group_id"] == group["group_id"]
    assert [job["id"] for job in shown["jobs"]] == [group["jobs"][0]["id"], again["id"]]
    assert shown["states"] == {"queued": 2}
    assert client_of(alice).get(f"/api/v1/jobs/?group_id={group['group_id']}").data["count"] == 3


def test_cancel_ends_all_that_have_not_ended(post: Any, alice: User) -> None:
    group = post(**SWEEP).data
    done = group["jobs"][0]["id"]
    Job.objects.filter(pk=done).update(status=Status.SUCCEEDED)
    answer = client_of(alice).post(f"/api/v1/groups/{group['group_id']}/cancel/")
    assert (answer.status_code, answer.data["states"]) == (202, {"succeeded": 1, "cancelled": 5})
    again = client_of(alice).post(f"/api/v1/groups/{group['group_id']}/cancel/")
    assert (again.status_code, again.data["code"]) == (409, "conflict")


def test_a_group_is_its_owners_and_staffs(post: Any, bob: User, staff: User) -> None:
    group = post(steps=[1, 2]).data["group_id"]
    for method, path in (("get", ""), ("post", "cancel/")):
        answer = getattr(client_of(bob), method)(f"/api/v1/groups/{group}/{path}")
        assert (answer.status_code, answer.data["code"]) == (404, "not_found")
    assert client_of(staff).get(f"/api/v1/groups/{group}/").status_code == 200
    assert not Job.objects.filter(status=Status.CANCELLED).exists()


# What is documented -------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "kind"), list(registry.all_kinds().items()))
def test_what_may_be_swept_takes_one_value_otherwise(name: str, kind: Any) -> None:
    """A parameter that is a list by itself could not tell its values from those of a sweep."""
    fields = kind.Params().fields
    for parameter in kind.sweep:
        assert not hasattr(fields[parameter], "child"), parameter


def test_the_schema_says_value_or_list(alice: User) -> None:
    from drf_spectacular.generators import SchemaGenerator

    own = client_of(alice).get("/api/v1/job-kinds/sae_training/").data["params"]["properties"]
    value, values = own["k"]["oneOf"]
    assert value == {"type": "integer", "minimum": 1, "maximum": 4096}
    assert values == {"type": "array", "items": value, "minItems": 1}
    assert own["k"]["default"] is None  # of the TopK kinds 32
    assert own["ce_tokens"]["type"] == "integer"
    schema = SchemaGenerator().get_schema(request=None, public=True)
    body = schema["components"]["schemas"]["SaeTrainingParams"]
    assert body["properties"]["k"]["oneOf"] == [value, values]
    assert body["properties"]["site"]["oneOf"][1]["type"] == "array"
    assert set(body["required"]) == {"d_sae"}  # and activations or a model
    answer = schema["paths"]["/api/v1/jobs/sae_training/"]["post"]["responses"]["201"]["content"]
    assert answer["application/json"]["schema"] == {"$ref": "#/components/schemas/JobOrGroup"}
    assert len(schema["components"]["schemas"]["JobOrGroup"]["oneOf"]) == 2
