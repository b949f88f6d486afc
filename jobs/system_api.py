"""REST `system/*` where the answer knows jobs: what the watchdog found and did."""

from __future__ import annotations

from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import generics

from jobs.models import WatchdogEvent
from jobs.serializers import WatchdogEventSerializer


class WatchdogEventFilter(filters.FilterSet):
    host = filters.CharFilter(field_name="host__name")
    job_id = filters.UUIDFilter(field_name="attempt__job_id")
    open = filters.BooleanFilter(field_name="closed_at", lookup_expr="isnull", label="Not closed yet")

    class Meta:
        model = WatchdogEvent
        fields = ["finding", "state", "gpu_uuid", "pid"]


@extend_schema_view(get=extend_schema(tags=["system"]))
class WatchdogEvents(generics.ListAPIView[WatchdogEvent]):
    """What the watchdog found on cards and what it did about it; newest first, a row moves on until it is `gone`."""

    queryset = WatchdogEvent.objects.select_related("host", "attempt").order_by("-found_at", "-id")
    serializer_class = WatchdogEventSerializer
    filterset_class = WatchdogEventFilter
