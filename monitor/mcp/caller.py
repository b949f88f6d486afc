"""Who calls: a user, what they may do, and the token that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib.auth.models import AbstractBaseUser
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from monitor.models import ApiToken


@dataclass(frozen=True)
class Caller:
    """`scopes` is what `gpus.rest.HasScope` looks at: a caller is the `request.auth` of the views that it asks."""

    user: AbstractBaseUser
    scopes: tuple[str, ...]
    token_id: UUID | None = None

    @classmethod
    def of(cls, token: ApiToken) -> Caller:
        return cls(token.user, tuple(token.scopes), token.public_id)


class AsCaller(BaseAuthentication):
    """The views ask nobody who they are: the door has done so."""

    def authenticate(self, request: Request) -> tuple[Any, Caller]:
        caller: Caller = request._request.caller  # type: ignore[attr-defined]
        return caller.user, caller
