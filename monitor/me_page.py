"""One's own page: who one is here, and which mails one wants."""

from __future__ import annotations

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods

from jobs.models import MailChoice
from monitor.views import Request


@login_required
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def me(request: Request) -> HttpResponse:
    """The address is the operator's to set: nobody has mails sent to others by it."""
    when = request.POST.get("when", "")
    if request.method == "POST" and when in MailChoice.When.values:
        MailChoice.objects.update_or_create(user=request.user, defaults={"when": when})
        messages.success(request, f"Mails: {MailChoice.When(when).label}.")
        return redirect("me")
    return render(request, "me/me.html", context(request), status=400 if request.method == "POST" else 200)


def context(request: Request) -> dict[str, object]:
    choice = MailChoice.objects.filter(user=request.user).first()
    return {
        "choices": MailChoice.When.choices,
        "when": choice.when if choice else MailChoice.When.FAILURE,
        "mail_is_set_up": settings.MISTUDIO_EMAIL_URL is not None,
    }
