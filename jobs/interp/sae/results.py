"""What came of a training: numbers for its result, SAEs in SAELens' layout, and how often latents fire."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from jobs.interp.files import write_json
from jobs.interp.sae import choices
from jobs.interp.sae.assess import Report
from jobs.interp.sae.files import Metadata, save_sae
from jobs.interp.sae.grounds import Ground
from jobs.interp.sae.metrics import histogram
from jobs.interp.sae.together import Together
from jobs.interp.sae.train import Training

#: A tenfold weight that moves L0 by less than this share does nothing (F26).
MOVED, TENFOLD = 0.02, 10.0
#: What is the same for every SAE of a job.
COMMON = ("ce_clean", "ce_tokens")


def of(ground: Ground, run: Together, reports: Mapping[int, Report]) -> list[dict[str, Any]]:
    """What came of each SAE asked for, in their order; of one that was lost, why."""
    found = []
    for number, (member, name) in enumerate(zip(ground.members, ground.artifact_names(), strict=True)):
        facts = {"name": member["name"]} if ground.several else {}
        if number in reports:
            training = run.trainings[number]
            facts |= facts_of(ground, number, training) | reports[number].numbers() | {"artifact": name}
            if training.step < training.settings.steps:
                facts |= {"ended_at_step": training.step, "steps_total": training.settings.steps}
        else:
            view = ground.views[number]
            facts |= {"architecture": member["architecture"], "site": ground.places[view[0]]["hook_name"]}
            facts |= {"d_sae": member["d_sae"]}
        found.append(facts | ({"error": run.lost[number]} if number in run.lost else {}))
    return found


def facts_of(ground: Ground, number: int, training: Training) -> dict[str, Any]:
    sae, member, view = training.sae, ground.members[number], ground.views[number]
    facts = {
        "architecture": member["architecture"],
        "site": ground.places[view[0]]["hook_name"],
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "scale_folded": training.scales[0],
    }
    if len(view) > 1:
        facts |= {"site_out": ground.places[view[1]]["hook_name"], "scale_out_folded": training.scales[1]}
    return facts | {
        name: member[name]
        for name in choices.SPARSITY[member["architecture"]]
        if member.get(name) is not None
    }


def together(ground: Ground, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of the job: of a single SAE its facts; of several a list, and what they share."""
    if not ground.several:
        return found[0]
    common = next(facts for facts in found if "fvu" in facts)
    result = {"saes": found} | {name: common[name] for name in COMMON}
    words = saturated(ground, found)
    return result | ({"saturated": words} if words else {})


def saturated(ground: Ground, found: list[dict[str, Any]]) -> str:
    """A sentence for weights of sparsity that do nothing any more; empty where each does something."""
    told = []
    rows = zip(ground.members, ground.views, found, strict=True)
    known = [row for row in rows if "fvu" in row[2] and choices.weight(row[0])]
    for (one, view, mine), (other, their_view, theirs) in combinations(known, 2):
        same = all(one[name] == other[name] for name in ("architecture", "d_sae", "lr"))
        weights = sorted((choices.weight(one), choices.weight(other)))
        if not same or view != their_view or weights[1] < TENFOLD * weights[0]:
            continue
        moved = abs(mine["l0"] - theirs["l0"]) / max(mine["l0"], theirs["l0"], 1e-12)
        if moved < MOVED:
            told.append(
                f"L0 moved by {100 * moved:.1f} % between the weights {weights[0]:g} and {weights[1]:g} of "
                f"{one['architecture']}: the penalty is saturated."
            )
    return " ".join(told)


def manifest(ground: Ground, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the artifact of one SAE."""
    return dict(facts) | {"model_artifact": ground.model_artifact, "model": ground.model}


def export(
    folder: Path, ground: Ground, number: int, training: Training, report: Report, facts: Mapping[str, Any]
) -> None:
    """The SAE in SAELens' layout, its recipe beside the weights."""
    places = [ground.places[site] for site in ground.views[number]]
    sae, trained = training.finished(), ground.members[number]["architecture"]
    out = (
        {"hook_name_out": places[1]["hook_name"], "hf_hook_name_out": places[1]["module"]}
        if places[1:]
        else {}
    )
    metadata = Metadata(
        model_name=ground.model["repository"],
        hook_name=places[0]["hook_name"],
        hf_hook_name=places[0]["module"],
        context_size=ground.context_size,
        prepend_bos=ground.prepend_bos,
        exclude_special_tokens=ground.exclude_special,
        dataset_path=ground.corpus,
        training_architecture=trained if trained != sae.architecture else None,
        **out,
    )
    # The weights of the model by their digest: a copy may be named after the repository that it is a copy of.
    recipe = {"model": ground.model, "settings": training.settings.as_dict(), **facts}
    save_sae(folder, sae, metadata, log10_frequencies=report.log10_frequencies, extra=recipe)


def write_histogram(folder: Path, ground: Ground, reports: Mapping[int, Report]) -> None:
    """Data of the results page's figure."""
    found = {number: histogram(report.log10_frequencies) for number, report in reports.items()}
    first = next(iter(found.values()))
    value: dict[str, Any] = first
    if ground.several:
        names = {number: ground.members[number]["name"] for number in found}
        series = [{"name": names[number], "counts": each["counts"]} for number, each in found.items()]
        value = {"edges": first["edges"], "series": series}
    write_json(folder / "firing_histogram.json", value)
