"""`hub-token/`: one's own Hugging Face token. It goes in and never comes out."""

from __future__ import annotations

from typing import Any, cast

from django.utils.decorators import method_decorator
from django.views.decorators.debug import sensitive_variables
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from jobs import hub_token


class HubTokenSerializer(serializers.Serializer[Any]):
    """In: `token`. Out: when one was set, null where there is none."""

    token = serializers.RegexField(
        rf"\A{hub_token.SPELLING.pattern}\Z",
        write_only=True,
        error_messages={"invalid": hub_token.SPELLED},
        help_text="A token of your Hugging Face account with the right to read; stored encrypted, never shown.",
    )
    set_at = serializers.DateTimeField(read_only=True, allow_null=True)


@extend_schema(responses=HubTokenSerializer)
class OwnHubToken(APIView):
    """GET: whether a token is set, and since when. PUT: set it, in place of the one before. DELETE: forget it."""

    serializer_class = HubTokenSerializer

    def get(self, request: Request) -> Response:
        return self._answer(request)

    @extend_schema(request=HubTokenSerializer)
    @method_decorator(sensitive_variables())
    def put(self, request: Request) -> Response:
        given = HubTokenSerializer(data=request.data)
        given.is_valid(raise_exception=True)
        hub_token.keep(_id(request), given.validated_data["token"])
        return self._answer(request)

    @extend_schema(responses={204: None})
    def delete(self, request: Request) -> Response:
        hub_token.forget(_id(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _answer(self, request: Request) -> Response:
        told: dict[str, Any] = {"set_at": hub_token.set_at(_id(request))}
        return Response(HubTokenSerializer(told).data, headers={"Cache-Control": "no-store"})


def _id(request: Request) -> int:
    return cast(int, request.user.pk)
