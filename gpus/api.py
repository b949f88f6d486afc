"""REST `system/*`: the cards, their readings and processes, the hosts, and whether all parts are alive."""

from __future__ import annotations

from typing import Any, TypedDict, cast

from django.http import Http404
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import generics, serializers
from rest_framework.permissions import IsAdminUser, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from gpus import health, owners, shapes
from gpus.choice import KnownCards
from gpus.models import Gpu, GpuEvent, Host, Maintenance
from gpus.rest import ApiError, HasScope, NoLogin
from gpus.schema import schema_of


class GpuList(TypedDict):
    gpu_count: int
    gpus: list[shapes.Info]


class GpuMetrics(TypedDict):
    gpu_count: int
    gpus: list[shapes.Metrics]


class CardProcesses(TypedDict):
    gpu_id: int
    uuid: str
    process_count: int
    processes: list[shapes.Process]
    listed_at: str | None


class GpuProcesses(TypedDict):
    gpu_count: int
    gpus: list[CardProcesses]


class Card(TypedDict):
    gpu_id: int
    uuid: str
    info: shapes.Info
    metrics: shapes.Metrics | None
    processes: list[shapes.Process]
    error: str | None


class HostState(TypedDict):
    host: str
    agent_alive: bool
    agent_seen_at: str | None
    worker_alive: bool
    worker_seen_at: str | None
    backend_error: str | None
    maintenance: str | None
    sampled_at: str | None
    cpu: dict[str, Any] | None
    memory: dict[str, Any] | None
    disk: dict[str, Any] | None
    network: dict[str, Any] | None


class Everything(TypedDict):
    gpu_available: bool
    gpu_count: int
    timestamp: str
    gpus: list[Card]
    aggregate: shapes.Aggregate
    hosts: list[HostState]


# The same questions, asked by the pages ------------------------------------------------------------------


def cards(gpu_id: str | None = None, host: str | None = None) -> list[Gpu]:
    """All cards that are in their hosts, or the one that is named (also one that was removed)."""
    known = KnownCards(host or None)
    if host and not Host.objects.filter(name=host).exists():
        names = list(Host.objects.order_by("name").values_list("name", flat=True))
        raise ApiError(400, "unknown_host", f"There is no host {host[:100]!r}.", available=names)
    return known.present if gpu_id is None else [known.find(gpu_id)]


def metrics_of(gpu: Gpu) -> shapes.Metrics:
    return shapes.metrics(gpu.index, gpu.uuid, gpu.reading, gpu.sampled_at)


def processes_of(gpu: Gpu) -> list[shapes.Process]:
    """What the card listed last, with owners; none for a card that is gone or silent."""
    found = owners.owner_of(gpu.host.name, gpu.uuid, gpu.processes)
    pairs = zip(gpu.processes, found, strict=True)
    return shapes.by_memory(shapes.process(gpu.uuid, entry, owner) for entry, owner in pairs)


def card_state(gpu: Gpu, hold: owners.Hold) -> Card:
    return {
        "gpu_id": gpu.index,
        "uuid": gpu.uuid,
        "info": shapes.info(gpu, hold),
        "metrics": metrics_of(gpu) if gpu.sampled_at else None,
        "processes": processes_of(gpu),
        "error": gpu.error or gpu.host.backend_error or None,
    }


def host_state(host: Host, maintenances: list[Maintenance]) -> HostState:
    reading = host.reading
    told = [one.sentence for one in maintenances if one.host_id in (None, host.pk)]
    return {
        "host": host.name,
        "agent_alive": host.agent_alive(),
        "agent_seen_at": shapes.iso(host.agent_seen_at),
        "worker_alive": host.worker_alive(),
        "worker_seen_at": shapes.iso(host.worker_seen_at),
        "backend_error": host.backend_error or None,
        "maintenance": told[0] if told else None,
        "sampled_at": reading.get("sampled_at"),
        "cpu": reading.get("cpu"),
        "memory": reading.get("memory"),
        "disk": reading.get("disk"),
        "network": reading.get("network"),
    }


def everything(gpu_id: str | None = None, host: str | None = None) -> Everything:
    found = cards(gpu_id, host)
    holds, maintenances = owners.holds(), list(Maintenance.in_force())
    hosts = Host.objects.order_by("name")
    return {
        "gpu_available": bool(found),
        "gpu_count": len(found),
        "timestamp": cast(str, shapes.iso(timezone.now())),
        "gpus": [card_state(gpu, holds.get(gpu.uuid, owners.NOTHING)) for gpu in found],
        "aggregate": shapes.aggregate([metrics_of(gpu) for gpu in found]),
        "hosts": [host_state(one, maintenances) for one in (hosts.filter(name=host) if host else hosts)],
    }


# Views --------------------------------------------------------------------------------------------------

GPU_ID = OpenApiParameter(
    "gpu_id", OpenApiTypes.STR, description="Index of gpu-list, or UUID; all cards without it."
)
HOST = OpenApiParameter("host", OpenApiTypes.STR, description="Cards of this host only.")


def answers(shape: type, *parameters: OpenApiParameter) -> Any:
    """The schema of a GET that answers one of the shapes above."""
    return extend_schema(parameters=list(parameters), responses={200: schema_of(shape)}, tags=["system"])


class CardsView(APIView):
    """`{gpu_count, gpus}` over the cards that `gpu_id` and `host` name."""

    def cards(self) -> list[Gpu]:
        query = self.request.query_params
        return cards(query.get("gpu_id"), query.get("host"))

    def listing(self, items: list[Any]) -> Response:
        return Response({"gpu_count": len(items), "gpus": items})


class GpuListView(CardsView):
    @answers(GpuList, GPU_ID, HOST)
    def get(self, request: Request) -> Response:
        """Every card with what stays the same while it is in its slot."""
        holds = owners.holds()
        return self.listing([shapes.info(gpu, holds.get(gpu.uuid, owners.NOTHING)) for gpu in self.cards()])


class GpuInfoView(GpuListView):
    """The same answer under the name for one card."""


class GpuMetricsView(CardsView):
    @answers(GpuMetrics, GPU_ID, HOST)
    def get(self, request: Request) -> Response:
        """The last sample of every card; what a card does not say is null."""
        return self.listing([metrics_of(gpu) for gpu in self.cards()])


class GpuProcessesView(CardsView):
    @answers(GpuProcesses, GPU_ID, HOST)
    def get(self, request: Request) -> Response:
        """The processes that every card listed last, largest first."""
        return self.listing([self._of(gpu) for gpu in self.cards()])

    def _of(self, gpu: Gpu) -> CardProcesses:
        processes = processes_of(gpu)
        return {
            "gpu_id": gpu.index,
            "uuid": gpu.uuid,
            "process_count": len(processes),
            "processes": processes,
            "listed_at": shapes.iso(gpu.processes_at),
        }


class EverythingView(APIView):
    @answers(Everything, GPU_ID, HOST)
    def get(self, request: Request) -> Response:
        """Every card with its readings, processes and errors, the aggregate, and the hosts."""
        return Response(everything(request.query_params.get("gpu_id"), request.query_params.get("host")))


class HealthView(NoLogin, APIView):  # type: ignore[misc]
    @extend_schema(
        responses={200: schema_of(health.Health), 503: schema_of(health.Health)}, tags=["system"], auth=[]
    )
    def get(self, request: Request) -> Response:
        """Whether every part answers; 503 when one does not. Needs no login."""
        state = health.state()
        return Response(state, status=200 if state["status"] == "ok" else 503)


class GpuEventSerializer(serializers.ModelSerializer[GpuEvent]):
    host = serializers.CharField(source="host.name", read_only=True)

    class Meta:
        model = GpuEvent
        fields = ["id", "at", "host", "uuid", "event", "detail"]


@extend_schema_view(get=extend_schema(tags=["system"]))
class EventsView(generics.ListAPIView[GpuEvent]):
    """Cards added, removed, lost, recovered, and changed by staff; newest first."""

    queryset = GpuEvent.objects.select_related("host").order_by("-at", "-id")
    serializer_class = GpuEventSerializer
    filterset_fields = ["uuid", "event"]


class GpuSettingsSerializer(serializers.ModelSerializer[Gpu]):
    """What staff may set on a card."""

    max_jobs = serializers.IntegerField(min_value=1, max_value=64)
    interactive_slots = serializers.IntegerField(min_value=0, max_value=64)

    class Meta:
        model = Gpu
        fields = ["enabled", "max_jobs", "interactive_slots", "note"]

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        unknown = set(self.initial_data) - set(self.fields)
        if unknown:
            raise serializers.ValidationError(
                {name: ["Cannot be set on a card."] for name in sorted(unknown)}
            )
        return attrs


class GpuSettingsView(APIView):
    permission_classes = [IsAuthenticated, HasScope, IsAdminUser]
    scope = "admin"

    @extend_schema(request=GpuSettingsSerializer, responses={200: schema_of(shapes.Info)}, tags=["system"])
    def patch(self, request: Request, uuid: str) -> Response:
        """Staff: switch a card off and on, how many jobs it takes at once, and a note."""
        gpu = Gpu.objects.select_related("host").filter(uuid__iexact=uuid).first()
        if gpu is None:
            raise Http404
        serializer = GpuSettingsSerializer(gpu, data=request.data, partial=True)
        serializer.is_valid(raise_exception=True)
        change(gpu, serializer.validated_data, by=str(request.user))
        return Response(shapes.info(gpu, owners.holds().get(gpu.uuid, owners.NOTHING)))


def change(gpu: Gpu, values: dict[str, Any], by: str) -> None:
    """Write only these columns: the agent writes the others at the same time."""
    changed = {name: value for name, value in values.items() if getattr(gpu, name) != value}
    if not changed:
        return
    Gpu.objects.filter(pk=gpu.pk).update(**changed)
    for name, value in changed.items():
        setattr(gpu, name, value)
    said = ", ".join(f"{name} = {value}" for name, value in changed.items())
    GpuEvent.objects.create(host=gpu.host, uuid=gpu.uuid, event="changed", detail=f"{said} (by {by})")
