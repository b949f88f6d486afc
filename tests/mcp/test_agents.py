"""The SDK's own client against a running miStudio: over HTTP in both eras of the protocol, and over stdio."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import pytest
from mcp import Client

from tests.mcp.agent import over_http, over_stdio, refused, said
from tests.system import System

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


async def run_a_job(client: Client, gpu: int) -> dict[str, Any]:
    """Submit to a card, follow to the end; the job, and what was told meanwhile."""
    card = (await said(client, "list_gpus"))["gpus"][gpu]
    job = await said(client, "submit_rehearsal", gpu=gpu, steps=8, seconds_per_step=0.12)
    told: list[tuple[float, str]] = []

    async def progress(fraction: float, total: float | None, message: str | None) -> None:
        told.append((fraction, message or ""))

    answer = await client.call_tool(
        "wait_for_job", {"id": job["id"], "seconds": 60}, progress_callback=progress
    )
    ended = answer.structured_content["job"]
    assert answer.structured_content["settled"], ended
    assert (ended["status"], ended["gpu_request"], ended["gpu_uuid"]) == (
        "succeeded",
        card["uuid"],
        card["uuid"],
    )
    assert [fraction for fraction, _ in told] == sorted({fraction for fraction, _ in told})
    assert "rehearsal: running · counting" in told[0][1]
    return ended


@pytest.mark.parametrize(("mode", "path"), [("auto", "/mcp"), ("legacy", "/mcp/")])
async def test_an_agent_runs_a_job_on_a_card(system: System, mode: str, path: str) -> None:
    async with over_http(system, system.token, mode, path) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert "gpu" in tools["submit_rehearsal"].input_schema["properties"]
        job = await run_a_job(client, 2)
        assert (await said(client, "job_result", id=job["id"]))["visible"] == job["gpu_uuid"]
        files = await said(client, "job_files", id=job["id"])
        assert "out/words.txt" in [file["path"] for file in files["results"]]
        assert (await said(client, "job_file", id=job["id"], path="out/words.txt"))["text"] == "done\n"
        unknown = await refused(client, "submit_rehearsal", gpu=7)
        assert (unknown["code"], len(unknown["available"])) == ("unknown_gpu", 3)
    calls = system.rows("SELECT tool, outcome FROM monitor_toolcall ORDER BY id DESC LIMIT 2")
    assert calls == [("submit_rehearsal", "unknown_gpu"), ("job_file", "ok")]


async def test_a_token_to_look_neither_submits_nor_cancels(system: System) -> None:
    look = system.call("POST", "tokens/", {"name": "look", "scopes": ["read"]})[1]["value"]
    control = system.call("POST", "tokens/", {"name": "control", "scopes": ["read", "control"]})[1]["value"]
    job = system.submit("rehearsal", steps=1000, seconds_per_step=0.05)
    async with over_http(system, look) as client:
        assert not any(t.name.startswith(("submit_", "cancel_")) for t in (await client.list_tools()).tools)
        for tool, arguments in (("cancel_job", {"id": job["id"]}), ("submit_rehearsal", {})):
            assert (await refused(client, tool, **arguments))["code"] == "permission_denied"
    assert system.wait(job["id"], "running")["cancel_requested_at"] is None
    async with over_http(system, control) as client:
        await said(client, "cancel_job", id=job["id"])
        assert (await said(client, "wait_for_job", id=job["id"]))["job"]["status"] == "cancelled"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({}, 401),
    ],
)
def test_the_door_of_a_running_system(system: System, headers: dict[str, str], status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=10)
    connection.request("POST", "/mcp", b"{}", {"Content-Type": "application/json"} | headers)
    assert connection.getresponse().status == status


@pytest.mark.parametrize(
    "accept",
    ["application/json, text/event-stream", pytest.param("application/json", marks=pytest.mark.slow)],
)
def test_a_wait_ends_with_whoever_waits(system: System, accept: str) -> None:
    job = system.submit("rehearsal", steps=1000, seconds_per_step=0.05)
    params = {"name": "wait_for_job", "arguments": {"id": job["id"], "seconds": 300}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
    headers = {
        "Authorization": f"Bearer {system.token}",
        "Content-Type": "application/json",
        "Accept": accept,
    }
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=10)
    connection.request("POST", "/mcp", body, headers)
    time.sleep(1)
    connection.close()
    deadline = time.monotonic() + 30
    newest = "SELECT tool, outcome FROM monitor_toolcall ORDER BY id DESC LIMIT 1"
    while system.rows(newest) != [("wait_for_job", "cancelled")]:
        assert time.monotonic() < deadline, system.rows(newest)
        time.sleep(0.1)
    system.call("POST", f"jobs/{job['id']}/cancel/")


async def test_an_agent_on_the_machine_needs_no_token(system: System) -> None:
    async with over_stdio(system, "--scope", "read", "--scope", "submit") as client:
        job = await run_a_job(client, 1)
        assert (await refused(client, "cancel_job", id=job["id"]))["code"] == "permission_denied"
    assert system.rows("SELECT token_id FROM monitor_toolcall ORDER BY id DESC LIMIT 1") == [(None,)]
