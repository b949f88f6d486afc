"""What the SAEs of a job are trained on, as their files and their names must say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jobs.interp.live import View
from jobs.interp.models import LanguageModel
from jobs.interp.names import slug
from jobs.interp.sae import choices
from jobs.interp.sae.options import Options
from jobs.interp.sae.settings import Settings
from jobs.interp.site import Site, place_of

Values = Mapping[str, Any]
#: Of model and corpus in a name, which says more than those.
LONGEST = 120
OPTIONS = tuple(field.name for field in fields(Options))


@dataclass(frozen=True)
class Ground:
    """`members`: parameters of each SAE; `views`: where each reads (and a transcoder writes); `places`: `hook_name`,
    `module` and, of stored activations, `folder` of each site; `model`: facts of the model; `order_seed`: of the order
    of the data, which all SAEs share."""

    name: str
    members: Sequence[Values]
    views: Sequence[View]
    places: Mapping[Site, Values]
    model: Values
    model_artifact: str
    corpus: str
    context_size: int
    prepend_bos: bool
    exclude_special: bool
    order_seed: int

    @classmethod
    def stored(cls, params: Values, name: str, manifest: Values) -> Ground:
        """On activations of this name and manifest."""
        members = choices.members(params)
        entries = [choices.places(member, manifest["sites"]) or [] for member in members]
        places = {Site(entry["block"], entry["site"]): entry for found in entries for entry in found}
        return cls(
            name.rpartition("/")[2],
            members,
            [tuple(Site(entry["block"], entry["site"]) for entry in found) for found in entries],
            places,
            manifest["model"],
            manifest["model_artifact"],
            manifest["corpus"]["name"],
            manifest["context_size"],
            manifest["prepend_bos"],
            manifest["exclude_special"],
            order_seed(params),
        )

    @classmethod
    def live(
        cls,
        params: Values,
        model: LanguageModel,
        model_artifact: str,
        facts: Values,
        corpus: str,
        with_bos: bool,
    ) -> Ground:
        """On a model that is run over a corpus."""
        members = choices.members(params)
        views = [view_of(member) for member in members]
        places = {
            site: {"hook_name": site.hook_name, "module": place_of(model.model, site).path}
            for view in views
            for site in view
        }
        text = slug(Path(corpus.partition("@")[0]).stem)  # `owner/name@commit` of the Hub
        name = f"{facts['name'].rpartition('/')[2]}-{text}"[:LONGEST]
        return cls(
            name if len({views[0], *views}) > 1 else f"{name}-{short(views[0])}",
            members,
            views,
            places,
            facts,
            model_artifact,
            corpus,
            params["context_size"],
            with_bos,
            params["exclude_special"],
            order_seed(params),
        )

    @property
    def several(self) -> bool:
        return bool(self.members[0]["name"])

    def settings(self) -> list[Settings]:
        return [settings_of(member) for member in self.members]

    def named(self, found: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Metrics of all SAEs by one name each: `fvu`, or `fvu[k 16]` where there are several."""
        return {
            f"{key}[{self.members[number]['name']}]" if self.several else key: value
            for number, metrics in found.items()
            for key, value in metrics.items()
        }

    def artifact_names(self) -> list[str]:
        """What the SAEs are called as artifacts: each another name."""
        names = [self._artifact_name(number) for number in range(len(self.members))]
        return [
            name if names.count(name) == 1 else f"{name}-{slug(member['name'])}"
            for name, member in zip(names, self.members, strict=True)
        ]

    def _artifact_name(self, number: int) -> str:
        member = self.members[number]
        where = f"-{short(self.views[number])}" if len(set(self.views)) > 1 else ""
        sparsity = next(name for name in choices.SPARSITY[member["architecture"]])
        value = f"{sparsity}{'' if sparsity == 'k' else '-'}{member[sparsity]:g}"
        return slug(f"{self.name}{where}-{member['architecture']}-{member['d_sae']}-{value}")


def order_seed(params: Values) -> int:
    return params["seed"] if params["order_seed"] is None else params["order_seed"]


def view_of(member: Values) -> View:
    return tuple(Site(member["site"]["block"], place) for place in choices.reads(member))


def short(view: View) -> str:
    """`b4`, `b4.mlp_in`: a place in names of artifacts; of a transcoder, its block."""
    site = view[0].site
    return f"b{view[0].block}" + ("" if site == "resid_post" or len(view) > 1 else f".{site}")


def settings_of(member: Values) -> Settings:
    """A member's parameters as the training takes them; what is `None` is its default."""
    given = {name: value for name, value in member.items() if value is not None}
    options = {name: given[name] for name in OPTIONS if name in given}
    rest = {name: given[name] for name in Settings.names() if name in given}
    return Settings(options=Options(**options), **rest)
