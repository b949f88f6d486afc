"""`/metrics` for Prometheus: cards under the names and labels of NVIDIA's DCGM exporter, so that dashboards made for
it work here; jobs and parts of miStudio under names of our own.

A value that the driver does not say, and a card whose reading is stale, give no sample: a gap, never an old number.
Names, units and labels: NVIDIA/dcgm-exporter, `etc/default-counters.csv`. A scrape costs a dozen
queries, whatever the number of cards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from django.db.models import Count, Min
from django.http import HttpResponse
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.request import Request
from rest_framework.views import APIView

from gpus import health, shapes
from gpus.models import Gpu, Host
from gpus.owners import NOTHING, holds
from jobs.models import ACTIVE, Job, Status

MIB = 2**20
Reading = Mapping[str, Any]
LABELS = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION")
OURS = ("gpu", "UUID", "Hostname")


def said(field: str, unit: float = 1) -> Callable[[Reading], float | None]:
    return lambda reading: None if reading.get(field) is None else reading[field] / unit


def pstate(reading: Reading) -> float | None:
    return float(state.removeprefix("P")) if (state := reading.get("performance_state")) else None


#: DCGM's field, what it tells, and where our reading has it.
FIELDS: tuple[tuple[str, str, Callable[[Reading], float | None]], ...] = (
    ("DCGM_FI_DEV_SM_CLOCK", "SM clock (MHz).", said("clock_sm_mhz")),
    ("DCGM_FI_DEV_MEM_CLOCK", "Memory clock (MHz).", said("clock_memory_mhz")),
    ("DCGM_FI_DEV_GPU_TEMP", "Temperature (degrees Celsius).", said("temperature_celsius")),
    ("DCGM_FI_DEV_SLOWDOWN_TEMP", "Temperature of slowdown (C).", said("temperature_slowdown_celsius")),
    ("DCGM_FI_DEV_POWER_USAGE", "Power draw (W).", said("power_draw_watts")),
    ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "Power limit in force (W).", said("power_limit_watts")),
    ("DCGM_FI_DEV_GPU_UTIL", "Utilization (%).", said("utilization_gpu_percent")),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory controller busy (%).", said("utilization_memory_percent")),
    ("DCGM_FI_DEV_FB_TOTAL", "Memory (MiB).", said("memory_total_bytes", MIB)),
    ("DCGM_FI_DEV_FB_FREE", "Memory free (MiB).", said("memory_free_bytes", MIB)),
    ("DCGM_FI_DEV_FB_USED", "Memory used (MiB).", said("memory_used_bytes", MIB)),
    ("DCGM_FI_DEV_FB_RESERVED", "Memory that the driver keeps (MiB).", said("memory_reserved_bytes", MIB)),
    ("DCGM_FI_DEV_FAN_SPEED", "Fan (%).", said("fan_percent")),
    ("DCGM_FI_DEV_PSTATE", "Performance state, 0 is the fastest.", pstate),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrectable memory errors.", said("ecc_errors_uncorrected")),
    ("DCGM_FI_DEV_PCIE_LINK_GEN", "PCIe generation of the link now.", said("pcie_generation")),
    ("DCGM_FI_DEV_PCIE_LINK_WIDTH", "PCIe lanes of the link now.", said("pcie_width")),
)


class Anything(BaseContentNegotiation):
    """Prometheus asks for media types that no renderer here knows; errors stay JSON."""

    def select_parser(self, request: Request, parsers: Any) -> Any:
        return parsers[0]

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> Any:
        return renderers[0], renderers[0].media_type


@extend_schema(exclude=True)
class MetricsView(APIView):
    """Text for Prometheus, with a token of scope `read` (`authorization: {credentials: …}` in its settings)."""

    content_negotiation_class = Anything

    def get(self, request: Request) -> HttpResponse:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return HttpResponse(encode(Everything()), content_type=content_type)


class Everything(Collector):
    """All metrics of this moment, read from the database."""

    def collect(self) -> Iterator[Metric]:
        gpus = list(
            Gpu.objects.filter(removed_at=None).select_related("host").order_by("host__name", "index")
        )
        yield from of_cards(gpus)
        yield from of_leases(gpus)
        yield from of_jobs()
        yield from of_parts()


def of_cards(gpus: list[Gpu]) -> Iterator[Metric]:
    fresh = [(labels(gpu), gpu.reading) for gpu in gpus if gpu.fresh() and gpu.lost_at is None]
    for name, help_text, value_of in FIELDS:
        family = GaugeMetricFamily(name, help_text, labels=LABELS)
        for values, reading in fresh:
            if (value := value_of(reading)) is not None:
                family.add_metric(values, value)
        yield family


def labels(gpu: Gpu) -> list[str]:
    driver = gpu.info.get("driver_version") or ""
    bus = gpu.info.get("pci_bus_id") or ""
    return [str(gpu.index), gpu.uuid, bus, f"nvidia{gpu.index}", gpu.name, gpu.host.name, driver]


def of_leases(gpus: list[Gpu]) -> Iterator[Metric]:
    held = holds()
    jobs = GaugeMetricFamily("mistudio_gpu_jobs", "Jobs that hold the card.", labels=OURS)
    state = GaugeMetricFamily(
        "mistudio_gpu_health", "1 for the card's health in one word.", labels=(*OURS, "health")
    )
    for gpu in gpus:
        hold, of_gpu = held.get(gpu.uuid, NOTHING), [str(gpu.index), gpu.uuid, gpu.host.name]
        jobs.add_metric(of_gpu, len(hold["jobs"]))
        state.add_metric([*of_gpu, shapes.info(gpu, hold)["health"]], 1)
    yield from (jobs, state)


def of_jobs() -> Iterator[Metric]:
    jobs = GaugeMetricFamily("mistudio_jobs", "Jobs by kind and status.", labels=("kind", "status"))
    for row in Job.objects.values("kind", "status").order_by("kind", "status").annotate(count=Count("pk")):
        jobs.add_metric([row["kind"], row["status"]], row["count"])
    yield jobs
    wait = GaugeMetricFamily("mistudio_queue_oldest_seconds", "Age of the oldest queued job; 0 without one.")
    oldest = Job.objects.filter(status=Status.QUEUED).aggregate(at=Min("queued_at"))["at"]
    wait.add_metric([], age(oldest) or 0)
    yield wait
    yield of_running()


def of_running() -> Metric:
    done = GaugeMetricFamily(
        "mistudio_job_progress_ratio", "Share of the stage that is done.", labels=("job", "kind", "UUID")
    )
    for job in Job.objects.filter(status__in=ACTIVE).only("kind", "gpu_uuid", "progress"):
        if (share := (job.progress or {}).get("fraction")) is not None:
            done.add_metric([str(job.pk), job.kind, job.gpu_uuid or ""], share)
    return done


def of_parts() -> Iterator[Metric]:
    up = GaugeMetricFamily("mistudio_healthy", "1 when every part answers, as system/health has it.")
    up.add_metric([], health.state()["status"] == "ok")
    yield up
    for part in ("agent", "worker"):
        ages = GaugeMetricFamily(
            f"mistudio_{part}_age_seconds",
            f"Since the last sign of life of the host's {part}.",
            labels=["Hostname"],
        )
        for host in Host.objects.all():
            if (seconds := age(getattr(host, f"{part}_seen_at"))) is not None:
                ages.add_metric([host.name], seconds)
        yield ages


def age(moment: datetime | None) -> float | None:
    return (timezone.now() - moment).total_seconds() if moment else None
