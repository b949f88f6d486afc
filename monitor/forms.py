"""The form of a kind, drawn from its `Params`: what on the left, where on the right.

Nothing here knows a single kind. A field of `Params` becomes a widget by its class (`monitor.widgets`); what was typed
is kept as it was typed, and errors stand at the field.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.http import QueryDict
from django.urls import reverse
from rest_framework import serializers
from rest_framework.fields import empty

from gpus import choice
from gpus.models import Host
from gpus.rest import ApiError, body
from jobs import artifacts, fit, groups, registry, submit, templates
from jobs.fields import SITES, ArtifactField, CorpusField, SiteField
from jobs.models import FINAL, Artifact, Job, JobGroup, JobTemplate
from jobs.serializers import may_see
from monitor import board, links
from monitor.widgets import (
    MISSING,
    Widget,
    as_typed,
    default_of,
    label_of,
    plainly,
    range_text,
    read,
    read_sites,
    rows_of,
    widget_kind,
)

Typed = Mapping[str, Any]
#: So many of a kind's fields are never hidden under "More".
MAIN = 7
#: Refusals that are about the card, not about a parameter.
GPU_CODES = frozenset(
    {"invalid_gpu", "unknown_gpu", "ambiguous_gpu", "gpu_not_available", "too_many_gpus", "model_too_large"}
    | {"driver_unavailable"}
)


def stages() -> list[dict[str, Any]]:
    """Every kind, by stage, in the order in which work is done."""
    kinds = registry.all_kinds().items()
    return [
        {"name": stage, "kinds": [{"name": name, "kind": kind} for name, kind in group]}
        for stage, group in groupby(kinds, key=lambda item: item[1].stage)
    ]


# The form of a kind -------------------------------------------------------------------------------------
class KindForm:
    """One kind's form with what was typed. Raises `KeyError` when there is no such kind."""

    def __init__(self, kind_name: str, user: User, typed: QueryDict, base_url: str) -> None:
        self.name, self.kind = kind_name, registry.get(kind_name)
        self.user, self.typed, self.base_url = user, typed, base_url
        self.posted = "csrfmiddlewaretoken" in typed or "name" in typed
        self.serializer = self.kind.Params()
        self.errors: dict[str, list[str]] = {}
        self.gpu_error = ""

    # What was typed
    @cached_property
    def again(self) -> Job | None:
        """The job that is to be run again with changes."""
        job = self.named("again", Job.objects.all())
        return job if job and job.kind == self.name and may_see(job, self.user) else None

    @cached_property
    def template(self) -> JobTemplate | None:
        return self.named("template", templates.visible(self.user).filter(kind=self.name))

    def named(self, field: str, among: QuerySet[Any]) -> Any:
        wanted = str(self.typed.get(field, ""))
        return among.filter(pk=wanted).first() if valid_uuid(wanted) else None

    @cached_property
    def before(self) -> Typed:
        """Parameters to begin with."""
        if self.again:
            return templates.params_of(self.again)
        return self.template.params if self.template else {}

    @cached_property
    def gpu(self) -> str:
        if "gpu" in self.typed or self.again is None:
            return self.typed.get("gpu") or "auto"
        return "auto" if self.card_gone else self.again.gpu_request

    @cached_property
    def card_gone(self) -> bool:
        """Whether the job that is run again asked for a card that cannot be chosen any more."""
        there = {gpu.uuid for gpu in board.present(board.gpu_map().values())}
        return self.again is not None and self.again.gpu_request not in {"auto", *there}

    @property
    def more_filled(self) -> bool:
        """Whether something under "More" is not its default: then it is not hidden."""
        return any(plainly(widget.value) != plainly(self.default(widget.name)) for widget in self.more)

    def default(self, name: str) -> Any:
        """What the widget shows when nobody has chosen anything."""
        f = self.serializer.fields[name]
        return as_typed(f, default_of(f), self.many(name))

    @property
    def job_name(self) -> str:
        return self.typed.get("name", self.name_again)

    @property
    def name_again(self) -> str:
        """The name of the job that is run again; of a group's member the group's, which its values are added to."""
        if self.again is None:
            return ""
        group = JobGroup.objects.filter(pk=self.again.group_id).first() if self.again.group_id else None
        return group.name if group else self.again.name

    def many(self, name: str) -> bool:
        return name in self.kind.sweep

    def value(self, name: str, f: serializers.Field) -> Any:
        """What the widget shows."""
        if self.posted:
            return self.raw(name, f)
        if name in self.typed:
            return self.spelled(str(self.typed[name])) if isinstance(f, CorpusField) else self.typed[name]
        return self.stored(name, f)

    def stored(self, name: str, f: serializers.Field) -> Any:
        value = self.before.get(name, default_of(f))
        if isinstance(f, CorpusField) and isinstance(value, str):
            value = self.spelled(value)
        return as_typed(f, value, self.many(name))

    def raw(self, name: str, f: serializers.Field) -> Any:
        kind = widget_kind(f, self.many(name))
        if kind == "check":
            return name in self.typed
        if kind == "several":
            return self.typed.getlist(name)
        if kind in ("site", "sites"):
            return rows_of(list(read_sites(name, self.typed)))
        return self.typed.get(name, "")

    def parameters(self) -> dict[str, Any]:
        """The parameters as the serializer takes them; what was left empty is left out, so that defaults hold."""
        take = (
            self.prefilled if not self.posted else lambda name, f: read(f, name, self.typed, self.many(name))
        )
        found = {name: take(name, f) for name, f in self.serializer.fields.items()}
        return {name: value for name, value in found.items() if value is not MISSING}

    def prefilled(self, name: str, f: serializers.Field) -> Any:
        if self.typed.get(name):
            return self.typed[name]
        return self.before.get(name, MISSING if f.default is empty else f.default)

    def data(self) -> dict[str, Any]:
        """The body of the request that submits this."""
        body = self.parameters()
        if self.kind.needs_gpu != "never":
            body["gpu"] = self.gpu
        return body | ({"name": self.job_name} if self.job_name else {})

    # What it looks like
    @cached_property
    def widgets(self) -> list[Widget]:
        return [self.widget(name, f) for name, f in self.serializer.fields.items() if not f.read_only]

    @property
    def first(self) -> list[Widget]:
        """What must be filled in, and what is wrong: never hidden under "More"."""
        shown = [w for w in self.widgets if w.required or w.errors or w.name in self.always]
        return sorted(shown, key=lambda w: not w.required)

    @property
    def more(self) -> list[Widget]:
        shown = {w.name for w in self.first}
        return [w for w in self.widgets if w.name not in shown]

    @cached_property
    def always(self) -> set[str]:
        """Inputs, and the few main numbers: the first fields of a kind are its main ones."""
        names = list(self.serializer.fields)
        inputs = {n for n, f in self.serializer.fields.items() if isinstance(f, ArtifactField)}
        return inputs | set(names[:MAIN])

    def widget(self, name: str, f: serializers.Field) -> Widget:
        value = self.value(name, f)
        return Widget(
            name=name,
            label=label_of(name, f),
            kind=widget_kind(f, self.many(name)),
            required=f.required,
            help=str(f.help_text or ""),
            range=range_text(f),
            value=value,
            options=self.options(f, value),
            errors=self.errors_of(name),
            of_artifacts=isinstance(f, ArtifactField),
            many=self.many(name),
            was=plainly(self.stored(name, f)) if self.again else None,
        )

    def errors_of(self, name: str) -> list[str]:
        return [text for key, texts in self.errors.items() if key.split(".")[0] == name for text in texts]

    @property
    def other_errors(self) -> list[str]:
        """Errors that belong to no field of this form."""
        known = set(self.serializer.fields) | {"name"}
        return [
            text for key, texts in self.errors.items() if key.split(".")[0] not in known for text in texts
        ]

    def options(self, f: serializers.Field, value: Any) -> list[tuple[str, str]]:
        if isinstance(f, CorpusField):
            return self.corpora()
        if isinstance(f, ArtifactField):
            return self.sources(f, value)
        if isinstance(f, serializers.ChoiceField):
            return [(str(key), str(label)) for key, label in f.choices.items()]
        site = f if isinstance(f, SiteField) else getattr(f, "child", None)
        return [(name, name) for name in SITES] if isinstance(site, SiteField) else []

    def sources(self, f: ArtifactField, value: str) -> list[tuple[str, str]]:
        """Artifacts that this parameter takes, then unfinished jobs that will make one, then what was typed."""
        found = [("", "none" if not f.required else "choose …")]
        for artifact in artifacts.visible(self.user).filter(type__in=f.types).select_related("owner")[:200]:
            whose = "" if artifact.owner_id == self.user.pk else f" · {artifact.owner}"
            found.append((str(artifact.pk), f"{artifact.name}{whose}"))
        found += [
            (f"job:{job.pk}", f"{job} · not made yet, the job is {job.status}")
            for job in self.makers(f.types)
        ]
        if value and value not in [key for key, _ in found]:
            found.append((value, self.described(value)))
        return found

    def corpora(self) -> list[tuple[str, str]]:
        """What may be chosen instead of typing a path: the built-in text, and artifacts as they are spelled."""
        found = artifacts.visible(self.user).filter(type="corpus").select_related("owner")[:200]
        return [("english", "built in"), *((self.name_of(corpus), "uploaded") for corpus in found)]

    def name_of(self, artifact: Artifact) -> str:
        return artifact.name if artifact.owner_id == self.user.pk else f"{artifact.owner}/{artifact.name}"

    def spelled(self, reference: str) -> str:
        """The name behind the id that a link carried: people read and change this field."""
        if not valid_uuid(reference):
            return reference
        found = artifacts.visible(self.user).filter(pk=reference, type="corpus").first()
        return self.name_of(found) if found else reference

    def makers(self, types: tuple[str, ...]) -> list[Job]:
        kinds = [name for name, kind in registry.all_kinds().items() if set(kind.makes) & set(types)]
        jobs = Job.objects.filter(kind__in=kinds).exclude(status__in=FINAL).select_related("owner")[:50]
        return [job for job in jobs if may_see(job, self.user)]

    def described(self, reference: str) -> str:
        """What a reference that is not in the list names, as far as this user may know it."""
        job_id = reference.removeprefix("job:")
        job = Job.objects.filter(pk=job_id).first() if valid_uuid(job_id) else None
        return f"the result of {job}" if job and may_see(job, self.user) else reference

    # What it begins with, and what comes next
    @property
    def templates(self) -> list[JobTemplate]:
        return list(templates.visible(self.user).filter(kind=self.name))

    def then(self, job: Job) -> str:
        """The form of the kind that was to come next, with this job's result chosen; empty where none was named."""
        wanted = [taker for taker in links.takers(self.kind) if taker["name"] == self.typed.get("then")]
        if not wanted:
            return ""
        address = reverse("new-kind", args=[wanted[0]["name"]])
        return f"{address}?{urlencode({wanted[0]['parameter']: f'job:{job.pk}'})}"

    # Where it would run
    def place(self) -> dict[str, Any]:
        """The estimate, and every card with whether this job fits it now, later or never; of a sweep, the largest."""
        found = fit.fit(self.user, self.name, self.data() | self.largest)
        gpus = board.gpu_map()
        known = {gpu.uuid for gpu in board.present(gpus.values())}
        cards = [
            card | {"host": gpus[card["uuid"]].host.name} for card in found["cards"] if card["uuid"] in known
        ]
        return {
            **found,
            "cards": sorted(cards, key=lambda card: (card["host"], card["gpu_id"])),
            "several_hosts": len({card["host"] for card in cards}) > 1,
            "chosen": self.gpu,
            "sweep": self.sweep,
            "takers": [] if self.sweep else list(links.takers(self.kind)),
            "on_cpu": self.kind.needs_gpu != "never" and not cards and choice.cpu_allowed(),
            "no_cards": []
            if cards
            else [host.backend_error for host in Host.objects.exclude(backend_error="")],
            "curl": self.curl(),
        }

    @cached_property
    def sweep(self) -> dict[str, Any] | None:
        """How many jobs this makes and how long all take, or why it cannot; `None` for a single job."""
        data = self.data()
        if not groups.swept(self.kind, data):
            return None
        try:
            return groups.appraise(self.user, self.name, data)
        except serializers.ValidationError as refusal:
            return {"refused": body(refusal)["detail"]}

    @property
    def largest(self) -> dict[str, Any]:
        """The combination of a sweep that needs the most memory."""
        return (self.sweep or {}).get("largest", {})

    def curl(self) -> str:
        """The same request for a terminal."""
        return (
            f"curl -X POST {self.base_url}api/v1/jobs/{self.name}/ \\\n"
            '  -H "Authorization: Token $MISTUDIO_TOKEN" -H "Content-Type: application/json" \\\n'
            f"  -d {shlex.quote(json.dumps(self.plain()))}"
        )

    def plain(self) -> dict[str, Any]:
        """The body with numbers as numbers; a value that its field refuses stays as it was typed."""
        return {name: self.converted(name, value) for name, value in self.data().items()}

    def converted(self, name: str, value: Any) -> Any:
        f = self.serializer.fields.get(name)
        if self.many(name) and isinstance(value, list):
            return [self.converted_one(f, item) for item in value]
        return self.converted_one(f, value)

    def converted_one(self, f: serializers.Field | None, value: Any) -> Any:
        try:
            return value if f is None else submit.plain(f.run_validation(value))
        except serializers.ValidationError:
            return value

    def refused(self, refusal: Exception) -> None:
        """Keep why the submit was refused, at the place it belongs to."""
        said = body(refusal)
        self.errors = said.get("errors", {})
        if isinstance(refusal, ApiError) and refusal.code in GPU_CODES:
            self.gpu_error = said["detail"]
        if not self.errors:
            self.errors = {"gpu" if self.gpu_error else "form": [said["detail"]]}
        self.__dict__.pop("widgets", None)


def valid_uuid(text: str | None) -> bool:
    from uuid import UUID

    try:
        UUID(text or "")
    except ValueError:
        return False
    return True
