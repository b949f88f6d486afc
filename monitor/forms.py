"""The form of a kind, drawn from its `Params`: what on the left, where on the right.

Nothing here knows a single kind. A field of `Params` becomes a widget by its class; what was typed is kept as it was
typed, and errors stand at the field.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from django.contrib.auth.models import User
from django.http import QueryDict
from rest_framework import serializers
from rest_framework.fields import empty

from gpus import choice
from gpus.models import Host
from gpus.rest import ApiError, body
from jobs import artifacts, fit, registry, submit
from jobs.fields import SITES, ArtifactField, CorpusField, SiteField
from jobs.kind import JobKind
from jobs.models import FINAL, Artifact, Job
from jobs.serializers import may_see
from monitor import board
from monitor.templatetags.show import worded

#: Refusals that are about the card, not about a parameter.
GPU_CODES = frozenset(
    {"invalid_gpu", "unknown_gpu", "ambiguous_gpu", "gpu_not_available", "too_many_gpus", "model_too_large"}
    | {"driver_unavailable"}
)
#: What people write between the digits of a long number.
SPACES = str.maketrans("", "", " _,\u00a0\u202f")
Typed = Mapping[str, Any]
MISSING: Any = object()


def stages() -> list[dict[str, Any]]:
    """Every kind, by stage, in the order in which work is done."""
    kinds = registry.all_kinds().items()
    return [
        {"name": stage, "kinds": [{"name": name, "kind": kind} for name, kind in group]}
        for stage, group in groupby(kinds, key=lambda item: item[1].stage)
    ]


# One field ----------------------------------------------------------------------------------------------
@dataclass
class Widget:
    """A field as the template draws it."""

    name: str
    label: str
    kind: str  # text | number | check | select | lines | json | site | sites | several
    required: bool
    help: str
    range: str
    value: Any
    options: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    of_artifacts: bool = False

    @property
    def wide(self) -> bool:
        return self.kind in ("lines", "json", "sites", "several") or self.of_artifacts

    @property
    def described_by(self) -> str:
        return f"about-{self.name}"


def widget_kind(f: serializers.Field) -> str:
    """Which widget draws this field; what has no better one is edited as JSON."""
    name = next((name for classes, name in WIDGETS if isinstance(f, classes)), "json")
    if name == "list":
        return "sites" if isinstance(f.child, SiteField) else "lines"  # type: ignore[attr-defined]
    return "lines" if name == "text" and f.style.get("base_template") == "textarea.html" else name


WIDGETS: tuple[tuple[Any, str], ...] = (
    (SiteField, "site"),
    (serializers.MultipleChoiceField, "several"),
    (serializers.ChoiceField, "select"),
    (CorpusField, "text"),
    (ArtifactField, "select"),
    (serializers.BooleanField, "check"),
    ((serializers.IntegerField, serializers.FloatField), "number"),
    (serializers.CharField, "text"),
    ((serializers.ListSerializer, serializers.ListField), "list"),
)


def label_of(name: str, f: serializers.Field) -> str:
    """The kind's own label, else the parameter's name; short names and dimensions keep their spelling."""
    by_itself = name.replace("_", " ").capitalize()  # what DRF fills in
    if f.label and f.label != by_itself:
        return str(f.label)
    label = worded(name)
    return label if len(label) < 3 or "_" in label else label[:1].upper() + label[1:]


def bound(value: float) -> str:
    return f"{value:,}".replace(",", "\u202f") if isinstance(value, int) else f"{value:g}"


def range_text(f: serializers.Field) -> str:
    low, high = getattr(f, "min_value", None), getattr(f, "max_value", None)
    if low is not None and high is not None:
        return f"{bound(low)} to {bound(high)}"
    if low is not None:
        return f"at least {bound(low)}"
    return f"at most {bound(high)}" if high is not None else ""


def default_of(f: serializers.Field) -> Any:
    return None if f.default is empty or callable(f.default) else f.default


def as_typed(f: serializers.Field, value: Any) -> Any:
    """A stored or default value as somebody would have typed it."""
    kind = widget_kind(f)
    if kind in ("site", "sites"):
        return rows_of(value)
    if kind in ("check", "several"):
        return value
    if value is None:
        return ""
    if kind == "lines" and isinstance(value, list | tuple):
        return "\n".join(str(item) for item in value)
    return json.dumps(value) if kind == "json" else str(value)


def rows_of(value: Any) -> list[dict[str, Any]]:
    """Sites as rows of the form, at least an empty one."""
    if isinstance(value, Mapping):
        return [dict(value)]
    return list(value or [{}])


def read(f: serializers.Field, name: str, typed: QueryDict) -> Any:
    """What was typed, as the serializer takes it; `MISSING` where nothing was, so that the default holds.
    A field that may be null and was emptied is null."""
    kind = widget_kind(f)
    if kind == "check":
        return name in typed
    if kind == "several":
        return typed.getlist(name) or MISSING
    if kind in ("site", "sites"):
        rows = list(read_sites(name, typed))
        return (rows if kind == "sites" else rows[0]) if rows else MISSING
    text = typed.get(name, "").strip()
    if not text:
        return None if f.allow_null and name in typed else MISSING
    return PARSERS.get(kind, lambda f, text: text)(f, text)


def read_sites(name: str, typed: QueryDict) -> Iterator[dict[str, str]]:
    """Rows of block and site; a row without a block is an empty row."""
    for block, site in zip(typed.getlist(f"{name}.block"), typed.getlist(f"{name}.site"), strict=False):
        if block.strip():
            yield {"block": block.strip(), "site": site}


def number(f: serializers.Field, text: str) -> Any:
    """`16 384` and `1e6` are numbers to people; what is none is left to the serializer's own sentence."""
    plain = text.translate(SPACES)
    try:
        value = float(plain)
    except ValueError:
        return text
    whole = isinstance(f, serializers.IntegerField) and value.is_integer() and abs(value) < 2**53
    return int(value) if whole else plain


def lines(f: serializers.Field, text: str) -> Any:
    if isinstance(f, serializers.CharField):
        return text
    numbers = isinstance(getattr(f, "child", None), serializers.IntegerField | serializers.FloatField)
    parts = text.replace(",", "\n").split() if numbers else text.splitlines()
    return [part.strip() for part in parts if part.strip()]


def from_json(f: serializers.Field, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


PARSERS: dict[str, Any] = {"number": number, "lines": lines, "json": from_json}


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
    def before(self) -> Typed:
        """Parameters to begin with: those of the job that is to be run again with changes."""
        again = str(self.typed.get("again", ""))
        job = Job.objects.filter(pk=again).first() if valid_uuid(again) else None
        return job.params if job and job.kind == self.name and may_see(job, self.user) else {}

    @property
    def gpu(self) -> str:
        return self.typed.get("gpu") or "auto"

    @property
    def job_name(self) -> str:
        return self.typed.get("name", "")

    def value(self, name: str, f: serializers.Field) -> Any:
        """What the widget shows."""
        if self.posted:
            return self.raw(name, f)
        if name in self.typed:
            return self.spelled(str(self.typed[name])) if isinstance(f, CorpusField) else self.typed[name]
        return as_typed(f, self.before.get(name, default_of(f)))

    def raw(self, name: str, f: serializers.Field) -> Any:
        kind = widget_kind(f)
        if kind == "check":
            return name in self.typed
        if kind == "several":
            return self.typed.getlist(name)
        if kind in ("site", "sites"):
            return rows_of(list(read_sites(name, self.typed)))
        return self.typed.get(name, "")

    def parameters(self) -> dict[str, Any]:
        """The parameters as the serializer takes them; what was left empty is left out, so that defaults hold."""
        take = self.prefilled if not self.posted else lambda name, f: read(f, name, self.typed)
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
        return inputs | set(names[:6])

    def widget(self, name: str, f: serializers.Field) -> Widget:
        value = self.value(name, f)
        return Widget(
            name=name,
            label=label_of(name, f),
            kind=widget_kind(f),
            required=f.required,
            help=str(f.help_text or ""),
            range=range_text(f),
            value=value,
            options=self.options(f, value),
            errors=self.errors_of(name),
            of_artifacts=isinstance(f, ArtifactField),
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
        visible = artifacts.visible(self.user) if valid_uuid(reference) else Artifact.objects.none()
        found = visible.filter(pk=reference, type="corpus").first()
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

    # Where it would run
    def place(self) -> dict[str, Any]:
        """The estimate, and every card with whether this job fits it now, later or never."""
        found = fit.fit(self.user, self.name, self.data())
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
            "on_cpu": self.kind.needs_gpu != "never" and not cards and choice.cpu_allowed(),
            "no_cards": []
            if cards
            else [host.backend_error for host in Host.objects.exclude(backend_error="")],
            "curl": self.curl(),
        }

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


def has_picker(kind: JobKind) -> bool:
    """Every kind that may load a model lets people choose the card."""
    return kind.needs_gpu != "never"
