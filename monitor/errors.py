"""Errors outside of any view: JSON for programs, a page for people."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views import defaults

from gpus import rest

API_PREFIXES = ("/api/", "/system/")


def for_program(request: HttpRequest) -> bool:
    return request.path.startswith(API_PREFIXES)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    if for_program(request):
        return JsonResponse({"code": "invalid", "detail": "The request is not in order."}, status=400)
    return defaults.bad_request(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    return rest.not_found(request) if for_program(request) else defaults.page_not_found(request, exception)


def server_error(request: HttpRequest) -> HttpResponse:
    return rest.server_error(request) if for_program(request) else defaults.server_error(request)
