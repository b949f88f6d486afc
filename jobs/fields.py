"""Parameter fields of our own: an artifact, a site of a model."""

from __future__ import annotations

import re
from typing import Any

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

#: `owner/name`, `name`, an artifact id, or `job:<id>` of a job that will make one.
REFERENCE = re.compile(r"^(job:)?[A-Za-z0-9][A-Za-z0-9._/-]{0,160}$")
SITES = ("resid_pre", "resid_mid", "resid_post", "mlp_in", "mlp_out", "attn_out")


#: A data set of the Hugging Face Hub where a corpus is named: `hf:owner/name`, with `@` and a revision if need be.
HUB_DATA = re.compile(r"^hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]{1,100}))?\Z")


def is_path(text: str) -> bool:
    """Whether `text` means a place on this machine rather than a repository or another name."""
    return text.startswith(("/", "~", "./", "../"))


@extend_schema_field({"type": "string", "description": "artifact id, name, or job:<id>"})
class ArtifactField(serializers.CharField):
    """A reference to an artifact of one of `types`: its id, its name, or `job:<id>`.

    The field checks the spelling; `jobs.artifacts.resolve` finds what it names, as the caller may see it.
    """

    def __init__(self, *types: str, **options: Any) -> None:
        options.setdefault("max_length", 200)
        super().__init__(**options)
        self.types = types

    def names_artifact(self, value: str) -> bool:
        """Whether this value is a reference; a field may take other things beside."""
        return True

    def to_internal_value(self, data: Any) -> str:
        value = super().to_internal_value(data)
        if not REFERENCE.match(value) or ".." in value:
            raise serializers.ValidationError(
                f"{value!r} is not an artifact id, an artifact name or job:<id>."
            )
        return value


@extend_schema_field(
    {
        "type": "string",
        "description": "`english`, the path of a file or folder, `hf:owner/name`, or a corpus artifact's id or name",
    }
)
class CorpusField(ArtifactField):
    """Text to run models on: `english` (built in), a path (`/…`, `~…`), a data set of the Hub (`hf:owner/name`), or an
    artifact of type `corpus`."""

    def __init__(self, **options: Any) -> None:
        super().__init__("corpus", **{"max_length": 300, "default": "english"} | options)

    def names_artifact(self, value: str) -> bool:
        return value != "english" and not is_path(value) and not value.startswith("hf:")

    def to_internal_value(self, data: Any) -> str:
        value = serializers.CharField.to_internal_value(self, data)
        if value.startswith("hf:") and (".." in value or not HUB_DATA.match(value)):
            raise serializers.ValidationError(f"{value!r} is not hf:owner/name, nor hf:owner/name@revision.")
        return super().to_internal_value(value) if self.names_artifact(value) else value


class SiteField(serializers.Serializer):
    """Where in the model: the block's number and the place in it."""

    block = serializers.IntegerField(min_value=0, help_text="Number of the block, from 0.")
    site = serializers.ChoiceField(choices=SITES, default="resid_post", help_text="Place in the block.")
