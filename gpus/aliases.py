"""`/system/*`: the addresses of the first miStudio, answered at the root too and left out of the schema."""

from __future__ import annotations

from django.urls import re_path

from gpus.urls import FROM_THE_SEED

urlpatterns = [
    re_path(rf"^system/{name}/?$", view.as_view(schema=None)) for name, view in FROM_THE_SEED.items()
]
