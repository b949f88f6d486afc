"""`manage.py signin-link [--user NAME]`: print a link that signs in once, within 15 minutes."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser

from monitor.signin import base_url, make_link


class Command(BaseCommand):
    help = "Print a link that signs the operator (or --user) in: once, within 15 minutes."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--user", help="who is signed in; default: the operator")
        parser.add_argument("--next", default="/", help="the page to open then")
        parser.add_argument("--base-url", help="default: MISTUDIO_PUBLIC_URL, else where `up` serves")

    def handle(self, *args: Any, **options: Any) -> None:
        user = self.user(options["user"]) if options["user"] else None
        self.stdout.write(make_link(options["base_url"] or base_url(), user, options["next"]))

    def user(self, name: str) -> Any:
        user = get_user_model().objects.filter(username=name, is_active=True).first()
        if user is None:
            raise CommandError(f"There is no active user {name!r}.")
        return user
