"""The list of artifacts: filters, search, pages, what they take on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db.models import Count, QuerySet, Sum

from jobs import contents, uploads
from jobs.artifacts import visible
from jobs.models import Artifact
from monitor.joblist import more, whole

PAGE = 50
FILTERS = ("type", "owner", "q")


def page(user: User, asked: Mapping[str, str]) -> dict[str, Any]:
    # No database takes a NUL, and PostgreSQL says so with an error.
    chosen = {name: asked.get(name, "").replace("\0", "").strip() for name in FILTERS}
    start = whole(asked.get("from", ""))
    shown = list(filtered(visible(user), chosen)[start : start + PAGE + 1])
    return {
        "rows": shown[:PAGE],
        "chosen": chosen,
        "any": any(chosen.values()),
        "more": more(chosen, start + PAGE) if len(shown) > PAGE else "",
        "upload_types": list(contents.TYPES),
        "upload_limit_bytes": uploads.LIMIT_BYTES,
    } | around(user)


def around(user: User) -> dict[str, Any]:
    """What stands around the rows, whatever is filtered."""
    seen = visible(user).order_by()
    return {
        "types": sorted(seen.values_list("type", flat=True).distinct()),
        "owners": sorted(seen.values_list("owner__username", flat=True).distinct()),
        "total": seen.aggregate(count=Count("pk"), size_bytes=Sum("size_bytes", default=0)),
        "free_bytes": shutil.disk_usage(settings.MISTUDIO_HOME).free,
    }


def filtered(artifacts: QuerySet[Artifact], chosen: Mapping[str, str]) -> QuerySet[Artifact]:
    if chosen["type"]:
        artifacts = artifacts.filter(type=chosen["type"])
    if chosen["owner"]:
        artifacts = artifacts.filter(owner__username=chosen["owner"])
    if chosen["q"]:
        artifacts = artifacts.filter(name__icontains=chosen["q"])
    counted = artifacts.select_related("owner", "job").annotate(users=Count("uses__job", distinct=True))
    return counted.order_by("-created_at", "-pk")  # counting drops the model's own order
