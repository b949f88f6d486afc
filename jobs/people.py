"""Who asks: somebody signed in (views refuse the others before they come here)."""

from __future__ import annotations

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser

Person = AbstractBaseUser | AnonymousUser


def is_staff(person: Person | None) -> bool:
    return bool(getattr(person, "is_staff", False))
