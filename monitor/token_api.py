"""`tokens/` and `ws-ticket/`: what a signed-in user gives to programs."""

from __future__ import annotations

from typing import Any, cast

from django.contrib.auth.models import AbstractBaseUser
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema, inline_serializer
from rest_framework import generics, serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer
from rest_framework.views import APIView

from monitor import tokens
from monitor.access import TICKET_SECONDS, issue_ticket
from monitor.models import ApiToken


class OwnTokens(generics.GenericAPIView[ApiToken]):
    serializer_class = tokens.TokenSerializer
    queryset = ApiToken.objects.none()  # for the schema
    lookup_field, lookup_url_kwarg = "public_id", "id"

    def get_queryset(self) -> QuerySet[ApiToken]:
        return tokens.own(cast(AbstractBaseUser, self.request.user))


class TokenList(generics.ListCreateAPIView[ApiToken], OwnTokens):
    """GET: one's own tokens, without their values. POST: a new one; its value is in this answer only."""

    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        response = super().create(request, *args, **kwargs)
        response["Cache-Control"] = "no-store"
        return response

    def perform_create(self, serializer: BaseSerializer[ApiToken]) -> None:
        serializer.save(user=self.request.user, maker=self.request.auth)


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
