"""Curves and figures of a job: which metrics share a chart, and results drawn as plotly figures.

Figures are plain dictionaries of plotly's schema (`tests/monitor/test_figures.py` has plotly check them), so that
the web process never loads plotly itself. No WebGL traces: the Content-Security-Policy forbids their code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from django.db.models import Max, Min

from jobs.models import Job, JobMetric
from monitor.templatetags.show import worded

MAX_POINTS = 600
#: Charts of known metrics, in the order of the page. A metric that is named nowhere gets a chart of its own.
KNOWN: tuple[dict[str, Any], ...] = (
    {"names": ["loss"], "title": "Loss", "unit": "log₁₀", "log": True},
    {"names": ["fvu"], "title": "Variance unexplained", "unit": "FVU", "low": 0},
    {"names": ["l0"], "title": "Live latents per token", "unit": "L0", "low": 0},
    {"names": ["dead_percent"], "title": "Dead latents", "unit": "%", "low": 0},
    {"names": ["dead_fraction"], "title": "Dead latents", "unit": "%", "low": 0, "times": 100},
    {"names": ["dead_features"], "title": "Dead latents", "unit": "", "low": 0},
    {"names": ["tokens_per_s", "tokens_per_second"], "title": "Speed", "unit": "tokens/s", "low": 0},
    {"names": ["mse"], "title": "Squared error", "unit": "log₁₀", "log": True},
    {"names": ["aux_loss"], "title": "AuxK loss", "unit": "log₁₀", "log": True},
    {"names": ["gradient_norm"], "title": "Gradient norm", "unit": "log₁₀", "log": True},
    {"names": ["lr"], "title": "Learning rate", "unit": "", "low": 0},
)


# Curves -------------------------------------------------------------------------------------------------
def chart_specs() -> list[dict[str, Any]]:
    """For job.js: titles, units and scales; names it does not find here are drawn under their own name."""
    return list(KNOWN)


def points(job: Job) -> dict[str, Any]:
    """Name → `[[steps], [values]]`, each thinned to `MAX_POINTS`."""
    rows = JobMetric.objects.filter(job=job)
    span = rows.aggregate(first=Min("step"), last=Max("step"))
    curves: dict[str, tuple[list[int], list[float | None]]] = defaultdict(lambda: ([], []))
    for name, step, value in rows.order_by("step").values_list("name", "step", "value"):
        curves[name][0].append(step)
        curves[name][1].append(value)
    return {"span": [span["first"], span["last"]], "curves": {n: thinned(*c) for n, c in curves.items()}}


def thinned(steps: list[int], values: list[float | None]) -> list[list[Any]]:
    """Every n-th point, and always the last."""
    stride = -(-len(steps) // MAX_POINTS)
    if stride <= 1:
        return [steps, values]
    last = [] if (len(steps) - 1) % stride == 0 else [-1]
    return [steps[::stride] + [steps[i] for i in last], values[::stride] + [values[i] for i in last]]


# Results ------------------------------------------------------------------------------------------------
def numbers(result: Mapping[str, Any] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The single values of a result, nested ones under `outer inner`; lists belong to figures."""
    for name, value in (result or {}).items():
        label = f"{prefix} {worded(name)}".strip()
        if is_histogram(value):
            continue
        if isinstance(value, Mapping):
            yield from numbers(value, label)
        elif value is None or isinstance(value, int | float | str | bool):
            yield label, value


def result_figures(job: Job) -> list[dict[str, Any]]:
    """Every histogram of the result, ready for plotly."""
    return [
        {"id": f"figure-{number}", "title": worded(name).capitalize(), "figure": histogram(name, value)}
        for number, (name, value) in enumerate((job.result or {}).items())
        if is_histogram(value)
    ]


def is_histogram(value: Any) -> bool:
    """`{"edges": [n + 1 numbers], "counts": [n], "unit"?: text}`."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("edges"), list)
        and isinstance(value.get("counts"), list)
        and len(value["edges"]) == len(value["counts"]) + 1
    )


def histogram(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    edges, counts = value["edges"], value["counts"]
    bars = {
        "type": "bar",
        "x": [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)],
        "width": [high - low for low, high in zip(edges, edges[1:], strict=False)],
        "y": counts,
        "hovertemplate": "%{x:.3g}: %{y}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": value.get("unit") or worded(name)}},
        "yaxis": {"title": {"text": value.get("count_of") or "count"}},
        "bargap": 0.05,
    }
    return {"data": [bars], "layout": layout}
