"""The pages of cards: one card, what staff may do to it, and the curves behind all charts of cards."""

from __future__ import annotations

import math

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_POST, require_safe
from rest_framework.exceptions import ValidationError

from gpus import api
from gpus.choice import KnownCards
from gpus.models import Gpu
from gpus.rest import ApiError, body
from jobs.people import is_staff
from monitor import cardpage, curves
from monitor.views import Request

#: What the form of a card sends; `enabled` comes from the buttons beside it.
FIELDS = ("note", "max_jobs", "interactive_slots", "enabled")


def found(uuid: str) -> Gpu:
    """Also a card that was taken out: its jobs and its story are still there."""
    gpu = Gpu.objects.select_related("host").filter(uuid__iexact=uuid).first()
    if gpu is None:
        raise Http404
    return gpu


@login_required
@require_safe
def card(request: Request, uuid: str) -> HttpResponse:
    return render(request, "cards/card.html", cardpage.context(found(uuid), request.user))


@login_required
@require_safe
def card_parts(request: Request, uuid: str) -> HttpResponse:
    return render(request, "cards/_parts.html", cardpage.context(found(uuid), request.user))


@login_required
@require_POST
def card_change(request: Request, uuid: str) -> HttpResponse:
    """Staff: note and slots, or `enabled` off (drain) and on (reopen)."""
    if not is_staff(request.user):
        raise PermissionDenied
    gpu = found(uuid)
    typed = {name: request.POST[name] for name in FIELDS if name in request.POST}
    changed = api.GpuSettingsSerializer(gpu, data=typed, partial=True)
    try:
        changed.is_valid(raise_exception=True)
    except ValidationError as refusal:
        shown = cardpage.context(gpu, request.user, typed, body(refusal)["errors"])
        return render(request, "cards/card.html", shown, status=400)
    api.change(gpu, changed.validated_data, by=str(request.user))
    messages.success(request, said(typed))
    return redirect("card", gpu.uuid)


def said(typed: dict[str, str]) -> str:
    if "enabled" not in typed:
        return "Saved."
    return "The card is open again." if typed["enabled"] == "true" else "The card takes no new jobs."


# Curves -------------------------------------------------------------------------------------------------
@login_required
@require_safe
@gzip_page
def curves_of(request: Request) -> HttpResponse:
    """`?minutes=` of a window, `since=` (seconds since 1970) for its end only, `card=` for one card."""
    asked = request.GET
    try:
        known = KnownCards()
        cards = known.present if asked.get("card") is None else [known.find(asked["card"])]
        minutes, since = window(asked.get("minutes", "")), moment(asked.get("since"))
    except ApiError as refusal:
        return JsonResponse(body(refusal), status=refusal.status_code)
    return JsonResponse(curves.curves([gpu.uuid for gpu in cards], minutes, since))


def window(text: str) -> int:
    for minutes in curves.WINDOWS:
        if text == str(minutes):
            return minutes
    choices = ", ".join(map(str, curves.WINDOWS))
    raise ApiError(400, "invalid", f"minutes: one of {choices}.", errors={"minutes": [f"One of {choices}."]})


def moment(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < 2**33:  # the year 2242; no float beyond is a date
        raise ApiError(
            400, "invalid", "since: seconds since 1970.", errors={"since": ["Seconds since 1970."]}
        )
    return seconds
