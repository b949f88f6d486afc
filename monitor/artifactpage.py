"""What an artifact's page shows: its manifest as facts, its files, what made it, what uses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User

from jobs import files, paths, registry, shelf
from jobs.artifacts import ALWAYS_SHARED, references
from jobs.models import Artifact
from jobs.people import is_staff
from jobs.serializers import may_see
from monitor.templatetags.show import duration, parameter, size, worded

#: Keys of every manifest that say how a result was made, not what it is.
MAKING = (
    *("kind", "params", "inputs", "version", "python", "libraries", "threads", "cards", "card_names"),
    *("simulated", "peak_rss_bytes", "seconds"),
)
#: Shown elsewhere on the page.
ELSEWHERE = ("job", "files")
FILES_SHOWN = 100
USES_SHOWN = 50


def context(artifact: Artifact, user: User) -> dict[str, Any]:
    manifest = artifact.manifest
    about = {key: value for key, value in manifest.items() if key not in (*MAKING, *ELSEWHERE)}
    return {
        "artifact": artifact,
        "mine": is_staff(user) or artifact.owner_id == user.pk,
        "for_all": artifact.type in ALWAYS_SHARED,
        "facts": list(facts(about)),
        "making": list(facts({key: manifest[key] for key in MAKING if key in manifest})),
        "uploaded": uploaded(artifact),
        "folder": paths.artifact_folder(artifact) if artifact.type == "sae" else None,
        "in_use": shelf.in_use(artifact),
        "next": list(next_kinds(artifact)),
        **listed(artifact),
        **uses(artifact, user),
    }


def uploaded(artifact: Artifact) -> bool:
    return artifact.manifest.get("kind") == "upload"


def listed(artifact: Artifact) -> dict[str, Any]:
    """Its files; of those that somebody uploaded also the digest and the name under which they came."""
    found = files.listing(paths.artifact_folder(artifact))
    sent = artifact.manifest["files"] if uploaded(artifact) else {}
    shown = [file | {"sent": sent.get(file["path"])} for file in found[:FILES_SHOWN]]
    return {"files": shown, "files_more": max(0, len(found) - FILES_SHOWN)}


def uses(artifact: Artifact, user: User) -> dict[str, Any]:
    """The jobs that take it. What a stranger's job takes is the stranger's affair: those are counted only."""
    rows = artifact.uses.select_related("job__owner").order_by("-job__queued_at")
    seen = [row for row in rows if may_see(row.job, user)]
    return {
        "uses": seen[:USES_SHOWN],
        "uses_more": max(0, len(seen) - USES_SHOWN),
        "uses_of_others": len(rows) - len(seen),
    }


def next_kinds(artifact: Artifact) -> Iterator[dict[str, str]]:
    """Kinds that take an artifact of this type, with the parameter that takes it."""
    for name, kind in registry.all_kinds().items():
        takes = [parameter for parameter, f in references(kind).items() if artifact.type in f.types]
        if takes:
            yield {"name": name, "label": kind.label, "parameter": takes[0]}


# Facts --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    code: bool = False


def facts(values: Mapping[str, Any], before: str = "") -> Iterator[Fact]:
    """One line per value; what is nested is spelled out: `model d_model`."""
    for name, value in values.items():
        label = f"{before} {worded(name)}".strip()
        if isinstance(value, Mapping):
            yield from facts(value, label)
        else:
            yield fact(name, label, value)


def fact(name: str, label: str, value: Any) -> Fact:
    """The value as people write it, by what its name says of its unit."""
    counted = isinstance(value, int | float)
    if counted and name.endswith("bytes"):
        return Fact(label.removesuffix("bytes").strip() or "size", size(value))
    if counted and name.endswith("seconds"):
        return Fact(label.removesuffix("seconds").strip() or "took", duration(value))
    if name.endswith(("sha256", "_artifact")) or name in ("id", "cards"):
        return Fact(label, parameter(value), code=True)
    return Fact(label, parameter(value))
