"""What holds of every architecture: its definition, folding, how it begins, and what its options allow."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from jobs.interp.errors import Unusable
from jobs.interp.sae import support
from jobs.interp.sae.architectures import BatchTopK, JumpReLU, Options, TopK, Weights, begin
from jobs.interp.sae.architectures.selection import select_batch
from jobs.interp.sae.options import NAMES, TRANSCODERS
from tests.interp.dense_saes import D_IN, D_OUT, D_SAE, dense_terms, options, pair, random_sae

NOTHING = Weights(0.0, torch.zeros(D_SAE, dtype=torch.bool))


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["all places", "live places"])
@pytest.mark.parametrize("architecture", NAMES)
def test_it_reconstructs_by_the_definition(
    architecture: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all three ways: forward, through the code, and as the definition's squared error says."""
    monkeypatch.setattr(support, "SPARSE_BELOW", share)
    sae = random_sae(architecture)
    x, y = pair(sae)
    acts = sae.encode(x)
    y_hat, firings = sae.reconstruct(x)
    torch.testing.assert_close(sae(x), y_hat)
    beside = x @ sae.W_skip.T if architecture == "skip_transcoder" else 0
    torch.testing.assert_close(sae.decode(acts) + beside, y_hat)
    assert firings.tolist() == (acts > 0).sum(0).tolist()
    expected = dense_terms(sae, x, y, NOTHING)["reconstruction"]
    torch.testing.assert_close((y_hat - y).square().sum(1).mean(), expected)


@pytest.mark.parametrize("architecture", NAMES)
def test_folding_changes_nothing_but_the_units_f18_f19(architecture: str) -> None:
    """Twice at different times, as checkpoints are, with the training's own weights left as they are."""
    sae = random_sae(architecture)
    s_in, s_out = (0.31, 2.3) if architecture in TRANSCODERS else (0.31, 0.31)
    for _ in range(2):
        sae.backward(*pair(sae), Weights(0.1, NOTHING.dead))  # a batch form's threshold needs a batch
        before = copy.deepcopy(sae.state_dict())
        x = 7 * pair(sae)[0]
        reference = sae.exported()(s_in * x) / s_out
        folded = sae.folded(s_in, s_out)
        torch.testing.assert_close(folded(x), reference, atol=1e-9, rtol=1e-9)
        assert (folded.encode(x) > 0).equal(sae.exported().encode(s_in * x) > 0)
        assert all(torch.equal(before[name], value) for name, value in sae.state_dict().items())
        with torch.no_grad():
            folded.b_dec.copy_(sae.b_dec)
        assert (folded(x) - reference).abs().max() > 0.1  # forgetting the bias would show
        with torch.no_grad():
            sae.b_dec.add_(0.5)


def test_an_autoencoder_has_one_scale() -> None:
    with pytest.raises(Unusable, match=r"not 0\.5 for its input and 2 for its output"):
        random_sae("standard").folded(0.5, 2.0)


def test_a_transcoder_leaves_its_input_untouched_f29() -> None:
    """Width 8 → 6: b_dec has another size, and what it is changes no latent."""
    for architecture in TRANSCODERS:
        sae = random_sae(architecture)
        x, _ = pair(sae)
        before = sae.encode(x)
        with torch.no_grad():
            sae.b_dec.add_(100)
        assert torch.equal(sae.encode(x), before)
        assert (sae.d_in, sae.d_out, sae.b_dec.shape) == (D_IN, D_OUT, (D_OUT,))


def test_a_batch_form_is_exported_as_what_its_threshold_lets_through() -> None:
    """O3: a JumpReLU that gives, where nothing else lies between, the code that the batch gave."""
    sae = random_sae("batchtopk")
    x, _ = pair(sae)
    sae.backward(x, x, NOTHING)
    exported = sae.exported()
    acts, found = sae.encode(x), exported.encode(x)
    assert isinstance(exported, JumpReLU)
    assert exported.threshold.tolist() == pytest.approx([acts[acts > 0].min().item()] * D_SAE, rel=1e-12)
    smallest = acts == acts[acts > 0].min()  # on the threshold itself rounding decides
    torch.testing.assert_close(found.masked_fill(smallest, 0), acts.masked_fill(smallest, 0))


def test_the_running_threshold_forgets_the_zero_it_began_with() -> None:
    """As Adam's moments do; else a short training would export a threshold near zero."""
    sae = random_sae("batchtopk")
    found = []
    for seed in range(3):
        x, _ = pair(sae, seed=seed)
        code = sae.selected(sae.pre_acts(x))
        found.append(code.values.min())
        sae.backward(x, x, NOTHING)
    shares = torch.tensor([0.01 * 0.99**2, 0.01 * 0.99, 0.01], dtype=torch.float64)
    torch.testing.assert_close(sae.threshold, (shares * torch.stack(found)).sum() / shares.sum())


@pytest.mark.parametrize("count", [1, 7, 60, 200, 400])
def test_of_a_batch_full_of_ties_the_first_are_taken(count: int) -> None:
    pre = torch.randint(-3, 4, (40, 10), generator=torch.Generator().manual_seed(0)).float()
    flat = pre.flatten()
    order = flat.sort(descending=True, stable=True).indices[:count]
    expected = torch.zeros_like(flat).index_copy(0, order, flat[order].relu()).reshape(pre.shape)
    code = select_batch(pre, count)
    assert torch.equal(code.dense(), expected)
    assert code.values.min() > 0


def test_a_wrong_guess_of_the_cut_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample sees the largest values alone, so the guess lets too few through."""
    monkeypatch.setattr("jobs.interp.sae.architectures.selection.GUESS_FROM", 40)
    monkeypatch.setattr("jobs.interp.sae.architectures.selection.GENEROUS", 0.1)
    pre = torch.randn(40, 101, generator=torch.Generator().manual_seed(0))
    pre.view(-1)[::101] += 100
    assert sorted(select_batch(pre, 300).values.tolist()) == sorted(pre.flatten().topk(300).values.tolist())


@pytest.mark.parametrize("architecture", NAMES)
def test_it_begins_fitted_to_the_data_and_drawn_from_the_seed(architecture: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(512, D_IN, generator=draw) + 3
    y = torch.randn(512, D_OUT, generator=draw) - 2 if architecture in TRANSCODERS else x
    sae, again, other = (
        begin(options(architecture), D_IN, y.shape[1], D_SAE, seed=seed, sample=x, target=y)
        for seed in (3, 3, 4)
    )
    torch.testing.assert_close(sae.b_dec.detach(), y.mean(0))
    expected = 1.0 if sae.unit_norm else 0.1
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.full((D_SAE,), expected))
    assert torch.equal(sae.W_dec, again.W_dec)
    assert not torch.equal(sae.W_dec, other.W_dec)
    if architecture not in TRANSCODERS:
        assert torch.equal(sae.W_enc, sae.W_dec.T)
    assert sae.pre_acts(x).mean(0).abs().max() < 0.02  # the encoder sees them centred
    assert (sae.reconstruct(x)[1] > 0).all()


def test_jumprelu_begins_with_as_many_live_latents_as_asked_for() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 8, generator=draw) * torch.arange(1, 9)
    for target in (1.5, 4, 12):
        sae = begin(Options("jumprelu", target_l0=target), 8, 8, 24, seed=0, sample=x, target=x)
        assert (sae.encode(x) > 0).sum(1).double().mean() == pytest.approx(min(target, 12), rel=0.01)


@pytest.mark.parametrize(
    ("given", "shapes", "words"),
    [
        ({"architecture": "temporal"}, (8, 8, 24), "no architecture 'temporal'; there are topk,"),
        ({"k": 25}, (8, 8, 24), "k is 25, but 24 latents allow 1 to 24"),
        ({"k": 1.5}, (8, 8, 24), "k is 1.5; topk takes a whole number"),
        ({"architecture": "batchtopk", "k": 0.5}, (8, 8, 24), "k is 0.5"),
        ({"architecture": "jumprelu", "target_l0": 24}, (8, 8, 24), "target_l0 is 24 .* less than 24"),
        ({"architecture": "jumprelu", "bandwidth": 0}, (8, 8, 24), "bandwidth is 0"),
        ({"architecture": "standard", "l1": -1}, (8, 8, 24), "l1 is -1"),
        (
            {"architecture": "gated"},
            (8, 6, 24),
            "input has 8 dimensions and the target 6; transcoder or skip",
        ),
        (
            {"architecture": "matryoshka_batchtopk", "k": 4, "widths": (12, 6)},
            (8, 8, 24),
            "they are 12, 6, 24",
        ),
        (
            {"architecture": "matryoshka_batchtopk", "k": 4, "widths": (6, 30)},
            (8, 8, 24),
            "they are 6, 30, 24",
        ),
    ],
)
def test_what_cannot_be_is_said_with_numbers(
    given: dict[str, Any], shapes: tuple[int, int, int], words: str
) -> None:
    with pytest.raises(Unusable, match=words):
        Options(**given).check(*shapes)


def test_options_know_what_matters_to_a_training() -> None:
    assert [Options(name, l1=5, l0=2).sparsity for name in ("topk", "standard", "gated", "jumprelu")] == [
        0,
        5,
        5,
        2,
    ]
    assert [name for name in NAMES if Options(name).has_aux] == ["topk", "batchtopk", "matryoshka_batchtopk"]
    assert Options("matryoshka_batchtopk").prefixes(64) == (4, 8, 16, 32, 64)
    assert Options("matryoshka_batchtopk", widths=(6,)).prefixes(64) == (6, 64)
    assert isinstance(random_sae("topk"), TopK)
    assert isinstance(random_sae("matryoshka_batchtopk"), BatchTopK)
