"""Jobs on cards that come from a driver: our stand-in library, the real `nvidia-ml-py`, everything else as it is.

The stand-in lists what a test tells it to; jobs compute on the CPU (`MISTUDIO_TORCH_DEVICE=cpu`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_cards import wait_behind_a_job
from tests.stubs.driver import IS_LOST, StandIn, StandInCard
from tests.system import System

pytestmark = pytest.mark.engine
GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def driver(driver_library: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    """SIM-4 of the field cases: four cards of 24 GiB in PCI order."""
    cards = [StandInCard(bus=f"00000000:{bus}:00.0") for bus in ("01", "41", "81", "C1")]
    return StandIn(tmp_path_factory.mktemp("standin"), driver_library, cards)


@pytest.fixture(scope="module")
def host(driver: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("host"), driver=driver, time_scale=0.2) as running:
        yield running


@pytest.fixture(autouse=True)
def as_new(driver: StandIn, host: System) -> Iterator[None]:
    """Every test starts on four empty cards."""
    yield
    for card in driver.cards:
        card.used, card.processes, card.faults, card.hangs = 2, [], {}, {}
    driver.write()
    host.wait_for_free_cards()
    seen(host, lambda cards: all(card["health"] == "ok" and not card["jobs"] for card in cards))
    for index in range(len(driver.cards)):
        listed(host, driver, index, 0)
    seen(host, lambda cards: all(free_of(host, driver, n) == (24576 - 258) * MIB for n in range(4)))


@pytest.fixture
def stranger() -> Iterator[int]:
    """The pid of a living process that is none of ours."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def seen(host: System, holds: Callable[[list[dict[str, Any]]], bool], timeout: float = 10) -> None:
    """Wait until the cards' rows say so."""
    deadline = time.monotonic() + timeout
    while not holds(cards := host.cards()):
        assert time.monotonic() < deadline, cards
        time.sleep(0.05)


def listed(host: System, driver: StandIn, index: int, count: int) -> None:
    """Wait until the row of the card lists so many processes."""
    uuid = driver.cards[index].uuid
    deadline = time.monotonic() + 10
    while len(processes_of(host, uuid)) != count:
        assert time.monotonic() < deadline, processes_of(host, uuid)
        time.sleep(0.05)


def processes_of(host: System, uuid: str) -> list[dict[str, Any]]:
    return host.get(f"system/gpu-processes?gpu_id={uuid}")["gpus"][0]["processes"]


def work_of(host: System, job_id: str) -> int:
    return host.job(job_id)["attempts"][-1]["work_pid"]


def test_index_1_is_the_second_card_by_pci_to_the_last_process_g01(
    driver_library: Path, tmp_path: Path
) -> None:
    """SIM-2MIX: an RTX 3060 of 12 GiB on PCI 01 and an RTX 4090 of 24 GiB on PCI 81; CUDA would say B, A."""
    small = StandInCard(bus="00000000:01:00.0", total=12288, name="NVIDIA GeForce RTX 3060")
    large = StandInCard(bus="00000000:81:00.0", total=24576, name="NVIDIA GeForce RTX 4090")
    driver = StandIn(tmp_path, driver_library, [small, large])
    with System(tmp_path / "home", driver=driver) as host:
        job = host.submit("rehearsal", gpu=1, steps=1)
        assert job["gpu_request"] == large.uuid
        done = host.wait(job["id"])
        assert done["status"] == "succeeded", done["error"]
        assert done["gpu_uuid"] == large.uuid
        assert done["attempts"][0]["reported_gpu_uuids"] == [large.uuid]
        assert done["result"]["visible"] == large.uuid
        assert done["gpu_names"] == ["NVIDIA GeForce RTX 4090"]
        assert done["simulated"] is False


def test_a_uuid_in_upper_case_with_spaces_is_the_drivers_own_g08(
    driver_library: Path, tmp_path: Path
) -> None:
    uuid = "GPU-13096139-7ada-8313-ee08-000dd8540fe1"
    driver = StandIn(
        tmp_path, driver_library, [StandInCard(), StandInCard(uuid=uuid, bus="00000000:41:00.0")]
    )
    with System(tmp_path / "home", driver=driver) as host:
        job = host.submit("rehearsal", gpu="  GPU-13096139-7ADA-8313-EE08-000DD8540FE1 ", steps=1)
        done = host.wait(job["id"])
        assert done["gpu_request"] == done["gpu_uuid"] == done["result"]["visible"] == uuid


def test_a_named_card_a_gibibyte_short_is_refused_with_the_cards_that_fit_g17(
    host: System, driver: StandIn
) -> None:
    """Card A has 7 GiB free, the job needs 8 GiB, B, C and D are empty."""
    driver.cards[0].used = 24576 - 256 - 7 * 1024
    driver.write()
    seen(host, lambda cards: free_of(host, driver, 0) == 7 * GIB)
    job = host.submit("rehearsal", gpu=0, steps=1, estimate_mib=8 * 1024 - 160)  # and 160 for the process
    refused = host.wait(job["id"])
    assert (refused["status"], refused["failure_reason"]) == ("refused", "insufficient_gpu_memory")
    assert "needs 8.0 GiB beside a reserve of 0.5 GiB" in refused["error"]
    assert "Card 0 has 7.0 GiB" in refused["error"]
    assert "card 1, 2, 3" in refused["hint"]
    assert refused["gpu_uuid"] is None
    assert refused["attempts"] == []


def free_of(host: System, driver: StandIn, index: int) -> int:
    shown = host.get(f"system/gpu-metrics?gpu_id={driver.cards[index].uuid}")["gpus"][0]
    return shown["memory_free_bytes"]


def test_a_strangers_20_of_24_gib_refuse_the_name_and_send_auto_elsewhere_g20(
    host: System, driver: StandIn, stranger: int
) -> None:
    driver.cards[0].processes = [("compute", stranger, 20 * 1024)]
    driver.cards[2].used = driver.cards[3].used = 20 * 1024  # B is the only empty one
    driver.write()
    listed(host, driver, 0, 1)
    assert processes_of(host, driver.cards[0].uuid)[0]["owner"] == "foreign"
    named = host.submit("rehearsal", gpu=0, steps=1, estimate_mib=8 * 1024)
    auto = host.submit("rehearsal", gpu="auto", steps=1, estimate_mib=8 * 1024)
    refused, done = host.wait(named["id"]), host.wait(auto["id"])
    assert (refused["status"], refused["failure_reason"]) == ("refused", "insufficient_gpu_memory")
    assert (
        f"20.0 of 24.0 GiB are used outside miStudio by sleep (pid {stranger}, 20.0 GiB)" in refused["error"]
    )
    assert done["status"] == "succeeded"
    assert done["gpu_uuid"] == driver.cards[1].uuid
    os.kill(stranger, 0)  # it was never touched


def test_auto_is_refused_only_where_no_card_would_fit_without_our_jobs(
    host: System, driver: StandIn, stranger: int
) -> None:
    for card in driver.cards[1:]:
        card.processes = [("compute", stranger, 20 * 1024)]
    driver.write()
    listed(host, driver, 3, 1)
    long = host.submit("rehearsal", gpu=0, steps=1000, estimate_mib=10 * 1024)
    host.wait(long["id"], "running")
    patient = host.submit("rehearsal", steps=1, estimate_mib=18 * 1024)
    time.sleep(3)
    assert host.job(patient["id"])["status"] == "queued"  # card 0 will do, once our own job has ended
    driver.cards[0].processes = [("compute", stranger, 20 * 1024)]
    driver.write()
    refused = host.wait(patient["id"])
    assert (refused["status"], refused["failure_reason"]) == ("refused", "insufficient_gpu_memory")
    assert "No card has that" in refused["error"]
    host.call("POST", f"jobs/{long['id']}/cancel")


def test_a_desktop_on_a_card_leaves_it_eligible_g19(host: System, driver: StandIn, stranger: int) -> None:
    """A: Xorg with 153 MiB; B: 2 MiB and nobody."""
    driver.cards[0].processes = [("graphics", stranger, 153)]
    for card in driver.cards[2:]:
        card.used = 20 * 1024
    driver.write()
    listed(host, driver, 0, 1)
    first, second = (host.submit("rehearsal", steps=40) for _ in range(2))
    ran = [host.wait(job["id"], "running")["gpu_uuid"] for job in (first, second)]
    assert ran == [
        driver.cards[1].uuid,
        driver.cards[0].uuid,
    ]  # most free memory first, and then A all the same
    shown = processes_of(host, driver.cards[0].uuid)
    assert [(p["type"], p["owner"], p["memory_used_bytes"]) for p in shown if p["pid"] == stranger] == [
        ("graphics", "foreign", 153 * MIB)
    ]


def test_a_job_of_ours_one_second_old_is_never_taken_for_a_stranger(host: System, driver: StandIn) -> None:
    """Its work, and a child that no heartbeat has recorded yet, hold 20 GiB the moment they run."""
    first = host.submit("rehearsal", gpu=0, steps=60, children=1, estimate_mib=20 * 1024)
    running = host.wait(first["id"], "running")
    work = work_of(host, first["id"])
    child = child_of(host, work)
    driver.cards[0].processes = [("compute", work, 19 * 1024), ("compute", child, 1024)]
    driver.write()
    listed(host, driver, 0, 2)
    shown = processes_of(host, driver.cards[0].uuid)
    assert {(p["owner"], p["job_id"]) for p in shown} == {("job", first["id"])}, running
    second = host.submit("rehearsal", gpu=0, steps=1, estimate_mib=8 * 1024)
    wait_behind_a_job(host, second["id"])
    time.sleep(1.5)
    assert host.job(second["id"])["status"] == "queued"
    driver.cards[0].processes = []
    driver.write()
    os.kill(work, signal.SIGTERM)
    host.call("POST", f"jobs/{first['id']}/cancel")
    assert host.wait(second["id"])["status"] == "succeeded"


def child_of(host: System, work: int) -> int:
    """An orphan of the work: it lives in a session of its own, under the keeper."""
    keeper = int(Path(f"/proc/{work}/stat").read_text().rpartition(")")[2].split()[1])
    deadline = time.monotonic() + 5
    while True:
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        if others := [int(pid) for pid in children if int(pid) != work]:
            return others[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_card_is_not_given_on_while_memory_of_our_job_stays(host: System, driver: StandIn) -> None:
    """The lease ends when the card is read without our process and with its memory back."""
    job = host.submit("rehearsal", gpu=1, steps=1)
    driver.cards[1].used = 10 * 1024
    driver.write()
    host.wait(job["id"])
    time.sleep(1)
    assert [lease[0] for lease in host.open_leases()] == [f"gpu:{driver.cards[1].uuid}"]
    driver.cards[1].used = 2
    driver.write()
    host.wait_for_free_cards()


def test_stale_readings_make_jobs_wait_and_say_so_within_six_seconds_g30(
    host: System, driver: StandIn
) -> None:
    """The agent is stopped, not ended, so that nobody starts it again. Six seconds at this clock are 1.2."""
    agent = host.pid("agent")
    os.kill(agent, signal.SIGSTOP)
    try:
        stopped = time.monotonic()
        seen(host, lambda cards: all(card["health"] in ("stale", "host_lost") for card in cards))
        assert time.monotonic() - stopped < 6
        metrics = host.get("system/gpu-metrics")["gpus"]
        assert all(card["stale"] and card["age_s"] > 0 for card in metrics)
        job = host.submit("rehearsal", gpu=0, steps=1)
        auto = host.submit("rehearsal", steps=1)
        deadline = time.monotonic() + 6
        while not all(host.job(j["id"])["waiting_for"] for j in (job, auto)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        told = [host.job(j["id"])["waiting_for"]["detail"] for j in (job, auto)]
        assert all("stale" in text or "silent" in text for text in told), told
        assert [host.job(j["id"])["status"] for j in (job, auto)] == ["queued", "queued"]
        deadline = time.monotonic() + 10
        while host.call("GET", "system/health")[0] != 503:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(agent, signal.SIGCONT)
    assert {host.wait(j["id"])["status"] for j in (job, auto)} == {"succeeded"}


def test_a_machine_without_a_driver_says_so_once_and_runs_what_needs_no_card_g07(tmp_path: Path) -> None:
    """No libnvidia-ml.so.1: the cards endpoint answers with nothing and the reason; a job for a card is refused
    with it, one without a card runs; a line in the log, not one every 2 s."""
    env = {"MISTUDIO_GPU_BACKEND": "auto", "MISTUDIO_ALLOW_CPU": "off"}
    with System(tmp_path / "home", time_scale=0.1, **env) as host:
        answer = host.get("system/gpu-list")
        assert (answer["gpu_count"], answer["gpus"]) == (0, [])
        reasons = [entry["backend_error"] for entry in host.get("system/all")["hosts"]]
        assert "no libnvidia-ml.so.1" in reasons[0]
        status, refused = host.call("POST", "jobs/rehearsal/", {"steps": 1})
        assert (status, refused["code"]) == (400, "driver_unavailable")
        assert "nvidia-smi" in refused["hint"]
        assert host.get("jobs/")["count"] == 0
        assert host.wait(host.submit("rehearsal", steps=1, on_card=False)["id"])["status"] == "succeeded"
        time.sleep(3)
        told = (host.home / "logs" / "agent.log").read_text()
        assert told.count("No cards can be read") == 1


@pytest.mark.parametrize("request_", ["named", "auto"])
def test_a_card_that_falls_off_the_bus_ends_or_moves_its_job_g27(
    request_: str, host: System, driver: StandIn
) -> None:
    """C answers GPU_IS_LOST to every call: named, its job fails and keeps the checkpoint; auto goes on elsewhere."""
    lost = driver.cards[2]
    for card in driver.cards:
        card.used = 2 if card is lost else 20 * 1024  # C is the emptiest
    driver.write()
    seen(host, lambda cards: free_of(host, driver, 0) < 5 * GIB and free_of(host, driver, 2) > 20 * GIB)
    gpu = lost.uuid if request_ == "named" else "auto"
    job = host.submit(
        "rehearsal", gpu=gpu, steps=60, seconds_per_step=0.1, checkpoint_every=1, estimate_mib=100
    )
    running = host.wait(job["id"], "running")
    assert running["gpu_uuid"] == lost.uuid
    time.sleep(1)  # some steps, some checkpoints
    lost.faults = {"handle": IS_LOST}
    driver.write()
    done = host.wait(job["id"])
    first = done["attempts"][0]
    if request_ == "named":
        assert (done["status"], done["failure_reason"]) == ("failed", "card_lost"), done["error"]
        assert f"Card 2 (NVIDIA GeForce RTX 3090, {lost.uuid}) was lost while the job ran" in done["error"]
        assert "Retry from its checkpoint" in done["hint"]
        assert first["outcome"] == "ended"
    else:
        assert (done["status"], first["outcome"]) == ("succeeded", "lost"), done["error"]
        assert done["gpu_uuid"] != lost.uuid
        assert done["result"]["first"] > 0  # from its checkpoint
