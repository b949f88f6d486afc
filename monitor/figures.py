"""Curves and figures of a job: which metrics share a chart, and results drawn as plotly figures.

Figures are plain dictionaries of plotly's schema (`tests/monitor/test_figures.py` has plotly check them), so that
the web process never loads plotly itself. No WebGL traces: the Content-Security-Policy forbids their code.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from django.db.models import Max, Min, OuterRef, Subquery

from jobs import paths
from jobs.models import Job, JobMetric
from monitor.templatetags.show import worded

MAX_POINTS = 600
OVERLAID_POINTS = 6000
MAX_FIGURE_BYTES = 500_000
#: Charts of known metrics, in the order of the page. A metric that is named nowhere gets a chart of its own.
KNOWN: tuple[dict[str, Any], ...] = (
    {"names": ["loss"], "title": "Loss", "unit": "log scale", "log": True},
    {"names": ["fvu"], "title": "Variance unexplained", "unit": "FVU", "low": 0},
    {"names": ["l0"], "title": "Live latents per token", "unit": "L0", "low": 0},
    {"names": ["dead_percent"], "title": "Dead latents", "unit": "%", "low": 0},
    {"names": ["dead_fraction"], "title": "Dead latents", "unit": "%", "low": 0, "times": 100},
    {"names": ["dead_features"], "title": "Dead latents", "unit": "", "low": 0},
    {"names": ["tokens_per_s", "tokens_per_second"], "title": "Speed", "unit": "tokens/s", "low": 0},
    {"names": ["mse"], "title": "Squared error", "unit": "log scale", "log": True},
    {"names": ["aux_loss"], "title": "AuxK loss", "unit": "log scale", "log": True},
    {"names": ["gradient_norm"], "title": "Gradient norm", "unit": "log scale", "log": True},
    {"names": ["lr"], "title": "Learning rate", "unit": "", "low": 0},
)


#: Which way a number is better; of the others nobody can say.
LESS = ("loss", "mse", "fvu", "dead_fraction", "dead_percent", "dead_features", "aux_loss", "ce_sae", "kl")
MORE = ("explained_variance", "ce_recovered", "cosine")

#: What says how good a result is; its other numbers stand under "More".
HEADLINES = (
    "fvu",
    "explained_variance",
    "l0",
    "dead_fraction",
    "ce_recovered",
    "tokens",
    "documents",
    "parameters",
    "n_layers",
    "d_model",
)


# Curves -------------------------------------------------------------------------------------------------
def chart_specs() -> list[dict[str, Any]]:
    """For job.js: titles, units and scales; names it does not find here are drawn under their own name."""
    return list(KNOWN)


def overlaid(jobs: Iterable[Job], name: str) -> dict[str, list[list[Any]]]:
    """One metric of several jobs: id → `[[steps], [values]]`, each thinned to a fair share of what a chart can show."""
    found: dict[str, tuple[list[int], list[float | None]]] = {str(job.pk): ([], []) for job in jobs}
    rows = JobMetric.objects.filter(job__in=list(found), name=name).order_by("step")
    for job_id, step, value in rows.values_list("job_id", "step", "value"):
        found[str(job_id)][0].append(step)
        found[str(job_id)][1].append(value)
    most = max(50, OVERLAID_POINTS // max(1, len(found)))
    return {job_id: thinned(*curve, most) for job_id, curve in found.items() if curve[0]}


def curve_names(jobs: Iterable[Job]) -> list[str]:
    """Names of the curves that any of the jobs has, in the order of the pages."""
    names = set(JobMetric.objects.filter(job__in=list(jobs)).values_list("name", flat=True).distinct())
    known = [name for spec in KNOWN for name in spec["names"] if name in names]
    return known + sorted(names - set(known))


def last_values(jobs: Iterable[Job]) -> dict[Any, dict[str, float | None]]:
    """Of each job, the last point of each of its curves."""
    ends = (
        JobMetric.objects.filter(job=OuterRef("job"), name=OuterRef("name"))
        .order_by("-step")
        .values("step")[:1]
    )
    rows = JobMetric.objects.filter(job__in=list(jobs), step=Subquery(ends))
    found: dict[Any, dict[str, float | None]] = defaultdict(dict)
    for job_id, name, value in rows.values_list("job_id", "name", "value"):
        found[job_id][name] = value
    return found


def points(job: Job) -> dict[str, Any]:
    """Name → `[[steps], [values]]`, each thinned to `MAX_POINTS`."""
    rows = JobMetric.objects.filter(job=job)
    span = rows.aggregate(first=Min("step"), last=Max("step"))
    curves: dict[str, tuple[list[int], list[float | None]]] = defaultdict(lambda: ([], []))
    for name, step, value in rows.order_by("step").values_list("name", "step", "value"):
        curves[name][0].append(step)
        curves[name][1].append(value)
    return {"span": [span["first"], span["last"]], "curves": {n: thinned(*c) for n, c in curves.items()}}


def thinned(steps: list[int], values: list[float | None], most: int = MAX_POINTS) -> list[list[Any]]:
    """Every n-th point, and always the last."""
    stride = -(-len(steps) // most)
    if stride <= 1:
        return [steps, values]
    last = [] if (len(steps) - 1) % stride == 0 else [-1]
    return [steps[::stride] + [steps[i] for i in last], values[::stride] + [values[i] for i in last]]


# Results ------------------------------------------------------------------------------------------------
def numbers(result: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """The numbers of a result, shown large: those that say how good it is, where there are any, else all."""
    found = {name: value for name, value in (result or {}).items() if is_number(value)}
    names = [name for name in HEADLINES if name in found] or list(found)
    return [(worded(name), found[name]) for name in names]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def other_values(result: Mapping[str, Any] | None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Everything else of a result, nested values as `outer inner`; long lists are left to files."""
    large = set() if prefix else {label for label, _ in numbers(result)}
    for name, value in (result or {}).items():
        label = f"{prefix} {worded(name)}".strip()
        if isinstance(value, Mapping):
            yield from other_values(value, label)
        elif isinstance(value, list):
            if not any(isinstance(item, Mapping) for item in value):  # a table is the kind's own template's
                yield label, value if len(value) <= 16 else f"{len(value)} values"
        elif value is not None and label not in large:
            yield label, value


def result_figures(job: Job) -> list[dict[str, Any]]:
    """Every histogram that the job left among its files, ready for plotly."""
    found = []
    for file in sorted((paths.job_folder(job) / "out").glob("*histogram*.json")):
        value = read_small(file)
        if is_histogram(value):
            name = file.stem
            title = TITLES.get(name, worded(name).capitalize())
            found.append({"id": f"figure-{name}", "title": title, "figure": histogram(name, value)})
    return found


def read_small(file: Path) -> Any:
    """The JSON of a file, or `None` when it is too large for a page or no JSON."""
    try:
        return json.loads(file.read_text()) if file.stat().st_size < MAX_FIGURE_BYTES else None
    except (OSError, ValueError):
        return None


def is_histogram(value: Any) -> bool:
    """`{"edges": [n + 1 numbers], "counts": [n]}`, or of several things `"series": [{"name", "counts"}]`."""
    if not isinstance(value, Mapping) or not isinstance(value.get("edges"), list):
        return False
    series = value.get("series", [{"name": "", "counts": value.get("counts")}])
    return isinstance(series, list) and bool(series) and all(is_series(one, value["edges"]) for one in series)


def is_series(one: Any, edges: list[float]) -> bool:
    counts = one.get("counts") if isinstance(one, Mapping) and "name" in one else None
    return isinstance(counts, list) and len(edges) == len(counts) + 1


def histogram(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if "series" in value:
        series = {one["name"]: one["counts"] for one in value["series"]}
        return several_histograms(name, value["edges"], series)
    edges, counts = value["edges"], value["counts"]
    layout: dict[str, Any] = {"bargap": 0.05}
    if name == FIRING:
        layout |= firing_axes(counts[0])
        edges, counts = from_the_first(edges[1:], counts[1:])
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    bars = {
        "type": "bar",
        "x": middles,
        "y": counts,
        "width": [high - low for low, high in pairwise(edges)],
        "hovertemplate": "%{x:.2f}: %{y}<extra></extra>",
    }
    return {"data": [bars], "layout": layout}


def several_histograms(name: str, edges: list[float], series: Mapping[str, list[float]]) -> dict[str, Any]:
    """One outline each, over the bins that any of them fills."""
    first = 0
    layout: dict[str, Any] = {
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "showlegend": True,
    }
    if name == FIRING:
        layout |= firing_axes(None)
        never = {label: counts[0] for label, counts in series.items()}
        series = {f"{label} · {never[label]:g} never": counts[1:] for label, counts in series.items()}
        edges = edges[1:]
        filled = [n for counts in series.values() for n, count in enumerate(counts) if count]
        first = min(filled, default=0)
    traces = [outline(label, edges[first:], counts[first:]) for label, counts in series.items()]
    return {"data": traces, "layout": layout}


def outline(label: str, edges: list[float], counts: list[float]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": [(low + high) / 2 for low, high in pairwise(edges)],
        "y": counts,
        "line": {"shape": "hvh", "width": 1.5},
        "hovertemplate": "%{x:.2f}: %{y}",
    }


def firing_axes(never: float | None) -> dict[str, Any]:
    """The first bin, of those that never fire, is said: as a bar it would stand far from all others."""
    said = "" if never is None else f" · {never:g} latents never fire"
    x = f"log₁₀ of share of tokens{said}"
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": "latents"}}}


def from_the_first(edges: list[float], counts: list[float]) -> tuple[list[float], list[float]]:
    """Without the empty bins in front."""
    first = next((n for n, count in enumerate(counts) if count), 0)
    return edges[first:], counts[first:]


FIRING = "firing_histogram"
TITLES = {FIRING: "How often latents fire"}
