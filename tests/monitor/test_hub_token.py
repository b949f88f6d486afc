"""One's own Hugging Face token: it goes in encrypted, comes out for one's own downloads, and is shown to nobody."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection

from jobs import hub_token
from jobs.context import WorkContext
from jobs.exceptions import JobRejected
from jobs.models import HubToken, Job
from tests.conftest import client_of
from tests.security.conftest import browser

pytestmark = pytest.mark.django_db
API = "/api/v1/hub-token/"
TOKEN = "hf_theSecretOfAlice"


def everything_stored() -> str:
    """All text of all tables."""
    with connection.cursor() as cursor:
        rows = []
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')
            rows += cursor.fetchall()
    return repr(rows)


def job_of(owner: User) -> WorkContext:
    """The context of a job of this user, without its folders."""
    context = WorkContext.__new__(WorkContext)
    context.job = Job.objects.create(kind="model_download", owner=owner)
    return context


def test_it_goes_in_and_never_comes_out(alice: User, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(alice)
    assert client.get(API).json() == {"set_at": None}
    with caplog.at_level(logging.DEBUG):
        told = client.put(API, {"token": TOKEN})
    assert (told.status_code, list(told.json()), told["Cache-Control"]) == (200, ["set_at"], "no-store")
    assert TOKEN not in told.content.decode() + caplog.text + everything_stored()
    assert client.get(API).json() == told.json()
    page = browser(alice).get("/me/").content.decode()
    assert TOKEN not in page and HubToken.objects.get().set_at.strftime("One was set %Y-%m-%d") in page
    assert hub_token.of(alice.pk) == TOKEN
    assert client.delete(API).status_code == 204
    assert not HubToken.objects.exists() and client.get(API).json() == {"set_at": None}


@pytest.mark.parametrize(
    "wrong", ["", "short", "hf_two words", "hf_line\nend", "hf_é" * 5, "x" * 501, None, 5.5]
)
def test_what_is_no_token_is_refused_and_not_repeated(alice: User, wrong: Any) -> None:
    answer = client_of(alice).put(API, {"token": wrong})
    assert (answer.status_code, list(answer.json()["errors"])) == (400, ["token"])
    page = browser(alice).post("/me/hub-token/", {"token": str(wrong or "")})
    assert (page.status_code, not wrong or str(wrong) in page.content.decode()) == (400, not wrong)
    assert not HubToken.objects.exists()


def test_the_page_sets_replaces_and_forgets(alice: User) -> None:
    page = browser(alice)
    assert b"None is set" in page.get("/me/").content and b"Forget it" not in page.get("/me/").content
    for token in ("hf_theFirstOne", TOKEN):
        assert page.post("/me/hub-token/", {"token": f" {token} "}).status_code == 302
        assert hub_token.of(alice.pk) == token
    assert page.post("/me/hub-token/forget/").status_code == 302
    assert hub_token.of(alice.pk) is None


def test_it_is_given_to_its_owners_downloads_alone(alice: User, bob: User, staff: User) -> None:
    hub_token.keep(alice.pk, TOKEN)
    assert job_of(alice).hub_token() == TOKEN
    assert job_of(bob).hub_token() is False and job_of(staff).hub_token() is False
    assert client_of(bob).get(API).json() == client_of(staff).get(API).json() == {"set_at": None}


def test_the_hosts_own_token_serves_others_only_where_a_setting_says_so(
    alice: User, bob: User, settings: Any
) -> None:
    hub_token.keep(alice.pk, TOKEN)
    settings.MISTUDIO_SHARE_HF_TOKEN = True
    assert job_of(bob).hub_token() is True
    assert job_of(alice).hub_token() == TOKEN


def test_another_secret_key_opens_nothing_and_an_old_one_may_be_named(alice: User, settings: Any) -> None:
    hub_token.keep(alice.pk, TOKEN)
    old, settings.SECRET_KEY = settings.SECRET_KEY, "another"
    with pytest.raises(JobRejected, match="under another secret key") as said:
        job_of(alice).hub_token()
    assert "/me/" in said.value.hint
    settings.SECRET_KEY_FALLBACKS = [old]
    assert hub_token.of(alice.pk) == TOKEN


def test_two_equal_tokens_do_not_look_alike(alice: User, bob: User) -> None:
    stored = [hub_token.keep(user.pk, TOKEN).ciphertext for user in (alice, bob)]
    assert stored[0] != stored[1]
