"""Who is asking: a session, a token or a ticket; over HTTP (DRF's classes) and over a WebSocket."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AbstractBaseUser
from django.http import parse_cookie
from django.http.request import split_domain_port, validate_host
from knox.auth import TokenAuthentication as KnoxAuthentication
from rest_framework import authentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from monitor.models import ApiToken, OneTimeKey

TICKET_SECONDS = 30
TOKEN_SHAPE = re.compile(rb"[0-9A-Za-z]{32,200}")


# Over HTTP ----------------------------------------------------------------------------------------------
class TokenAuthentication(KnoxAuthentication):
    """`Authorization: Token <value>`."""

    scheme = "Token"

    def authenticate_header(self, request: Request) -> str:
        return self.scheme  # knox takes this for the word to expect, too

    def authenticate_credentials(self, token: bytes) -> tuple[AbstractBaseUser, ApiToken]:
        # knox decodes before it looks: a byte that is no UTF-8 would be a 500.
        if not TOKEN_SHAPE.fullmatch(token):
            raise AuthenticationFailed("Invalid token.")
        return super().authenticate_credentials(token)


class BearerAuthentication(TokenAuthentication):
    """`Authorization: Bearer <value>`, what most clients send by default."""

    scheme = "Bearer"


class SessionAuthentication(authentication.SessionAuthentication):
    """The session cookie of a signed-in browser; DRF checks CSRF for it."""


# Over a WebSocket ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Credential:
    """What somebody came in with, so that it can be looked at again: is it still good, and whose is it?"""

    kind: str  # session | token
    key: str  # the session's key | the token's hash

    def user(self) -> AbstractBaseUser | None:
        return self._session_user() if self.kind == "session" else self._token_user()

    def _session_user(self) -> AbstractBaseUser | None:
        store = import_module(settings.SESSION_ENGINE).SessionStore(self.key or None)
        user = get_user(SimpleNamespace(session=store))  # type: ignore[arg-type]
        return user if user.is_authenticated else None

    def _token_user(self) -> AbstractBaseUser | None:
        token = ApiToken.objects.filter(digest=self.key).select_related("user").first()
        if token is None or token.expired or "read" not in token.scopes:
            return None
        return token.user if token.user.is_active else None


@dataclass(frozen=True)
class Visitor:
    user: AbstractBaseUser
    credential: Credential


def credential_of(request: Request) -> Credential:
    """The credential behind an HTTP request that already is signed in."""
    if isinstance(request.auth, ApiToken):
        return Credential("token", request.auth.digest)
    return Credential("session", request.session.session_key or "")


def issue_ticket(request: Request) -> str:
    """A key for one WebSocket, for clients that can set neither cookie nor header; it ends with its credential."""
    user = cast(AbstractBaseUser, request.user)  # the view lets no stranger come this far
    return OneTimeKey.issue(OneTimeKey.Purpose.TICKET, user, TICKET_SECONDS, **asdict(credential_of(request)))


def visitor(scope: dict[str, Any]) -> Visitor | None:
    """Who opens this WebSocket; `None` when the address, the page it comes from, or the sign-in is not in order."""
    headers = {name: value.decode("latin1") for name, value in scope["headers"]}
    host, origin = headers.get(b"host", ""), headers.get(b"origin")
    if not host_allowed(host) or (origin is not None and not origin_allowed(origin, host)):
        return None
    credential = _credential(scope, headers, from_page=origin is not None)
    user = credential.user() if credential else None
    return Visitor(user, credential) if user and credential else None


def _credential(scope: dict[str, Any], headers: dict[bytes, str], *, from_page: bool) -> Credential | None:
    ticket = parse_qs(scope["query_string"].decode("latin1")).get("ticket")
    if b"authorization" in headers:
        token = token_of(headers[b"authorization"])
        return Credential("token", token.digest) if token else None
    if ticket:
        row = OneTimeKey.spend(OneTimeKey.Purpose.TICKET, ticket[0])
        return Credential(**row.data) if row else None
    # Browsers send cookies from any page; only the Origin tells ours from a stranger's.
    key = parse_cookie(headers.get(b"cookie", "")).get(settings.SESSION_COOKIE_NAME)
    return Credential("session", key) if key and from_page else None


def token_of(authorization: str) -> ApiToken | None:
    """The token of an `Authorization` header, with its user; `None` unless both are good now."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() not in ("token", "bearer"):
        return None
    try:
        return TokenAuthentication().authenticate_credentials(value.strip().encode("latin1"))[1]
    except AuthenticationFailed:
        return None


def host_allowed(host: str) -> bool:
    domain, _ = split_domain_port(host)
    return bool(domain) and validate_host(domain, settings.ALLOWED_HOSTS)


def origin_allowed(origin: str, host: str) -> bool:
    """Our own page: same host *and port* (cookies do not know ports, so a neighbour's page could send ours)."""
    if origin in getattr(settings, "CSRF_TRUSTED_ORIGINS", []):
        return True
    schemes = ("https",) if settings.MISTUDIO_TLS else ("http", "https")
    try:
        parts = urlsplit(origin)
    except ValueError:  # brackets that hold no address
        return False
    return parts.scheme in schemes and parts.netloc.lower() == host.lower()
