"""What lets somebody in: API tokens with scopes, and keys that are good for one use (tickets, sign-in links). And when
they were here."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.db import models
from django.utils import timezone
from knox.models import AbstractAuthToken


class ApiToken(AbstractAuthToken):
    """A knox token (only its hash is stored) that says what it may be used for."""

    # `digest` is the primary key; addresses name a token by this instead.
    public_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    name = models.CharField(max_length=80)
    scopes = models.JSONField(default=list)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return self.name

    @property
    def expired(self) -> bool:
        return self.expiry is not None and self.expiry < timezone.now()


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Visit(models.Model):
    """When somebody was here last: from `began_at` to `seen_at`, and before that until `left_at` (`monitor.visits`)."""

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    left_at = models.DateTimeField(null=True, help_text="The end of the visit before; null at the first one")
    began_at = models.DateTimeField()
    seen_at = models.DateTimeField()
    dismissed = models.BooleanField(default=False, help_text="What happened since was read")

    def __str__(self) -> str:
        return f"{self.user} {self.began_at:%Y-%m-%d %H:%M}"


class OneTimeKey(models.Model):
    """issued ─spend─▶ gone; or expires. Only the hash is stored; `data` is what the key stands for."""

    class Purpose(models.TextChoices):
        TICKET = "ticket"
        SIGNIN = "signin"

    purpose = models.CharField(max_length=10, choices=Purpose.choices)
    digest = models.CharField(max_length=64, unique=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    data = models.JSONField(default=dict)
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.purpose} for {self.user}"

    @classmethod
    def issue(cls, purpose: str, user: AbstractBaseUser, seconds: int, **data: Any) -> str:
        """Make a key and return it; expired ones are cleared away on the occasion."""
        now = timezone.now()
        cls.objects.filter(expires_at__lt=now).delete()
        key = secrets.token_urlsafe(32)
        expires_at = now + timedelta(seconds=seconds)
        cls.objects.create(purpose=purpose, digest=digest(key), user=user, data=data, expires_at=expires_at)
        return key

    @classmethod
    def find(cls, purpose: str, key: str) -> OneTimeKey | None:
        rows = cls.objects.filter(purpose=purpose, digest=digest(key), expires_at__gt=timezone.now())
        return rows.select_related("user").first()

    @classmethod
    def spend(cls, purpose: str, key: str) -> OneTimeKey | None:
        """The key's row, to the first who asks; `None` to everybody after, and for unknown or expired keys."""
        row = cls.find(purpose, key)
        if row is None or not cls.objects.filter(digest=row.digest).delete()[0]:
            return None
        return row


class ToolCall(models.Model):
    """An agent called a tool: who, which, how it went. The arguments leave only their digest here."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    token_id = models.UUIDField(
        null=True, help_text="Public id of the token; none over standard input and output"
    )
    tool = models.CharField(max_length=100, blank=True, help_text="Empty for a name that no tool has")
    arguments_digest = models.CharField(max_length=64, help_text="SHA-256 of the arguments")
    outcome = models.CharField(max_length=60, help_text="ok, or the code of the error")
    duration_ms = models.PositiveIntegerField()
    job_id = models.UUIDField(null=True, help_text="The job that it made")

    class Meta:
        ordering = ["-at", "-id"]

    def __str__(self) -> str:
        return f"{self.tool or 'unknown tool'} by {self.user}: {self.outcome}"
