"""What the tests of the monitor share: cards in the database, sockets, signed-in clients."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from gpus.models import Gpu, Host
from monitor.models import ApiToken


@pytest.fixture(autouse=True)
def quick_passwords(settings: Any) -> None:
    """Users of tests are many, and the real hash takes half a second on purpose."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def host(db: None) -> Host:
    reading = {"cpu": {"percent": 12.5}, "memory": {"percent": 40.0}, "disk": {"disks": []}, "network": {}}
    return Host.objects.create(name="alpha", agent_seen_at=timezone.now(), reading=reading)


@pytest.fixture
def card(host: Host) -> Gpu:
    reading = {
        "utilization_gpu_percent": 37.0,
        "power_draw_watts": None,
        "missing": {"power_draw_watts": "no sensor"},
    }
    return Gpu.objects.create(
        uuid="GPU-AbCd0000-1111-2222-3333-444455556666",
        host=host,
        index=1,
        name="Odd",
        memory_total_bytes=24 * 2**30,
        reading=reading,
        sampled_at=timezone.now(),
    )


def token_for(user: User, *scopes: str, **values: Any) -> str:
    _, value = ApiToken.objects.create(user=user, name="test", scopes=list(scopes) or ["read"], **values)
    return value


def session_cookie(user: User) -> str:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    name = django_settings.SESSION_COOKIE_NAME
    return f"{name}={client.cookies[name].value}"
