"""The admin of cards: staff look at everything and change four fields."""

from __future__ import annotations

from typing import Any

import pytest
from rest_framework.test import APIClient

from gpus.models import Gpu, GpuEvent, Pulse
from tests.gpus.conftest import MakeCard

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("model", ["host", "gpu", "gpuevent", "pulse"])
def test_every_list_and_every_row_opens(model: str, as_operator: APIClient, make_card: MakeCard) -> None:
    card = make_card()
    event = GpuEvent.objects.create(host=card.host, uuid=card.uuid, event="lost")
    Pulse.beat("beat")
    key = {"host": card.host.pk, "gpu": card.pk, "gpuevent": event.pk, "pulse": "beat"}[model]
    assert as_operator.get(f"/admin/gpus/{model}/").status_code == 200
    assert as_operator.get(f"/admin/gpus/{model}/?q=vm").status_code == 200
    assert as_operator.get(f"/admin/gpus/{model}/{key}/change/").status_code == 200
    assert as_operator.get(f"/admin/gpus/{model}/add/").status_code == 403
    assert as_operator.post(f"/admin/gpus/{model}/{key}/delete/", {"post": "yes"}).status_code == 403


def test_only_what_staff_may_set_is_written(as_operator: APIClient, make_card: MakeCard) -> None:
    card = make_card()
    posted: dict[str, Any] = {
        "max_jobs": 4,
        "interactive_slots": 1,
        "note": "new",
        "name": "other",
        "memory_total_bytes": 1,
    }
    response = as_operator.post(f"/admin/gpus/gpu/{card.pk}/change/", posted, format="multipart")
    assert response.status_code == 302
    changed = Gpu.objects.get()
    assert (changed.enabled, changed.max_jobs, changed.note) == (False, 4, "new")
    assert (changed.name, changed.memory_total_bytes) == (card.name, card.memory_total_bytes)
    assert GpuEvent.objects.get().event == "changed"
