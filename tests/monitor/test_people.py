"""People: added, disabled and written to by commands; what they choose themselves on their page."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client

from jobs.models import MailChoice, Message
from monitor import operator
from monitor.signin import BACKEND
from tests.jobs.test_states import make_job
from tests.monitor.conftest import token_for

pytestmark = pytest.mark.django_db


def browser(user: User) -> Client:
    client = Client()
    client.force_login(user, backend=BACKEND)
    return client


def test_a_new_person_gets_in_by_a_link_once(capsys: Any, client: Client) -> None:
    call_command("user", "add", "carol", "--email", "carol@example.org")
    link = next(word for word in capsys.readouterr().out.split() if word.startswith("http"))
    carol = User.objects.get(username="carol")
    assert (carol.is_staff, carol.has_usable_password()) == (False, False)
    key = {"key": link.partition("key=")[2].replace("%3A", ":")}
    assert client.post("/signin/link/", key).status_code == 302
    assert client.get("/me/").status_code == 200
    assert Client().post("/signin/link/", key).status_code == 410


def test_a_password_is_typed_on_the_terminal_and_must_be_good(monkeypatch: Any, capsys: Any) -> None:
    typed = iter(["12345678", "correct horse", "other", "correct horse", "correct horse"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("monitor.management.commands.user.getpass", lambda prompt: next(typed))
    call_command("user", "add", "carol", "--staff")
    carol = User.objects.get(username="carol")
    assert carol.is_staff and carol.check_password("correct horse")
    said = capsys.readouterr().out
    assert "too common" in said and "differ" in said and "http" not in said and "horse" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add", "ALICE"], "already"),
        (["add", "x y"], "valid username"),
        (["add", "dan", "--email", "dan"], "no e-mail address"),
        (["disable", "nobody"], "no user"),
        (["disable", operator.NAME], "cannot be disabled"),
    ],
)
def test_it_says_what_it_will_not_do(alice: User, words: list[str], says: str) -> None:
    operator.account()
    with pytest.raises(CommandError, match=says):
        call_command("user", *words)
    assert User.objects.count() == 2


def test_who_is_disabled_is_out_at_once_and_the_jobs_go_on(alice: User, capsys: Any) -> None:
    page, job, token = browser(alice), make_job(alice), token_for(alice)
    call_command("user", "disable", "alice")
    assert "1 of their jobs" in capsys.readouterr().out
    assert page.get("/me/").status_code == 302
    with_token = Client().get("/api/v1/jobs/", headers={"Authorization": f"Token {token}"})
    assert with_token.status_code in (401, 403)
    job.refresh_from_db()
    assert job.status == "queued"
    call_command("user", "list")
    assert "alice: disabled, no address" in capsys.readouterr().out
    call_command("user", "enable", "alice")
    assert Client().get("/api/v1/jobs/", headers={"Authorization": f"Token {token}"}).status_code == 200


def test_one_chooses_ones_own_mails(alice: User, bob: User) -> None:
    page = browser(alice)
    assert b'value="failure" checked' in page.get("/me/").content
    assert page.post("/me/", {"when": "always"}).status_code == 302
    assert b'value="always" checked' in page.get("/me/").content
    assert page.post("/me/", {"when": "hourly"}).status_code == 400
    assert {choice.user for choice in MailChoice.objects.all()} == {alice}


def test_health_tells_of_messages_that_do_not_arrive(alice: User, staff: User) -> None:
    Message.objects.create(
        channel="webhook", event="test", payload={}, last_error="host.example did not answer"
    )
    seen = browser(alice).get("/health/").content.decode()
    assert "1 not delivered yet" in seen and "host.example" not in seen
    assert "host.example did not answer" in browser(staff).get("/health/").content.decode()
