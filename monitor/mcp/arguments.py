"""What the tools take, in the language of the kinds: DRF fields, from which the JSON schemas are drawn.

Only the spelling is checked here; what a value means is for the view behind the tool.
"""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from gpus import samples
from jobs import registry
from jobs.models import Status

#: An agent reads every row that it is sent, and pays for it.
PAGE_SIZE, MAX_PAGE_SIZE = 20, 100
MAX_LINES, MAX_PIECE_BYTES, MAX_WAIT_SECONDS = 2000, 64 * 1024, 300


class Nothing(serializers.Serializer[Any]):
    pass


class JobId(serializers.Serializer[Any]):
    id = serializers.UUIDField(help_text="Id of the job.")


class GroupId(serializers.Serializer[Any]):
    id = serializers.UUIDField(help_text="Id of the group.")


class ArtifactId(serializers.Serializer[Any]):
    id = serializers.UUIDField(help_text="Id of the artifact.")


class KindName(serializers.Serializer[Any]):
    kind = serializers.ChoiceField(registry.names(), help_text="Name of a kind of job.")


class Page(serializers.Serializer[Any]):
    page = serializers.IntegerField(min_value=1, default=1, help_text="Number of the page, from 1.")
    page_size = serializers.IntegerField(
        min_value=1, max_value=MAX_PAGE_SIZE, default=PAGE_SIZE, help_text="Rows of a page."
    )


class Cards(serializers.Serializer[Any]):
    gpu_id = serializers.CharField(
        required=False, help_text="Index of list_gpus, or UUID; all cards without it."
    )
    host = serializers.CharField(required=False, help_text="Cards of this host only.")


AGO = "ISO 8601 with its zone, or how long ago: -90s, -15m, -6h, -30d."


class History(Cards):
    metric = serializers.ChoiceField(
        list(samples.METRICS), default=next(iter(samples.METRICS)), help_text="What is asked about."
    )
    to = serializers.CharField(required=False, help_text=f"{AGO} Now without it.")
    points = serializers.IntegerField(
        min_value=1, max_value=500, default=60, help_text="About how many steps the curve has."
    )


History._declared_fields["from"] = serializers.CharField(
    required=False, help_text=f"{AGO} An hour ago without it."
)


class Fit(KindName):
    params = serializers.DictField(
        required=False, help_text="Parameters of the kind, as its submit tool takes them."
    )
    gpu = serializers.JSONField(
        required=False, allow_null=True, help_text="auto (default), an index of list_gpus, or a card's UUID."
    )


class SystemEvents(Page):
    uuid = serializers.CharField(required=False, help_text="UUID of a card.")
    event = serializers.CharField(required=False, help_text="added, removed, lost, recovered, changed …")


class WatchdogEvents(Page):
    gpu_uuid = serializers.CharField(required=False, help_text="UUID of a card.")
    job_id = serializers.UUIDField(required=False, help_text="Findings that belong to this job.")
    open = serializers.BooleanField(required=False, help_text="true: only those that are still there.")


class Jobs(Page):
    kind = serializers.ChoiceField(registry.names(), required=False, help_text="Name of a kind.")
    status = serializers.CharField(
        required=False, help_text=f"One or more of {', '.join(Status.values)}, with commas between."
    )
    owner = serializers.CharField(required=False, help_text="Name of a user.")
    gpu_uuid = serializers.CharField(required=False, help_text="UUID of the card that they ran on.")
    group_id = serializers.UUIDField(required=False, help_text="Jobs of one sweep.")
    created_after = serializers.DateTimeField(required=False, help_text="ISO 8601 with its zone.")
    ordering = serializers.CharField(
        required=False,
        help_text="queued_at, started_at, finished_at, status, kind or priority; a minus before it turns it "
        "round. Newest first without it.",
    )


class JobLog(JobId):
    tail = serializers.IntegerField(
        min_value=1, max_value=MAX_LINES, default=100, help_text="Lines from the end."
    )
    offset = serializers.IntegerField(
        min_value=0, required=False, help_text="Instead of tail: from this byte on, such as next_offset."
    )


class JobMetrics(JobId):
    names = serializers.CharField(required=False, help_text="Names of curves, with commas between; else all.")
    points = serializers.IntegerField(
        min_value=2, max_value=2000, default=100, help_text="At most so many steps, thinned evenly."
    )


class Piece(serializers.Serializer[Any]):
    path = serializers.CharField(max_length=1000, help_text="Path of the file, as the list of files has it.")
    offset = serializers.IntegerField(min_value=0, default=0, help_text="From this byte on.")
    limit = serializers.IntegerField(
        min_value=1, max_value=MAX_PIECE_BYTES, default=16 * 1024, help_text="At most so many bytes."
    )


class JobFile(Piece, JobId):
    pass


class ArtifactFile(Piece, ArtifactId):
    pass


class Artifacts(Page):
    type = serializers.CharField(required=False, help_text="model, corpus, activations, sae, features …")
    name = serializers.CharField(required=False, help_text="Its name, whole.")
    owner = serializers.CharField(required=False, help_text="Name of a user.")
    job = serializers.UUIDField(required=False, help_text="Those that this job made.")


class Wait(JobId):
    seconds = serializers.IntegerField(
        min_value=0, max_value=MAX_WAIT_SECONDS, default=25, help_text="How long to wait at most."
    )
