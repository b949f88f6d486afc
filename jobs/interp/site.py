"""Where in a model: a block and a place in it. The only definition; every kind asks here.

Names are TransformerLens' (`blocks.3.hook_resid_post`), so that SAEs and lenses can be exchanged. A place is
the input or the output of one module, found without a table of architectures: candidates are tried in a fixed
order (an unordered set once made the chosen module depend on the hash seed of the process).

Two families need care. *Gemma-2 style* blocks norm what attention and MLP return before adding it, so
`attn_out` and
`mlp_out` are the outputs of those norms. *Parallel* blocks (GPT-NeoX, GPT-J, Falcon) add attention and MLP to
the same input: the stream between them, `resid_mid`, does not exist there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from jobs.interp.errors import Unusable

Moment = Literal["input", "output"]

BLOCKS = (
    "model.layers",
    "model.language_model.layers",
    "transformer.h",
    "gpt_neox.layers",
    "transformer.layers",
    "model.decoder.layers",
    "encoder.layer",
    "decoder.layers",
    "layers",
    "h",
)
ATTENTION = ("self_attn", "attention", "attn", "self_attention")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
#: The norm in front of the MLP, whose input is the stream after attention. Gemma's own name comes first: its
#: `post_attention_layernorm` is something else than Llama's module of the same name.
SECOND_NORM = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ffn_norm")

HOOKS = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "mlp_in": "ln2.hook_normalized",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}


@dataclass(frozen=True, order=True)
class Site:
    """A place in a model: block number from 0, and one of the names in `HOOKS`."""

    block: int
    site: str = "resid_post"

    def __post_init__(self) -> None:
        if self.site not in HOOKS:
            raise Unusable(f"{self.site!r} is not a place in a block; places are {', '.join(HOOKS)}.")

    @property
    def hook_name(self) -> str:
        """TransformerLens' name, also the name of the folder that holds this site's activations."""
        return f"blocks.{self.block}.{HOOKS[self.site]}"

    def as_dict(self) -> dict[str, int | str]:
        return {"block": self.block, "site": self.site}


class Place(NamedTuple):
    """A module of a loaded model and the moment at which the site's values pass it."""

    path: str
    module: nn.Module
    moment: Moment


def blocks_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and the list of a model's transformer blocks.

    Raises `Unusable` when no known container of blocks is found.
    """
    for path in BLOCKS:
        found = _descend(model, path)
        if isinstance(found, nn.ModuleList) and len(found):
            return path, found
    raise Unusable(
        f"No list of transformer blocks found in {type(model).__name__}; looked for {', '.join(BLOCKS)}."
    )


def place_of(model: nn.Module, site: Site) -> Place:
    """The module and moment of `site` in `model`.

    Raises `Unusable` when the block does not exist or the architecture has no such place.
    """
    path, blocks = blocks_of(model)
    if not 0 <= site.block < len(blocks):
        raise Unusable(
            f"Block {site.block} does not exist: {type(model).__name__} has blocks 0 to {len(blocks) - 1}."
        )
    inner, moment = _inside(blocks[site.block], site.site)
    full = ".".join(filter(None, (path, str(site.block), inner)))
    return Place(full, model.get_submodule(full), moment)


def _inside(block: nn.Module, site: str) -> tuple[str, Moment]:
    """Path below the block (empty: the block itself) and moment."""
    match site:
        case "resid_pre":
            return "", "input"
        case "resid_post":
            return "", "output"
        case "resid_mid":
            return _second_norm(block), "input"
        case "attn_out":
            return (
                _first(block, ("post_attention_layernorm",))
                if _norms_outputs(block)
                else _first(block, ATTENTION)
            ), "output"
        case "mlp_out":
            return (
                _first(block, ("post_feedforward_layernorm",))
                if _norms_outputs(block)
                else _first(block, MLP)
            ), "output"
        case _:
            return _first(block, MLP), "input"


def _norms_outputs(block: nn.Module) -> bool:
    return hasattr(block, "post_feedforward_layernorm")


def _second_norm(block: nn.Module) -> str:
    if _is_parallel(block):
        raise Unusable(
            f"{type(block).__name__} adds attention and MLP in parallel: there is no resid_mid. "
            "Use resid_pre, attn_out, mlp_out or resid_post."
        )
    return _first(block, SECOND_NORM)


def _is_parallel(block: nn.Module) -> bool:
    declared = getattr(block, "use_parallel_residual", None)
    return bool(declared) if declared is not None else not any(hasattr(block, name) for name in SECOND_NORM)


def _first(block: nn.Module, names: tuple[str, ...]) -> str:
    for name in names:
        if hasattr(block, name):
            return name
    raise Unusable(f"{type(block).__name__} has none of {', '.join(names)}.")


def _descend(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found
