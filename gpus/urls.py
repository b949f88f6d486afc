"""`/api/v1/system/*`, with and without a trailing slash."""

from __future__ import annotations

from django.urls import re_path

from gpus import api, history_api

#: What the first miStudio answered at the root; `gpus.aliases` keeps it there.
FROM_THE_SEED = {
    "all": api.EverythingView,
    "gpu-list": api.GpuListView,
    "gpu-info": api.GpuInfoView,
    "gpu-metrics": api.GpuMetricsView,
    "gpu-processes": api.GpuProcessesView,
    "health": api.HealthView,
}
urlpatterns = [
    *(
        re_path(rf"^system/{name}/?$", view.as_view(), name=f"system-{name}")
        for name, view in FROM_THE_SEED.items()
    ),
    re_path(r"^system/gpu-history/?$", history_api.GpuHistoryView.as_view(), name="system-gpu-history"),
    re_path(r"^system/events/?$", api.EventsView.as_view(), name="system-events"),
    re_path(
        r"^system/gpus/(?P<uuid>[A-Za-z0-9-]+(?:/[0-9]+/[0-9]+)?)/?$",
        api.GpuSettingsView.as_view(),
        name="system-gpus",
    ),
]
