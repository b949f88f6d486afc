"""`manage.py doctor` on machines that are well, and on machines that are not: it names the fault and the repair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stubs.driver import IS_LOST, NOT_SUPPORTED, VERSION_MISMATCH, StandIn, StandInCard
from tests.system import ROOT, System

pytestmark = pytest.mark.engine


def doctor(home: Path, **env: str) -> tuple[int, str]:
    command = [sys.executable, "manage.py", "doctor"]
    values = {k: v for k, v in os.environ.items() if not k.startswith(("MISTUDIO_", "DATABASE_", "REDIS_"))}
    ran = subprocess.run(
        command, check=False, cwd=ROOT, env=values | {"MISTUDIO_HOME": str(home)} | env,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "fault of the doctor" not in ran.stdout, ran.stdout
    assert not ran.stderr, ran.stderr
    return ran.returncode, ran.stdout


@pytest.fixture
def driver(driver_library: Path, tmp_path: Path) -> StandIn:
    return StandIn(tmp_path, driver_library, [StandInCard(), StandInCard(bus="00000000:41:00.0")])


def on_driver(driver: StandIn) -> dict[str, str]:
    return driver.environment | {"MISTUDIO_GPU_BACKEND": "nvml", "MISTUDIO_TORCH_DEVICE": "cpu"}


def test_a_running_system_is_well(system: System) -> None:
    code, said = doctor(system.home, **{k: v for k, v in system.env.items() if k.startswith("MISTUDIO_")})
    assert (code, said.splitlines()[-1]) == (0, "Nothing is wrong.")
    for part in ("simulated cards", "card 0: Simulated", "SQLite 3", "beat_age_s", "torch 2."):
        assert part in said


def test_a_fresh_machine_without_a_driver_is_well_and_is_told_what_to_do(tmp_path: Path) -> None:
    code, said = doctor(tmp_path / "home")
    assert code == 0, said
    assert "no NVIDIA driver is installed" in said
    assert "make demo" in said
    assert "nothing has run here yet" in said


def test_each_card_says_what_it_does_not_say(tmp_path: Path, driver: StandIn) -> None:
    driver.cards[1].faults = {"power": NOT_SUPPORTED}
    driver.write()
    code, said = doctor(tmp_path / "home", **on_driver(driver))
    assert code == 0, said
    assert f"card 0: NVIDIA GeForce RTX 3090, {driver.cards[0].uuid}: 0.0 GiB of 24.0 GiB used" in said
    assert "does not say" in said
    assert "power_draw_watts" in said


def test_a_card_that_fell_off_the_bus_is_named(tmp_path: Path, driver: StandIn) -> None:
    driver.cards[1].faults = {"utilization": IS_LOST}
    driver.write()
    code, said = doctor(tmp_path / "home", **on_driver(driver))
    assert code == 1
    assert f"wrong  card 1: NVIDIA GeForce RTX 3090, {driver.cards[1].uuid}" in said


def test_a_driver_that_was_upgraded_under_the_kernel_module_says_reboot(
    tmp_path: Path, driver: StandIn
) -> None:
    driver.init = VERSION_MISMATCH
    driver.write()
    code, said = doctor(tmp_path / "home", **on_driver(driver))
    assert code == 1
    assert "kernel module: reboot" in said


def test_a_torch_without_cuda_on_a_machine_with_cards_is_wrong(tmp_path: Path, driver: StandIn) -> None:
    code, said = doctor(tmp_path / "home", **on_driver(driver) | {"MISTUDIO_TORCH_DEVICE": "cuda"})
    assert code == 1
    assert "built without CUDA" in said or "sees no card" in said


def test_a_database_that_is_away_and_a_folder_that_others_read(tmp_path: Path) -> None:
    code, said = doctor(tmp_path / "home", DATABASE_URL="postgres://nobody@127.0.0.1:1/none")
    assert code == 1
    assert "the database does not answer" in said
    assert "Look at DATABASE_URL" in said
