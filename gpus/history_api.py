"""REST `system/gpu-history`: a card's curve, or those of all cards on one time axis."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any, NoReturn, TypedDict

from django.utils import timezone
from django.utils.dateparse import parse_datetime
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import ValidationError
from rest_framework.views import APIView

from gpus import api, history, samples, shapes
from gpus.models import Gpu
from gpus.schema import schema_of

DEFAULT_WINDOW = timedelta(hours=1)
DEFAULT_POINTS = 300
AGO = re.compile(r"-([0-9]{1,9})([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
#: A `+` in an address is a space by the time it arrives.
LOST_PLUS = re.compile(r"(?<=\d) (?=\d\d:?\d\d$)")


class Curve(TypedDict):
    gpu_id: int
    uuid: str
    host: str
    min: list[float | None]
    mean: list[float | None]
    max: list[float | None]


class CardHistory(Curve):
    """`t` holds the starts of the steps; a step without a reading is null."""

    metric: str
    unit: str
    resolution_s: int
    t: list[str]


class CardsHistory(TypedDict):
    metric: str
    unit: str
    resolution_s: int
    t: list[str]
    gpu_count: int
    gpus: list[Curve]


class GpuHistoryView(APIView):
    @extend_schema(
        tags=["system"],
        parameters=[
            api.GPU_ID,
            api.HOST,
            OpenApiParameter("metric", enum=list(samples.METRICS), default=next(iter(samples.METRICS))),
            OpenApiParameter(
                "from",
                description="ISO 8601 with its zone, or how long ago: -90s, -15m, -6h, -30d; -1h without it.",
            ),
            OpenApiParameter("to", description="As `from`; now without it, and never later."),
            OpenApiParameter(
                "points",
                OpenApiTypes.INT,
                description=f"About how many steps, at most {history.MAX_POINTS}; else 300.",
            ),
        ],
        responses={200: {"oneOf": [schema_of(CardHistory), schema_of(CardsHistory)]}},
    )
    def get(self, request: Request) -> Response:
        """What a card did: minimum, mean and maximum of a metric in equal steps; null where nothing was read.

        With `gpu_id` one card's curve; without it those of all cards on one time axis, under `gpus`.
        """
        query = request.query_params
        gpu_id = query.get("gpu_id")
        cards = api.cards(gpu_id, query.get("host"))
        start, end = window(query.get("from"), query.get("to"))
        found = history.query(
            metric_of(query.get("metric")),
            [gpu.uuid for gpu in cards],
            start,
            end,
            points_of(query.get("points")),
        )
        return Response(of_all(cards, found) if gpu_id is None else of_one(cards[0], found))


# Answers ----------------------------------------------------------------------------------------------


def of_one(gpu: Gpu, found: history.Window) -> CardHistory:
    return {**curve(gpu, found), **head(found)}  # type: ignore[typeddict-item]


def of_all(cards: list[Gpu], found: history.Window) -> CardsHistory:
    gpus = [curve(gpu, found) for gpu in cards]
    return {**head(found), "gpu_count": len(gpus), "gpus": gpus}  # type: ignore[typeddict-item]


def head(found: history.Window) -> dict[str, Any]:
    return {
        "metric": found.metric.name,
        "unit": found.metric.unit,
        "resolution_s": found.resolution_s,
        "t": [shapes.iso(datetime.fromtimestamp(at, timezone.get_default_timezone())) for at in found.t],
    }


def curve(gpu: Gpu, found: history.Window) -> Curve:
    series = found.series[gpu.uuid]
    return {
        "gpu_id": gpu.index,
        "uuid": gpu.uuid,
        "host": gpu.host.name,
        "min": series.min,
        "mean": series.mean,
        "max": series.max,
    }


# Questions --------------------------------------------------------------------------------------------


def metric_of(raw: str | None) -> str:
    name = next(iter(samples.METRICS)) if raw is None else raw
    if name not in samples.METRICS:
        refuse("metric", f"{raw!r:.100} has no history; one of {', '.join(samples.METRICS)}.")
    return name


def points_of(raw: str | None) -> int:
    if raw is None:
        return DEFAULT_POINTS
    if not (raw.isascii() and raw.isdigit() and len(raw) < 9 and 1 <= int(raw) <= history.MAX_POINTS):
        refuse("points", f"A whole number from 1 to {history.MAX_POINTS}.")
    return int(raw)


def window(since: str | None, until: str | None) -> tuple[datetime, datetime]:
    """The two ends of the window. A client's clock may be ahead of ours: what lies in the future is now."""
    now = timezone.now()
    end = now if until is None else min(now, moment("to", until, now))
    start = end - DEFAULT_WINDOW if since is None else moment("from", since, now)
    if start >= end:
        refuse("from", f"It must be earlier than `to` ({shapes.iso(end)}), and not in the future.")
    if start < now - samples.HOURS_KEPT - timedelta(days=1):
        refuse("from", f"History is kept for two years, since {shapes.iso(now - samples.HOURS_KEPT)}.")
    return start, end


def moment(name: str, raw: str, now: datetime) -> datetime:
    ago = AGO.fullmatch(raw.strip())
    try:
        if ago:
            return now - timedelta(seconds=int(ago[1]) * SECONDS[ago[2]])
        at = parse_datetime(LOST_PLUS.sub("+", raw.strip()))
    except (ValueError, OverflowError):
        at = None
    if at is None:
        refuse(name, "Not a time: ISO 8601 such as 2026-11-30T12:00:00Z, or how long ago, such as -15m.")
    if at.tzinfo is None:
        refuse(name, f"Say the zone: {at.isoformat()}Z is UTC.")
    return at


def refuse(field: str, sentence: str) -> NoReturn:
    raise ValidationError({field: [sentence]})
