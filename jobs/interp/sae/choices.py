"""Which parameters each architecture takes, and the SAEs that one request asks for. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs.interp.sae.options import NAMES, TRANSCODERS, WITH_K, WITH_L1, Options

Values = Mapping[str, Any]

#: Parameters that only some architectures take; the first of each is what makes it sparse.
SPARSITY: dict[str, tuple[str, ...]] = (
    dict.fromkeys(WITH_K, ("k", "aux_k", "aux_coefficient"))
    | dict.fromkeys(WITH_L1, ("l1", "resample_every", "sparsity_warmup_fraction"))
    | {"jumprelu": ("l0", "target_l0", "bandwidth", "sparsity_warmup_fraction")}
)
SPARSITY["matryoshka_batchtopk"] += ("widths",)
#: What an SAE of a request may have of its own.
OWN = ("site", "architecture", "d_sae", "k", "l1", "l0", "lr", "seed")
#: Where none was given.
DEFAULTS = {"k": int(Options.k), "l1": Options.l1, "l0": Options.l0}
LABEL_LENGTH = 24
#: Steps from which on a training is long, and the learning rate that no short one exceeds by itself.
LONG, HIGHEST_LR = 5000, 4e-3
#: All parameters that not every architecture takes.
SOME = tuple(dict.fromkeys(name for architecture in NAMES for name in SPARSITY[architecture]))


def members(params: Values) -> list[dict[str, Any]]:
    """Parameters of each SAE that is asked for, with its `name`; of a single one the name is empty.

    Values that were given for all are left out where an architecture has no use for them.
    """
    variants = params.get("variants") or [{}]
    found = []
    for number, variant in enumerate(variants):
        own = {key: value for key, value in variant.items() if key != "name"}
        merged = {key: value for key, value in params.items() if key != "variants"} | own
        unused = set(SOME) - set(SPARSITY[merged["architecture"]])
        merged = {key: None if key in unused else value for key, value in merged.items()}
        for name, value in DEFAULTS.items():
            if merged.get(name) is None and name not in unused:
                merged[name] = value
        if merged.get("lr") is None:
            merged["lr"] = default_lr(merged["d_sae"], merged["tokens"] // merged["batch_size"])
        merged["name"] = label(variant, number) if params.get("variants") else ""
        found.append(merged)
    return found


def default_lr(d_sae: int, steps: int) -> float:
    """2e-4 at 16 384 latents, falling with their root (Gao et al. 2024, appendix A.3), and more for short runs.

    Measured with SmolLM2-135M at blocks 4 and 15, 293 steps, 2304 latents: FVU 0.052 and 0.176 at 2e-3, 0.078 and
    0.248 at 5e-4, best at 4e-3.
    """
    return min(HIGHEST_LR, 2e-4 * (2**14 / d_sae) ** 0.5 * max(1.0, LONG / max(1, steps)) ** 0.5)


def label(variant: Values, number: int) -> str:
    """What an SAE is called in curves and tables: its name, or what it has of its own."""
    if variant.get("name"):
        return variant["name"]
    parts = [worded(name, variant[name]) for name in OWN if variant.get(name) is not None]
    told = ", ".join(parts)
    return told if told and len(told) <= LABEL_LENGTH else f"SAE {number + 1}"


def worded(name: str, value: Any) -> str:
    if name == "site":
        return f"b{value['block']}" + ("" if value["site"] == "resid_post" else f".{value['site']}")
    if name == "architecture":
        return str(value)
    return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def errors(params: Values) -> dict[str, list[str]]:
    """What is wrong with the SAEs asked for, by parameter."""
    found: dict[str, list[str]] = {}
    variants = params.get("variants") or []
    asked = members(params)
    if len({member["name"] for member in asked}) < len(asked):
        found["variants"] = [
            "Two SAEs would have the same name; give each a `name`, or something of its own."
        ]
    given = [name for name in SOME if params.get(name) is not None]
    for name in given:
        takers = [a for a in NAMES if name in SPARSITY[a]]
        if not any(member["architecture"] in takers for member in asked):
            found[name] = [unused_words(name, asked[0]["architecture"], takers)]
    for number, (variant, member) in enumerate(zip(variants or [{}], asked, strict=True)):
        for name, words in _errors_of(variant, member):
            if variants:
                found.setdefault("variants", []).append(f"{member['name'] or number + 1}: {words}")
            else:
                found.setdefault(name, []).append(words)
    return found


def _errors_of(variant: Values, member: Values) -> Iterable[tuple[str, str]]:
    architecture = member["architecture"]
    for name in SOME:
        if variant.get(name) is not None and name not in SPARSITY[architecture]:
            takers = [a for a in NAMES if name in SPARSITY[a]]
            yield name, unused_words(name, architecture, takers)
    if member.get("k") and member["k"] > member["d_sae"]:
        yield "k", f"k is {member['k']}, but there are only {member['d_sae']} latents."
    site = member.get("site")
    if site and architecture in TRANSCODERS and site["site"] not in ("mlp_in", "mlp_out"):
        yield (
            "site",
            f"A {architecture} reads mlp_in and gives mlp_out of a block; name one of them, not {site['site']}.",
        )
    target = member.get("target_l0") or Options.target_l0
    if architecture == "jumprelu" and not target < member["d_sae"]:
        yield (
            "target_l0",
            f"target_l0 is {target:g}; of {member['d_sae']} latents fewer have to be live. Lower it.",
        )
    widths = member.get("widths")
    if widths and (list(widths) != sorted(set(widths)) or widths[-1] > member["d_sae"]):
        yield "widths", f"Widths must rise and end at most at {member['d_sae']}, the number of latents."


def unused_words(name: str, architecture: str, takers: Sequence[str]) -> str:
    return f"{architecture} does not take {name}; {', '.join(takers)} {'do' if len(takers) > 1 else 'does'}."


def weight(member: Values) -> float:
    """The weight of an SAE's sparsity penalty; 0 for those that count live latents."""
    name = SPARSITY[member["architecture"]][0]
    return 0.0 if name == "k" else member[name]


def reads(member: Values) -> tuple[str, ...]:
    """Names of the places that a training reads in the block of its site."""
    if member["architecture"] in TRANSCODERS:
        return ("mlp_in", "mlp_out")
    return (member["site"]["site"],)


def places(member: Values, there: Sequence[Values]) -> list[dict[str, Any]] | None:
    """The entries among the sites that are `there` which a training reads: one, or a transcoder's input and target.

    `None` where they are not there, or where several could be meant.
    """
    names = ("mlp_in", "mlp_out") if member["architecture"] in TRANSCODERS else None
    wanted = member.get("site")
    by_place = {(site["block"], site["site"]): dict(site) for site in there}
    if names:
        blocks = sorted({block for block, site in by_place if (block, "mlp_in") in by_place})
        blocks = [block for block in blocks if (block, "mlp_out") in by_place]
        block = wanted["block"] if wanted else blocks[0] if len(blocks) == 1 else None
        return [by_place[block, name] for name in names] if block in blocks else None
    if wanted is None:
        return [dict(there[0])] if len(there) == 1 else None
    found = by_place.get((wanted["block"], wanted["site"]))
    return [found] if found else None
