"""OpenAPI schemas from the typed shapes, so that a field is written down once."""

from __future__ import annotations

from typing import Any

from drf_spectacular.plumbing import resolve_type_hint


def schema_of(shape: Any) -> dict[str, Any]:
    """The schema of a `TypedDict`; every key is always there, and may be null where its type says so."""
    schema: dict[str, Any] = resolve_type_hint(shape)
    return schema
