"""Ways in for people: a link as Jupyter prints it, or name and password (under django-axes' lock)."""

from __future__ import annotations

import json
from urllib.parse import urlencode

from django import forms
from django.conf import settings
from django.contrib.auth import login
from django.contrib.auth.forms import AuthenticationForm, UsernameField
from django.contrib.auth.models import AbstractBaseUser
from django.contrib.auth.views import LoginView, LogoutView
from django.core import signing
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.http import url_has_allowed_host_and_scheme
from django.views import View
from django.views.decorators.cache import never_cache

from monitor import operator
from monitor.models import OneTimeKey

LINK_SECONDS = 15 * 60
SIGNIN = OneTimeKey.Purpose.SIGNIN
BACKEND = "django.contrib.auth.backends.ModelBackend"
signer = signing.TimestampSigner(salt="mistudio.signin-link")


def make_link(base_url: str, user: AbstractBaseUser | None = None, next: str = "/") -> str:
    """A link that signs `user` (the operator) in: once, within 15 minutes. Its key stands behind the `?`,
    which daphne's access log leaves out."""
    key = OneTimeKey.issue(SIGNIN, user or operator.account(), LINK_SECONDS, next=next)
    return f"{base_url.rstrip('/')}{reverse('signin-link')}?{urlencode({'key': signer.sign(key)})}"


def base_url() -> str:
    """Where people reach this installation, as far as it is known here."""
    if settings.MISTUDIO_PUBLIC_URL:
        return settings.MISTUDIO_PUBLIC_URL
    try:
        return json.loads((settings.MISTUDIO_HOME / "run" / "ready.json").read_text())["url"]
    except (FileNotFoundError, ValueError, KeyError):
        return "http://127.0.0.1:8000"


def key_of(signed: str) -> str:
    """The key inside; the empty one, which opens nothing, when it was not signed here or is too old."""
    try:
        return signer.unsign(signed, max_age=LINK_SECONDS)
    except signing.BadSignature:
        return ""


def safe_next(request: HttpRequest, target: str) -> str:
    ours = url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure())
    return target if ours else "/"


@method_decorator(never_cache, name="dispatch")
class SignInLink(View):
    """GET shows one button and spends nothing (link previews and prefetch do GET); its POST signs in."""

    def get(self, request: HttpRequest) -> HttpResponse:
        signed = request.GET.get("key", "")
        row = OneTimeKey.find(SIGNIN, key_of(signed))
        if row is None:
            return spent(request)
        return render(request, "registration/signin_link.html", {"key": signed, "account": row.user})

    def post(self, request: HttpRequest) -> HttpResponse:
        row = OneTimeKey.spend(SIGNIN, key_of(request.POST.get("key", "")))
        if row is None or not row.user.is_active:
            return spent(request)
        login(request, row.user, backend=BACKEND)
        return redirect(safe_next(request, row.data.get("next", "/")))


def spent(request: HttpRequest) -> HttpResponse:
    return render(request, "registration/signin_link.html", {"key": ""}, status=410)


class SignInForm(AuthenticationForm):
    """Django's, which says how long a name may be to the browser alone; the lock keeps the name in a column."""

    username = UsernameField(max_length=150, widget=forms.TextInput(attrs={"autofocus": True}))


class SignIn(LoginView):
    authentication_form = SignInForm
    template_name = "registration/signin.html"


class SignOut(LogoutView):
    """POST only: a link on a stranger's page must not sign anybody out."""
