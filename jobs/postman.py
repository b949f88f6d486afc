"""Delivers the outbox: one round at a time, in a thread of its own, so that a receiver that hangs holds up nobody.

Each message reaches its receiver at least once until that says that it has it, and is not sent again after that. Who
was killed between the two sends it twice: `id` stays the same.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import smtplib
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, unquote

from django.conf import settings
from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend
from django.db import connections
from django.db.models import F, QuerySet
from django.utils import timezone

from gpus.shapes import iso
from gpus.timing import scaled
from jobs import letters
from jobs.models import Message
from jobs.turns import one_at_a_time
from jobs.version import VERSION

logger = logging.getLogger(__name__)

ROUND_SECONDS = 60.0
#: A silence of the receiver, and all that a webhook may take for one message.
TIMEOUT_SECONDS, LIMIT_SECONDS = 5.0, 10.0
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 3600.0
#: So long after its claim, a message whose postman was killed is due again.
CLAIM_SECONDS = 60.0
GIVE_UP = timedelta(days=1)
KEPT = timedelta(days=30)


class Undelivered(Exception):
    """Why the receiver does not have it, in a sentence without secrets: addresses of webhooks are such."""


# Rounds -------------------------------------------------------------------------------------------------
_lock = threading.Lock()
_thread: threading.Thread | None = None


def wake() -> None:
    """Begin a round, unless one of this process is under way."""
    global _thread  # noqa: PLW0603 (one per process)
    with _lock:
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_round, name="postman", daemon=True)
            _thread.start()


def _round() -> None:
    try:
        with one_at_a_time("messages") as mine:
            if mine:
                deliver_due()
    except Exception:
        logger.exception("messages")
    finally:
        connections.close_all()


def due() -> QuerySet[Message]:
    return Message.objects.filter(due_at__lte=timezone.now()).order_by("due_at", "created_at")[:500]


def deliver_due() -> None:
    """What is due, oldest first. A channel that failed once is left alone for the rest of the round."""
    deadline, silent = time.monotonic() + ROUND_SECONDS, set()
    for message in due():
        if time.monotonic() > deadline:
            return
        if message.channel not in silent and claim(message) and not deliver(message):
            silent.add(message.channel)


def claim(message: Message) -> bool:
    """Only for now: without an answer from us it is due again, and another host may take it."""
    later = timezone.now() + timedelta(seconds=max(2 * LIMIT_SECONDS, scaled(CLAIM_SECONDS)))
    here = Message.objects.filter(pk=message.pk, due_at=message.due_at)
    return bool(here.update(due_at=later, tries=F("tries") + 1))


def deliver(message: Message) -> bool:
    message.refresh_from_db()
    try:
        SENDERS[message.channel](message)
    except Undelivered as why:
        put_off(message, str(why))
        return False
    except Exception as error:  # a fault of ours with this one; those behind it are not to wait for it
        logger.exception("%s", message)
        put_off(message, f"It could not be sent: {type(error).__name__}.")
        return False
    now = timezone.now()
    Message.objects.filter(pk=message.pk).update(sent_at=now, due_at=None, last_error="")
    return True


def put_off(message: Message, why: str) -> None:
    pause = scaled(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(20, message.tries - 1)))
    values: dict[str, Any] = {"due_at": timezone.now() + timedelta(seconds=pause), "last_error": why}
    if timezone.now() - message.created_at > GIVE_UP:
        values |= {"due_at": None, "given_up_at": timezone.now()}
        logger.error("%s is given up after %d tries: %s", message, message.tries, why)
    Message.objects.filter(pk=message.pk).update(**values)


def prune() -> None:
    Message.objects.filter(due_at=None, created_at__lt=timezone.now() - KEPT).delete()


# Webhook ------------------------------------------------------------------------------------------------
def send_webhook(message: Message) -> str:
    """One POST; any 2xx is a receipt. Returns what came back."""
    if settings.MISTUDIO_WEBHOOK_URL is None:
        raise Undelivered("MISTUDIO_WEBHOOK_URL is not set any more.")
    body = json.dumps(letters.body(message)).encode()
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"miStudio/{VERSION}",
        "X-Mistudio-Event": message.event,
        "X-Mistudio-Delivery": str(message.pk),
    }
    if secret := settings.MISTUDIO_WEBHOOK_SECRET:
        headers["X-Mistudio-Signature"] = (
            "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
        )
    status = post(settings.MISTUDIO_WEBHOOK_URL, body, headers)
    if 300 <= status < 400:
        raise Undelivered(f"The receiver answered {status}; redirects are not followed.")
    if not 200 <= status < 300:
        raise Undelivered(f"The receiver answered {status}.")
    return f"answered {status}"


def post(url: SplitResult, body: bytes, headers: dict[str, str]) -> int:
    """The status of the answer. `http.client` follows no redirect; the guard ends a receiver that drips."""
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS)
    guard = threading.Timer(LIMIT_SECONDS, lambda: cut(connection))
    guard.start()
    try:
        connection.request("POST", (url.path or "/") + (f"?{url.query}" if url.query else ""), body, headers)
        return connection.getresponse().status
    except TimeoutError:
        raise Undelivered(f"{url.hostname} did not answer within {TIMEOUT_SECONDS:.0f} s.") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Undelivered(f"{url.hostname} could not be reached: {type(error).__name__}.") from None
    finally:
        guard.cancel()
        connection.close()


def cut(connection: http.client.HTTPConnection) -> None:
    with suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


# Mail ---------------------------------------------------------------------------------------------------
def send_email(message: Message) -> str:
    url = settings.MISTUDIO_EMAIL_URL
    if url is None:
        raise Undelivered("MISTUDIO_EMAIL_URL is not set any more.")
    subject, text = letters.letter(message)
    headers = {
        "Message-ID": f"<{message.pk}@{settings.MISTUDIO_EMAIL_FROM.rpartition('@')[2].rstrip('>')}>",
        "Auto-Submitted": "auto-generated",
        "Date": f"{message.created_at:%a, %d %b %Y %H:%M:%S +0000}",
    }
    mail = EmailMessage(subject, text, settings.MISTUDIO_EMAIL_FROM, [message.address], headers=headers)
    mail.connection = mailer(url)
    try:
        mail.send()
    except smtplib.SMTPRecipientsRefused:
        raise Undelivered(f"{url.hostname} does not take mail for this address.") from None
    except ValueError as error:  # of Django, before anything is sent
        raise Undelivered(f"No mail can be written with these addresses: {type(error).__name__}.") from None
    except (OSError, smtplib.SMTPException) as error:
        raise Undelivered(f"{url.hostname} did not take the mail: {type(error).__name__}.") from None
    return f"{url.hostname} took the mail for {message.address}"


def mailer(url: SplitResult) -> EmailBackend:
    ports = {"smtp": 25, "smtp+tls": 587, "smtps": 465}
    return EmailBackend(
        host=url.hostname,
        port=url.port or ports[url.scheme],
        username=unquote(url.username or ""),
        password=unquote(url.password or ""),
        use_tls=url.scheme == "smtp+tls",
        use_ssl=url.scheme == "smtps",
        timeout=TIMEOUT_SECONDS,
    )


SENDERS: dict[str, Callable[[Message], str]] = {
    Message.Channel.WEBHOOK: send_webhook,
    Message.Channel.EMAIL: send_email,
}


def summary() -> dict[str, Any]:
    """For the page of health: what waits after a failure, and what was given up in the last week."""
    failing = Message.objects.filter(due_at__isnull=False).exclude(last_error="")
    given_up = Message.objects.filter(given_up_at__gte=timezone.now() - timedelta(days=7))
    first, last = failing.first(), given_up.last()
    return {
        "failing": failing.count(),
        "since": iso(first.created_at) if first else None,
        "given_up": given_up.count(),
        "last_error": (first or last).last_error if first or last else "",  # type: ignore[union-attr]
    }
