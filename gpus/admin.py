"""Cards and hosts for operators: everything to look at, four fields to change."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from gpus import api
from gpus.models import Gpu, GpuEvent, Host, Pulse


class ReadOnly(admin.ModelAdmin[Any]):
    """Rows that the agent writes; an edit here would be overwritten, or break what others rely on."""

    editable: tuple[str, ...] = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return [field.name for field in self.model._meta.fields if field.name not in self.editable]


@admin.register(Host)
class HostAdmin(ReadOnly):
    list_display = ["name", "agent", "worker", "cards", "backend_error"]
    search_fields = ["name"]

    @admin.display(boolean=True)
    def agent(self, host: Host) -> bool:
        return host.agent_alive()

    @admin.display(boolean=True)
    def worker(self, host: Host) -> bool:
        return host.worker_alive()

    @admin.display
    def cards(self, host: Host) -> int:
        return host.gpus.filter(removed_at=None).count()


@admin.register(Gpu)
class GpuAdmin(ReadOnly):
    editable = ("enabled", "max_jobs", "interactive_slots", "note")
    list_display = [
        "uuid",
        "host",
        "index",
        "name",
        "state",
        "enabled",
        "max_jobs",
        "interactive_slots",
        "note",
    ]
    list_filter = ["host", "enabled", "simulated", "selectable"]
    list_select_related = ["host"]
    search_fields = ["uuid", "name", "note"]

    @admin.display(description="health")
    def state(self, gpu: Gpu) -> str:
        return gpu.health()[0]

    def save_model(self, request: HttpRequest, obj: Gpu, form: Any, change: bool) -> None:
        """Only the changed columns: the agent writes the rest every two seconds."""
        stored = Gpu.objects.select_related("host").get(pk=obj.pk)
        api.change(
            stored, {name: form.cleaned_data[name] for name in form.changed_data}, by=str(request.user)
        )


@admin.register(GpuEvent)
class GpuEventAdmin(ReadOnly):
    list_display = ["at", "event", "uuid", "host", "detail"]
    list_filter = ["event", "host"]
    list_select_related = ["host"]
    search_fields = ["uuid", "detail"]
    date_hierarchy = "at"


@admin.register(Pulse)
class PulseAdmin(ReadOnly):
    list_display = ["name", "at"]
