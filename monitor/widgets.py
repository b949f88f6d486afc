"""One field of a form: which widget draws it, what its value looks like typed, and what typed text means.

A parameter that may be swept takes several values: numbers between commas, rows of sites, ticked choices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.http import QueryDict
from rest_framework import serializers
from rest_framework.fields import empty

from jobs.fields import ArtifactField, CorpusField, SiteField
from monitor.templatetags.show import worded

#: What people write between the digits of a long number.
SPACES = str.maketrans("", "", " _,\u00a0\u202f")
#: What stands between several values.
BETWEEN = re.compile(r"[,;\n]")
MISSING: Any = object()


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
    many: bool = False  # several values make several jobs
    was: str | None = None  # before the change, where a job is run again

    @property
    def changed(self) -> bool:
        return self.was is not None and self.was != plainly(self.value)

    @property
    def wide(self) -> bool:
        return self.kind in ("lines", "json", "sites", "several") or self.of_artifacts

    @property
    def described_by(self) -> str:
        return f"about-{self.name}"


#: Widgets that take several values, in place of those that take one.
SEVERAL = {"site": "sites", "select": "several"}


def plainly(value: Any) -> str:
    """A value of a widget in a line, to compare and to show."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(plainly(item) for item in value)
    if isinstance(value, Mapping):
        return " ".join(str(part) for part in value.values())
    return str(value)


def widget_kind(f: serializers.Field, many: bool = False) -> str:
    """Which widget draws this field; what has no better one is edited as JSON. `many`: it may be swept."""
    name = next((name for classes, name in WIDGETS if isinstance(f, classes)), "json")
    one_choice = isinstance(f, serializers.ChoiceField) and len(f.choices) < 2
    if many and name in SEVERAL and not one_choice:
        return SEVERAL[name]
    if name == "list":
        child = f.child  # type: ignore[attr-defined]
        if isinstance(child, SiteField):
            return "sites"
        return "json" if isinstance(child, serializers.Serializer) else "lines"
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


def as_typed(f: serializers.Field, value: Any, many: bool = False) -> Any:
    """A stored or default value as somebody would have typed it."""
    kind = widget_kind(f, many)
    if kind in ("site", "sites"):
        return rows_of(value)
    if kind == "several":
        return list(value) if isinstance(value, list | tuple | set) else [value]
    if kind == "check":
        return value
    if many and isinstance(value, list):
        return ", ".join(str(item) for item in value)
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


def read(f: serializers.Field, name: str, typed: QueryDict, many: bool = False) -> Any:
    """What was typed, as the serializer takes it; `MISSING` where nothing was, so that the default holds.
    A field that may be null and was emptied is null."""
    kind = widget_kind(f, many)
    if kind == "check":
        return name in typed
    if kind in ("several", "sites", "site"):
        found = typed.getlist(name) if kind == "several" else list(read_sites(name, typed))
        return one_or_all(found, f, many)
    text = typed.get(name, "").strip()
    if not text:
        return None if f.allow_null and name in typed else MISSING
    if many and kind == "number":
        parts = [number(f, part) for part in BETWEEN.split(text) if part.strip()]
        return parts[0] if len(parts) == 1 else parts
    return PARSERS.get(kind, lambda f, text: text)(f, text)


def one_or_all(found: list[Any], f: serializers.Field, many: bool) -> Any:
    """The list of a field that is a list; of another, its one value, or the values to try."""
    if not found:
        return MISSING
    single = many or isinstance(f, SiteField)
    return found[0] if single and (len(found) == 1 or not many) else found


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
