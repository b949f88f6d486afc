"""Every tool: one per kind, drawn from its `Params`; one per verb, drawn from the addresses of REST; and those that
look. A tool is a REST view with a schema, so rights, scopes, checks and sentences are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rest_framework import serializers
from rest_framework.views import APIView

from gpus import api as cards
from gpus import history_api
from jobs import api as jobs
from jobs import registry, schema, system_api, urls, verbs
from jobs.kind import JobKind
from monitor.mcp import arguments, reading

Data = dict[str, Any]
Shape = Callable[[Any], Data]


@dataclass(frozen=True)
class Tool:
    """`view` answers for it. Arguments named in `in_path` are of the address, the rest is the query of a GET or the
    body of a POST. `input_schema` takes the place of the one that is drawn from `fields`; `shape` makes the answer an
    object of a bounded size."""

    name: str
    title: str
    description: str
    view: type[APIView]
    fields: type[serializers.Serializer[Any]] = arguments.Nothing
    method: str = "GET"
    in_path: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: Shape = dict
    #: The view itself says what is wrong with the arguments: its sentences are those of REST.
    checks_itself: bool = False
    waits: bool = False
    destroys: bool = False
    input_schema: Data = field(default_factory=dict)

    @property
    def scope(self) -> str:
        """As `gpus.rest.HasScope` asks for it."""
        return "read" if self.method == "GET" else getattr(self.view, "scope", "control")

    @property
    def reads_only(self) -> bool:
        return self.scope == "read"

    @property
    def schema(self) -> Data:
        return self.input_schema or schema.object_schema(self.fields().fields)


# Answers ------------------------------------------------------------------------------------------------
#: What a list says of a job; get_job says the rest.
BRIEF = (
    "id", "kind", "name", "owner", "status", "stalled", "failure_reason", "error", "gpu_request", "gpu_uuid",
    "gpu_names", "progress", "waiting_for", "queued_at", "started_at", "finished_at", "duration_s", "group_id",
)  # fmt: skip


def listed(rows: Any) -> Data:
    return {"count": len(rows), "results": list(rows)}


def paged(page: Any) -> Data:
    """REST gives the addresses of the neighbours; an agent asks for a number."""
    return {"count": page["count"], "more": page["next"] is not None, "results": page["results"]}


def paged_jobs(page: Any) -> Data:
    return paged(page | {"results": brief(page["results"])})


def job_or_group(answer: Any) -> Data:
    """A submit answers with a job, or with the group of a sweep, whose jobs come in short form."""
    return answer | {"jobs": brief(answer["jobs"])} if "jobs" in answer else answer


def brief(jobs: Any) -> list[Data]:
    return [{name: job[name] for name in BRIEF} for job in jobs]


# Looking ------------------------------------------------------------------------------------------------
def of_cards() -> Iterator[Tool]:
    yield Tool(
        "list_gpus", "List cards",
        "Every card: index, UUID, name, memory, health, and the jobs that hold it.",
        cards.GpuListView, arguments.Cards,
    )  # fmt: skip
    yield Tool(
        "gpu_metrics", "Metrics of cards",
        "The last sample of every card: utilization, memory, temperature, power. null: the card does not say.",
        cards.GpuMetricsView, arguments.Cards,
    )  # fmt: skip
    yield Tool(
        "gpu_processes", "Processes on cards",
        "The processes on every card, with their memory and the job they belong to.",
        cards.GpuProcessesView, arguments.Cards,
    )  # fmt: skip
    yield Tool(
        "gpu_history", "History of cards",
        "What a metric of a card did over time: minimum, mean and maximum in equal steps.",
        history_api.GpuHistoryView, arguments.History,
    )  # fmt: skip
    yield Tool(
        "gpu_fit", "Would a job fit",
        "The estimate of a job, and for every card whether it fits now, later or never. Queues nothing.",
        jobs.GpuFit, arguments.Fit, "POST",
    )  # fmt: skip
    yield Tool(
        "system_events", "Events of cards",
        "Cards added, removed, lost, recovered or changed; newest first.",
        cards.EventsView, arguments.SystemEvents, shape=paged,
    )  # fmt: skip
    yield Tool(
        "watchdog_events", "Findings of the watchdog",
        "Processes and memory on cards without a job, and what was done about them; newest first.",
        system_api.WatchdogEvents, arguments.WatchdogEvents, shape=paged,
    )  # fmt: skip


def of_jobs() -> Iterator[Tool]:
    yield Tool(
        "get_job_kind", "Describe a kind",
        "A kind of job: what it does, its parameters, what it takes and makes, an example.",
        jobs.KindDetail, arguments.KindName, in_path=("kind",),
    )  # fmt: skip
    yield Tool(
        "list_jobs", "List jobs",
        "Jobs in short form, newest first; those of others without their private fields.",
        jobs.JobList, arguments.Jobs, shape=paged_jobs,
    )  # fmt: skip
    yield by_id(
        "get_job", "One job", "All about a job: state, card, progress, why it waits, error and hint.",
        jobs.JobDetail,
    )  # fmt: skip
    yield Tool(
        "wait_for_job", "Wait for a job",
        "Wait until a job has ended, or is paused or held, but no longer than `seconds`; sends progress meanwhile. "
        "Call it again while `settled` is false.",
        jobs.JobDetail, arguments.Wait, in_path=("id",), waits=True,
    )  # fmt: skip
    yield by_id(
        "job_log", "Log of a job", "The end of a job's log, or a piece from `offset` on.",
        jobs.JobLog, arguments.JobLog,
    )  # fmt: skip
    yield by_id(
        "job_metrics", "Curves of a job", "Metric curves of a job by step, such as its loss.",
        jobs.JobMetrics, arguments.JobMetrics,
    )  # fmt: skip
    yield by_id(
        "get_group", "One sweep", "The jobs of a sweep in short form, and how many are in which state.",
        jobs.OneGroup, arguments.GroupId, job_or_group,
    )  # fmt: skip
    yield by_id("job_result", "Result of a job", "What a job found, once it has succeeded.", jobs.JobResult)
    yield by_id("job_events", "Story of a job", "What happened to a job.", jobs.JobEvents, shape=listed)
    yield by_id("job_files", "Files of a job", "Paths and sizes of its files.", jobs.JobFiles, shape=listed)
    yield by_id(
        "job_file", "Read a file of a job", "A piece of a text file of a job.",
        reading.JobFilePiece, arguments.JobFile,
    )  # fmt: skip


def of_artifacts() -> Iterator[Tool]:
    yield Tool(
        "list_artifacts", "List artifacts",
        "Models, corpora, activations, SAEs and what else jobs made and take.",
        jobs.ArtifactList, arguments.Artifacts, shape=paged,
    )  # fmt: skip
    yield by_id(
        "get_artifact",
        "One artifact",
        "An artifact and its manifest.",
        jobs.ArtifactDetail,
        arguments.ArtifactId,
    )
    yield by_id(
        "artifact_files", "Files of an artifact", "Paths and sizes of its files.",
        jobs.ArtifactFiles, arguments.ArtifactId, listed,
    )  # fmt: skip
    yield by_id(
        "artifact_file", "Read a file of an artifact", "A piece of a text file of an artifact.",
        reading.ArtifactFilePiece, arguments.ArtifactFile,
    )  # fmt: skip


def by_id(
    name: str,
    title: str,
    description: str,
    view: type[APIView],
    fields: type[serializers.Serializer[Any]] = arguments.JobId,
    shape: Shape = dict,
) -> Tool:
    return Tool(name, title, description, view, fields, in_path=("id",), shape=shape)


# Submitting ---------------------------------------------------------------------------------------------
def submits() -> Iterator[Tool]:
    for name, kind in registry.all_kinds().items():
        yield Tool(
            f"submit_{name}",
            kind.label,
            " ".join(
                [
                    kind.description,
                    "Queues a job and answers with it; wait_for_job follows it.",
                    *sweeps(kind),
                ]
            ),
            jobs.SubmitJob,
            method="POST",
            options={"kind": name},
            shape=job_or_group,
            checks_itself=True,
            input_schema=submit_schema(name, kind),
        )


def sweeps(kind: JobKind) -> list[str]:
    return (
        [f"A list for {' or '.join(kind.sweep)} makes a job for each value, as one group."]
        if kind.sweep
        else []
    )


def submit_schema(name: str, kind: JobKind) -> Data:
    drawn = schema.request_schema(name, kind)
    drawn["properties"]["gpu"] = gpu_schema(kind)
    return drawn | {"examples": [dict(kind.example)]}


def gpu_schema(kind: JobKind) -> Data:
    """The field that every kind takes; a list only where a kind uses several cards."""
    one = [{"type": "string"}, {"type": "integer", "minimum": 0}]
    several: list[Data] = [{"type": "array", "items": {"anyOf": one}, "maxItems": kind.max_gpus}]
    return {
        "anyOf": [*one, *(several if kind.max_gpus > 1 else []), {"type": "null"}],
        "default": "auto",
        "description": "The card: auto (the one with the most free memory when the job starts), an index of list_gpus, "
        "or a card's UUID" + ("; a list or auto:N for several." if kind.max_gpus > 1 else ".")
        + " A named card is never swapped for another.",
    }  # fmt: skip


# Controlling --------------------------------------------------------------------------------------------
def controls() -> Iterator[Tool]:
    """Every verb that REST has an address for: a new one appears here by itself. And the end of a sweep."""
    for pattern in urls.urlpatterns:
        view = getattr(pattern.callback, "cls", None)
        if isinstance(view, type) and issubclass(view, jobs.Verb):
            yield control(view, getattr(pattern.callback, "view_initkwargs", {}))
    yield Tool(
        "cancel_group", "Cancel a sweep", "End every job of a sweep that has not ended.",
        jobs.GroupCancel, arguments.GroupId, "POST", ("id",), shape=job_or_group, destroys=True,
    )  # fmt: skip


def control(view: type[jobs.Verb], options: Mapping[str, Any]) -> Tool:
    name = options.get("name", view.name)
    says = getattr(verbs, name, view).__doc__ or ""
    takes = type("Arguments", (arguments.JobId, view.fields), {})
    return Tool(
        f"{name}_job", f"{name.capitalize()} a job", " ".join(says.split()), view, takes, "POST", ("id",), options,
        destroys=name == "cancel",
    )  # fmt: skip


@cache
def all_tools() -> dict[str, Tool]:
    return {tool.name: tool for tool in (*of_cards(), *of_jobs(), *of_artifacts(), *submits(), *controls())}
