"""One call of a tool: its view is asked as REST asks it, with the caller in place of a sign-in; a row is written."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.core.handlers.wsgi import WSGIRequest
from django.db import DatabaseError
from rest_framework import serializers

from gpus import rest
from monitor.mcp.caller import AsCaller, Caller
from monitor.mcp.tools import Tool, all_tools
from monitor.models import ToolCall

log = logging.getLogger(__name__)

Arguments = Mapping[str, Any]
#: What a call answers at most; more would fill the memory of whoever asked.
MAX_ANSWER_BYTES = 512 * 1024


@dataclass(frozen=True)
class Answer:
    """What the tool found, or the error envelope of REST; always an object."""

    data: dict[str, Any]
    failed: bool = False

    @property
    def outcome(self) -> str:
        return str(self.data["code"]) if self.failed else "ok"

    @property
    def text(self) -> str:
        return json.dumps(self.data, ensure_ascii=False)


#: Whoever called did not stay for the answer.
GONE = Answer({"code": "cancelled", "detail": "The call was given up."}, failed=True)


def call(caller: Caller, name: str, arguments: Arguments) -> Answer:
    """Perform, and leave the row: one piece that nobody who goes away can cut in two."""
    began = time.monotonic()
    answer = perform(caller, name, arguments)
    note(caller, name, arguments, answer, began)
    return answer


def perform(caller: Caller, name: str, arguments: Arguments) -> Answer:
    """Call the tool of this name, and say every failure as REST would."""
    try:
        return bounded(ask(caller, known(name), arguments))
    except Exception as error:
        return envelope(error)


def known(name: str) -> Tool:
    try:
        return all_tools()[name]
    except KeyError:
        raise rest.ApiError(404, "unknown_tool", "There is no tool of this name.") from None


def envelope(error: Exception) -> Answer:
    """The error as REST says it; a fault of ours is told in the log alone."""
    response = rest.envelope(error, {})
    if response is not None:
        return Answer(response.data, failed=True)
    log.error("A tool failed", exc_info=error)
    return Answer({"code": "server_error", "detail": "miStudio failed here; its log says how."}, failed=True)


def bounded(answer: Answer) -> Answer:
    size = len(answer.text.encode())
    if size > MAX_ANSWER_BYTES:
        detail = (
            f"The answer has {size} bytes, a tool's at most {MAX_ANSWER_BYTES}. Ask for less, or over REST."
        )
        raise rest.ApiError(413, "answer_too_large", detail, size=size, limit=MAX_ANSWER_BYTES)
    return answer


# The view -----------------------------------------------------------------------------------------------
def ask(caller: Caller, tool: Tool, arguments: Arguments) -> Answer:
    checked = sound(tool, arguments)
    in_path = {name: checked.pop(name) for name in tool.in_path}
    view = tool.view.as_view(authentication_classes=[AsCaller], **tool.options)
    response = view(request_of(caller, tool, checked), **in_path)
    response.render()
    data = json.loads(response.content)
    return Answer(data, failed=True) if response.status_code >= 400 else Answer(tool.shape(data))


def sound(tool: Tool, arguments: Arguments) -> dict[str, Any]:
    """The arguments, when they are such as JSON over HTTP could bring, and what the tool takes."""
    rest.check(dict(arguments))
    return dict(arguments) if tool.checks_itself else valid(tool, arguments)


def valid(tool: Tool, arguments: Arguments) -> dict[str, Any]:
    """The arguments as plain values, defaults filled in; a null is an argument that was left out."""
    given = {name: value for name, value in arguments.items() if value is not None}
    fields = tool.fields(data=given)
    fields.is_valid(raise_exception=True)
    if unknown := set(given) - set(fields.fields):
        there = ", ".join(sorted(fields.fields))
        sentence = f"There is no argument of this name. There are: {there}."
        raise serializers.ValidationError({name: [sentence] for name in sorted(unknown)})
    return {name: plain(value) for name, value in fields.validated_data.items()}


def plain(value: Any) -> Any:
    """As it stands in an address or a body."""
    if isinstance(value, str | int | float | bool | list | dict):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def request_of(caller: Caller, tool: Tool, values: dict[str, Any]) -> WSGIRequest:
    body = b"" if tool.method == "GET" else json.dumps(values).encode()
    request = WSGIRequest(
        {
            "REQUEST_METHOD": tool.method,
            "PATH_INFO": "/",
            "QUERY_STRING": urlencode(values) if tool.method == "GET" else "",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(body)),
            "SERVER_NAME": "localhost",
            "SERVER_PORT": "80",
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body),
        }
    )
    request.caller = caller  # type: ignore[attr-defined]
    return request


# The row ------------------------------------------------------------------------------------------------
def note(caller: Caller, name: str, arguments: Arguments, answer: Answer, began: float) -> None:
    """One row per call. Neither arguments nor answers stand in it."""
    row = ToolCall(
        user_id=caller.user.pk,
        token_id=caller.token_id,
        tool=name if name in all_tools() else "",
        arguments_digest=digest(arguments),
        outcome=answer.outcome[:60],
        duration_ms=round((time.monotonic() - began) * 1000),
        job_id=made(name, arguments, answer),
    )
    try:
        row.save()
    except DatabaseError as error:  # what was done is done, and its answer must not be lost
        log.error("No row for %s: %s", row, error)


def digest(arguments: Arguments) -> str:
    return hashlib.sha256(json.dumps(dict(arguments), sort_keys=True, default=str).encode()).hexdigest()


def made(name: str, arguments: Arguments, answer: Answer) -> UUID | None:
    """The new job that a submit or a verb answered with, of a sweep the first; none where the answer is what the call
    was about."""
    if answer.failed or all_tools()[name].reads_only:
        return None
    about = str(UUID(str(arguments["id"]))) if "id" in arguments else ""
    if about in (answer.data.get("id"), answer.data.get("group_id")):
        return None
    return UUID(answer.data.get("jobs", [answer.data])[0]["id"])
