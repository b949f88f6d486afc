"""The SDK's server for one caller: the tools that they may call, and a row for each call."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import mcp_types as types
from django.db import DatabaseError
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from rest_framework.exceptions import APIException

from jobs.version import VERSION
from monitor.mcp import calls, waiting
from monitor.mcp.caller import Caller
from monitor.mcp.calls import Answer
from monitor.mcp.threads import in_thread
from monitor.mcp.tools import Tool, all_tools

INSTRUCTIONS = (
    "miStudio runs mechanistic-interpretability jobs on GPUs. list_gpus shows the cards. A submit_ tool queues a job "
    "on the card that `gpu` names (auto: the one with the most free memory) and answers with its id; wait_for_job "
    "follows it, job_result reads what it found. A parameter that takes an artifact takes its id, its name, or "
    "job:<id> of a job that will make it. An error says in `detail` what is wrong and in `hint` what helps."
)
Context = ServerRequestContext[Any, Any]


def server_for(find: Callable[[], Caller]) -> Server[Any]:
    """A server whose every call is made by the caller that `find` answers with; it may ask the database."""
    desk = Desk(find)
    return Server(
        "miStudio",
        version=VERSION,
        instructions=INSTRUCTIONS,
        on_list_tools=desk.list_tools,
        on_call_tool=desk.call_tool,
        get_tool_input_schema=lambda name: None,  # no argument of ours travels in a header
    )


class Desk:
    def __init__(self, find: Callable[[], Caller]) -> None:
        self.find = in_thread(find)

    async def list_tools(
        self, context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        caller = await self.find()
        return types.ListToolsResult(
            tools=[shown(tool) for tool in all_tools().values() if tool.scope in caller.scopes]
        )

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> types.CallToolResult:
        name, given, caller = params.name, params.arguments or {}, await self.find()
        if name in all_tools() and all_tools()[name].waits:
            answer = await self.wait(context, caller, name, given)
        else:
            answer = await in_thread(calls.call)(caller, name, given)
        if answer.outcome == "unknown_tool":
            raise MCPError(types.INVALID_PARAMS, str(answer.data["detail"]))
        text = types.TextContent(type="text", text=answer.text)
        return types.CallToolResult(content=[text], structured_content=answer.data, is_error=answer.failed)

    async def wait(self, context: Context, caller: Caller, name: str, given: dict[str, Any]) -> Answer:
        began, answer = time.monotonic(), calls.GONE
        look = partial(in_thread(calls.perform), caller, name, given)
        try:
            asked = calls.sound(all_tools()[name], given)
            peek = partial(in_thread(waiting.peek), asked["id"])
            with waiting.one_of_few(caller.user.pk):
                answer = await waiting.wait(look, peek, asked["seconds"], context.session.report_progress)
        except (APIException, DatabaseError) as error:  # between the looks, too
            answer = calls.envelope(error)
        finally:  # an agent that has gone away leaves its row, too
            with anyio.CancelScope(shield=True):
                await in_thread(calls.note)(caller, name, given, answer, began)
        return answer


def shown(tool: Tool) -> types.Tool:
    return types.Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.schema,
        annotations=types.ToolAnnotations(
            title=tool.title,
            read_only_hint=tool.reads_only,
            destructive_hint=tool.destroys,
            open_world_hint=False,
        ),
    )
