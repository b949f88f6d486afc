"""An extraction on a real card that is too full: the batch halves, and the vectors are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs.interp.activations import Recipe, extract
from jobs.interp.microbatches import MicroBatches
from jobs.interp.site import Site
from jobs.interp.tokens import RowStream
from tests.interp.conftest import language_model
from tests.interp.test_activations import DOCUMENTS
from tests.interp.test_extraction import stored

pytestmark = pytest.mark.gpu


def test_a_card_that_is_too_small_halves_the_batch_and_gives_the_same_vectors(tmp_path: Path) -> None:
    """A real lack of memory: the card is filled but for what a few rows take."""
    lm = language_model("LL")
    rows = list(RowStream(DOCUMENTS * 40, lm.tokenizer, 16, max_tokens=10_000, bos_id=1))
    recipe = Recipe((Site(1), Site(0, "mlp_out")), "float32")
    extract(lm, rows, recipe, tmp_path / "cpu", batch_size=64)
    lm.model.to("cuda:0")
    on_card = type(lm)(lm.model, lm.tokenizer, lm.name, "cuda:0")

    def read(part: list[int]) -> bool:
        torch.empty(len(part) * 2**30, dtype=torch.uint8, device="cuda:0")  # a GiB a row
        return True

    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, free - 6 * 2**30), dtype=torch.uint8, device="cuda:0")
    parts = MicroBatches(64)
    assert [list(part) for part, _ in parts.over(list(range(8)), read)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert parts.size == 4
    summary = extract(on_card, rows, recipe, tmp_path / "card", batch_size=64)
    assert summary["micro_batch"] == 64
    del held
    for site in recipe.sites:
        found, expected = stored(tmp_path / "card", site), stored(tmp_path / "cpu", site)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
