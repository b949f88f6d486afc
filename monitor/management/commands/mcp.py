"""`manage.py mcp`: the MCP server over standard input and output, for an agent on this machine (docs/mcp.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from gpus.rest import SCOPES
from monitor import access, operator
from monitor.mcp import contract
from monitor.mcp.caller import Caller


class Command(BaseCommand):
    help = "Serve agents over standard input and output. Who may start this may read the database: no token is asked."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--user", default=operator.NAME, help="who calls; default: the operator")
        parser.add_argument(
            "--scope", action="append", choices=SCOPES[:3], help="what may be done, repeated; default: read"
        )
        parser.add_argument("--token-file", type=Path, help="call with the user and the scopes of this token")
        parser.add_argument("--contract", action="store_true", help=f"write {contract.FILE} and end")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["contract"]:
            self.stdout.write(f"{contract.write()}")
            return
        find = self.finder(options)
        find()  # who cannot call is told now, not at the first call
        try:
            asyncio.run(serve(find))
        except KeyboardInterrupt:
            pass

    def finder(self, options: dict[str, Any]) -> Callable[[], Caller]:
        if options["token_file"]:
            return lambda: by_token(options["token_file"])
        return lambda: by_name(options["user"], tuple(options["scope"] or ["read"]))


def by_token(path: Path) -> Caller:
    """Asked before each call: a token that is revoked ends here, too."""
    try:
        token = access.token_of(f"Bearer {path.read_text().strip()}")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"No token can be read from {path}: {error}") from None
    if token is None:
        raise CommandError(f"The token in {path} is unknown, has expired or was revoked.")
    return Caller.of(token)


def by_name(name: str, scopes: tuple[str, ...]) -> Caller:
    user = get_user_model().objects.filter(username=name, is_active=True).first()
    if user is None:
        raise CommandError(f"There is no active user {name!r}.")
    return Caller(user, scopes)


async def serve(find: Callable[[], Caller]) -> None:
    from mcp.server.stdio import stdio_server

    from monitor.mcp.server import server_for

    server = server_for(find)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())
