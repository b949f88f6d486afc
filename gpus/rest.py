"""What every REST view shares: the error envelope, pages, scopes, and a JSON parser that lets nothing odd in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, JsonResponse
from rest_framework import exceptions
from rest_framework.pagination import PageNumberPagination
from rest_framework.parsers import BaseParser
from rest_framework.permissions import SAFE_METHODS, AllowAny, BasePermission
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response

if TYPE_CHECKING:
    from rest_framework.views import APIView

SCOPES = ("read", "submit", "control", "admin")
#: Parameters of real kinds nest four deep; a body of brackets is somebody's test.
MAX_DEPTH = 32


class ApiError(exceptions.APIException):
    """An answer with a code for programs, a sentence for people, and the numbers of the case."""

    def __init__(self, status: int, code: str, detail: str, **extra: Any) -> None:
        super().__init__(detail, code)
        self.status_code = status
        self.code = code
        self.extra = extra


# The error envelope -----------------------------------------------------------------------------------


def envelope(exc: Exception, context: dict[str, Any]) -> Response | None:
    """Every error as `{"code", "detail", "errors"?, "hint"?, …numbers}`; `None` lets a real fault rise."""
    from rest_framework.views import (
        exception_handler,
    )  # here: DRF imports this module while it imports its views

    exc = translated(exc)
    response = exception_handler(exc, context)
    if response is not None:
        response.data = body(exc)
    return response


def translated(exc: Exception) -> Exception:
    """Faults of other libraries that mean "bad input" or "a needed part is down"."""
    if isinstance(exc, Http404):
        return exceptions.NotFound()
    if isinstance(exc, RequestDataTooBig):
        return ApiError(413, "too_large", str(exc))
    if isinstance(exc, RecursionError):
        return ApiError(400, "invalid", "The request is nested too deeply.")
    if isinstance(exc, OperationalError | InterfaceError):
        return ApiError(503, "database_unavailable", "The database does not answer; try again in a moment.")
    if isinstance(exc, DataError | OverflowError) or (isinstance(exc, ValueError) and "NUL" in str(exc)):
        return ApiError(400, "invalid", "The request holds characters or numbers that cannot be stored.")
    return exc


def body(exc: Exception) -> dict[str, Any]:
    if isinstance(exc, exceptions.ValidationError):
        errors = dict(flattened(exc.detail))
        field, messages = next(iter(errors.items()), ("", ["Not valid."]))
        said = messages[0] if field in ("", "non_field_errors") else f"{field}: {messages[0]}"
        return {"code": "invalid", "detail": said, "errors": errors}
    if isinstance(exc, ApiError):
        return {"code": exc.code, "detail": str(exc.detail), **exc.extra}
    if isinstance(exc, exceptions.ParseError):
        return {"code": "invalid", "detail": str(exc.detail)}
    detail = getattr(exc, "detail", "You may not do this.")
    return {"code": getattr(detail, "code", "permission_denied"), "detail": str(detail)}


def flattened(detail: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Nested DRF errors as (`sites.0.block`, [sentences])."""
    if isinstance(detail, dict):
        for key, value in detail.items():
            yield from flattened(value, f"{path}.{key}" if path else str(key))
    elif isinstance(detail, list) and any(isinstance(item, dict | list) for item in detail):
        for number, item in enumerate(detail):
            yield from flattened(item, f"{path}.{number}" if path else str(number))
    elif detail:
        yield (
            path or "non_field_errors",
            [str(item) for item in (detail if isinstance(detail, list) else [detail])],
        )


def not_found(request: HttpRequest, exception: Exception | None = None) -> JsonResponse:
    """`handler404` for paths under `/api/` and `/system/`."""
    return JsonResponse({"code": "not_found", "detail": "There is nothing at this address."}, status=404)


def server_error(request: HttpRequest) -> JsonResponse:
    """`handler500` for paths under `/api/` and `/system/`; the traceback is in the log, not in the answer."""
    return JsonResponse(
        {"code": "server_error", "detail": "miStudio failed here; its log says how."}, status=500
    )


# Input ------------------------------------------------------------------------------------------------


class StrictJSONParser(BaseParser):
    """JSON that a database can store and a kind can trust: bounded in size and depth, finite numbers, sound text."""

    media_type = "application/json"
    renderer_class = JSONRenderer

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        raw = stream.read(settings.DATA_UPLOAD_MAX_MEMORY_SIZE + 1)
        if len(raw) > settings.DATA_UPLOAD_MAX_MEMORY_SIZE:
            raise ApiError(
                413, "too_large", "The request body is too large.", limit=settings.DATA_UPLOAD_MAX_MEMORY_SIZE
            )
        try:
            value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        except RecursionError:
            raise exceptions.ParseError("The JSON is nested too deeply.") from None
        except ValueError as error:
            raise exceptions.ParseError(f"This is not JSON: {error}") from None
        check(value)
        return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def check(value: Any, depth: int = 0) -> None:
    """Refuse what would fail later: NUL and lone surrogates in text, numbers beyond the finite, deep nesting."""
    if depth > MAX_DEPTH:
        raise exceptions.ParseError(f"The JSON is nested more than {MAX_DEPTH} deep.")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float) and not math.isfinite(value):
        raise exceptions.ParseError("A number in the JSON is too large.")
    elif isinstance(value, list):
        for item in value:
            check(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(key)
            check(item, depth + 1)


def _check_text(text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise exceptions.ParseError("Text may not hold NUL characters or lone surrogates.")


class Pages(PageNumberPagination):
    """`{count, next, previous, results}`, `?page=&page_size=`: 50, at most 200."""

    page_size = 50
    page_size_query_param = "page_size"
    max_page_size = 200

    def get_page_size(self, request: Request) -> int | None:
        raw = request.query_params.get(self.page_size_query_param)
        if raw is not None and not (raw.isascii() and raw.isdigit() and len(raw) < 9 and int(raw) > 0):
            raise exceptions.ValidationError({self.page_size_query_param: ["A whole number from 1 to 200."]})
        return super().get_page_size(request)


# Who may ----------------------------------------------------------------------------------------------


class HasScope(BasePermission):
    """A token may do what its scopes say: reading needs `read`, the rest what the view's `scope` names.

    A session (no `request.auth`) has every scope; what staff alone may do is checked besides.
    """

    message = "This token lacks the scope “{}”."

    def has_permission(self, request: Request, view: APIView) -> bool:
        scopes = getattr(request.auth, "scopes", None)
        needed = "read" if request.method in SAFE_METHODS else getattr(view, "scope", "control")
        self.message = type(self).message.format(needed)
        return scopes is None or needed in scopes


class NoLogin:
    """Views that answer strangers inherit from this, so that the list of them is its subclasses."""

    authentication_classes: list[Any] = []
    permission_classes = [AllowAny]
