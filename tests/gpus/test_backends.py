"""Which backend the settings mean, and what is said where there is no driver (field case G07)."""

from __future__ import annotations

from typing import Any

import pytest

from gpus import backends
from gpus.backends.base import BackendUnavailable


def no_library(name: str) -> Any:
    raise OSError(name)


@pytest.mark.parametrize("name", ["auto", "nvml"])
def test_it_names_cause_and_repair_where_there_is_no_driver(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_load", no_library)
    with pytest.raises(BackendUnavailable, match=r"no libnvidia-ml\.so\.1") as caught:
        backends.get(name)
    assert "nvidia-smi" in caught.value.repair


def test_auto_never_means_simulated(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_load", no_library)
    settings.MISTUDIO_GPU_BACKEND, settings.MISTUDIO_SIMULATED_GPUS = "auto", [2**30]
    with pytest.raises(BackendUnavailable):
        backends.get()


def test_it_looks_up_a_simulated_card(settings: Any) -> None:
    settings.MISTUDIO_GPU_BACKEND, settings.MISTUDIO_SIMULATED_GPUS = "simulated", [2**30]
    (card,) = backends.get().list_cards()
    assert backends.get("simulated").lookup(card.uuid) == card


@pytest.mark.parametrize(
    ("files", "library", "present"), [([], False, False), (["/dev/nvidia0"], False, True), ([], True, True)]
)
def test_a_driver_is_its_library_or_its_device_files(
    files: list[str], library: bool, present: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "glob", lambda pattern: files)
    monkeypatch.setattr(backends, "_load", (lambda name: object()) if library else no_library)
    assert backends.driver_present() is present
