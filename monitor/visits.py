"""Visits: a visit ends after half an hour without a request, and the next one asks what happened since.

Only what a person does counts: pages opened and buttons pressed, not what an open page fetches by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import F
from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from gpus.timing import scaled
from monitor.models import Visit

AWAY_SECONDS = 1800.0
#: A visit that was written so lately need not be written again.
NOTE_SECONDS = 60.0
PROGRAMS = ("/api/", "/system/", "/metrics", "/static/")


def noted(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """The middleware that keeps the time of everybody's last request."""

    def respond(request: HttpRequest) -> HttpResponse:
        if by_a_person(request):
            note(request.user)  # type: ignore[arg-type]  # somebody signed in
        return get_response(request)

    return respond


def signed_in(sender: object, request: HttpRequest, user: AbstractBaseUser, **more: object) -> None:
    """A visit may begin with the sign-in."""
    note(user)


def by_a_person(request: HttpRequest) -> bool:
    """Signed in, and not one of the fetches of `live.js` (which say so) or of htmx."""
    by_itself = "X-Requested-With" in request.headers or "HX-Request" in request.headers
    return not by_itself and not request.path.startswith(PROGRAMS) and request.user.is_authenticated


def note(user: AbstractBaseUser) -> None:
    """Go on with the visit, or begin the next one."""
    now, mine = timezone.now(), Visit.objects.filter(user_id=user.pk)
    visit = mine.first()
    if visit is None:
        Visit.objects.get_or_create(user_id=user.pk, defaults={"began_at": now, "seen_at": now})
    elif now - visit.seen_at > timedelta(seconds=scaled(AWAY_SECONDS)):
        # Of two requests at once, the first begins it.
        mine.filter(seen_at=visit.seen_at).update(
            left_at=F("seen_at"), began_at=now, seen_at=now, dismissed=False
        )
    elif now - visit.seen_at > timedelta(seconds=scaled(NOTE_SECONDS)):
        mine.update(seen_at=now)


def dismiss(user: AbstractBaseUser) -> None:
    Visit.objects.filter(user_id=user.pk).update(dismissed=True)
