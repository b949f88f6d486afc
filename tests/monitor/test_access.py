"""Who gets in, and what a token may do: P10 of the contract."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone
from django.utils.regex_helper import normalize
from rest_framework.test import APIClient

from gpus.rest import NoLogin
from monitor import operator, signin
from monitor.models import ApiToken, OneTimeKey
from tests.monitor.conftest import token_for

pytestmark = pytest.mark.django_db
API = "/api/v1"
SIGNIN_PAGES = {"/signin/", "/signin/link/", "/admin/login/"}
SAMPLES = {
    "id": "00000000-0000-7000-8000-000000000000",
    "job_id": "00000000-0000-7000-8000-000000000000",
    "artifact_id": "00000000-0000-7000-8000-000000000000",
    "group_id": "00000000-0000-7000-8000-000000000000",
    "template_id": "00000000-0000-7000-8000-000000000000",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "kind": "sae_training",
    "path": "a",
}


def client_with(value: str, scheme: str = "Token", **headers: str) -> APIClient:
    client = APIClient(**headers)
    client.credentials(HTTP_AUTHORIZATION=f"{scheme} {value}")
    return client


def page_of(user: User, **values: Any) -> Client:
    client = Client(**values)
    client.force_login(user, backend=signin.BACKEND)
    return client


# Everything wants a login -------------------------------------------------------------------------------


def addresses(resolver: URLResolver, prefix: str = "") -> Iterator[tuple[str, URLPattern]]:
    """Every address of the project with sample values, and what answers there."""
    for entry in resolver.url_patterns:
        pattern = prefix + entry.pattern.regex.pattern.lstrip("^")
        if isinstance(entry, URLResolver):
            yield from addresses(entry, pattern)
            continue
        for form, names in normalize(pattern.replace(r"\Z", "")):
            values = {name: SAMPLES.get(name, "1") for name in names}
            yield "/" + form % values, entry


def open_to_strangers(entry: URLPattern, address: str) -> bool:
    view = getattr(entry.callback, "cls", None) or getattr(entry.callback, "view_class", None)
    return address in SIGNIN_PAGES or (isinstance(view, type) and issubclass(view, NoLogin))


@pytest.mark.parametrize("method", ["get", "post", "patch", "delete"])
def test_it_lets_no_stranger_in_anywhere(method: str) -> None:
    client, let_in, seen = Client(enforce_csrf_checks=False), {}, 0
    for address, entry in addresses(get_resolver()):
        if open_to_strangers(entry, address):
            continue
        seen += 1
        answer = getattr(client, method)(address)
        to_signin = answer.status_code == 302 and answer["Location"].startswith(("/signin/", "/admin/"))
        # 405 is said before anybody is asked who they are; it tells and does nothing.
        if answer.status_code not in (401, 403, 405) and not to_signin:
            let_in[address] = answer.status_code
    assert let_in == {}
    assert seen > 40


def test_it_leaves_open_only_what_the_contract_names() -> None:
    views = {address for address, entry in addresses(get_resolver()) if open_to_strangers(entry, address)}
    health = {"/api/v1/system/health", "/system/health", "/api/v1/system/health/", "/system/health/"}
    assert {"/signin/", "/signin/link/"} <= views <= SIGNIN_PAGES | health


def test_it_says_how_to_sign_in() -> None:
    answer = APIClient().get(f"{API}/tokens/")
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Token")
    assert set(answer.json()) == {"code", "detail"}


def test_it_answers_wrong_addresses_in_the_form_of_their_readers() -> None:
    assert APIClient().get(f"{API}/nothing-here/").json()["code"] == "not_found"
    assert "text/html" in Client().get("/nothing-here/")["Content-Type"]


# Tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["Token", "Bearer", "bearer"])
def test_it_takes_a_token_in_both_spellings(alice: User, scheme: str) -> None:
    assert client_with(token_for(alice), scheme).get(f"{API}/tokens/").status_code == 200


@pytest.mark.parametrize("value", ["", "short", "0" * 64, "a b", "\xff" * 40, "0" * 5000, "%00" * 20])
def test_it_refuses_what_is_no_token(alice: User, value: str) -> None:
    assert client_with(value).get(f"{API}/tokens/").status_code == 401


def test_it_refuses_expired_tokens_and_disabled_users(alice: User) -> None:
    old = token_for(alice, expiry=timedelta(seconds=-1))
    assert client_with(old).get(f"{API}/tokens/").status_code == 401
    value = token_for(alice)
    User.objects.filter(pk=alice.pk).update(is_active=False)
    assert client_with(value).get(f"{API}/tokens/").status_code == 401


def test_it_shows_a_token_once_and_stores_its_hash(alice: User) -> None:
    client = page_of(alice)
    made = client.post(f"{API}/tokens/", {"name": "laptop", "scopes": ["submit", "read"]}, "application/json")
    assert made.status_code == 201
    value = made.json()["value"]
    assert made.json()["scopes"] == ["read", "submit"]
    listed = client.get(f"{API}/tokens/").json()["results"]
    assert [row["name"] for row in listed] == ["laptop"]
    assert value not in str(listed)
    assert value not in str(list(ApiToken.objects.values()))
    days = (ApiToken.objects.get().expiry - timezone.now()).days
    assert days == 89
    assert client_with(value).get(f"{API}/tokens").status_code == 200


def test_it_makes_a_token_that_never_expires_when_asked(alice: User) -> None:
    body = {"name": "agent", "scopes": ["read"], "expires_at": None}
    assert page_of(alice).post(f"{API}/tokens/", body, "application/json").json()["expires_at"] is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": "read"},
        {"name": "", "scopes": ["read"]},
        {"name": "x" * 81, "scopes": ["read"]},
        {"name": "x", "scopes": ["read"], "expires_at": "yesterday"},
        {"name": "x", "scopes": ["read"], "expires_at": "2001-01-01T00:00:00Z"},
        {"name": "x", "scopes": [["read"]]},
        [],
    ],
)
def test_it_refuses_bad_tokens_with_the_envelope(alice: User, body: Any) -> None:
    answer = page_of(alice).post(f"{API}/tokens/", body, "application/json")
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
    assert not ApiToken.objects.exists()


def test_it_wants_a_csrf_token_from_sessions_only(alice: User) -> None:
    body = {"name": "x", "scopes": ["read"]}
    by_session = page_of(alice, enforce_csrf_checks=True).post(f"{API}/tokens/", body, "application/json")
    assert by_session.status_code == 403
    client = client_with(token_for(alice, "read", "control"), enforce_csrf_checks=True)
    assert client.post(f"{API}/tokens/", body, format="json").status_code == 201


@pytest.mark.parametrize(
    ("scopes", "wanted", "status"),
    [
        (["read"], ["read"], 403),
        (["read", "control"], ["read"], 201),
        (["read", "control"], ["read", "submit"], 403),
        (["read", "control"], ["admin"], 403),
        (["control", "admin"], ["read", "submit", "admin"], 201),
    ],
)
def test_it_makes_no_token_stronger_than_its_maker(
    alice: User, scopes: list[str], wanted: list[str], status: int
) -> None:
    client = client_with(token_for(alice, *scopes))
    assert client.post(f"{API}/tokens/", {"name": "x", "scopes": wanted}, format="json").status_code == status


def test_it_makes_no_token_that_outlives_its_maker(alice: User) -> None:
    client = client_with(token_for(alice, "read", "control", expiry=timedelta(days=1)))
    for expires_at in ({}, {"expires_at": None}):
        body = {"name": "x", "scopes": ["read"], **expires_at}
        assert client.post(f"{API}/tokens/", body, format="json").status_code == 403
    soon = (timezone.now() + timedelta(hours=1)).isoformat()
    body = {"name": "x", "scopes": ["read"], "expires_at": soon}
    assert client.post(f"{API}/tokens/", body, format="json").status_code == 201


def test_it_lists_and_revokes_ones_own_tokens_only(alice: User, bob: User) -> None:
    value = token_for(alice)
    address = f"{API}/tokens/{ApiToken.objects.get().public_id}/"
    assert page_of(bob).get(f"{API}/tokens/").json()["count"] == 0
    assert page_of(bob).delete(address).status_code == 404
    assert page_of(alice).delete(address).status_code == 204
    assert client_with(value).get(f"{API}/tokens/").status_code == 401


# The operator -------------------------------------------------------------------------------------------


@pytest.fixture
def home(settings: Any, tmp_path: Path) -> Path:
    settings.MISTUDIO_HOME = tmp_path
    return tmp_path


def test_it_makes_the_operator_and_a_private_token_file(home: Path) -> None:
    operator.ensure()
    user = User.objects.get(username="operator")
    assert user.is_superuser
    assert not user.has_usable_password()
    path = home / "operator-token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    token = ApiToken.objects.get()
    assert (token.expiry, token.scopes) == (None, ["read", "submit", "control", "admin"])
    assert client_with(path.read_text().strip()).get(f"{API}/tokens/").status_code == 200


def test_it_changes_nothing_the_second_time(home: Path) -> None:
    operator.ensure()
    before = (home / "operator-token").read_text(), ApiToken.objects.get().pk
    (home / "operator-token").chmod(0o644)
    operator.ensure()
    assert ((home / "operator-token").read_text(), ApiToken.objects.get().pk) == before
    assert stat.S_IMODE((home / "operator-token").stat().st_mode) == 0o600


@pytest.mark.parametrize("harm", ["missing", "wrong", "bytes", "revoked"])
def test_it_makes_a_lost_token_anew_and_revokes_the_old(home: Path, harm: str) -> None:
    operator.ensure()
    path = home / "operator-token"
    old = path.read_text().strip()
    match harm:
        case "missing":
            path.unlink()
        case "wrong":
            path.write_text("0" * 64)
        case "bytes":
            path.write_bytes(b"\xff\xfe\x00")
        case "revoked":
            ApiToken.objects.all().delete()
    operator.ensure()
    assert client_with(path.read_text().strip()).get(f"{API}/tokens/").status_code == 200
    assert client_with(old).get(f"{API}/tokens/").status_code == 401
    assert ApiToken.objects.count() == 1


def test_it_keeps_out_of_test_databases() -> None:
    assert operator.in_test_run()
    assert not User.objects.filter(username="operator").exists()


# The sign-in link ---------------------------------------------------------------------------------------


def button(page: bytes) -> dict[str, str]:
    found = re.search(r'name="key" value="([^"]+)"', page.decode())
    return {"key": found[1]} if found else {}


def signed_in(client: Client) -> str | None:
    key = client.session.get("_auth_user_id")
    return User.objects.get(pk=key).username if key else None


def test_it_signs_the_operator_in_once() -> None:
    link = signin.make_link("http://testserver/")
    first, second = Client(), Client()
    for _ in range(2):  # looking spends nothing
        page = first.get(link)
        assert (page.status_code, signed_in(first)) == (200, None)
    answer = first.post("/signin/link/", button(page.content))
    assert (answer.status_code, answer["Location"]) == (302, "/")
    assert signed_in(first) == "operator"
    assert second.post("/signin/link/", button(page.content)).status_code == 410
    assert second.get(link).status_code == 410
    assert signed_in(second) is None


def test_it_wants_a_csrf_token_on_the_button() -> None:
    link = signin.make_link("http://testserver")
    client = Client(enforce_csrf_checks=True)
    assert client.post("/signin/link/", button(client.get(link).content)).status_code == 403
    assert OneTimeKey.objects.count() == 1


def test_it_refuses_old_and_foreign_keys(alice: User) -> None:
    signed = signin.make_link("", alice).partition("key=")[2].replace("%3A", ":")
    ticket = OneTimeKey.issue(OneTimeKey.Purpose.TICKET, alice, 60)
    for key in ("", "x", signed[:-1], signin.signer.sign(ticket), signed.split(":")[0]):
        assert Client().post("/signin/link/", {"key": key}).status_code == 410
    OneTimeKey.objects.update(expires_at=timezone.now())
    assert Client().post("/signin/link/", {"key": signed}).status_code == 410


def test_it_stores_only_the_hash_of_a_key(alice: User) -> None:
    key = signin.key_of(signin.make_link("", alice).partition("key=")[2].replace("%3A", ":"))
    assert key
    assert key not in str(list(OneTimeKey.objects.values()))


def test_it_does_not_sign_in_a_disabled_user(alice: User) -> None:
    link = signin.make_link("http://testserver", alice)
    page = Client().get(link)
    User.objects.update(is_active=False)
    client = Client()
    assert client.post("/signin/link/", button(page.content)).status_code == 410
    assert signed_in(client) is None


@pytest.mark.parametrize(
    ("target", "goes_to"),
    [
        ("/jobs/", "/jobs/"),
        ("https://evil.example/", "/"),
        ("//evil.example/", "/"),
        ("/\\evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("", "/"),
    ],
)
def test_it_goes_nowhere_else_after_sign_in(alice: User, target: str, goes_to: str) -> None:
    page = Client().get(signin.make_link("http://testserver", alice, target))
    assert Client().post("/signin/link/", button(page.content))["Location"] == goes_to
    by_password = {"username": "alice", "password": "alice-pw-1", "next": target}
    assert Client().post("/signin/", by_password)["Location"] == goes_to


def test_it_prints_a_link_from_the_command_line(alice: User, home: Path) -> None:
    output = StringIO()
    call_command("signin-link", user="alice", stdout=output)
    client = Client()
    page = client.get("/signin/link/?" + output.getvalue().strip().partition("?")[2])
    client.post("/signin/link/", button(page.content))
    assert signed_in(client) == "alice"


# Name and password --------------------------------------------------------------------------------------


def test_it_signs_in_by_password_and_out_by_post(alice: User) -> None:
    client = Client()
    client.post("/signin/", {"username": "alice", "password": "alice-pw-1"})
    assert signed_in(client) == "alice"
    assert client.get("/signout/").status_code == 405
    assert client.post("/signout/")["Location"] == "/signin/"
    assert signed_in(client) is None


def test_it_locks_after_too_many_wrong_passwords(alice: User) -> None:
    client = Client()
    statuses = [
        client.post("/signin/", {"username": "alice", "password": f"guess {n}"}).status_code
        for n in range(12)
    ]
    assert statuses[0] == 200
    assert set(statuses[8:]) == {429}
    right = client.post("/signin/", {"username": "alice", "password": "alice-pw-1"})
    assert right.status_code == 429
    assert signed_in(client) is None


def test_it_shows_the_description_to_those_who_are_signed_in(alice: User) -> None:
    client = page_of(alice)
    schema = client.get("/api/schema/", {"format": "json"})
    assert schema.status_code == 200
    page = client.get("/api/docs/")
    assert page.status_code == 200
    scripts = re.findall(r"<script(.*?)>(.*?)</script>", page.content.decode(), re.S)
    assert scripts
    assert all("src=" in attributes and not body.strip() for attributes, body in scripts)
    assert "http" not in "".join(attributes for attributes, _ in scripts)
    assert "script-src 'self'" in page["Content-Security-Policy"]
