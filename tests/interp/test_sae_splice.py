"""The loss through SAEs: each number against a model changed by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel
from jobs.interp.sae.splice import CrossEntropy, Splice, cross_entropies
from jobs.interp.site import Site
from jobs.interp.tokens import pad

IN, OUT = Site(1, "mlp_in"), Site(1, "mlp_out")
ROW = [1, 5, 9, 12, 7, 20, 6]


@pytest.fixture
def text() -> list[list[int]]:
    return [ROW, [1, 8, 4, 4, 21]]


def at(block: int, rebuild: Callable[[torch.Tensor], torch.Tensor]) -> Splice:
    return Splice(Site(block), Site(block), rebuild)


def test_an_sae_that_changes_nothing_recovers_all(LL: LanguageModel, text: list[list[int]]) -> None:
    [found] = cross_entropies(LL, [at(1, lambda x: x)], [pad(text, 0)], excluded_ids=[1])
    assert found.recovered == pytest.approx(1.0, abs=1e-9)
    assert found.kl == pytest.approx(0.0, abs=1e-9)
    assert found.tokens == 6 + 4


def test_an_sae_of_zeros_recovers_nothing(LL: LanguageModel, text: list[list[int]]) -> None:
    [found] = cross_entropies(LL, [at(1, torch.zeros_like)], [pad(text, 0)])
    assert found.recovered == pytest.approx(0, abs=1e-9)
    assert found.kl > 0.1


def test_recovered_is_the_share_of_what_zeros_lose() -> None:
    assert CrossEntropy(clean=2.0, sae=3.0, zero=6.0, kl=0.5, tokens=1).recovered == 0.75


def test_where_nothing_was_replaced_or_predicted_nothing_is_recovered(LL: LanguageModel) -> None:
    """A row whose every position is left out, and a row of one token, after which nothing is predicted."""
    [untouched] = cross_entropies(LL, [at(1, torch.zeros_like)], [pad([[1, 5]], 0)], excluded_ids=[1, 5])
    assert untouched.zero == untouched.clean > 0
    assert (untouched.recovered, untouched.tokens) == (None, 1)
    [alone] = cross_entropies(LL, [at(1, torch.zeros_like)], [pad([[1]], 0)])
    assert (alone.recovered, alone.tokens) == (None, 0)


@pytest.mark.parametrize("block", [0, 1, 2])
def test_loss_and_kl_are_those_of_a_model_changed_at_the_site(LL: LanguageModel, block: int) -> None:
    """Half the stream after a block, by a hook placed by hand; the block matters. Beside it one that does nothing."""
    ids = torch.tensor([ROW])
    clean = LL.model(ids).logits[0, :-1].double()
    handle = LL.model.model.layers[block].register_forward_hook(
        lambda _m, _a, stream: (
            torch.cat([stream[:, :1], stream[:, 1:] / 2], dim=1) + 0.1 * (ids != 1)[..., None]
        )
    )
    changed = LL.model(ids).logits[0, :-1].double()
    handle.remove()
    splices = [at(block, lambda x: x / 2 + 0.1), at(block, lambda x: x)]
    found, same = cross_entropies(LL, splices, [pad(ids.tolist(), 0)], excluded_ids=[1])
    assert found.sae == pytest.approx(F.cross_entropy(changed, ids[0, 1:]).item(), rel=1e-5)
    assert found.sae != pytest.approx(found.clean, rel=1e-4)
    p, q = clean.softmax(-1), changed.softmax(-1)
    assert found.kl == pytest.approx((p * (p.log() - q.log())).sum(-1).mean().item(), rel=1e-4)
    assert same.sae == pytest.approx(found.clean, rel=1e-6)
    assert same.zero == found.zero


def test_the_clean_loss_is_the_models_own(LL: LanguageModel, text: list[list[int]]) -> None:
    """Per predicted token, padding left out, whatever the batching."""
    alone = [
        LL.model(torch.tensor([row]), labels=torch.tensor([row])).loss.item() * (len(row) - 1) for row in text
    ]
    for batches in ([pad(text, 0)], [pad([row], 0) for row in text], [pad(text, 0, side="left")]):
        [found] = cross_entropies(LL, [at(1, lambda x: x / 2)], batches)
        assert found.clean == pytest.approx(sum(alone) / 10, rel=1e-5)


def test_a_transcoder_reads_before_the_mlp_and_stands_in_for_what_comes_out(LL: LanguageModel) -> None:
    """Half of what the MLP gives, computed from its input; zeros are at its output, too."""
    mlp = LL.model.model.layers[1].mlp
    inner, ids = mlp.forward, torch.tensor([ROW])
    halves = Splice(IN, OUT, lambda x: inner(x) / 2)
    found, whole = cross_entropies(LL, [halves, Splice(IN, OUT, inner)], [pad([ROW], 0)])
    losses = []
    for share in (0.5, 0.0):
        handle = mlp.register_forward_hook(lambda _m, _a, out, share=share: share * out)
        losses.append(LL.model(ids, labels=ids).loss.item())
        handle.remove()
    assert [found.sae, found.zero] == pytest.approx(losses, rel=1e-5)
    assert losses[0] != pytest.approx(found.clean, rel=1e-3)
    assert whole.recovered == pytest.approx(1.0, abs=1e-5)


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
    cross_entropies(LL, [at(1, watch)], [batch], excluded_ids=[1], limits={Site(1): limit})
    assert len(seen[0]) == (norms <= limit).sum() < len(norms)
    assert seen[0].norm(dim=1).max() <= limit + 1e-4
