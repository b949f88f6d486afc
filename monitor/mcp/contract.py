"""All tools as one JSON text: `docs/mcp-tools.json`, made by `manage.py mcp --contract` and never by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.conf import settings

from monitor.mcp.tools import Tool, all_tools

FILE = Path("docs") / "mcp-tools.json"


def shown(tool: Tool) -> dict[str, Any]:
    return {
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "scope": tool.scope,
        "reads_only": tool.reads_only,
        "input_schema": tool.schema,
    }


def text(tools: Iterable[Tool] | None = None) -> str:
    """In the order in which agents are shown them."""
    listed = [shown(tool) for tool in (all_tools().values() if tools is None else tools)]
    return json.dumps({"tools": listed}, indent=1, ensure_ascii=False) + "\n"


def write() -> Path:
    path = settings.BASE_DIR / FILE
    path.write_text(text())
    return path
