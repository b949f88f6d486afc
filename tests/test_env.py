"""Settings that hold secrets: refused when malformed, and not repeated."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from mistudio import env


@pytest.mark.parametrize(
    "raw", ["ftp://u:hunter2@host", "http://", "hunter2", "http://[hunter2", "http://h:hunter2"]
)
def test_an_address_with_a_secret_is_not_repeated(raw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", raw)
    with pytest.raises(ImproperlyConfigured, match="HOOK: expected https://host") as refusal:
        env.url("HOOK", ("http", "https"), "https://host")
    assert "hunter2" not in str(refusal.value)


def test_an_address_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.url("HOOK", ("https",), "") is None
    monkeypatch.setenv("HOOK", "https://hooks.example.org:8443/a/b?c=d")
    url = env.url("HOOK", ("https",), "")
    assert url and (url.hostname, url.port, url.path, url.query) == ("hooks.example.org", 8443, "/a/b", "c=d")


def test_a_limit_is_none_when_unset_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.limit("LIMIT") is None
    monkeypatch.setenv("LIMIT", "3")
    assert env.limit("LIMIT") == 3
    monkeypatch.setenv("LIMIT", "0")
    with pytest.raises(ImproperlyConfigured, match="LIMIT='0': expected a whole number, 1 or more"):
        env.limit("LIMIT")
