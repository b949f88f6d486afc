"""What beat rings for the monitor."""

from __future__ import annotations

from datetime import timedelta

from celery import shared_task
from django.db.models import Max
from django.utils import timezone

from monitor.models import ToolCall

KEPT = timedelta(days=90)
#: An agent that looks every second makes 86 000 rows a day.
MAX_ROWS = 500_000


@shared_task(ignore_result=True)
def prune_tool_calls() -> None:
    """Rows are kept for 90 days, and no more than half a million of them."""
    ToolCall.objects.filter(at__lt=timezone.now() - KEPT).delete()
    newest = ToolCall.objects.aggregate(Max("pk"))["pk__max"] or 0
    ToolCall.objects.filter(pk__lte=newest - MAX_ROWS).delete()
