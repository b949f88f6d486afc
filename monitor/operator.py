"""The operator: the account that a fresh installation has, and its API token in the data folder.

`ensure()` runs after every `migrate`; it repairs and never doubles.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.db import connections
from knox.crypto import hash_token

from gpus.rest import SCOPES
from monitor.models import ApiToken

log = logging.getLogger(__name__)

NAME = "operator"
TOKEN_NAME = "operator-token"


def account() -> User:
    """The superuser of this installation; without a password until somebody sets one."""
    operator, new = get_user_model().objects.get_or_create(
        username=NAME, defaults={"is_superuser": True, "is_staff": True}
    )
    if new:
        operator.set_unusable_password()
        operator.save(update_fields=["password"])
    return operator


def token_file() -> Path:
    return settings.MISTUDIO_HOME / TOKEN_NAME


def ensure() -> None:
    """The account, and a token file that works; a missing or wrong one is made anew and its token revoked."""
    operator = account()
    if works(token_file(), operator):
        token_file().chmod(0o600)
        return
    operator.auth_token_set.filter(name=TOKEN_NAME).delete()
    _, value = ApiToken.objects.create(user=operator, name=TOKEN_NAME, scopes=list(SCOPES), expiry=None)
    write_private(token_file(), value + "\n")
    log.info("The operator's API token is in %s", token_file())


def write_private(path: Path, content: str) -> None:
    """Readable by its owner from the first byte on, and never half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    os.replace(temporary, path)


def works(path: Path, operator: User) -> bool:
    try:
        value = path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    token = operator.auth_token_set.filter(name=TOKEN_NAME, digest=hash_token(value)).first()
    return token is not None and not token.expired


def after_migrate(using: str, **_: Any) -> None:
    """Signal receiver: not in test databases (tests call `ensure` themselves), nor before our tables exist."""
    tables = connections[using].introspection.table_names()
    if using == "default" and not in_test_run() and ApiToken._meta.db_table in tables:
        ensure()


def in_test_run() -> bool:
    """Whether Django's `setup_test_environment` was called (by pytest-django, or by `manage.py test`)."""
    tools = sys.modules.get("django.test.utils")
    return tools is not None and hasattr(tools._TestState, "saved_data")
