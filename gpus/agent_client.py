"""Ask this host's agent for a card now, not in two seconds. Loads next to nothing: keepers use it."""

from __future__ import annotations

import json
import socket
from typing import Any

SOCKET_NAME = "agent.sock"


def socket_path() -> str:
    from django.conf import settings

    return str(settings.MISTUDIO_SOCKETS / SOCKET_NAME)


def fresh(uuid: str, timeout: float = 1.0) -> dict[str, Any] | None:
    """`{"uuid", "reading", "processes", "sampled_at"}` of this moment; `None` when the agent or card is silent."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            connection.connect(socket_path())
            connection.sendall(f"fresh {uuid}\n".encode())
            answer = json.loads(connection.makefile().readline() or "{}")
    except (OSError, ValueError):
        return None
    return answer if "reading" in answer else None
