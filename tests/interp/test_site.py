"""Finding blocks and places without a table of architectures."""

from __future__ import annotations

import pytest
from torch import nn

from jobs.interp.errors import Unusable
from jobs.interp.models import LanguageModel
from jobs.interp.site import HOOKS, Site, blocks_of, place_of
from tests.interp.conftest import neox


def test_blocks_are_found_in_every_family(any_model: LanguageModel) -> None:
    paths = {"G2": "transformer.h", "LL": "model.layers", "GE": "model.layers", "NX": "gpt_neox.layers"}
    path, blocks = blocks_of(any_model.model)
    assert path == paths[any_model.name]
    assert len(blocks) == any_model.model.config.num_hidden_layers


def test_every_place_is_found_in_every_family_that_has_it(any_model: LanguageModel) -> None:
    for site in HOOKS:
        if (any_model.name, site) != ("NX", "resid_mid"):
            assert place_of(any_model.model, Site(1, site)).moment in ("input", "output")


def test_parallel_blocks_have_no_middle() -> None:
    with pytest.raises(Unusable, match="parallel"):
        place_of(neox(), Site(0, "resid_mid"))
    assert place_of(neox(parallel=False), Site(0, "resid_mid")).path.endswith("post_attention_layernorm")


def test_gemma_adds_what_its_norms_give() -> None:
    from tests.interp.conftest import gemma2

    model = gemma2()
    assert place_of(model, Site(0, "attn_out")).path == "model.layers.0.post_attention_layernorm"
    assert place_of(model, Site(0, "mlp_out")).path == "model.layers.0.post_feedforward_layernorm"
    assert place_of(model, Site(0, "resid_mid")).path == "model.layers.0.pre_feedforward_layernorm"


def test_a_block_that_does_not_exist_is_refused_with_the_range(LL: LanguageModel) -> None:
    with pytest.raises(Unusable, match=r"Block 3 does not exist.*0 to 2"):
        place_of(LL.model, Site(3))


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(Unusable, match="resid_post"):
        Site(0, "residual")


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(Unusable, match="No list of transformer blocks"):
        blocks_of(nn.Sequential(nn.Linear(2, 2)))
