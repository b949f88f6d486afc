"""The page of one's own API tokens: what there is, a new one, an end to one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse, QueryDict
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST
from rest_framework.exceptions import ValidationError

from gpus.rest import flattened
from monitor import operator
from monitor import tokens as shelf
from monitor.models import ApiToken
from monitor.views import Request

#: What each scope lets a program do, as `docs/api.md` says it.
SCOPES = {
    "read": "look at everything that you see",
    "submit": "submit jobs, upload artifacts",
    "control": "cancel, pause, retry, change, delete; make and revoke tokens",
    "admin": "what is staff's, if you are staff",
}
#: Days that a new token lives, and how the page says it; nothing stands for ever.
LIVES = {"7": "7 days", "30": "30 days", "90": "90 days", "365": "a year", "": "until it is revoked"}


@login_required
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def tokens(request: Request) -> HttpResponse:
    """POST makes one and shows its value in this very answer: no redirect, for its value is stored nowhere."""
    if request.method != "POST":
        return page(request)
    wanted = shelf.TokenSerializer(data=typed(request.POST))
    try:
        wanted.is_valid(raise_exception=True)
    except ValidationError as refusal:
        return page(request, 400, errors=dict(flattened(refusal.detail)), typed=request.POST)
    return page(request, 201, made=wanted.save(user=request.user, maker=None))


def typed(form: QueryDict) -> dict[str, Any]:
    data: dict[str, Any] = {"name": form.get("name", ""), "scopes": form.getlist("scopes")}
    days = form.get("days")
    if days in LIVES:
        data["expires_at"] = timezone.now() + timedelta(days=int(days)) if days else None
    return data


def page(request: Request, status: int = 200, **more: Any) -> HttpResponse:
    asked = more.get("typed", QueryDict())
    shown = {
        "rows": [row(token) for token in shelf.own(request.user)],
        "scopes": SCOPES,
        "chosen": asked.getlist("scopes") if asked else ["read"],
        "lives": LIVES,
        "days": asked.get("days", str(shelf.DEFAULT_DAYS)),
    }
    return render(request, "tokens/tokens.html", shown | more, status=status)


def row(token: ApiToken) -> dict[str, Any]:
    """`begins`: enough to recognise it by, far too little to use it."""
    in_file = token.user.get_username() == operator.NAME and token.name == operator.TOKEN_NAME
    return {"token": token, "begins": token.token_key[:8], "in_file": in_file}


@login_required
@require_POST
def revoke(request: Request, id: UUID) -> HttpResponse:
    """One's own alone: for staff, too, the tokens of others do not exist."""
    token = get_object_or_404(shelf.own(request.user), public_id=id)
    token.delete()
    messages.success(request, f"{token} is revoked; programs that use it are refused from now on.")
    return redirect("token-page")
