"""What the page of a group shows: how far it is, the curves of its jobs in one chart, a table of what came of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jobs import groups
from jobs.models import Job, JobGroup
from monitor import board, figures, links
from monitor.templatetags.show import took

#: So many curves can be told apart: six colours, solid and dashed.
DRAWN = 12


def context(group: JobGroup) -> dict[str, Any]:
    jobs = list(groups.members(group).select_related("owner"))
    lasts = figures.last_values(jobs)
    metrics = metric_names(jobs, lasts)
    return {
        "group": group,
        "gpus": board.gpu_map(),
        "swept": list(group.swept),
        "metrics": metrics,
        "rows": rows(group, jobs, metrics, lasts),
        "names": figures.curve_names(jobs),
        "charts": figures.chart_specs(),
        "drawn": DRAWN,
        **links.progress(jobs),
    }


def metric_names(jobs: Sequence[Job], lasts: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    """Columns: the numbers of the results that say how good they are, then those that only curves have."""
    results = [job.result or {} for job in jobs]
    headlines = [n for n in figures.HEADLINES if any(figures.is_number(result.get(n)) for result in results)]
    curves = [n for spec in figures.KNOWN for n in spec["names"] if any(n in last for last in lasts.values())]
    plain = (
        []
        if headlines or curves
        else sorted({n for r in results for n, v in r.items() if figures.is_number(v)})
    )
    return list(dict.fromkeys([*headlines, *curves, *plain]))


def rows(
    group: JobGroup, jobs: Sequence[Job], metrics: Sequence[str], lasts: Mapping[Any, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    found = [{name: value(job, name, lasts) for name in metrics} for job in jobs]
    best = {name: best_of(name, found) for name in metrics}
    return [
        {
            "job": job,
            "number": number,
            "words": groups.words({name: job.params.get(name) for name in group.swept}),
            "values": [job.params.get(name) for name in group.swept],
            "metrics": [cell(numbers[name], best[name]) for name in metrics],
            "took": took(job),
        }
        for number, (job, numbers) in enumerate(zip(jobs, found, strict=True))
    ]


def value(job: Job, name: str, lasts: Mapping[Any, Mapping[str, Any]]) -> Any:
    """The number of the result; before there is one, where the curve is now."""
    result = (job.result or {}).get(name)
    return result if figures.is_number(result) else lasts.get(job.pk, {}).get(name)


def best_of(name: str, numbers: Sequence[Mapping[str, Any]]) -> Any:
    """The best value of a column, where one can say which way is better and not all are the same."""
    known = [row[name] for row in numbers if row[name] is not None]
    if len(set(known)) < 2 or name not in figures.LESS + figures.MORE:
        return None
    return min(known) if name in figures.LESS else max(known)


def cell(number: Any, best: Any) -> dict[str, Any]:
    return {"value": number, "best": best is not None and number == best}
