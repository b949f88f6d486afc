"""Numbers that can be compared: pooled FVU, firing, cross-entropy through the SAE."""

from __future__ import annotations

import pytest
import torch

from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel
from jobs.interp.sae.architectures import TopK
from jobs.interp.sae.metrics import (
    CrossEntropy,
    Fvu,
    cross_entropy,
    histogram,
    limited,
    log10_frequency,
    quality,
)
from jobs.interp.site import Site
from jobs.interp.tokens import pad

X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [10.0, 10.0]])
X_HAT = torch.tensor([[1.0, 1.0], [0.0, 1.0], [9.0, 10.0]])


def fvu_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    fvu = Fvu()
    for x, x_hat in pairs:
        fvu.add(x, x_hat)
    return fvu.value()


def test_explained_variance_is_pooled_f21() -> None:
    assert 1 - fvu_of((X, X_HAT)) == pytest.approx(0.98352, abs=5e-6)
    assert 1 - fvu_of((X, X_HAT)) != pytest.approx(0.97963, abs=1e-3)  # the average of per-token ratios


def test_predicting_the_mean_explains_nothing_f21() -> None:
    assert fvu_of((X, X.mean(0).expand(3, 2))) == pytest.approx(1.0, abs=1e-12)


def test_batches_of_one_give_the_same_value_f21() -> None:
    whole = fvu_of((X, X_HAT))
    assert fvu_of(*zip(X.split(1), X_HAT.split(1), strict=True)) == pytest.approx(whole, abs=1e-12)


def test_the_second_published_example() -> None:
    x, x_hat = torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    assert 1 - fvu_of((x, x_hat)) == pytest.approx(0.8, abs=1e-12)


def test_quality_counts_what_fires(S8: TopK, X32: torch.Tensor) -> None:
    with torch.no_grad():
        found = quality(S8, X32.split(5))
        acts = S8.encode(X32)
        assert found.firings.tolist() == (acts > 0).sum(0).tolist()
        assert found.l0 == pytest.approx((acts > 0).sum().item() / 32)
        assert found.squared_error == pytest.approx((S8(X32) - X32).square().sum(1).mean().item(), rel=1e-5)
        assert found.fvu == pytest.approx(fvu_of((X32, S8(X32))), rel=1e-6)


def test_frequencies_are_logarithms_with_a_floor() -> None:
    found = log10_frequency(torch.tensor([0, 1, 10]), 10)
    torch.testing.assert_close(found, torch.tensor([-10.0, -1.0, 0.0]), atol=1e-6, rtol=0)
    counts = histogram(found)["counts"]
    assert (sum(counts), counts[0], counts[-1]) == (3, 1, 1)


def test_a_stream_can_be_cut() -> None:
    assert [len(part) for part in limited(torch.zeros(10, 2).split(4), 6)] == [4, 2]


@pytest.fixture
def text() -> list[list[int]]:
    return [[1, 5, 9, 12, 7, 20, 6], [1, 8, 4, 4, 21]]


def test_an_sae_that_changes_nothing_recovers_all(LL: LanguageModel, text: list[list[int]]) -> None:
    found = cross_entropy(LL, Site(1), lambda x: x, [pad(text, 0)], excluded_ids=[1])
    assert found.recovered == pytest.approx(1.0, abs=1e-9)
    assert found.tokens == 6 + 4


def test_an_sae_of_zeros_recovers_nothing(LL: LanguageModel, text: list[list[int]]) -> None:
    assert cross_entropy(LL, Site(1), torch.zeros_like, [pad(text, 0)]).recovered == pytest.approx(
        0, abs=1e-9
    )


def test_recovered_is_the_share_of_what_zeros_lose() -> None:
    assert CrossEntropy(clean=2.0, sae=3.0, zero=6.0, tokens=1).recovered == 0.75


@pytest.mark.parametrize("block", [0, 1, 2])
def test_the_loss_is_that_of_a_model_changed_at_the_site(LL: LanguageModel, block: int) -> None:
    """Half the stream after a block, by a hook placed by hand; the block matters."""
    ids = torch.tensor([[1, 5, 9, 12, 7, 20, 6]])
    handle = LL.model.model.layers[block].register_forward_hook(
        lambda _m, _a, stream: (
            torch.cat([stream[:, :1], stream[:, 1:] / 2], dim=1) + 0.1 * (ids != 1)[..., None]
        )
    )
    expected = LL.model(ids, labels=ids).loss.item()
    handle.remove()
    found = cross_entropy(LL, Site(block), lambda x: x / 2 + 0.1, [pad(ids.tolist(), 0)], excluded_ids=[1])
    assert found.sae == pytest.approx(expected, rel=1e-5)
    assert found.sae != pytest.approx(found.clean, rel=1e-4)


def test_the_clean_loss_is_the_models_own(LL: LanguageModel, text: list[list[int]]) -> None:
    """Per predicted token, padding left out, whatever the batching."""
    alone = [
        LL.model(torch.tensor([row]), labels=torch.tensor([row])).loss.item() * (len(row) - 1) for row in text
    ]
    expected = sum(alone) / 10
    for batches in ([pad(text, 0)], [pad([row], 0) for row in text], [pad(text, 0, side="left")]):
        found = cross_entropy(LL, Site(1), torch.zeros_like, batches)
        assert found.clean == pytest.approx(expected, rel=1e-5)


def test_only_positions_an_sae_is_made_for_are_replaced(LL: LanguageModel, text: list[list[int]]) -> None:
    """Not BOS, not padding, not vectors longer than the limit."""
    batch = pad(text, 0)
    stream = capture(LL.model, [Site(1)], **batch.model_inputs("cpu"))[Site(1)]
    norms = stream[batch.mask.bool() & (batch.input_ids != 1)].norm(dim=1)
    seen: list[torch.Tensor] = []

    def watch(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    limit = norms.median().item()
    cross_entropy(LL, Site(1), watch, [batch], excluded_ids=[1], norm_limit=limit)
    assert len(seen[0]) == (norms <= limit).sum() < len(norms)
    assert seen[0].norm(dim=1).max() <= limit + 1e-4
