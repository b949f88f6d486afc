from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from jobs import keeper


class Command(BaseCommand):
    help = "Keeps one attempt of a job (started by the worker, not by hand)."
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("job")
        parser.add_argument("attempt", type=int)

    def handle(self, *args: Any, **options: Any) -> None:
        keeper.main(options["job"], options["attempt"])
