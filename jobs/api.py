"""REST of jobs, kinds and artifacts (contract, section 4). Views parse and answer; the rest is elsewhere."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse
from django.shortcuts import get_object_or_404
from django_filters import rest_framework as filters
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import (
    OpenApiParameter,
    PolymorphicProxySerializer,
    extend_schema,
    inline_serializer,
)
from rest_framework import generics, serializers
from rest_framework.filters import OrderingFilter
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from gpus.rest import ApiError
from jobs import files, fit, groups, logs, paths, registry, schema, shelf, submit, templates, verbs
from jobs.artifacts import visible
from jobs.exceptions import Conflict
from jobs.kind import JobKind
from jobs.models import Artifact, Job, JobGroup, JobMetric, JobTemplate
from jobs.people import Person
from jobs.serializers import (
    ArtifactSerializer,
    AttemptSerializer,
    GroupSerializer,
    JobEventSerializer,
    JobSerializer,
    TemplateSerializer,
    may_see,
)


def jobs() -> QuerySet[Job]:
    """Jobs with all that their shape shows, in a fixed number of queries."""
    return Job.objects.select_related("owner", "host").prefetch_related(
        "attempts__host", "inputs__artifact", "artifacts", "after"
    )


class JobFilter(filters.FilterSet):
    owner = filters.CharFilter(field_name="owner__username")
    created_after = filters.IsoDateTimeFilter(field_name="queued_at", lookup_expr="gte")
    status = filters.CharFilter(method="by_status")

    class Meta:
        model = Job
        fields = ["kind", "gpu_uuid", "group_id"]

    def by_status(self, jobs: QuerySet[Job], name: str, value: str) -> QuerySet[Job]:
        return jobs.filter(status__in=value.split(","))


class JobViews(generics.GenericAPIView[Job]):
    """Serializers learn who asks, so that others get the reduced form."""

    serializer_class = JobSerializer

    def get_queryset(self) -> QuerySet[Job]:
        return jobs()

    def get_serializer_context(self) -> dict[str, Any]:
        return {**super().get_serializer_context(), "user": self.request.user}


class JobList(JobViews, generics.ListAPIView[Job]):
    """All jobs, newest first; those of others in reduced form."""

    filterset_class = JobFilter
    filter_backends = [filters.DjangoFilterBackend, OrderingFilter]
    ordering_fields = ["queued_at", "started_at", "finished_at", "status", "kind", "priority"]
    ordering = ["-queued_at"]


class JobDetail(JobViews, generics.RetrieveAPIView[Job]):
    """One job; private fields are null for all but its owner and staff."""

    lookup_url_kwarg = "id"


class OneJob(APIView):
    """Base of what only the owner and staff may do or read: for others the job is unknown."""

    def job(self) -> Job:
        job = get_object_or_404(jobs(), pk=self.kwargs["id"])
        if not may_see(job, self.request.user):
            raise ApiError(404, "not_found", "There is no such job of yours.")
        return job


class SubmitJob(APIView):
    """Queue a job of one kind. Everything that can be known is checked before the row is made."""

    scope = "submit"
    kind = ""

    def post(self, request: Request) -> Response:
        try:
            shown, new = submitted(request.user, self.kind, request.data)
        except Conflict as conflict:
            raise ApiError(409, "conflict", str(conflict)) from None
        return Response(shown, status=201 if new else 200)


def submitted(user: Person, kind_name: str, data: Any) -> tuple[dict[str, Any], bool]:
    """The job, or the group where a parameter is swept, as it is shown; and whether it is new."""
    if groups.swept(submit.get_kind(kind_name), data):
        group, new = groups.submit_once(user, kind_name, data)
        return shown_group(group, user), new
    job, new = submit.submit_once(user, kind_name, data)
    return dict(JobSerializer(jobs().get(pk=job.pk), context={"user": user}).data), new


def shown_group(group: JobGroup, user: Person) -> dict[str, Any]:
    found = list(groups.members(group, jobs()))
    return dict(GroupSerializer(group, context={"user": user, "members": found}).data)


class UnknownKind(APIView):
    """A kind that does not exist: 404 with the ones that do."""

    scope = "submit"

    @extend_schema(exclude=True)
    def post(self, request: Request, kind: str) -> Response:
        submit.get_kind(kind)
        raise ApiError(405, "method_not_allowed", "Use the address of the kind itself.")


class Verb(OneJob):
    """cancel · hold · release · pause · resume · retry · finalize: 202 with the job, or 409 with the reason."""

    scope = "control"
    name = ""
    #: What the body may hold.
    fields: type[serializers.Serializer[Any]] = serializers.Serializer

    @extend_schema(request=None, responses={202: JobSerializer})
    def post(self, request: Request, id: str) -> Response:
        body = request.data if isinstance(request.data, dict) else {}
        try:
            job = self.act(self.job(), request, body)
        except Conflict as conflict:
            raise ApiError(409, "conflict", str(conflict)) from None
        return Response(JobSerializer(jobs().get(pk=job.pk), context={"user": request.user}).data, status=202)

    def act(self, job: Job, request: Request, body: dict[str, Any]) -> Job:
        return getattr(verbs, self.name)(job, request.user)


def refuse_unknown(body: dict[str, Any], fields: serializers.Serializer[Any], why: str) -> None:
    """What would be dropped in silence is refused."""
    if unknown := set(body) - set(fields.fields):
        sentence = f"There is no field of this name here. {why}"
        raise serializers.ValidationError({name: [sentence] for name in sorted(unknown)})


SAME_CARD = "auto, an index of gpu-list, or a card's UUID; without it the card of the last attempt."


class ResumeFields(serializers.Serializer[Any]):
    gpu = serializers.JSONField(required=False, allow_null=True, help_text=SAME_CARD)


class Resume(Verb):
    name = "resume"
    fields = ResumeFields

    @extend_schema(request=ResumeFields, responses={202: JobSerializer})
    def post(self, request: Request, id: str) -> Response:
        return super().post(request, id)

    def act(self, job: Job, request: Request, body: dict[str, Any]) -> Job:
        refuse_unknown(body, ResumeFields(), "A resume changes nothing but the card.")
        return verbs.resume(job, request.user, gpu=body.get("gpu"))


class RetryFields(serializers.Serializer[Any]):
    gpu = serializers.JSONField(required=False, allow_null=True, help_text=SAME_CARD)
    params = serializers.DictField(required=False, help_text="Parameters that are to be others this time.")


RetryFields._declared_fields["from"] = serializers.ChoiceField(
    ["checkpoint", "start"], required=False, help_text="checkpoint where there is one, unless said otherwise."
)


class Retry(Verb):
    """A new job on the same card (or `gpu`), from the checkpoint where there is one."""

    name = "retry"
    fields = RetryFields

    @extend_schema(request=RetryFields, responses={202: JobSerializer})
    def post(self, request: Request, id: str) -> Response:
        return super().post(request, id)

    def act(self, job: Job, request: Request, body: dict[str, Any]) -> Job:
        fields = RetryFields(data=body)
        fields.is_valid(raise_exception=True)
        refuse_unknown(body, fields, "Changed parameters go into params.")
        asked = fields.validated_data
        return verbs.retry(job, request.user, asked.get("gpu"), asked.get("from"), asked.get("params"))


class JobLog(OneJob):
    """`?tail=` lines from the end, or `?offset=` bytes; `next_offset` goes on from there."""

    @extend_schema(
        parameters=[OpenApiParameter("tail", int), OpenApiParameter("offset", int)],
        responses=inline_serializer(
            "JobLog",
            {
                "text": serializers.CharField(),
                "offset": serializers.IntegerField(),
                "next_offset": serializers.IntegerField(),
                "size": serializers.IntegerField(),
            },
        ),
    )
    def get(self, request: Request, id: str) -> Response:
        job, query = self.job(), request.query_params
        piece = (
            logs.read(job, number(query, "offset", 0))
            if "offset" in query
            else logs.tail(job, number(query, "tail", 200))
        )
        return Response(piece.__dict__)


def number(query: Any, name: str, default: int, maximum: int = 10**12) -> int:
    """A whole number of the query string, or 400."""
    raw = query.get(name, str(default))
    if not raw.isascii() or not raw.isdigit() or len(raw) > 13 or int(raw) > maximum:
        raise serializers.ValidationError(
            {name: [f"{raw[:40]!r} is not a whole number from 0 to {maximum}."]}
        )
    return int(raw)


CURVES = [OpenApiParameter("names", str), OpenApiParameter("points", int)]


class JobMetrics(OneJob):
    """Curves: `{"step": […], "loss": […]}`; `?names=loss,fvu`, `?points=` thins them evenly."""

    @extend_schema(parameters=CURVES, responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, id: str) -> Response:
        return Response(curves(self.job(), request.query_params))


class JobMetricsCsv(OneJob):
    @extend_schema(parameters=CURVES, responses={(200, "text/csv"): OpenApiTypes.STR})
    def get(self, request: Request, id: str) -> HttpResponse:
        columns = curves(self.job(), request.query_params)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        return HttpResponse(text.getvalue(), content_type="text/csv")


def curves(job: Job, query: Any) -> dict[str, list[Any]]:
    """Columns over the union of steps; null where a curve has no point."""
    rows = JobMetric.objects.filter(job=job)
    if names := query.get("names"):
        rows = rows.filter(name__in=names.split(","))
    table: dict[str, dict[int, float | None]] = {}
    for name, step, value in rows.values_list("name", "step", "value"):
        table.setdefault(name, {})[step] = value
    steps = thinned(
        sorted({s for points in table.values() for s in points}), number(query, "points", 2000, 20000)
    )
    return {"step": steps} | {name: [points.get(s) for s in steps] for name, points in sorted(table.items())}


def thinned(steps: list[int], points: int) -> list[int]:
    """At most `points` of them, evenly, the last one always."""
    if len(steps) <= points or points < 2:
        return steps
    return [steps[round(i * (len(steps) - 1) / (points - 1))] for i in range(points)]


class JobResult(OneJob):
    @extend_schema(responses=OpenApiTypes.OBJECT)
    def get(self, request: Request, id: str) -> Response:
        job = self.job()
        if job.result is None:
            raise ApiError(404, "no_result", f"The job has no result; it is {job.status}.")
        return Response(job.result)


class JobAttempts(OneJob):
    @extend_schema(responses=AttemptSerializer(many=True))
    def get(self, request: Request, id: str) -> Response:
        return Response(AttemptSerializer(self.job().attempts.all(), many=True).data)


class JobEvents(OneJob):
    @extend_schema(responses=JobEventSerializer(many=True))
    def get(self, request: Request, id: str) -> Response:
        return Response(JobEventSerializer(self.job().events.all(), many=True).data)


FILE_LIST = inline_serializer(
    "File", {"path": serializers.CharField(), "size_bytes": serializers.IntegerField()}, many=True
)


class JobFiles(OneJob):
    @extend_schema(responses=FILE_LIST)
    def get(self, request: Request, id: str) -> Response:
        return Response(files.listing(paths.job_folder(self.job())))


class JobFile(OneJob):
    @extend_schema(responses={(200, "application/octet-stream"): OpenApiTypes.BINARY})
    def get(self, request: Request, id: str, path: str) -> Any:
        return files.stream(request, files.inside(paths.job_folder(self.job()), path))


# Kinds ------------------------------------------------------------------------------------------------


class KindList(APIView):
    """Every kind in the order of the stages."""

    @extend_schema(responses=schema.KindSerializer(many=True))
    def get(self, request: Request) -> Response:
        return Response([schema.describe(name, kind) for name, kind in registry.all_kinds().items()])


class KindDetail(APIView):
    @extend_schema(responses=schema.KindSerializer)
    def get(self, request: Request, kind: str) -> Response:
        return Response(schema.describe(kind, submit.get_kind(kind)))


def answer_of(kind: JobKind) -> Any:
    """A job; of a kind that can sweep, a job or a group."""
    if not kind.sweep:
        return JobSerializer
    both: list[Any] = [JobSerializer, GroupSerializer]
    return PolymorphicProxySerializer("JobOrGroup", both, resource_type_field_name=None)


def submit_view(name: str, kind: JobKind) -> type[SubmitJob]:
    """The submit view of one kind, with its parameters in the schema."""

    # A function of the kind's own: the description must not land on the one that all kinds share.
    def post(self: SubmitJob, request: Request) -> Response:
        return SubmitJob.post(self, request)

    documented = extend_schema(
        operation_id=f"submit_{name}",
        summary=kind.label,
        description=kind.description,
        request=schema.request_serializer(name, kind),
        responses=dict.fromkeys((201, 200), answer_of(kind)),
    )
    return type(f"Submit{schema.camel(name)}", (SubmitJob,), {"kind": name, "post": documented(post)})


# Groups and templates ---------------------------------------------------------------------------------


class OneGroup(APIView):
    """A sweep with its jobs; for others than its owner and staff there is no such group."""

    scope = "read"

    def group(self) -> JobGroup:
        group = get_object_or_404(JobGroup.objects.select_related("owner"), pk=self.kwargs["id"])
        if not may_see(group, self.request.user):
            raise ApiError(404, "not_found", "There is no such group of yours.")
        return group

    @extend_schema(responses=GroupSerializer)
    def get(self, request: Request, id: str) -> Response:
        return Response(shown_group(self.group(), request.user))


class GroupCancel(OneGroup):
    """End every job of the group that has not ended: 202 with the group, or 409 when all have."""

    scope = "control"
    http_method_names = ["post", "options"]

    @extend_schema(request=None, responses={202: GroupSerializer})
    def post(self, request: Request, id: str) -> Response:
        group = self.group()
        try:
            groups.cancel(group, request.user)
        except Conflict as conflict:
            raise ApiError(409, "conflict", str(conflict)) from None
        return Response(shown_group(group, request.user), status=202)


class Templates(generics.ListCreateAPIView[JobTemplate]):
    """One's own and shared templates; POST keeps parameters (or those of a `job`) under a name."""

    serializer_class = TemplateSerializer
    filterset_fields = ["kind", "shared"]
    queryset = JobTemplate.objects.none()

    @property
    def scope(self) -> str:
        return "submit" if self.request.method == "POST" else "read"

    def get_queryset(self) -> QuerySet[JobTemplate]:
        return templates.visible(self.request.user)

    def perform_create(self, serializer: Any) -> None:
        asked, user = serializer.validated_data, self.request.user
        kind, params = asked.get("kind", ""), asked.get("params", {})
        if "job" in asked:
            kind, params = taken_from(asked["job"], user)
        serializer.instance = templates.save(
            user, kind, asked["name"], params, shared=asked.get("shared", False)
        )


def taken_from(job_id: Any, user: Person) -> tuple[str, dict[str, Any]]:
    job = Job.objects.filter(pk=job_id).first()
    if job is None or not may_see(job, user):
        raise serializers.ValidationError({"job": [f"No job {job_id} of yours."]})
    return job.kind, templates.params_of(job)


class TemplateDetail(generics.DestroyAPIView[JobTemplate]):
    """DELETE, for its owner and staff."""

    scope = "control"
    lookup_url_kwarg = "id"
    serializer_class = TemplateSerializer

    def get_queryset(self) -> QuerySet[JobTemplate]:
        return templates.changeable(self.request.user)


# Artifacts --------------------------------------------------------------------------------------------


class ArtifactFilter(filters.FilterSet):
    owner = filters.CharFilter(field_name="owner__username")

    class Meta:
        model = Artifact
        fields = ["type", "name", "shared", "job"]


class ArtifactList(generics.ListAPIView[Artifact]):
    serializer_class = ArtifactSerializer
    filterset_class = ArtifactFilter
    queryset = Artifact.objects.none()

    def get_queryset(self) -> QuerySet[Artifact]:
        return visible(self.request.user).select_related("owner")


class ArtifactDetail(generics.RetrieveUpdateDestroyAPIView[Artifact]):
    """PATCH `name`, `shared` (owner and staff); DELETE answers 409 while something uses it."""

    serializer_class = ArtifactSerializer
    lookup_url_kwarg = "id"
    http_method_names = ["get", "patch", "delete", "head", "options"]

    @property
    def scope(self) -> str:
        return "read" if self.request.method in ("GET", "HEAD", "OPTIONS") else "control"

    def get_queryset(self) -> QuerySet[Artifact]:
        found = shelf.changeable if self.request.method in ("PATCH", "DELETE") else visible
        return found(self.request.user).select_related("owner")

    def perform_update(self, serializer: Any) -> None:
        shelf.change(serializer)

    def perform_destroy(self, artifact: Artifact) -> None:
        shelf.delete(artifact)


class OneArtifact(APIView):
    def folder(self) -> Path:
        return paths.artifact_folder(get_object_or_404(visible(self.request.user), pk=self.kwargs["id"]))


class ArtifactFiles(OneArtifact):
    @extend_schema(responses=FILE_LIST)
    def get(self, request: Request, id: str) -> Response:
        return Response(files.listing(self.folder()))


class ArtifactFile(OneArtifact):
    @extend_schema(responses={(200, "application/octet-stream"): OpenApiTypes.BINARY})
    def get(self, request: Request, id: str, path: str) -> Any:
        return files.stream(request, files.inside(self.folder(), path))


class GpuFit(APIView):
    """The estimate of a job, and for every card whether it fits now, later or never, with the numbers."""

    scope = "read"

    @extend_schema(
        request=inline_serializer(
            "FitRequest",
            {
                "kind": serializers.CharField(),
                "params": serializers.DictField(required=False),
                "gpu": serializers.JSONField(required=False, allow_null=True),
            },
        ),
        responses=OpenApiTypes.OBJECT,
    )
    def post(self, request: Request) -> Response:
        body = request.data if isinstance(request.data, dict) else {}
        kind, params = body.get("kind"), body.get("params") or {}
        if not isinstance(kind, str) or not isinstance(params, dict):
            raise serializers.ValidationError({"kind": ["The name of a kind, and its params as an object."]})
        return Response(fit.fit(request.user, kind, params, body.get("gpu")))
