"""The cast and the rigs that all tests share: alice, bob, staff; cards; a whole running system."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from rest_framework.test import APIClient

from gpus.models import Gpu, Host
from jobs import processes
from tests.hub_server import Hub, point_at
from tests.stubs import driver
from tests.system import System

GIB = 2**30
#: What a test may lack on a machine without root; each is skipped by name and listed at the end.
TOOLS = {"browser": "chromium"}


@pytest.fixture(autouse=True)
def cheap_passwords(settings: Any) -> None:
    """The real hash takes a fifth of a second on purpose."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def alice(db: None) -> User:
    return User.objects.create_user("alice", password="alice-pw-1")


@pytest.fixture
def bob(db: None) -> User:
    return User.objects.create_user("bob", password="bob-pw-1")


@pytest.fixture
def staff(db: None) -> User:
    return User.objects.create_user("staff", password="staff-pw-1", is_staff=True)


def client_of(user: User | None) -> APIClient:
    client = APIClient()
    if user is not None:
        client.force_authenticate(user)
    return client


@pytest.fixture
def living_host(db: None) -> Host:
    """A host whose agent and worker were seen just now."""
    now = timezone.now()
    return Host.objects.create(
        name="alpha", boot_id=processes.boot_id(), agent_seen_at=now, worker_seen_at=now
    )


def make_card(host: Host, index: int, free_gib: float = 24, total_gib: float = 24, **fields: object) -> Gpu:
    uuid = f"GPU-{chr(97 + index) * 8}-0000-0000-0000-00000000000{index}"
    reading = {
        "memory_total_bytes": int(total_gib * GIB),
        "memory_free_bytes": int(free_gib * GIB),
        "memory_used_bytes": int((total_gib - free_gib) * GIB),
    }
    values = {
        "uuid": uuid,
        "host": host,
        "index": index,
        "name": f"Card {total_gib:g} GiB",
        "memory_total_bytes": int(total_gib * GIB),
        "reading": reading,
        "sampled_at": timezone.now(),
    }
    return Gpu.objects.create(**values | fields)


@pytest.fixture
def three_cards(living_host: Host) -> list[Gpu]:
    return [make_card(living_host, index) for index in range(3)]


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our stand-in for the driver's library, compiled once."""
    if driver.compiler() is None:
        pytest.skip("gcc is not installed")
    return driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """miStudio as people run it (`manage.py up`), three simulated cards, ten times faster clocks."""
    with System(tmp_path_factory.mktemp("system"), time_scale=0.1) as running:
        yield running


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of models, and leave to use the network."""
    from huggingface_hub import constants

    from jobs.interp import transfer

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, hub_cache: Path) -> Iterator[Hub]:
    """A hub of our own that this process takes for the only one."""
    with Hub() as running:
        point_at(monkeypatch, running.url)
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, tool in TOOLS.items():
            if item.get_closest_marker(marker) and shutil.which(tool) is None:
                item.add_marker(pytest.mark.skip(reason=f"{tool} is not installed"))
