"""A real card, from its values to the end of its jobs. `tests/gpu/run.sh` runs this within eight minutes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpus import backends
from gpus.readers import Readers
from jobs import processes
from tests.gpu.conftest import MIB, back_to, smi, used_mib
from tests.system import System

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
HELD_MIB = 2048
#: A value that moves between two questions: what it may differ by.
CLOSE = {
    "temperature_celsius": 5,
    "power_draw_watts": 80,
    "memory_used_bytes": 600 * MIB,
    "memory_free_bytes": 600 * MIB,
}
#: Our reading, and the question to `nvidia-smi` that gives the same number in the same unit (MiB for bytes).
ASKED = {
    "memory_total_bytes": "memory.total",
    "memory_used_bytes": "memory.used",
    "memory_free_bytes": "memory.free",
    "temperature_celsius": "temperature.gpu",
    "power_draw_watts": "power.draw",
    "power_limit_watts": "power.limit",
    "clock_memory_mhz": "clocks.mem",
    "performance_state": "pstate",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
}


async def swept(count: int = 1) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The first card as our reader has it, and milliseconds per reading."""
    readers = Readers(backends.spec("nvml"))
    try:
        info = (await readers.call("list", seconds=60))["cards"][0]
        await readers.call("read", info["uuid"])
        began = time.perf_counter()
        for _ in range(count):
            reading = await readers.call("read", info["uuid"])
        return info, reading, 1000 * (time.perf_counter() - began) / count
    finally:
        await readers.close()


def test_every_value_is_the_one_that_nvidia_smi_shows() -> None:
    info, reading, _ = asyncio.run(swept())
    uuid, name, bus, driver = smi("uuid,name,pci.bus_id,driver_version")[0]
    assert (info["uuid"], info["name"], info["driver_version"]) == (uuid, name, driver)
    assert info["pci_bus_id"].lower() == bus.lower()
    for field, said in zip(ASKED, smi(",".join(ASKED.values()))[0], strict=True):
        if reading[field] is None:
            assert said.startswith("["), (
                f"{field}: nvidia-smi says {said}, we say nothing ({reading['missing']})"
            )
        elif field == "performance_state":
            assert reading[field] == said
        else:
            unit = MIB if field.endswith("bytes") else 1
            assert reading[field] == pytest.approx(float(said) * unit, abs=CLOSE.get(field, unit)), field


def test_a_sweep_costs_little() -> None:
    """Printed, not judged: `bench/nvml_sweep.py` has the ratio to the bare calls."""
    milliseconds = asyncio.run(swept(50))[2]
    print(f"\na reading through the reader process: {milliseconds:.2f} ms")
    assert milliseconds < 500  # a sweep of four such cards would miss its two seconds


def test_the_fork_server_never_touches_a_card_and_the_work_sees_the_one_it_was_given(
    real: System, card: dict[str, Any]
) -> None:
    job = real.submit("rehearsal", gpu=card["uuid"], steps=100, seconds_per_step=0.1, card_mib=HELD_MIB)
    working = real.wait(job["id"], "running")
    server = real.pid("forkserver")
    assert not [fd for fd in Path(f"/proc/{server}/fd").iterdir() if "nvidia" in os.readlink(fd)]
    assert len(os.listdir(f"/proc/{server}/task")) == 1
    attempt = real.get(f"jobs/{working['id']}/attempts/")[-1]
    assert attempt["reported_gpu_uuids"] == [card["uuid"]]
    assert real.wait(job["id"])["status"] == "succeeded"


def test_the_peak_of_a_job_is_that_of_its_card(real: System, card: dict[str, Any]) -> None:
    """The 2 GiB that it held and the context beside them, not what the process has of the host's memory."""
    job = real.submit("rehearsal", gpu=card["uuid"], steps=5, card_mib=HELD_MIB, memory_mib=1)
    assert real.wait(job["id"])["status"] == "succeeded"
    real.wait_for_free_cards()  # the keeper notes it when it has reaped the work
    peak = real.job(job["id"])["peak_memory_bytes"] / MIB
    print(f"\nheld {HELD_MIB} MiB, peak {peak:.0f} MiB")
    assert HELD_MIB + 100 < peak < HELD_MIB + 1500


@pytest.mark.parametrize("end", ["success", "failure", "cancel", "kill"])
def test_the_memory_comes_back_after(end: str, real: System, card: dict[str, Any]) -> None:
    before = used_mib(card["uuid"])
    steps = {"success": {"steps": 20}, "failure": {"steps": 200, "fail_at": 20}}.get(end, {"steps": 3000})
    job = real.submit("rehearsal", gpu=card["uuid"], seconds_per_step=0.1, card_mib=HELD_MIB, **steps)
    real.wait(job["id"], "running")
    deadline = time.monotonic() + 60
    while used_mib(card["uuid"]) < before + HELD_MIB:
        assert time.monotonic() < deadline, "the job's memory never showed on the card"
        time.sleep(0.2)
    if end == "kill":
        os.kill(real.get(f"jobs/{job['id']}/attempts/")[-1]["work_pid"], signal.SIGKILL)
        back_to(card["uuid"], before + HELD_MIB + 1024)  # the next attempt takes it again
        real.wait(job["id"], "running")
    if end in ("cancel", "kill"):
        real.call("POST", f"jobs/{job['id']}/cancel/")
    final = real.wait(job["id"], timeout=120)["status"]
    assert final == {"success": "succeeded", "failure": "failed"}.get(end, "cancelled")
    print(f"\n{end}: {before} MiB before, {back_to(card['uuid'], before)} MiB after")


HOLD = """
import sys, time, torch
held = torch.ones(int(sys.argv[1]) * 2**20, dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(600)
"""


def test_a_leftover_that_holds_the_cards_memory_is_cleaned(real: System, card: dict[str, Any]) -> None:
    """It has the token of an attempt that has ended, in a session of its own: gone within grace, round and ladder."""
    before, token = used_mib(card["uuid"]), secrets.token_hex(16)
    job = real.submit("rehearsal", gpu=card["uuid"], steps=1)
    real.wait(job["id"])
    real.wait_for_free_cards()
    with sqlite3.connect(real.home / "db.sqlite3", timeout=20) as database:
        database.execute(
            "UPDATE jobs_attempt SET token_hash = ? WHERE job_id = ?",
            [processes.token_hash(token), job["id"].replace("-", "")],
        )
    environment = os.environ | {processes.TOKEN_VARIABLE: token, "CUDA_VISIBLE_DEVICES": card["uuid"]}
    left = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(HELD_MIB)],
        env=environment,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert left.stdout and left.stdout.readline() == b"held\n"
        assert used_mib(card["uuid"]) >= before + HELD_MIB
        began = time.monotonic()
        left.wait(timeout=10 + 60 + 15 + 30)
        print(f"\nended after {time.monotonic() - began:.0f} s, {back_to(card['uuid'], before)} MiB are left")
    finally:
        left.kill()
    rows = real.get("system/watchdog-events/")["results"]
    [row] = [row for row in rows if row["pid"] == left.pid]
    assert (row["finding"], row["state"]) == ("leftover", "gone")
    assert row["freed_bytes"] is None or row["freed_bytes"] >= HELD_MIB * MIB


def test_no_kind_takes_more_than_it_estimated(real: System, card: dict[str, Any]) -> None:
    """Every example on the card, in the order of the stages: estimate and peak, and how far apart they are."""
    for kind in real.get("job-kinds/"):
        if kind["name"] == "rehearsal":
            continue
        job = real.submit(kind["name"], gpu=card["uuid"], **kind["example"])
        done = real.wait(job["id"], timeout=240)
        assert done["status"] == "succeeded", done["error"]
        if done["gpu_uuid"]:
            estimate, peak = done["estimate"]["memory_bytes"], real.job(job["id"])["peak_memory_bytes"]
            figures = f"estimate {estimate / MIB:.0f} MiB, peak {peak / MIB:.0f} MiB ({estimate / peak:.2f})"
            print(f"\n{kind['name']}: {figures}")
            assert estimate >= peak
