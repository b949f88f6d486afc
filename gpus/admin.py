"""Cards and hosts for operators: everything to look at, four fields to change."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from gpus import api
from gpus.models import Gpu, GpuEvent, Host, Maintenance, Pulse


class ReadOnly(admin.ModelAdmin[Any]):
    """Rows that the agent writes; an edit here would be overwritten, or break what others rely on."""

    editable: tuple[str, ...] = ()

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Without a field to edit a save would still write every column back, over what the agent wrote since."""
        return bool(self.editable) and super().has_change_permission(request, obj)

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
    actions = ["drain", "reopen"]

    @admin.display(description="health")
    def state(self, gpu: Gpu) -> str:
        return gpu.health()[0]

    @admin.action(description="Drain: no new jobs, the running ones go on", permissions=["change"])
    def drain(self, request: HttpRequest, cards: QuerySet[Gpu]) -> None:
        self._switch(request, cards, enabled=False, done="drained")

    @admin.action(description="Reopen for new jobs", permissions=["change"])
    def reopen(self, request: HttpRequest, cards: QuerySet[Gpu]) -> None:
        self._switch(request, cards, enabled=True, done="reopened")

    def _switch(self, request: HttpRequest, cards: QuerySet[Gpu], *, enabled: bool, done: str) -> None:
        """As `PATCH system/gpus/{uuid}` does it, event included; cards that already are so are left alone."""
        others = list(cards.exclude(enabled=enabled))
        for card in others:
            api.change(card, {"enabled": enabled}, by=str(request.user))
        already = cards.count() - len(others)
        self.message_user(request, f"{len(others)} {done}, {already} were so already.", messages.SUCCESS)

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


@admin.register(Maintenance)
class MaintenanceAdmin(ReadOnly):
    list_display = ["began_at", "ended_at", "host", "by", "note"]
    list_select_related = ["host"]
