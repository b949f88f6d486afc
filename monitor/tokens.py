"""API tokens of a user: what a new one must be like, and who may make which. For the API and the page."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import QuerySet
from django.utils import timezone
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied

from gpus.rest import SCOPES
from monitor.models import ApiToken

DEFAULT_DAYS = 90


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
    """`save(user=…, maker=…)`: whose the token is, and the token that asks for it, if one does."""

    id = serializers.UUIDField(source="public_id", read_only=True)
    name = serializers.CharField(max_length=80)
    scopes = serializers.MultipleChoiceField(
        choices=SCOPES,
        allow_empty=False,
        help_text="read: look; submit: new jobs; control: cancel, change; admin: all",
    )
    created_at = serializers.DateTimeField(source="created", read_only=True)
    expires_at = serializers.DateTimeField(
        source="expiry",
        required=False,
        allow_null=True,
        help_text=f"{DEFAULT_DAYS} days from now; null: never",
    )
    value = serializers.CharField(read_only=True, help_text="Shown once, in the answer that makes the token")

    class Meta:
        model = ApiToken
        fields = ("id", "name", "scopes", "created_at", "expires_at", "value")

    def validate_scopes(self, scopes: Iterable[str]) -> list[str]:
        return [scope for scope in SCOPES if scope in scopes]

    def validate_expires_at(self, moment: datetime | None) -> datetime | None:
        if moment is not None and moment <= timezone.now():
            raise serializers.ValidationError("This moment has passed.")
        return moment

    def to_representation(self, token: ApiToken) -> dict[str, Any]:
        shown = super().to_representation(token)
        shown["scopes"] = self.validate_scopes(token.scopes)  # in their order; the field itself makes a set
        return shown

    def create(self, values: dict[str, Any]) -> ApiToken:
        maker: ApiToken | None = values.pop("maker")
        expiry = values.pop("expiry", timezone.now() + timedelta(days=DEFAULT_DAYS))
        check_not_stronger(maker, values["scopes"], expiry)
        # knox's manager counts from now and would round; the moment asked for is set as it is.
        token, value = ApiToken.objects.create(expiry=None, **values)
        ApiToken.objects.filter(pk=token.pk).update(expiry=expiry)
        token.expiry, token.value = expiry, value
        return token


def check_not_stronger(maker: ApiToken | None, scopes: list[str], expiry: datetime | None) -> None:
    """A token makes no token that may do more than itself or lives longer, unless it has the scope `admin`."""
    if maker is None or "admin" in maker.scopes:
        return
    if set(scopes) - set(maker.scopes):
        raise PermissionDenied("This token cannot make one with more scopes than its own.")
    if maker.expiry is not None and (expiry is None or expiry > maker.expiry):
        raise PermissionDenied("This token cannot make one that lives longer than itself.")


def own(user: AbstractBaseUser) -> QuerySet[ApiToken]:
    return ApiToken.objects.filter(user=user).order_by("-created", "public_id")
