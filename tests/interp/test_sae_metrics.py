"""Numbers that can be compared: pooled FVU, firing, how far an SAE shrinks."""

from __future__ import annotations

import pytest
import torch

from jobs.interp.sae.architectures import TopK
from jobs.interp.sae.metrics import (
    Fvu,
    histogram,
    limited,
    log10_frequency,
)
from tests.interp.conftest import quality

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


def test_cosine_and_length_say_how_far_it_shrinks(S8: TopK, X32: torch.Tensor) -> None:
    with torch.no_grad():
        found = S8(X32)
    expected = torch.nn.functional.cosine_similarity(X32, found).mean().item()
    measured = quality(S8, X32.split(5))
    assert measured.cosine == pytest.approx(expected, rel=1e-5)
    assert measured.norm_ratio == pytest.approx((found.norm(dim=1) / X32.norm(dim=1)).mean().item(), rel=1e-5)
    half = S8.folded(1.0)
    with torch.no_grad():
        half.W_dec.div_(2)
        half.b_dec.zero_()
    shrunk, whole = quality(half, X32.split(5)), S8.folded(1.0)
    with torch.no_grad():
        whole.b_dec.zero_()
    assert shrunk.norm_ratio == pytest.approx(quality(whole, X32.split(5)).norm_ratio / 2, rel=1e-5)
