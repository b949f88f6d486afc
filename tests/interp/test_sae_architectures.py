"""The TopK autoencoder as a function of its weights."""

from __future__ import annotations

import pytest
import torch

from jobs.interp.errors import Unusable
from jobs.interp.sae.architectures import Options, TopK, begin, select


def by_hand(sae: TopK, x: torch.Tensor) -> torch.Tensor:
    """x_hat from the definition, token by token, with W_enc and W_dec as SAELens keeps them."""
    rows = []
    for token in x:
        pre = (token - sae.b_dec) @ sae.W_enc + sae.b_enc
        acts = torch.zeros_like(pre)
        for index in sorted(range(len(pre)), key=lambda i: (-pre[i].item(), i))[: sae.k]:
            acts[index] = max(pre[index].item(), 0.0)
        rows.append(acts @ sae.W_dec + sae.b_dec)
    return torch.stack(rows)


def test_it_reconstructs_by_the_definition(S8: TopK, X32: torch.Tensor) -> None:
    with torch.no_grad():
        expected = by_hand(S8, X32)
        torch.testing.assert_close(S8(X32), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(S8.decode(S8.encode(X32)), expected, atol=1e-5, rtol=1e-5)


def test_weights_are_oriented_as_saelens_has_them(S8: TopK) -> None:
    assert S8.W_enc.shape == (8, 24)
    assert S8.W_dec.shape == (24, 8)
    assert (S8.d_in, S8.d_sae) == (8, 24)


def test_exactly_k_are_selected_and_negative_ones_become_zero(S8: TopK, X32: torch.Tensor) -> None:
    acts = S8.encode(X32)
    assert (acts > 0).sum(1).max() == 4
    with torch.no_grad():
        S8.b_enc.fill_(-100.0)
    assert S8.encode(X32).abs().max() == 0


def test_of_equal_values_the_lowest_index_is_taken() -> None:
    pre = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [5.0, 1.0, 4.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    values, indexes = select(pre, 2)
    assert indexes.tolist() == [[1, 2], [0, 2], [0, 1]]
    assert values.tolist() == [[2.0, 2.0], [5.0, 4.0], [1.0, 1.0]]


@pytest.mark.parametrize("k", [1, 3, 7])
def test_selection_equals_a_stable_sort_on_data_full_of_ties(k: int) -> None:
    pre = torch.randint(0, 4, (200, 7), generator=torch.Generator().manual_seed(0)).float()
    expected = pre.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(select(pre, k)[1].sort(1).values, expected.sort(1).values)


@pytest.mark.parametrize("k", [0, 25])
def test_k_must_be_possible(k: int) -> None:
    with pytest.raises(Unusable, match="1 to 24"):
        TopK(8, 24, k)


def test_folding_a_scale_changes_nothing_but_the_input_it_wants_f19(S8: TopK, X7: torch.Tensor) -> None:
    reference = S8(0.31 * X7) / 0.31
    torch.testing.assert_close(S8.folded(0.31)(X7), reference, atol=1e-5, rtol=1e-5)


def test_forgetting_the_decoder_bias_in_folding_would_show_f19(S8: TopK, X7: torch.Tensor) -> None:
    wrong = S8.folded(0.31)
    with torch.no_grad():
        wrong.b_dec.copy_(S8.b_dec)
    assert (wrong(X7) - S8(0.31 * X7) / 0.31).abs().max() > 0.1


def test_the_decoder_is_normalised_by_feature_f27(S8: TopK) -> None:
    S8.normalise_decoder()
    torch.testing.assert_close(S8.W_dec.norm(dim=1), torch.ones(24), atol=1e-6, rtol=0)
    assert (S8.W_dec.norm(dim=0) - 1).abs().min() > 0.1


def test_it_begins_with_the_encoder_equal_to_the_decoder_and_the_mean_as_bias() -> None:
    sample = torch.arange(8.0) + torch.tensor([[-1.0], [1.0]])
    sae, again, other = (
        begin(Options(k=4), 8, 8, 24, seed=seed, sample=sample, target=sample) for seed in (3, 3, 4)
    )
    assert isinstance(sae, TopK)
    assert torch.equal(sae.W_enc, sae.W_dec.T)
    assert torch.equal(sae.b_dec, torch.arange(8.0))
    assert sae.b_enc.abs().max() == 0
    assert torch.equal(again.W_dec, sae.W_dec)
    assert not torch.equal(other.W_dec, sae.W_dec)
