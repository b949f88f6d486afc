"""`tokens/` and `ws-ticket/`: what a signed-in user gives to programs."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from gpus.rest import SCOPES
from monitor.access import TICKET_SECONDS, issue_ticket
from monitor.models import ApiToken

DEFAULT_DAYS = 90


class TokenSerializer(serializers.ModelSerializer[ApiToken]):
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
        maker: ApiToken | None = self.context["request"].auth
        expiry = values.pop("expiry", timezone.now() + timedelta(days=DEFAULT_DAYS))
        check_not_stronger(maker, values["scopes"], expiry)
        # knox's manager counts from now and would round; the moment asked for is set as it is.
        token, value = ApiToken.objects.create(user=self.context["request"].user, expiry=None, **values)
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


class OwnTokens(generics.GenericAPIView[ApiToken]):
    serializer_class = TokenSerializer
    queryset = ApiToken.objects.none()  # for the schema
    lookup_field, lookup_url_kwarg = "public_id", "id"

    def get_queryset(self) -> QuerySet[ApiToken]:
        return ApiToken.objects.filter(user=self.request.user).order_by("-created", "public_id")  # type: ignore[misc]


class TokenList(generics.ListCreateAPIView[ApiToken], OwnTokens):
    """GET: one's own tokens, without their values. POST: a new one; its value is in this answer only."""

    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        response = super().create(request, *args, **kwargs)
        response["Cache-Control"] = "no-store"
        return response


class TokenDetail(generics.DestroyAPIView[ApiToken], OwnTokens):
    """DELETE: revoke it at once; its WebSockets end within a minute."""


class WebSocketTicket(APIView):
    """POST: a ticket for `/ws/?ticket=…`, good once, for 30 s."""

    scope = "read"

    @extend_schema(
        request=None,
        responses={
            201: inline_serializer(
                "WebSocketTicket",
                {"ticket": serializers.CharField(), "expires_in_seconds": serializers.IntegerField()},
            )
        },
    )
    def post(self, request: Request) -> Response:
        answer = {"ticket": issue_ticket(request), "expires_in_seconds": TICKET_SECONDS}
        return Response(answer, status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})
