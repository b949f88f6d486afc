"""Jobs in the admin: to look, follow and search. What would break an invariant cannot be edited.

A job moves through its verbs only (`jobs.verbs`); attempts and leases are written by grant, keeper and recovery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html
from django_celery_beat import models as beat

from jobs.exceptions import Conflict
from jobs.models import (
    Artifact,
    Attempt,
    Job,
    JobEvent,
    JobInput,
    JobMetric,
    Lease,
    MailChoice,
    Message,
    WatchdogEvent,
)


def link(row: Model | None) -> str:
    """The row's admin page, under its name; a dash for none."""
    if row is None:
        return "–"
    try:
        address = reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_change", args=[row.pk])
    except NoReverseMatch:
        return str(row)
    return format_html('<a href="{}">{}</a>', address, row)


def links_to(model: type[Model], by: str, label: str) -> Callable[[Any, Model], str]:
    """A column that leads to the rows of `model` that belong to this one."""

    @admin.display(description=label)
    def column(self: Any, row: Model) -> str:
        address = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
        return format_html('<a href="{}?{}={}">{}</a>', address, by, row.pk, label)

    return column


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """To look at: no adding, no deleting, no field to edit but those in `editable`."""

    editable: tuple[str, ...] = ()
    show_full_result_count = False
    list_per_page = 50

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        fields = [field.name for field in self.opts.fields if field.name not in self.editable]
        return [*fields, *self.readonly_fields]

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(self.editable) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Job)
class JobAdmin(ReadOnly):
    list_display = (
        "__str__",
        "kind",
        "status",
        "owner",
        "gpu_uuid",
        "host",
        "queued_at",
        "page",
        "attempts",
        "artifacts",
    )
    list_filter = ("status", "kind", "device", "simulated", "stalled", "failure_reason", "host", "queued_at")
    list_select_related = ("owner", "host")
    search_fields = ("id", "name", "owner__username", "gpu_uuid", "error", "group_id")
    date_hierarchy = "queued_at"
    actions = ("cancel", "retry", "hold", "release")
    readonly_fields = ("attempts", "artifacts", "inputs", "events")

    attempts = links_to(Attempt, "job__id__exact", "attempts")
    artifacts = links_to(Artifact, "job__id__exact", "artifacts")
    inputs = links_to(JobInput, "job__id__exact", "inputs")
    events = links_to(JobEvent, "job__id__exact", "events")

    @admin.display(description="page")
    def page(self, job: Job) -> str:
        return format_html('<a href="{}">open</a>', self.view_on_site(job))

    def view_on_site(self, job: Job) -> str:
        """The job's own page, which says why it waits and what it made."""
        return reverse("job", args=[job.pk])

    def has_verbs_permission(self, request: HttpRequest) -> bool:
        """Actions of this name ask here: `has_change_permission` is always no, for no field may be edited."""
        return request.user.has_perm("jobs.change_job")

    @admin.action(description="Cancel", permissions=["verbs"])
    def cancel(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        from jobs import verbs

        self._each(request, jobs, verbs.cancel, "cancelled")

    @admin.action(description="Retry as a new job on the same card", permissions=["verbs"])
    def retry(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        from jobs import verbs

        self._each(request, jobs, verbs.retry, "queued again")

    @admin.action(description="Hold: keep from starting", permissions=["verbs"])
    def hold(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        from jobs import verbs

        self._each(request, jobs, verbs.hold, "held")

    @admin.action(description="Release what is held", permissions=["verbs"])
    def release(self, request: HttpRequest, jobs: QuerySet[Job]) -> None:
        from jobs import verbs

        self._each(request, jobs, verbs.release, "released")

    def _each(self, request: HttpRequest, jobs: QuerySet[Job], verb: Callable[..., Any], done: str) -> None:
        """`verb` for each; one job's no does not keep the others from it."""
        told = 0
        for job in jobs:
            try:
                verb(job, request.user)
                told += 1
            except Exception as error:
                if not said_no(error):
                    raise
                self.message_user(request, f"{job}: {error}", messages.WARNING)
        if told:
            self.message_user(request, f"{told} {done}.", messages.SUCCESS)


def said_no(error: Exception) -> bool:
    """Whether a verb answered (409, 400) rather than broke."""
    return isinstance(error, Conflict) or getattr(error, "status_code", 500) < 500


@admin.register(Attempt)
class AttemptAdmin(ReadOnly):
    list_display = (
        "__str__",
        "job_link",
        "host",
        "gpu_uuids",
        "granted_at",
        "heartbeat_at",
        "ended_at",
        "outcome",
        "leases",
    )
    list_filter = ("outcome", "host", "granted_at", ("ended_at", admin.EmptyFieldListFilter))
    list_select_related = ("job", "host")
    search_fields = ("job__id", "job__name", "gpu_uuids", "=keeper_pid", "=work_pid")
    # The proof of membership (a hash) is nobody's to copy.
    exclude = ("token_hash",)
    readonly_fields = ("job_link", "leases")

    leases = links_to(Lease, "attempt__id__exact", "leases")

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return [name for name in super().get_readonly_fields(request, obj) if name != "token_hash"]

    @admin.display(description="job", ordering="job")
    def job_link(self, attempt: Attempt) -> str:
        return link(attempt.job)


@admin.register(Lease)
class LeaseAdmin(ReadOnly):
    list_display = (
        "resource",
        "job_class",
        "slot",
        "state",
        "attempt_link",
        "job_link",
        "created_at",
        "ended_at",
    )
    list_filter = ("state", "job_class", ("ended_at", admin.EmptyFieldListFilter))
    list_select_related = ("attempt__job",)
    search_fields = ("resource", "attempt__job__id", "attempt__job__name")
    readonly_fields = ("attempt_link", "job_link")

    @admin.display(description="attempt", ordering="attempt")
    def attempt_link(self, lease: Lease) -> str:
        return link(lease.attempt)

    @admin.display(description="job")
    def job_link(self, lease: Lease) -> str:
        return link(lease.attempt.job)


@admin.register(Artifact)
class ArtifactAdmin(ReadOnly):
    """`shared` may be switched; names and files are changed through the API, which keeps disk and row together."""

    editable = ("shared",)
    list_display = ("name", "type", "owner", "shared", "size_bytes", "job_link", "created_at", "uses")
    list_filter = ("type", "shared", "created_at")
    list_select_related = ("owner", "job")
    search_fields = ("id", "name", "owner__username", "job__id")
    readonly_fields = ("job_link", "uses")

    uses = links_to(JobInput, "artifact__id__exact", "uses")

    @admin.display(description="made by", ordering="job")
    def job_link(self, artifact: Artifact) -> str:
        return link(artifact.job)


@admin.register(JobInput)
class JobInputAdmin(ReadOnly):
    list_display = ("__str__", "job_link", "artifact_link", "source_link")
    list_select_related = ("job", "artifact", "source_job")
    search_fields = ("job__id", "artifact__id", "source_job__id", "parameter")

    @admin.display(description="job")
    def job_link(self, row: JobInput) -> str:
        return link(row.job)

    @admin.display(description="artifact")
    def artifact_link(self, row: JobInput) -> str:
        return link(row.artifact)

    @admin.display(description="made by")
    def source_link(self, row: JobInput) -> str:
        return link(row.source_job)


@admin.register(JobEvent)
class JobEventAdmin(ReadOnly):
    list_display = ("at", "job_link", "event", "attempt", "detail")
    list_filter = ("event", "at")
    list_select_related = ("job",)
    search_fields = ("job__id", "event", "detail")

    @admin.display(description="job", ordering="job")
    def job_link(self, event: JobEvent) -> str:
        return link(event.job)


@admin.register(JobMetric)
class JobMetricAdmin(ReadOnly):
    list_display = ("job_link", "name", "step", "value")
    list_select_related = ("job",)
    search_fields = ("=job__id", "=name")

    @admin.display(description="job", ordering="job")
    def job_link(self, metric: JobMetric) -> str:
        return link(metric.job)


@admin.register(WatchdogEvent)
class WatchdogEventAdmin(ReadOnly):
    list_display = (
        "found_at", "finding", "state", "name", "pid", "gpu_uuid", "host", "attempt_link", "memory_before_bytes",
        "memory_after_bytes", "closed_at",
    )  # fmt: skip
    list_filter = ("finding", "state", "host", ("closed_at", admin.EmptyFieldListFilter))
    list_select_related = ("host", "attempt__job")
    search_fields = ("name", "user", "gpu_uuid", "=pid", "attempt__job__id", "attempt__job__name")
    readonly_fields = ("attempt_link",)

    @admin.display(description="attempt", ordering="attempt")
    def attempt_link(self, row: WatchdogEvent) -> str:
        return link(row.attempt)


# Beat's tables: who may edit a PeriodicTask may call any task with any arguments.
for schedule in (
    beat.PeriodicTask,
    beat.IntervalSchedule,
    beat.CrontabSchedule,
    beat.SolarSchedule,
    beat.ClockedSchedule,
):
    if admin.site.is_registered(schedule):
        admin.site.unregister(schedule)


@admin.register(beat.PeriodicTask)
class PeriodicTaskAdmin(ReadOnly):
    """To look at; the schedule stands in the code (`mistudio/celery.py`)."""

    list_display = ("name", "task", "interval", "enabled", "last_run_at", "total_run_count")
    list_select_related = ("interval",)


@admin.register(Message)
class MessageAdmin(ReadOnly):
    list_display = (
        "created_at",
        "event",
        "channel",
        "address",
        "tries",
        "due_at",
        "sent_at",
        "given_up_at",
        "last_error",
    )
    list_filter = ("channel", "event", "created_at")


@admin.register(MailChoice)
class MailChoiceAdmin(ReadOnly):
    list_display = ("user", "when")
    list_select_related = ("user",)
