"""A world with one of everything (tests/security), and people who call tools in it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User

from gpus.rest import SCOPES
from monitor.mcp import calls
from monitor.mcp.caller import Caller
from monitor.mcp.calls import Answer
from monitor.mcp.tools import Tool
from tests.security.conftest import World, world

__all__ = ["world"]  # a fixture


def caller(user: User, *scopes: str) -> Caller:
    return Caller(user, scopes or SCOPES)


def example_of(tool: Tool, world: World) -> dict[str, Any]:
    """Arguments with which the tool has something to answer."""
    if tool.name.startswith("submit_"):
        return dict(tool.schema["examples"][0])
    thing = next((thing for thing in ("artifact", "group") if thing in tool.name), "job")
    known = {"id": world.id_for(f"/{thing}s/"), "path": "hello.txt"}
    given = {name: known.get(name, "rehearsal") for name in tool.schema["required"]}
    return given | ({"seconds": 0} if tool.waits else {})


def ask(who: Caller, tool: str, **arguments: Any) -> Answer:
    return calls.perform(who, tool, {name: plain(value) for name, value in arguments.items()})


def plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
