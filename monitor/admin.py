"""What agents did, in the admin: to look at and to search."""

from __future__ import annotations

from django.contrib import admin

from jobs.admin import ReadOnly
from monitor.models import ToolCall


@admin.register(ToolCall)
class ToolCallAdmin(ReadOnly):
    list_display = ("at", "user", "tool", "outcome", "duration_ms", "job_id", "token_id")
    list_filter = ("outcome", "tool", "at")
    list_select_related = ("user",)
    search_fields = ("user__username", "tool", "=job_id", "=token_id", "arguments_digest")
