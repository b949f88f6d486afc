"""One's own page: who one is here, which mails one wants, and the token that one's downloads use."""

from __future__ import annotations

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters, sensitive_variables
from django.views.decorators.http import require_http_methods, require_POST

from jobs import hub_token
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


@sensitive_post_parameters()
@sensitive_variables()
@login_required
@never_cache
@require_POST
def set_hub_token(request: Request) -> HttpResponse:
    """What was typed is in no page again, not even where it was wrong."""
    token = request.POST.get("token", "").strip()
    if not hub_token.SPELLING.fullmatch(token):
        return render(
            request, "me/me.html", context(request) | {"token_error": hub_token.SPELLED}, status=400
        )
    hub_token.keep(request.user.pk, token)
    messages.success(request, "Your downloads use this Hugging Face token from now on.")
    return redirect("me")


@login_required
@never_cache
@require_POST
def forget_hub_token(request: Request) -> HttpResponse:
    hub_token.forget(request.user.pk)
    messages.success(request, "Your Hugging Face token is forgotten here.")
    return redirect("me")


def context(request: Request) -> dict[str, object]:
    choice = MailChoice.objects.filter(user=request.user).first()
    return {
        "choices": MailChoice.When.choices,
        "when": choice.when if choice else MailChoice.When.FAILURE,
        "mail_is_set_up": settings.MISTUDIO_EMAIL_URL is not None,
        "token_set_at": hub_token.set_at(request.user.pk),
        "token_is_shared": settings.MISTUDIO_SHARE_HF_TOKEN,
    }
