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
    """Columns: the numbers of the results that say how good they are, then the curves that do."""
    results = [job.result or {} for job in jobs]
    numbers = {name for result in results for name, value in result.items() if figures.is_number(value)}
    curves = {name for last in lasts.values() for name in last}
    known = [n for n in figures.HEADLINES if n in numbers | curves] + [n for n in figures.LESS if n in curves]
    return list(dict.fromkeys(known)) or sorted(numbers)


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
