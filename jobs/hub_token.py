"""A user's Hugging Face token: its owner writes it, that owner's downloads read it, and nobody is shown it again.

It lies in the database under a key made from the server's secret key, so that neither a copy of the database nor a
backup without `secret-key` gives it away.
"""

from __future__ import annotations

import base64
import re
from datetime import datetime

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.utils import timezone

from jobs.exceptions import JobRejected
from jobs.models import HubToken

PURPOSE = b"mistudio: Hugging Face tokens of users"
#: What goes into a header as it is. Hubs of one's own have tokens of their own making.
SPELLING = re.compile(r"[\x21-\x7e]{8,500}")
SPELLED = "A token is 8 to 500 characters without spaces; those of Hugging Face begin with hf_."


def keep(user_id: int, token: str) -> HubToken:
    """Store the token in place of the one before."""
    values = {"ciphertext": _cipher().encrypt(token.encode()).decode(), "set_at": timezone.now()}
    return HubToken.objects.update_or_create(user_id=user_id, defaults=values)[0]


def forget(user_id: int) -> None:
    HubToken.objects.filter(user_id=user_id).delete()


def set_at(user_id: int) -> datetime | None:
    """When the user's token was stored; None when there is none."""
    return HubToken.objects.filter(user_id=user_id).values_list("set_at", flat=True).first()


def of(user_id: int) -> str | None:
    """The token itself, for a job of this user. Raises `JobRejected` when the server's secret key is another by now."""
    kept = HubToken.objects.filter(user_id=user_id).first()
    if kept is None:
        return None
    try:
        return _cipher().decrypt(kept.ciphertext.encode()).decode()
    except InvalidToken:
        sentence = "Your Hugging Face token was stored under another secret key of this server."
        raise JobRejected(sentence, hint="Put it on your page here (/me/) again, then retry.") from None


def _cipher() -> MultiFernet:
    secrets = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return MultiFernet([Fernet(_key(str(secret))) for secret in secrets])


def _key(secret: str) -> bytes:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=PURPOSE).derive(secret.encode())
    return base64.urlsafe_b64encode(derived)
