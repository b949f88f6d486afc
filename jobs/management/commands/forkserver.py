from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from setproctitle import setproctitle

from jobs import forkserver


class Command(BaseCommand):
    help = "Makes keepers for the worker that started it (not for use by hand)."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("socket", type=int)

    def handle(self, *args: Any, **options: Any) -> None:
        setproctitle("mistudio forkserver")
        forkserver.serve(options["socket"])
