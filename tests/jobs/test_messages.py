"""Messages: written with what they tell, delivered to real servers, none lost, none that holds up anybody."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import transaction
from django.utils import timezone

from gpus import inventory
from gpus.models import Host
from gpus.sampling import Card
from jobs import endings, letters, postman, readiness, verbs
from jobs.exceptions import JobRejected
from jobs.models import ACTIVE, Job, MailChoice, Message, Status
from tests.jobs.test_states import attempt_of, make_job, running  # noqa: F401 (a fixture)
from tests.stubs.receivers import Mailbox, Receiver


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    server = Receiver()
    settings.MISTUDIO_WEBHOOK_URL, settings.MISTUDIO_WEBHOOK_SECRET = urlsplit(server.url), "between us"
    settings.MISTUDIO_TIME_SCALE = 0.01
    yield server
    server.close()


@pytest.fixture
def mailbox(settings: Any) -> Iterator[Mailbox]:
    server = Mailbox()
    settings.MISTUDIO_EMAIL_URL, settings.MISTUDIO_EMAIL_FROM = urlsplit(server.url), "mistudio@example.org"
    yield server
    server.close()


def make_due() -> None:
    Message.objects.filter(due_at__isnull=False).update(due_at=timezone.now())


def broken(*args: Any) -> None:
    raise OSError("the disk is full")


# What is written ----------------------------------------------------------------------------------------


def test_an_end_and_its_message_are_written_together_or_not_at_all(running: Job, receiver: Receiver) -> None:  # noqa: F811
    with transaction.atomic():
        running.move(ACTIVE, Status.FAILED, failure_reason="error")
        transaction.set_rollback(True)
    assert not Message.objects.exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Message.objects, "bulk_create", broken)
        with pytest.raises(OSError, match="full"):
            running.move(ACTIVE, Status.FAILED)
    assert Job.objects.get(pk=running.pk).status == Status.RUNNING
    endings.fail(
        Job.objects.get(pk=running.pk), attempt_of(running), "out_of_memory", "secret /home/alice", "hint"
    )
    message = Message.objects.get()
    assert message.event == "job.failed"
    assert message.payload["job"]["failure_reason"] == "out_of_memory"


def test_every_end_is_told_and_a_state_in_between_is_not(alice: User, receiver: Receiver) -> None:
    def fresh(**fields: Any) -> Job:
        return make_job(alice, **fields)

    verbs.cancel(fresh(), alice)
    readiness.turn_away(fresh(), JobRejected("no", reason="rejected"))
    readiness.turn_away(fresh(), JobRejected("the input failed", reason="input_failed"))
    verbs.hold(fresh(), alice)
    fresh(status=Status.RUNNING).move([Status.RUNNING], Status.QUEUED)
    fresh(status=Status.RUNNING).move([Status.RUNNING], Status.SUCCEEDED)
    told = [message.event for message in Message.objects.order_by("created_at")]
    assert told == ["job.cancelled", "job.refused", "job.held", "job.succeeded"]


def test_it_holds_nothing_that_others_may_not_see(alice: User, receiver: Receiver, mailbox: Mailbox) -> None:
    alice.email = "alice@example.org"
    alice.save()
    job = make_job(
        alice, name="two\r\nBcc: all@example.org", params={"token": "hf_SECRET"}, result={"a": "hf_SECRET"}
    )
    job.move([Status.QUEUED], Status.REFUSED, error="hf_SECRET", hint="hf_SECRET", traceback="hf_SECRET")
    for message in Message.objects.all():
        assert "hf_SECRET" not in json.dumps(letters.body(message)) + "".join(letters.letter(message))
    postman.deliver_due()
    assert mailbox.got[0][1] == ["alice@example.org"]
    assert len(receiver.got) == 1


@pytest.mark.parametrize(
    ("when", "told"),
    [
        (None, ["failed"]),
        ("failure", ["failed"]),
        ("always", ["failed", "succeeded", "cancelled"]),
        ("never", []),
    ],
)
def test_people_choose_which_mails_they_get(
    alice: User, mailbox: Mailbox, when: str | None, told: list[str]
) -> None:
    alice.email = "alice@example.org"
    alice.save()
    if when:
        MailChoice.objects.create(user=alice, when=when)
    for status in (Status.FAILED, Status.SUCCEEDED, Status.CANCELLED):
        make_job(alice).move([Status.QUEUED], status)
    assert [m.payload["job"]["status"] for m in Message.objects.order_by("created_at")] == told


def test_without_a_receiver_nothing_is_written(alice: User) -> None:
    make_job(alice).move([Status.QUEUED], Status.FAILED)
    assert not Message.objects.exists()


def test_a_lost_card_is_told_to_the_operator(living_host: Host, receiver: Receiver, mailbox: Mailbox) -> None:
    User.objects.create_superuser("boss", "boss@example.org")
    User.objects.create_user("alice", "alice@example.org")
    card = Card({"uuid": "GPU-1", "index": 0, "name": "A", "memory_total_bytes": 1, "simulated": False})
    sight = inventory.Sight("alpha", "boot", cards=[card])
    inventory.record(sight)
    card.lost, card.error = True, "fell off the bus"
    inventory.record(sight)
    inventory.record(sight)
    assert sorted((m.channel, m.event, m.address) for m in Message.objects.all()) == [
        ("email", "card.lost", "boss@example.org"),
        ("webhook", "card.lost", ""),
    ]
    postman.deliver_due()
    assert "fell off the bus" in mailbox.got[0][2]


# Delivery -----------------------------------------------------------------------------------------------


def test_it_is_signed_and_sent_once(alice: User, receiver: Receiver) -> None:
    make_job(alice, name="one").move([Status.QUEUED], Status.FAILED)
    postman.deliver_due()
    make_due()
    postman.deliver_due()
    ((headers, body),) = receiver.got
    assert (
        headers["x-mistudio-signature"]
        == "sha256=" + hmac.new(b"between us", body, hashlib.sha256).hexdigest()
    )
    told = json.loads(body)
    assert told["text"] == "miStudio: one has failed"
    assert told["id"] == headers["x-mistudio-delivery"] == str(Message.objects.get().pk)


def test_it_tries_again_less_and_less_often_and_loses_none(alice: User, receiver: Receiver) -> None:
    receiver.plan = [500, 302]
    for name in ("one", "two"):
        make_job(alice, name=name).move([Status.QUEUED], Status.FAILED)
    postman.deliver_due()
    assert receiver.asked == 1, "the other one is left alone while the receiver is not well"
    make_due()
    for _ in range(2):
        postman.deliver_due()
        make_due()
    assert receiver.asked == 4
    assert sorted(json.loads(body)["job"]["name"] for _, body in receiver.got) == ["one", "two"]
    assert not [headers for headers, _ in receiver.got if "followed" in headers]
    assert not Message.objects.filter(sent_at=None).exists()


def test_the_pauses_double_to_an_hour(db: None) -> None:
    message = Message.objects.create(channel="webhook", event="test", payload={})
    pauses = []
    for message.tries in (1, 2, 3, 9, 10, 200):
        postman.put_off(message, "away")
        message.refresh_from_db(fields=["due_at"])
        pauses.append(round((message.due_at - timezone.now()).total_seconds()))
    assert pauses == [10, 20, 40, 2560, 3600, 3600]


@pytest.mark.parametrize("how", ["hang", pytest.param("drip", marks=pytest.mark.slow)])
def test_a_receiver_that_hangs_is_left_in_time(
    alice: User, receiver: Receiver, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postman, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(postman, "LIMIT_SECONDS", 1.0)
    receiver.plan = [how]
    make_job(alice).move([Status.QUEUED], Status.FAILED)
    began = time.monotonic()
    postman.deliver_due()
    assert time.monotonic() - began < 2
    message = Message.objects.get()
    assert message.due_at and "127.0.0.1" in message.last_error and "secret" not in message.last_error


def test_a_postman_that_is_killed_loses_none(
    alice: User, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_job(alice).move([Status.QUEUED], Status.FAILED)

    def killed(message: Message) -> str:
        raise KeyboardInterrupt

    monkeypatch.setitem(postman.SENDERS, "webhook", killed)
    with pytest.raises(KeyboardInterrupt):
        postman.deliver_due()
    monkeypatch.undo()
    postman.deliver_due()
    assert not receiver.got, "another postman leaves it alone while the first may still be at it"
    make_due()
    postman.deliver_due()
    assert len(receiver.got) == 1


def test_after_a_day_it_is_given_up_and_health_says_so(alice: User, receiver: Receiver) -> None:
    make_job(alice).move([Status.QUEUED], Status.FAILED)
    receiver.plan = [500, 500]
    postman.deliver_due()
    assert postman.summary()["failing"] == 1
    Message.objects.update(created_at=timezone.now() - timedelta(hours=25))
    make_due()
    postman.deliver_due()
    found = postman.summary()
    assert (found["failing"], found["given_up"], found["last_error"]) == (0, 1, "The receiver answered 500.")
    Message.objects.update(created_at=timezone.now() - timedelta(days=31))
    postman.prune()
    assert not Message.objects.exists()


def test_an_address_that_is_refused_holds_up_the_others_for_one_round(
    db: None, mailbox: Mailbox, settings: Any
) -> None:
    settings.MISTUDIO_TIME_SCALE = 0.01
    for name in ("nobody", "somebody"):
        user = User.objects.create_user(name, f"{name}@example.org")
        make_job(user).move([Status.QUEUED], Status.FAILED)
    postman.deliver_due()
    postman.deliver_due()
    assert [to for _, to, _ in mailbox.got] == [["somebody@example.org"]]


@pytest.mark.parametrize("address", ["somebody@a b", f"x@{'y' * 70}.org", "a@b.org\nBcc: c@d.org"])
def test_an_address_that_no_mail_can_have_holds_up_nobody(
    db: None, mailbox: Mailbox, receiver: Receiver, address: str
) -> None:
    """It comes first in every round, and is given up like any other."""
    bad = Message.objects.create(channel="email", event="test", payload={}, address=address)
    for channel in ("webhook", "email"):
        Message.objects.create(channel=channel, event="test", payload={}, address="alice@example.org")
    for _ in range(2):
        postman.deliver_due()
    assert ([to for _, to, _ in mailbox.got], len(receiver.got)) == ([["alice@example.org"]], 1)
    bad.refresh_from_db()
    assert bad.last_error.startswith("No mail can be written with these addresses") and bad.due_at


def test_a_fault_of_ours_holds_up_nobody(alice: User, receiver: Receiver, mailbox: Mailbox) -> None:
    bad = Message.objects.create(
        channel="email", event="job.new", payload={"job": {}}, address="a@example.org"
    )
    make_job(alice).move([Status.QUEUED], Status.FAILED)
    postman.deliver_due()
    assert len(receiver.got) == 1
    bad.refresh_from_db()
    assert (bad.last_error, bad.tries) == ("It could not be sent: KeyError.", 1)


def test_who_was_let_out_gets_no_mail(alice: User, mailbox: Mailbox) -> None:
    User.objects.filter(pk=alice.pk).update(is_active=False, email="alice@example.org")
    make_job(User.objects.get(pk=alice.pk)).move([Status.QUEUED], Status.FAILED)
    assert not Message.objects.exists()


@pytest.mark.django_db
def test_the_test_message_says_what_came_back(receiver: Receiver, mailbox: Mailbox, capsys: Any) -> None:
    call_command("notify", "--test", "--to", "boss@example.org")
    said = capsys.readouterr().out
    assert "webhook: answered 200" in said and "took the mail for boss@example.org" in said
    assert "Subject: miStudio: a test" in mailbox.got[0][2]
    receiver.plan = [404]
    with pytest.raises(CommandError):
        call_command("notify", "--test", "--to", "nobody@example.org")
    said = capsys.readouterr().err
    assert "webhook: The receiver answered 404." in said and "does not take mail for this address" in said
    assert not Message.objects.exists()
