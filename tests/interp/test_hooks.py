"""Reading and changing the stream: the right vectors, from the right place, without the rest of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs.interp.errors import Unusable
from jobs.interp.hooks import capture, first_tensor, replacing
from jobs.interp.models import LanguageModel
from jobs.interp.site import HOOKS, Site, blocks_of, place_of
from jobs.interp.tokens import pad

TWO_PROMPTS = [[5, 9, 12, 7, 30], [8, 4, 4, 21, 13]]


def block_output(model: Any, number: int, rows: list[list[int]]) -> torch.Tensor:
    """The output of a block, by a hook placed by hand."""
    seen: list[torch.Tensor] = []
    handle = blocks_of(model)[1][number].register_forward_hook(lambda _m, _a, output: seen.append(output))
    with torch.no_grad():
        model(input_ids=torch.tensor(rows))
    handle.remove()
    return seen[0]


def captured(lm: LanguageModel, site: Site, rows: list[list[int]]) -> torch.Tensor:
    return capture(lm.model, [site], **pad(rows, 0).model_inputs("cpu"))[site]


def test_it_returns_every_row_of_the_batch_f01(LL: LanguageModel) -> None:
    together = captured(LL, Site(1), TWO_PROMPTS)
    alone = torch.cat([captured(LL, Site(1), [row]) for row in TWO_PROMPTS])
    assert together.shape == (2, 5, 16)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_it_takes_the_first_member_of_a_tuple_f01(LL: LanguageModel) -> None:
    attention = LL.model.model.layers[1].self_attn
    seen: list[Any] = []
    handle = attention.register_forward_hook(lambda _m, _a, output: seen.append(output))
    found = captured(LL, Site(1, "attn_out"), TWO_PROMPTS)
    handle.remove()
    assert isinstance(seen[0], tuple)
    torch.testing.assert_close(found, seen[0][0], atol=0, rtol=0)


def test_a_bare_tensor_is_its_own_first_tensor() -> None:
    tensor = torch.randn(2, 5, 16)
    assert first_tensor(tensor) is tensor
    assert first_tensor((tensor, None)) is tensor
    with pytest.raises(Unusable):
        first_tensor((None, tensor))


@pytest.mark.parametrize("block", [0, 1, 2])
def test_it_reads_the_output_of_the_block_asked_for_f02(G2: LanguageModel, block: int) -> None:
    by_hand = block_output(G2.model, block, TWO_PROMPTS)
    torch.testing.assert_close(captured(G2, Site(block), TWO_PROMPTS), by_hand, atol=0, rtol=0)


def test_the_site_is_named_after_its_place_f02(G2: LanguageModel) -> None:
    names = {site: Site(2, site).hook_name for site in HOOKS}
    assert names["resid_post"] == "blocks.2.hook_resid_post"
    assert names["attn_out"] == "blocks.2.hook_attn_out"
    assert names["mlp_out"] == "blocks.2.hook_mlp_out"
    assert place_of(G2.model, Site(2)).path == "transformer.h.2"
    assert place_of(G2.model, Site(2, "mlp_out")).path == "transformer.h.2.mlp"


def test_the_last_block_is_read_before_the_final_norm_f03(any_model: LanguageModel) -> None:
    model = any_model.model
    inputs = {"input_ids": torch.tensor(TWO_PROMPTS)}
    last = captured(any_model, Site(any_model.n_layers - 1), TWO_PROMPTS)
    whole = model(**inputs, output_hidden_states=True)
    base = (
        model.get_base_model()
        if hasattr(model, "get_base_model")
        else getattr(model, model.base_model_prefix)
    )
    norm = next(getattr(base, name) for name in ("norm", "ln_f", "final_layer_norm") if hasattr(base, name))
    torch.testing.assert_close(norm(last), whole.hidden_states[-1], atol=1e-5, rtol=1e-5)
    assert (last - whole.hidden_states[-1]).abs().max() > 0.1  # norming is not nothing
    logits = model.get_output_embeddings()(norm(last))
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    torch.testing.assert_close(logits, whole.logits, atol=1e-4, rtol=1e-5)


def test_later_blocks_and_the_head_do_not_run_f11(LL: LanguageModel) -> None:
    by_hand = block_output(LL.model, 0, TWO_PROMPTS)
    calls: list[str] = []
    for name in ("model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"):
        LL.model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    found = captured(LL, Site(0), TWO_PROMPTS)
    assert calls == ["model.layers.0"]
    torch.testing.assert_close(found, by_hand, atol=0, rtol=0)


def test_several_sites_come_from_one_pass(any_model: LanguageModel) -> None:
    sites = [Site(1), Site(0), Site(1, "resid_pre"), Site(1, "mlp_out")]
    found = capture(any_model.model, sites, **pad(TWO_PROMPTS, 0).model_inputs("cpu"))
    for block in (0, 1):
        by_hand = block_output(any_model.model, block, TWO_PROMPTS)
        torch.testing.assert_close(found[Site(block)], by_hand, atol=0, rtol=0)
    assert torch.equal(found[Site(1, "resid_pre")], found[Site(0)])


def test_the_parts_of_a_block_add_up(any_model: LanguageModel) -> None:
    """resid_pre + attn_out + mlp_out = resid_post, and resid_mid stands between, in every family that has it."""
    sites = [Site(1, name) for name in ("resid_pre", "attn_out", "mlp_out", "resid_post")]
    found = capture(any_model.model, sites, **pad(TWO_PROMPTS, 0).model_inputs("cpu"))
    before, attention, mlp, after = (found[site] for site in sites)
    torch.testing.assert_close(before + attention + mlp, after, atol=1e-3, rtol=1e-4)
    if any_model.name != "NX":
        middle = captured(any_model, Site(1, "resid_mid"), TWO_PROMPTS)
        torch.testing.assert_close(before + attention, middle, atol=1e-3, rtol=1e-4)


def test_mlp_in_makes_mlp_out(any_model: LanguageModel) -> None:
    sites = [Site(0, "mlp_in"), Site(0, "mlp_out")]
    found = capture(any_model.model, sites, **pad(TWO_PROMPTS, 0).model_inputs("cpu"))
    block = blocks_of(any_model.model)[1][0]
    again = first_tensor(block.mlp(found[sites[0]]))
    if any_model.name == "GE":
        again = block.post_feedforward_layernorm(again)
    torch.testing.assert_close(again, found[sites[1]], atol=1e-4, rtol=1e-4)


def test_a_replaced_site_is_what_the_rest_of_the_model_sees(any_model: LanguageModel) -> None:
    inputs = {"input_ids": torch.tensor(TWO_PROMPTS)}
    stream = captured(any_model, Site(0), TWO_PROMPTS)
    plain = any_model.model(**inputs).logits
    with replacing(any_model.model, Site(1, "resid_pre"), lambda _: stream):
        torch.testing.assert_close(any_model.model(**inputs).logits, plain, atol=0, rtol=0)
    with replacing(any_model.model, Site(0), torch.zeros_like):
        assert captured(any_model, Site(1, "resid_pre"), TWO_PROMPTS).abs().max() == 0
        assert (any_model.model(**inputs).logits - plain).abs().max() > 0.1
    torch.testing.assert_close(any_model.model(**inputs).logits, plain, atol=0, rtol=0)


def test_replacing_keeps_the_other_members_of_a_tuple(LL: LanguageModel) -> None:
    """Row by row: a block that unpacks what attention returns would take a bare batch of two for a pair."""
    attention = captured(LL, Site(1, "attn_out"), TWO_PROMPTS)
    sites = [Site(1, "resid_pre"), Site(1, "resid_mid")]
    with replacing(LL.model, Site(1, "attn_out"), lambda stream: 3 * stream):
        found = capture(LL.model, sites, input_ids=torch.tensor(TWO_PROMPTS))
    expected = found[sites[0]] + 3 * attention
    torch.testing.assert_close(found[sites[1]], expected, atol=1e-5, rtol=1e-5)


def test_hooks_are_gone_after_an_error(LL: LanguageModel) -> None:
    def fail(_stream: torch.Tensor) -> torch.Tensor:
        raise RuntimeError

    with pytest.raises(RuntimeError), replacing(LL.model, Site(1), fail):
        LL.model(input_ids=torch.tensor(TWO_PROMPTS))
    with pytest.raises(IndexError):
        capture(LL.model, [Site(1)], input_ids=torch.tensor([[999]]))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in LL.model.modules())
