"""`manage.py notify [--test]`: what the outbox holds; a test message through every channel, now."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from jobs import messages, postman
from jobs.models import Message

UNSET = "Nothing is set up: set MISTUDIO_WEBHOOK_URL, or MISTUDIO_EMAIL_URL and MISTUDIO_EMAIL_FROM."


class Command(BaseCommand):
    help = (
        "Say how messages to people fare; with --test send one through every channel, and say what came back."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--test", action="store_true", help="send a test message now")
        parser.add_argument("--to", help="where the test mail goes; default: the operators' own addresses")

    def handle(self, *args: Any, **options: Any) -> None:
        if not (settings.MISTUDIO_WEBHOOK_URL or settings.MISTUDIO_EMAIL_URL):
            raise CommandError(UNSET)
        if not options["test"]:
            return self.tell()
        results = [self.send(message) for message in self.tests(options["to"])]
        if not all(results):
            raise CommandError("Not every message has arrived.")

    def tell(self) -> None:
        found = postman.summary()
        waits, sent = Message.objects.filter(due_at__isnull=False), Message.objects.exclude(sent_at=None)
        self.stdout.write(f"{waits.count()} wait, {found['failing']} of them after a failure; {sent.count()} were sent "
                          f"in 30 days, {found['given_up']} given up in 7. {found['last_error']}")  # fmt: skip

    def tests(self, to: str | None) -> list[Message]:
        """Not rows: a test is answered here, and tried once."""
        rows = (
            [Message(channel=Message.Channel.WEBHOOK, event="test", payload={})]
            if settings.MISTUDIO_WEBHOOK_URL
            else []
        )
        addresses = [to] if to else list(messages.operators())
        if settings.MISTUDIO_EMAIL_URL and not addresses:
            self.stderr.write("mail: no operator has an address; name one with --to.")
        return rows + [
            messages.mail("test", {}, address) for address in addresses if settings.MISTUDIO_EMAIL_URL
        ]

    def send(self, message: Message) -> bool:
        try:
            self.stdout.write(f"{message.channel}: {postman.SENDERS[message.channel](message)}")
        except postman.Undelivered as why:
            self.stderr.write(f"{message.channel}: {why}")
            return False
        return True
