"""Kinds as clients see them: a description, the JSON schema of the parameters, the body of a submit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from jobs.fields import ArtifactField
from jobs.kind import JobKind
from jobs.submit import SubmitFields


class KindSerializer(serializers.Serializer[Any]):
    """Shape of `job-kinds/`; documentation only."""

    name = serializers.CharField()
    label = serializers.CharField()  # type: ignore[assignment]  # a field of this name, not the label
    stage = serializers.CharField()
    description = serializers.CharField()
    needs_gpu = serializers.ChoiceField(["always", "never", "by_params"])
    max_gpus = serializers.IntegerField()
    sweep = serializers.ListField(child=serializers.CharField())
    interactive = serializers.BooleanField()
    params = serializers.DictField()
    takes = serializers.DictField()
    makes = serializers.ListField(child=serializers.CharField())
    example = serializers.DictField()


def describe(name: str, kind: JobKind) -> dict[str, Any]:
    fields = kind.Params().fields
    return {
        "name": name,
        "label": kind.label,
        "stage": kind.stage,
        "description": kind.description,
        "needs_gpu": kind.needs_gpu,
        "max_gpus": kind.max_gpus,
        "interactive": kind.interactive,
        "sweep": list(kind.sweep),
        "params": object_schema(fields, kind.sweep),
        "takes": {n: list(f.types) for n, f in fields.items() if isinstance(f, ArtifactField)},
        "makes": list(kind.makes),
        "example": dict(kind.example),
    }


def object_schema(fields: Mapping[str, serializers.Field], sweep: Sequence[str] = ()) -> dict[str, Any]:
    shown = {n: f for n, f in fields.items() if not f.read_only}
    return {
        "type": "object",
        "properties": {n: field_schema(f, many=n in sweep) for n, f in shown.items()},
        "required": [n for n, f in shown.items() if f.required],
        "additionalProperties": False,
    }


TYPES: list[tuple[type, str]] = [
    (serializers.BooleanField, "boolean"),
    (serializers.IntegerField, "integer"),
    (serializers.FloatField, "number"),
    (serializers.DictField, "object"),
]


#: What a range or a length is called in JSON schema.
LIMITS = {"min_value": "minimum", "max_value": "maximum", "max_length": "maxLength"}


def field_schema(field: serializers.Field | None, *, many: bool = False) -> dict[str, Any]:
    """JSON schema of one parameter: type, range, choices, default, and its sentence. `many`: or a list of values,
    one job for each."""
    if field is None:
        return {}
    basic, told = basic_schema(field), described(field)
    if not many:
        return basic | told
    limits = {name: told.pop(name) for name in LIMITS.values() if name in told}
    one = basic | limits
    return {"oneOf": [one, {"type": "array", "items": one, "minItems": 1}]} | told


def basic_schema(field: serializers.Field) -> dict[str, Any]:
    if isinstance(field, serializers.ListSerializer | serializers.ListField):
        return {"type": "array", "items": field_schema(field.child)}
    if isinstance(field, serializers.Serializer):
        return object_schema(field.fields)
    if isinstance(field, serializers.ChoiceField):
        return {"enum": list(field.choices)}
    if isinstance(field, ArtifactField):
        return {"type": "string", "x-artifact": list(field.types)}
    if isinstance(field, serializers.JSONField):
        return {}
    return {"type": next((name for cls, name in TYPES if isinstance(field, cls)), "string")}


def described(field: serializers.Field) -> dict[str, Any]:
    extra: dict[str, Any] = {"description": str(field.help_text)} if field.help_text else {}
    for ours, theirs in LIMITS.items():
        if (value := getattr(field, ours, None)) is not None:
            extra[theirs] = value
    if field.default is not serializers.empty and not callable(field.default):
        extra["default"] = field.default
    return extra


def camel(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def request_serializer(name: str, kind: JobKind) -> type[serializers.Serializer]:
    """The submit body of a kind: its own parameters and the common fields, under a name of its own."""
    fields = kind.Params().fields
    return body(name, kind, **{n: swept_field(fields[n]) for n in kind.sweep})


def request_schema(name: str, kind: JobKind) -> dict[str, Any]:
    """The same as JSON schema."""
    return object_schema(body(name, kind)().fields, kind.sweep)


def body(name: str, kind: JobKind, **several: serializers.Field) -> type[serializers.Serializer]:
    return type(f"{camel(name)}Params", (kind.Params, SubmitFields), several)


def swept_field(field: serializers.Field) -> serializers.Field:
    """A stand-in that says: a value or a list of them. It is drawn, never used."""
    drawn = field_schema(field, many=True) | ({"nullable": True} if field.allow_null else {})
    shown = extend_schema_field(drawn)(type("Swept", (serializers.JSONField,), {}))
    return shown(required=field.required)
