"""What a submit refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from gpus.models import Gpu
from jobs import registry
from jobs.models import Artifact, Attempt, Job, JobInput, Status
from tests.conftest import GIB, client_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def post(alice: User, three_cards: list[Gpu]) -> Any:
    client = client_of(alice)
    return lambda kind="rehearsal", **body: client.post(f"/api/v1/jobs/{kind}/", body, format="json")


GOOD = [
    (None, "auto"),
    ("auto", "auto"),
    ("AUTO", "auto"),
    ("auto:1", "auto"),
    (0, "index"),
    ("0", "index"),
    ("alpha/0", "index"),
    ("uuid", "uuid"),
    ("UUID", "uuid"),
]


@pytest.mark.parametrize(("asked", "stored"), GOOD)
def test_it_stores_what_was_asked_for(post: Any, three_cards: list[Gpu], asked: Any, stored: str) -> None:
    spelled = {"uuid": f" {three_cards[0].uuid} ", "UUID": three_cards[0].uuid.upper()}.get(asked, asked)
    answer = post(gpu=spelled)
    assert answer.status_code == 201, answer.data
    assert (
        answer.data["gpu_request"]
        == answer.data["gpu_wanted"]
        == ("auto" if stored == "auto" else three_cards[0].uuid)
    )
    assert answer.data["gpu_uuid"] is None
    assert answer.data["status"] == "queued"


def test_it_answers_at_once_while_the_broker_is_down(
    post: Any, django_capture_on_commit_callbacks: Any
) -> None:
    """There is none in these tests. The bell is not waited for: it is rung by the next tick."""
    began = time.monotonic()
    with django_capture_on_commit_callbacks(execute=True):
        assert post(steps=1).status_code == 201
    assert time.monotonic() - began < 3


BAD = [
    *(
        (asked, "invalid_gpu")
        for asked in (True, -1, 1.0, "", [], "0,1", "auto:0", "cuda:0", "GPU-aaaaaaaa", [0, 0])
    ),
    *((asked, "unknown_gpu") for asked in (3, "GPU-ffffffff-0000-0000-0000-000000000000")),
    *((asked, "too_many_gpus") for asked in ([0, 1], "auto:2")),
]


@pytest.mark.parametrize(("asked", "code"), BAD)
def test_it_refuses_a_card_that_cannot_be_and_queues_nothing(post: Any, asked: Any, code: str) -> None:
    answer = post(gpu=asked)
    assert (answer.status_code, answer.data["code"]) == (400, code)
    assert answer.data["detail"]
    if code == "unknown_gpu":
        assert len(answer.data["available"]) == 3
    assert Job.objects.count() == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("enabled", False), ("selectable", False), ("lost_at", "now"), ("removed_at", "now")],
)
def test_it_refuses_a_card_that_is_not_available(
    post: Any, three_cards: list[Gpu], field: str, value: Any
) -> None:
    from django.utils import timezone

    Gpu.objects.filter(pk=three_cards[0].pk).update(**{field: timezone.now() if value == "now" else value})
    answer = post(gpu=three_cards[0].uuid)
    assert (answer.status_code, answer.data["code"]) == (400, "gpu_not_available")
    assert Job.objects.count() == 0


def test_it_refuses_what_no_card_can_ever_hold(post: Any) -> None:
    answer = post(estimate_mib=30 * 1024)
    assert (answer.status_code, answer.data["code"]) == (400, "model_too_large")
    assert answer.data["need_bytes"] > 30 * GIB
    assert answer.data["largest_bytes"] < 24 * GIB
    assert Job.objects.count() == 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"steps": -1}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"stepz": 1}, "stepz"),
        ({"priority": 1}, "priority"),
        ({"name": "x" * 121}, "name"),
        ({"name": "two\nlines"}, "name"),
        ({"name": "\x1b[2J"}, "name"),
        ({"status": "succeeded"}, "status"),
    ],
)
def test_it_names_the_field_that_is_wrong(post: Any, body: dict[str, Any], field: str) -> None:
    answer = post(**body)
    assert answer.status_code == 400
    assert field in answer.data["errors"]
    assert Job.objects.count() == 0


@pytest.mark.parametrize("body", ["[1, 2]", '"x"', "{", "NaN", "[" * 5000])
def test_it_refuses_a_body_that_is_no_object(alice: User, body: str) -> None:
    answer = client_of(alice).post("/api/v1/jobs/rehearsal/", body, content_type="application/json")
    assert answer.status_code == 400
    assert Job.objects.count() == 0


def test_it_lists_the_kinds_when_one_is_unknown(post: Any) -> None:
    answer = post("no_such_kind")
    assert (answer.status_code, answer.data["code"]) == (404, "unknown_kind")
    assert "sae_training" in answer.data["detail"]


def test_it_says_which_artifacts_there_are(post: Any, alice: User) -> None:
    Artifact.objects.create(type="model", name="tiny", owner=alice)
    answer = post("activation_extraction", model="tyni", sites=[{"block": 0}])
    assert answer.status_code == 400
    assert "tiny" in answer.data["errors"]["model"][0]


def test_it_waits_for_the_job_that_makes_its_input(post: Any) -> None:
    first = post("model_download", source="demo")
    answer = post("activation_extraction", model=f"job:{first.data['id']}", sites=[{"block": 0}])
    assert answer.status_code == 201, answer.data
    assert answer.data["estimate"] is None
    assert JobInput.objects.get().source_job_id == Job.objects.get(kind="model_download").pk


def test_it_refuses_a_job_that_makes_something_else(post: Any) -> None:
    first = post()
    answer = post("activation_extraction", model=f"job:{first.data['id']}", sites=[{"block": 0}])
    assert answer.status_code == 400
    assert "makes capture, not model" in answer.data["errors"]["model"][0]


def test_it_refuses_the_job_of_somebody_else(post: Any, bob: User, three_cards: list[Gpu]) -> None:
    first = client_of(bob).post("/api/v1/jobs/model_download/", {"source": "demo"}, format="json")
    answer = post("activation_extraction", model=f"job:{first.data['id']}", sites=[{"block": 0}])
    assert answer.status_code == 400


# The registry -----------------------------------------------------------------------------------------


def kinds_on_cards() -> list[str]:
    return [name for name, kind in registry.all_kinds().items() if kind.needs_gpu != "never"]


@pytest.mark.parametrize("name", kinds_on_cards())
def test_it_documents_the_gpu_of_every_kind_on_a_card(name: str) -> None:
    """Contract P2, the API's half: the schema of the submit has `gpu`, and no kind takes the name for itself."""
    from drf_spectacular.generators import SchemaGenerator

    schema = SchemaGenerator().get_schema(request=None, public=True)
    body = schema["paths"][f"/api/v1/jobs/{name}/"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    fields = schema["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]["properties"]
    assert "gpu" in fields
    assert not set(registry.get(name).Params().fields) & {"gpu", "priority", "name", "after", "hold"}


@pytest.mark.parametrize("name", list(registry.names()))
def test_it_describes_every_kind(name: str, alice: User) -> None:
    answer = client_of(alice).get(f"/api/v1/job-kinds/{name}/")
    assert answer.status_code == 200
    assert answer.data["params"]["additionalProperties"] is False
    assert set(answer.data["example"]) <= set(answer.data["params"]["properties"])
    kind = registry.get(name)
    assert kind.Params(data=dict(kind.example)).is_valid(), "the example must be valid"


# Verbs ------------------------------------------------------------------------------------------------


def test_it_cancels_a_queued_job_at_once(post: Any, alice: User) -> None:
    job = post().data
    answer = client_of(alice).post(f"/api/v1/jobs/{job['id']}/cancel/")
    assert (answer.status_code, answer.data["status"]) == (202, "cancelled")
    again = client_of(alice).post(f"/api/v1/jobs/{job['id']}/cancel/")
    assert (again.status_code, again.data["code"]) == (409, "conflict")


def test_it_cancels_a_start_that_nobody_claimed(post: Any, alice: User) -> None:
    from jobs import dispatch
    from jobs.models import Attempt, Lease

    job = post().data
    assert dispatch.schedule() == 1
    answer = client_of(alice).post(f"/api/v1/jobs/{job['id']}/cancel/")
    assert answer.data["status"] == "cancelled"
    assert not Lease.objects.filter(ended_at=None).exists()
    assert not Attempt.objects.get().claim(1, 1, "boot")


def test_it_retries_on_the_same_card(post: Any, alice: User, three_cards: list[Gpu]) -> None:
    job = Job.objects.get(pk=post(gpu="auto", steps=7).data["id"])
    card = three_cards[1]
    Job.objects.filter(pk=job.pk).update(status=Status.FAILED, gpu_uuid=card.uuid, gpu_uuids=[card.uuid])
    Attempt.objects.create(
        job=job, number=1, host=card.host, gpu_uuids=[card.uuid], started_at=timezone.now()
    )
    answer = client_of(alice).post(f"/api/v1/jobs/{job.pk}/retry/")
    assert answer.status_code == 202
    assert answer.data["gpu_request"] == three_cards[1].uuid
    assert answer.data["params"]["steps"] == 7
    other = client_of(alice).post(f"/api/v1/jobs/{job.pk}/retry/", {"gpu": 2}, format="json")
    assert other.data["gpu_request"] == three_cards[2].uuid
    Gpu.objects.filter(pk=three_cards[1].pk).update(enabled=False)
    gone = client_of(alice).post(f"/api/v1/jobs/{job.pk}/retry/")
    assert (gone.status_code, gone.data["code"]) == (400, "gpu_not_available")


@pytest.mark.parametrize("verb", ["cancel", "retry", "pause", "resume"])
def test_it_hides_the_jobs_of_others(post: Any, bob: User, verb: str) -> None:
    job = post().data
    assert client_of(bob).post(f"/api/v1/jobs/{job['id']}/{verb}/").status_code == 404


@pytest.mark.parametrize("part", ["log", "metrics", "result", "attempts", "events", "files", "metrics.csv"])
def test_it_hides_what_belongs_to_others(post: Any, bob: User, part: str) -> None:
    job = post().data
    assert client_of(bob).get(f"/api/v1/jobs/{job['id']}/{part}/").status_code == 404


def test_it_shows_others_the_reduced_form(post: Any, bob: User) -> None:
    job = post(name="secret plan").data
    seen = client_of(bob).get(f"/api/v1/jobs/{job['id']}/").data
    assert (seen["kind"], seen["owner"], seen["status"]) == ("rehearsal", "alice", "queued")
    assert [seen[f] for f in ("params", "result", "error", "hint", "inputs", "artifacts")] == [None] * 6
    assert set(seen) == set(job)
