"""The page of one's own tokens: the value shown once, only one's own, gone at once."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from monitor import operator
from monitor.models import ApiToken
from tests.monitor.conftest import token_for
from tests.monitor.test_why import browser

pytestmark = pytest.mark.django_db


def make(client: Client, **form: Any) -> Any:
    return client.post("/tokens/", {"name": "notebook", "scopes": ["submit", "read"], "days": "30"} | form)


def test_the_value_is_shown_once_and_works(alice: User) -> None:
    client = browser(alice)
    answer = make(client)
    value = re.search(r'<pre id="value">(\w+)</pre>', answer.content.decode())[1]
    assert answer.status_code == 201
    assert "no-store" in answer["Cache-Control"]
    assert value not in client.get("/tokens/").content.decode()
    assert Client().get("/api/v1/jobs/", headers={"Authorization": f"Token {value}"}).status_code == 200
    token = ApiToken.objects.get()
    assert (token.user, token.name, token.scopes) == (alice, "notebook", ["read", "submit"])
    assert abs(token.expiry - timezone.now() - timedelta(days=30)) < timedelta(minutes=1)


def test_the_list_says_what_each_may_and_how_it_begins(alice: User) -> None:
    value = token_for(alice, "read", "control", expiry=None)
    html = browser(alice).get("/tokens/").content.decode()
    assert "read, control" in html
    assert f"{value[:8]}…" in html
    assert value[:16] not in html


@pytest.mark.parametrize(("days", "ends"), [("", None), ("7", 7), ("nonsense", 90)])
def test_how_long_it_lives(alice: User, days: str, ends: int | None) -> None:
    make(browser(alice), days=days)
    expiry = ApiToken.objects.get().expiry
    assert expiry is None if ends is None else abs((expiry - timezone.now()).days - ends) <= 1


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"name": ""}, "t-name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["all"]}, "scopes"),
        ({"name": "a\0"}, "t-name"),
    ],
)
def test_what_is_wrong_stands_at_its_field_and_makes_nothing(
    alice: User, form: dict[str, Any], field: str
) -> None:
    answer = make(browser(alice), **form)
    html = answer.content.decode()
    assert answer.status_code == 400
    assert re.search(rf'{field}"[^>]*aria-invalid="true"', html)
    assert 'class="error"' in html
    assert not ApiToken.objects.exists()


def test_what_was_typed_is_kept(alice: User) -> None:
    html = make(browser(alice), name="x" * 90, scopes=["control"]).content.decode()
    assert "x" * 90 in html
    assert re.search(r'value="control" checked', html)
    assert not re.search(r'value="read" checked', html)
    assert re.search(r'value="30" selected', html)


def test_revoked_is_revoked_at_once(alice: User) -> None:
    value = token_for(alice, "read")
    token = ApiToken.objects.get()
    client = browser(alice)
    assert f'action="/tokens/{token.public_id}/revoke/"' in client.get("/tokens/").content.decode()
    answer = client.post(f"/tokens/{token.public_id}/revoke/", follow=True)
    assert "test is revoked" in answer.content.decode()
    assert Client().get("/api/v1/jobs/", headers={"Authorization": f"Token {value}"}).status_code == 401


def test_tokens_of_others_do_not_exist_for_staff_either(alice: User, staff: User) -> None:
    token_for(alice, "read")
    token = ApiToken.objects.get()
    client = browser(staff)
    assert str(token.public_id) not in client.get("/tokens/").content.decode()
    assert client.post(f"/tokens/{token.public_id}/revoke/").status_code == 404
    assert client.get(f"/tokens/{token.public_id}/revoke/").status_code == 405


def test_a_token_opens_no_page(alice: User) -> None:
    """It is for programs; who holds one with little scope must not make a stronger one here."""
    header = {"Authorization": f"Token {token_for(alice, 'read')}"}
    for answer in (Client().get("/tokens/", headers=header), Client().post("/tokens/", headers=header)):
        assert answer.status_code == 302


def test_the_operators_file_is_named(db: None) -> None:
    owner = operator.account()
    ApiToken.objects.create(user=owner, name=operator.TOKEN_NAME, scopes=["read"])
    assert "of the data folder" in browser(owner).get("/tokens/").content.decode()


def test_every_page_leads_there(alice: User) -> None:
    assert 'href="/tokens/"' in browser(alice).get("/jobs/").content.decode()
