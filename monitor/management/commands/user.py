"""`manage.py user add|list|disable|enable|email`: the people of this installation."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from getpass import getpass
from typing import Any

from django.contrib.auth import get_user_model, password_validation
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.core.validators import validate_email

from jobs.models import FINAL, Job
from monitor import operator
from monitor.signin import base_url, make_link


class Command(BaseCommand):
    help = "Add, list, disable and enable people. A new one gets a password typed here, or a link that signs in once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        acts = parser.add_subparsers(dest="act", required=True)
        add = acts.add_parser(
            "add", help="asks for a password; without a terminal, or left empty: prints a sign-in link"
        )
        add.add_argument("name")
        add.add_argument(
            "--staff",
            action="store_true",
            help="sees and controls every job and card; rights in the admin are given there",
        )
        add.add_argument("--email", default="", help="for messages about the ends of jobs")
        add.add_argument("--link", action="store_true", help="ask for no password")
        acts.add_parser("list", help="everybody, with what they run")
        for act, says in (("disable", "signs out, refuses tokens; jobs go on"), ("enable", "lets in again")):
            acts.add_parser(act, help=says).add_argument("name")
        email = acts.add_parser("email", help="set or remove somebody's address")
        email.add_argument("name")
        email.add_argument("address", nargs="?", default="")

    def handle(self, *args: Any, **options: Any) -> None:
        getattr(self, options["act"])(options)

    def add(self, options: dict[str, Any]) -> None:
        users = get_user_model().objects
        if users.filter(username__iexact=options["name"]).exists():
            raise CommandError(f"There is a user {options['name']!r} already.")
        user = User(username=options["name"], email=good_email(options["email"]), is_staff=options["staff"])
        password = None if options["link"] or not sys.stdin.isatty() else asked_password(user)
        user.set_password(password)
        try:
            user.full_clean(exclude=["password"])
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        user.save()
        self.stdout.write(f"{user} is added{' as staff' if user.is_staff else ''}.")
        if password is None:
            self.stdout.write(f"Signs in once, within 15 minutes: {make_link(base_url(), user)}")
            self.stdout.write(f"Another link later: manage.py signin-link --user {user}")

    def list(self, options: dict[str, Any]) -> None:
        for user in get_user_model().objects.order_by("username"):
            words = [
                word for word, holds in (("staff", user.is_staff), ("disabled", not user.is_active)) if holds
            ]
            seen = f"last in {user.last_login:%Y-%m-%d}" if user.last_login else "never signed in"
            about = [*words, user.email or "no address", seen, f"{open_jobs(user)} jobs not ended"]
            self.stdout.write(f"{user.get_username()}: {', '.join(about)}")

    def disable(self, options: dict[str, Any]) -> None:
        user = named(options["name"])
        if user.get_username() == operator.NAME:
            raise CommandError("The operator is the way in when all else fails, and cannot be disabled.")
        User.objects.filter(pk=user.pk).update(is_active=False)
        self.stdout.write(
            f"{user} is let in no more. {open_jobs(user)} of their jobs have not ended, and go on."
        )

    def enable(self, options: dict[str, Any]) -> None:
        user = named(options["name"])
        User.objects.filter(pk=user.pk).update(is_active=True)
        self.stdout.write(f"{user} is let in again.")

    def email(self, options: dict[str, Any]) -> None:
        user = named(options["name"])
        User.objects.filter(pk=user.pk).update(email=good_email(options["address"]))
        self.stdout.write(f"{user}: {options['address'] or 'no address'}")


def named(name: str) -> User:
    user = User.objects.filter(username=name).first()
    if user is None:
        raise CommandError(f"There is no user {name!r}; see `manage.py user list`.")
    return user


def open_jobs(user: Any) -> int:
    return Job.objects.filter(owner=user).exclude(status__in=FINAL).count()


def good_email(address: str) -> str:
    try:
        if address:
            validate_email(address)
    except ValidationError:
        raise CommandError(f"{address!r} is no e-mail address.") from None
    return address


def asked_password(user: User) -> str | None:
    """Typed twice, on the terminal alone; an empty one means none."""
    while True:
        password = getpass(f"Password of {user} (empty: none, a link instead): ")
        if not password:
            return None
        try:
            password_validation.validate_password(password, user)
        except ValidationError as error:
            print(" ".join(error.messages))
            continue
        if getpass("Again: ") == password:
            return password
        print("The two differ.")
