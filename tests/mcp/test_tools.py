"""The tools: one per kind, one per verb, with the rights and the sentences of REST, and a row per call."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from rest_framework import serializers

from gpus.models import Gpu
from gpus.rest import SCOPES
from jobs import api, paths, registry, submit, urls
from jobs.models import Artifact, Job, Status
from monitor import tasks
from monitor.mcp import calls, contract
from monitor.mcp.tools import Tool, all_tools
from monitor.models import ToolCall
from monitor.signin import BACKEND
from tests.conftest import client_of
from tests.mcp.conftest import ask, caller, example_of
from tests.security.conftest import SECRET, World
from tests.system import REHEARSAL

pytestmark = pytest.mark.django_db
TOOLS = list(all_tools().values())
every_tool = pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)


# The registry -------------------------------------------------------------------------------------------
def test_every_kind_has_a_tool_with_all_that_a_submit_takes() -> None:
    """P2: a kind that can need a card takes `gpu` in its tool, and a new kind has one by itself."""
    assert "rehearsal" in registry.names()  # of MISTUDIO_KIND_PATHS: nobody has listed it anywhere
    for name, kind in registry.all_kinds().items():
        takes = all_tools()[f"submit_{name}"].schema["properties"]
        assert set(kind.Params().fields) | set(submit.SubmitFields().fields) == set(takes), name
        kinds_of_value = [one.get("type") for one in takes["gpu"]["anyOf"]]
        assert kinds_of_value == ["string", "integer", *(["array"] if kind.max_gpus > 1 else []), "null"]


def test_every_verb_has_a_tool() -> None:
    routes = {pattern.pattern.regex.pattern for pattern in urls.urlpatterns}
    verbs = {tool.name.removesuffix("_job") for tool in TOOLS if issubclass(tool.view, api.Verb)}
    assert {"cancel", "pause", "resume", "retry", "hold", "release"} <= verbs
    assert all(any(f"/{verb}/?$" in route for route in routes) for verb in verbs)


#: Kinds that only tests have (MISTUDIO_KIND_PATHS).
ONLY_HERE = {file.stem for file in REHEARSAL.glob("*.py")}


def test_the_contract_is_that_of_the_code() -> None:
    """Red when a kind or a tool has changed: `manage.py mcp --contract` writes the file anew."""
    assert shipped() == written()


def test_the_contract_turns_red_when_a_kind_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = registry.get("sae_training")
    more = type("Params", (kind.Params,), {"patience": serializers.IntegerField(default=3)})
    monkeypatch.setattr(type(kind), "Params", more)
    all_tools.cache_clear()
    try:
        changed = [name for name, tool in shipped().items() if tool != written()[name]]
        assert changed == ["submit_sae_training"]
    finally:
        monkeypatch.undo()
        all_tools.cache_clear()


def written() -> dict[str, Any]:
    return by_name((Path(__file__).parents[2] / contract.FILE).read_text())


def shipped() -> dict[str, Any]:
    found = by_name(contract.text())
    return {name: tool for name, tool in found.items() if name.removeprefix("submit_") not in ONLY_HERE}


def by_name(text: str) -> dict[str, Any]:
    tools = json.loads(text, object_hook=without_ours)["tools"]
    return {tool["name"]: tool for tool in tools}


def without_ours(values: dict[str, Any]) -> dict[str, Any]:
    return {k: [one for one in v if one not in ONLY_HERE] if k == "enum" else v for k, v in values.items()}


def test_the_manual_names_every_tool() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "mcp.md").read_text()
    assert [t.name for t in TOOLS if not t.name.startswith("submit_") and f"`{t.name}`" not in manual] == []


# Rights -------------------------------------------------------------------------------------------------
@every_tool
def test_a_tool_wants_its_scope(world: World, tool: Tool) -> None:
    """Without it: refused, and nothing has changed. With no other one: let in."""
    arguments, before = example_of(tool, world), list(Job.objects.values())
    others = [scope for scope in SCOPES if scope != tool.scope]
    refused = ask(caller(world.owner, *others), tool.name, **arguments)
    assert (refused.outcome, list(Job.objects.values())) == ("permission_denied", before)
    assert f"“{tool.scope}”" in refused.data["detail"]
    answer = ask(caller(world.owner, tool.scope), tool.name, **arguments)
    assert answer.outcome not in ("permission_denied", "not_found", "server_error"), answer.data
    json.dumps(answer.data)


@every_tool
def test_a_stranger_learns_nothing(world: World, bob: User, tool: Tool) -> None:
    """Somebody else's job and artifact are unknown to every tool but those that show the reduced form."""
    answer = ask(caller(bob), tool.name, **example_of(tool, world))
    assert SECRET not in answer.text
    named = "id" in tool.in_path and tool.name not in ("get_job", "wait_for_job")
    assert (answer.outcome == "not_found") is named
    assert not Job.objects.exclude(status=Status.FAILED).filter(owner=world.owner).exists()


def test_the_owner_reads_what_is_theirs(world: World) -> None:
    mine = caller(world.owner, "read")
    job, artifact = world.job.pk, world.artifact.pk
    assert ask(mine, "job_log", id=job).data["text"] == SECRET
    assert ask(mine, "job_result", id=job).data == {"note": SECRET}
    assert ask(mine, "job_metrics", id=job, names="loss").data["step"] == [1, 2, 3]
    assert ask(mine, "job_file", id=job, path="hello.txt").data["text"] == SECRET
    assert ask(mine, "artifact_file", id=artifact, path="hello.txt").data["text"] == SECRET
    assert ask(mine, "job_files", id=job).data["count"] == 2
    assert ask(mine, "list_artifacts", type="sae").data["results"][0]["name"] == "small"


def test_a_file_outside_is_no_file(world: World) -> None:
    mine = caller(world.owner, "read")
    other = Artifact.objects.create(type="sae", name="other", owner=world.owner, job=world.job, manifest={})
    paths.artifact_folder(other).mkdir(parents=True)
    (paths.artifact_folder(other) / "x.txt").write_text("x")
    for path in (f"../{other.pk}/x.txt", "/etc/passwd", "..", ".", "a\0b", "x" * 999):
        answer = ask(mine, "artifact_file", id=world.artifact.pk, path=path)
        assert answer.outcome in ("not_found", "invalid"), path


def test_a_file_comes_in_pieces_of_whole_characters(world: World) -> None:
    mine, file = caller(world.owner, "read"), paths.job_folder(world.job) / "words.txt"
    file.write_text("ä" * 10)
    first = ask(mine, "job_file", id=world.job.pk, path="words.txt", limit=5).data
    assert (first["text"], first["next_offset"], first["size_bytes"]) == ("ää", 4, 20)
    rest = ask(mine, "job_file", id=world.job.pk, path="words.txt", offset=4).data
    assert rest["text"] == "ä" * 8
    file.write_bytes(b"\0\1\2")
    assert ask(mine, "job_file", id=world.job.pk, path="words.txt").outcome == "not_text"
    file.write_bytes(b"\xff\xfebytes")
    assert ask(mine, "job_file", id=world.job.pk, path="words.txt").data["next_offset"] == 7


# Sentences ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        {"gpu": "cuda:0"},
        {"gpu": 7},
        {"gpu": True},
        {"steps": -1, "stepz": 1},
        {"priority": 5},
        {"after": ["x"]},
    ],
)
def test_a_submit_is_refused_as_rest_refuses_it(
    alice: User, three_cards: list[Gpu], body: dict[str, Any]
) -> None:
    over_rest = client_of(alice).post("/api/v1/jobs/rehearsal/", body, format="json")
    answer = ask(caller(alice), "submit_rehearsal", **body)
    assert (over_rest.status_code, answer.data) == (400, over_rest.json())
    assert not Job.objects.exists()


def test_a_named_card_is_the_one_of_the_row(alice: User, three_cards: list[Gpu]) -> None:
    job = ask(caller(alice, "submit"), "submit_rehearsal", gpu=1, name="mine", idempotency_key="a").data
    assert (job["gpu_request"], job["owner"], job["name"]) == (three_cards[1].uuid, "alice", "mine")
    again = ask(caller(alice, "submit"), "submit_rehearsal", gpu=1, name="mine", idempotency_key="a").data
    assert again["id"] == job["id"]
    other = ask(caller(alice, "submit"), "submit_rehearsal", gpu=2, idempotency_key="a")
    assert other.outcome == "conflict"


def test_a_sweep_is_a_group(alice: User, three_cards: list[Gpu]) -> None:
    me = caller(alice)
    group = calls.call(me, "submit_rehearsal", {"steps": [1, 2], "gpu": 1}).data
    assert [job["gpu_request"] for job in group["jobs"]] == [three_cards[1].uuid] * 2
    assert "params" not in group["jobs"][0]
    assert ask(me, "get_group", id=group["group_id"]).data["states"] == {"queued": 2}
    assert ask(me, "cancel_group", id=group["group_id"]).data["states"] == {"cancelled": 2}
    assert ask(me, "cancel_group", id=group["group_id"]).outcome == "conflict"
    assert str(ToolCall.objects.get().job_id) == group["jobs"][0]["id"]


def test_a_verb_moves_the_job_or_says_why_not(alice: User, three_cards: list[Gpu]) -> None:
    me = caller(alice)
    job = ask(me, "submit_rehearsal").data["id"]
    assert ask(me, "hold_job", id=job).data["status"] == "held"
    assert ask(me, "hold_job", id=job).outcome == "conflict"
    assert ask(me, "cancel_job", id=job).data["status"] == "cancelled"
    again = ask(me, "retry_job", id=job, gpu=2)
    assert (again.data["retry_of"], again.data["gpu_request"]) == (job, three_cards[2].uuid)
    assert ask(me, "retry_job", id=job, gpu=9).outcome == "unknown_gpu"


@pytest.mark.parametrize(
    ("tool", "arguments", "field"),
    [
        ("get_job", {}, "id"),
        ("get_job", {"id": "1/log"}, "id"),
        ("get_job", {"id": "00000000-0000-7000-8000-000000000000", "page": 1}, "page"),
        ("list_jobs", {"page_size": 1000}, "page_size"),
        ("list_jobs", {"kind": "nothing"}, "kind"),
        ("gpu_history", {"points": 0}, "points"),
        ("wait_for_job", {"id": "00000000-0000-7000-8000-000000000000", "seconds": 1e9}, "seconds"),
    ],
)
def test_a_wrong_argument_is_named(alice: User, tool: str, arguments: dict[str, Any], field: str) -> None:
    answer = ask(caller(alice), tool, **arguments)
    assert (answer.outcome, list(answer.data["errors"])) == ("invalid", [field])


def test_odd_arguments_are_no_faults(alice: User, three_cards: list[Gpu]) -> None:
    me = caller(alice)
    assert ask(me, "list_gpus", gpu_id=None).data["gpu_count"] == 3
    assert ask(me, "list_gpus", gpu_id=1).data["gpus"][0]["uuid"] == three_cards[1].uuid
    assert ask(me, "list_gpus", gpu_id="9").outcome == "unknown_gpu"
    deep: Any = []
    for _ in range(50):
        deep = [deep]
    for tool in TOOLS:
        for odd in ("\0", "\ud800", deep, float("inf"), {"a": {}}, 10**400):
            names = list(tool.schema["properties"])[:3] or ["x"]
            answer = ask(me, tool.name, **dict.fromkeys(names, odd))
            assert answer.outcome != "server_error", (tool.name, odd)
        odd_name = ask(me, tool.name, **{"\ud800": 1})
        assert (odd_name.outcome, odd_name.text.encode() != b"") == ("invalid", True)


def test_lists_are_paged_and_short(alice: User) -> None:
    Job.objects.bulk_create(Job(kind="rehearsal", owner=alice, params={"steps": n}) for n in range(25))
    first = ask(caller(alice), "list_jobs").data
    assert (first["count"], first["more"], len(first["results"])) == (25, True, 20)
    second = ask(caller(alice), "list_jobs", page=2).data
    assert (second["more"], len(second["results"])) == (False, 5)
    assert "params" not in first["results"][0]


def test_an_answer_that_is_too_large_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 50)
    answer = ask(caller(world.owner), "get_job", id=world.job.pk)
    assert (answer.outcome, answer.data["limit"]) == ("answer_too_large", 50)


def test_a_fault_of_ours_is_told_in_the_log_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr("jobs.logs.tail", fails)
    answer = ask(caller(world.owner), "job_log", id=world.job.pk)
    assert answer.outcome == "server_error"
    assert SECRET not in answer.text
    assert SECRET in caplog.text


# Rows ---------------------------------------------------------------------------------------------------
def test_a_call_leaves_a_row_without_its_arguments(alice: User, three_cards: list[Gpu]) -> None:
    arguments = {"steps": 3, "journal": SECRET}
    answer = calls.call(caller(alice), "submit_rehearsal", arguments)
    row = ToolCall.objects.get()
    assert (row.user, row.tool, row.outcome, str(row.job_id)) == (
        alice,
        "submit_rehearsal",
        "ok",
        answer.data["id"],
    )
    assert row.arguments_digest == calls.digest({"journal": SECRET, "steps": 3})
    assert SECRET not in str(ToolCall.objects.values())


def test_a_row_names_the_job_that_the_call_made(world: World) -> None:
    """Whatever made it; and none where a job was only moved."""
    me, failed = caller(world.owner), {"id": str(world.job.pk).upper()}
    paths.checkpoints(world.job).joinpath("0001").mkdir(parents=True)
    calls.call(me, "submit_rehearsal", {"steps": [1, 2]})
    first = Job.objects.exclude(group_id=None).order_by("queued_at").first()
    resumed = calls.call(me, "resume_job", failed).data["id"]  # of a failed one: a retry
    again = calls.call(me, "retry_job", failed).data["id"]
    calls.call(me, "hold_job", {"id": again})
    calls.call(me, "cancel_group", {"id": str(first and first.group_id)})
    made = [row and str(row) for row in ToolCall.objects.order_by("pk").values_list("job_id", flat=True)]
    assert made == [str(first and first.pk), resumed, again, None, None]


def test_a_refusal_and_an_unknown_tool_leave_rows(alice: User) -> None:
    for name in ("get_job", f"drop {SECRET}"):
        calls.call(caller(alice), name, {})
    rows = ToolCall.objects.order_by("pk").values_list("tool", "outcome", "job_id")
    assert list(rows) == [("get_job", "invalid", None), ("", "unknown_tool", None)]


def test_staff_reads_the_rows_and_changes_none(alice: User) -> None:
    calls.call(caller(alice), "get_job", {})
    root = Client()
    root.force_login(User.objects.create_superuser("root"), backend=BACKEND)
    row = ToolCall.objects.get()
    page, one = (root.get(f"/admin/monitor/toolcall/{rest}") for rest in ("", f"{row.pk}/change/"))
    assert (page.status_code, one.status_code) == (200, 200)
    assert row.arguments_digest in one.content.decode()
    assert [root.post(f"/admin/monitor/toolcall/{rest}").status_code for rest in ("add/", f"{row.pk}/delete/")] == [
        403, 403,
    ]  # fmt: skip


def test_rows_end_by_age_and_by_number(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"user": alice, "tool": "get_job", "arguments_digest": "", "outcome": "ok", "duration_ms": 1}
    old = timezone.now() - tasks.KEPT - timedelta(minutes=1)
    ToolCall.objects.bulk_create(ToolCall(**fields) for _ in range(4))
    ToolCall.objects.create(at=old, **fields)
    tasks.prune_tool_calls()
    assert ToolCall.objects.count() == 4
    monkeypatch.setattr(tasks, "MAX_ROWS", 2)
    tasks.prune_tool_calls()
    assert ToolCall.objects.count() == 2
