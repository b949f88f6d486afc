"""One error envelope, one paginator, one parser, one scope rule."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import DataError, OperationalError
from django.http import Http404
from django.urls import path
from rest_framework import exceptions, generics, serializers
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIClient
from rest_framework.views import APIView

from gpus import rest

raising: dict[str, Exception] = {}


class Raises(APIView):
    authentication_classes: list[Any] = []
    permission_classes = [AllowAny]
    parser_classes = [rest.StrictJSONParser]

    def get(self, request: Request) -> Response:
        raise raising["now"]

    def post(self, request: Request) -> Response:
        return Response(request.data)


class UserSerializer(serializers.ModelSerializer[User]):
    class Meta:
        model = User
        fields = ["username"]


class Users(generics.ListAPIView[User]):
    authentication_classes: list[Any] = []
    permission_classes = [AllowAny]
    queryset = User.objects.order_by("username")
    serializer_class = UserSerializer
    pagination_class = rest.Pages


urlpatterns = [path("raises/", Raises.as_view()), path("users/", Users.as_view())]
handler404 = "gpus.rest.not_found"
handler500 = "gpus.rest.server_error"
pytestmark = pytest.mark.urls(__name__)
client = APIClient()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (rest.ApiError(409, "conflict", "It runs."), 409, "conflict"),
        (Http404(), 404, "not_found"),
        (exceptions.ValidationError("No."), 400, "invalid"),
        (exceptions.ParseError("No JSON."), 400, "invalid"),
        (exceptions.PermissionDenied(), 403, "permission_denied"),
        (exceptions.NotAuthenticated(), 403, "not_authenticated"),
        (exceptions.MethodNotAllowed("PUT"), 405, "method_not_allowed"),
        (exceptions.Throttled(wait=3), 429, "throttled"),
        (OperationalError("database is locked"), 503, "database_unavailable"),
        (DataError("integer out of range"), 400, "invalid"),
        (ValueError("A string literal cannot contain NUL (0x00) characters."), 400, "invalid"),
        (RecursionError(), 400, "invalid"),
        (OverflowError("Python int too large to convert to SQLite INTEGER"), 400, "invalid"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_code_and_a_sentence(error: Exception, status: int, code: str) -> None:
    raising["now"] = error
    response = client.get("/raises/")
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert response.json()["detail"]


def test_an_error_carries_its_numbers_and_hint() -> None:
    raising["now"] = rest.ApiError(
        400, "insufficient_gpu_memory", "Too small.", need=5, free=3, hint="Fewer."
    )
    body = client.get("/raises/").json()
    assert body == {
        "code": "insufficient_gpu_memory",
        "detail": "Too small.",
        "need": 5,
        "free": 3,
        "hint": "Fewer.",
    }


def test_nested_field_errors_become_one_flat_list() -> None:
    raising["now"] = exceptions.ValidationError(
        {
            "sites": [{}, {"block": ["A valid integer is required."]}],
            "k": ["Too small."],
            "corpus": {"path": ["Gone."]},
        }
    )
    body = client.get("/raises/").json()
    assert body["errors"] == {
        "sites.1.block": ["A valid integer is required."],
        "k": ["Too small."],
        "corpus.path": ["Gone."],
    }
    assert body["detail"] == "sites.1.block: A valid integer is required."


def test_a_real_fault_is_not_dressed_up_as_an_answer() -> None:
    raising["now"] = KeyError("bug")
    with pytest.raises(KeyError):
        client.get("/raises/")
    quiet = APIClient(raise_request_exception=False)
    response = quiet.get("/raises/")
    assert (response.status_code, response.json()["code"]) == (500, "server_error")
    assert "bug" not in response.content.decode()


def test_an_unknown_address_answers_in_the_envelope() -> None:
    response = client.get("/nothing/here")
    assert (response.status_code, response.json()["code"]) == (404, "not_found")


BAD_JSON = {
    "broken": b"{",
    "not utf-8": b'"\xff"',
    "NaN": b'{"a": NaN}',
    "Infinity": b"[Infinity]",
    "too large a number": b"[1e999]",
    "NUL": b'{"name": "a\\u0000b"}',
    "NUL in a key": b'{"a\\u0000": 1}',
    "lone surrogate": b'{"name": "\\ud800"}',
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "deeper than kinds need": b"[" * 40 + b"]" * 40,
    "digits": b"[" + b"9" * 5000 + b"]",
}


@pytest.mark.parametrize("body", BAD_JSON.values(), ids=BAD_JSON)
def test_it_answers_400_to_odd_json(body: bytes) -> None:
    response = client.generic("POST", "/raises/", body, content_type="application/json")
    assert (response.status_code, response.json()["code"]) == (400, "invalid")


def test_it_answers_413_to_a_huge_body(settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    response = client.generic("POST", "/raises/", b'"' + b"x" * 2000 + b'"', content_type="application/json")
    assert (response.status_code, response.json()["code"]) == (413, "too_large")


def test_it_takes_sound_json_as_it_is() -> None:
    body = {"a": [1, 2.5, None, True, "ünïcödé 🙂"], "b": {"c": {"d": []}}}
    response = client.generic("POST", "/raises/", json.dumps(body).encode(), content_type="application/json")
    assert response.json() == body


@pytest.fixture
def users(db: None) -> None:
    User.objects.all().delete()
    User.objects.bulk_create(User(username=f"user{number:03}") for number in range(60))


def test_lists_come_in_pages_of_fifty(users: None) -> None:
    body = client.get("/users/").json()
    assert (body["count"], len(body["results"]), body["previous"]) == (60, 50, None)
    assert len(client.get(body["next"]).json()["results"]) == 10
    assert len(client.get("/users/?page_size=5&page=2").json()["results"]) == 5
    assert len(client.get("/users/?page_size=999").json()["results"]) == 60


@pytest.mark.parametrize("size", ["0", "-1", "x", "1.5", "", "9" * 50, "٣"])
def test_it_refuses_an_odd_page_size(size: str, users: None) -> None:
    response = client.get("/users/", {"page_size": size})
    assert (response.status_code, list(response.json()["errors"])) == (400, ["page_size"])


def test_a_page_beyond_the_end_is_not_found(users: None) -> None:
    for page in ("9", "0", "x"):
        assert client.get("/users/", {"page": page}).status_code == 404


@pytest.mark.parametrize(
    ("method", "scopes", "view_scope", "allowed"),
    [
        ("GET", None, None, True),
        ("DELETE", None, "admin", True),
        ("GET", ["read"], "submit", True),
        ("GET", ["submit"], "submit", False),
        ("POST", ["read"], "submit", False),
        ("POST", ["submit"], "submit", True),
        ("POST", ["submit"], None, False),
        ("POST", ["control"], None, True),
        ("PATCH", ["read", "submit", "control"], "admin", False),
        ("PATCH", [], "admin", False),
    ],
)
def test_a_token_may_do_what_its_scopes_say(
    method: str, scopes: list[str] | None, view_scope: str | None, allowed: bool
) -> None:
    request: Any = SimpleNamespace(
        method=method, auth=None if scopes is None else SimpleNamespace(scopes=scopes)
    )
    view: Any = SimpleNamespace(**({"scope": view_scope} if view_scope else {}))
    permission = rest.HasScope()
    assert permission.has_permission(request, view) is allowed
    assert (view_scope or ("read" if method == "GET" else "control")) in permission.message or method == "GET"
