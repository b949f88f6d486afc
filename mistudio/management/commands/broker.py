"""`manage.py broker`: the private broker alone, for an installation whose processes are services (`up` has its own)."""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from mistudio import broker, home


class Command(BaseCommand):
    help = "Become the private broker of this data folder, on a unix socket."

    def handle(self, *args: Any, **options: Any) -> None:
        if os.environ.get("REDIS_URL"):
            raise CommandError("REDIS_URL is set: that server is the broker.")
        path = home.socket_folder(settings.MISTUDIO_HOME) / "broker.sock"
        command = broker.command(path, settings.MISTUDIO_HOME / "run" / "broker")
        os.execv(command[0], command)  # noqa: S606 (no shell, our own words)
