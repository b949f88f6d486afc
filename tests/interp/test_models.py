"""Loading models from folders, and what a folder says about itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs.interp import models
from jobs.interp.errors import Unusable
from jobs.interp.models import LanguageModel


@pytest.fixture
def folder(LL: LanguageModel, tmp_path: Path) -> Path:
    """LL on disk, as transformers saves it."""
    LL.model.save_pretrained(tmp_path / "ll")
    LL.tokenizer.save_pretrained(tmp_path / "ll")
    return tmp_path / "ll"


@pytest.mark.parametrize("name", ["G2", "LL"])
def test_a_context_over_the_limit_is_refused_before_any_work_f09(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Also for LL, whose rotary positions would run on beyond 32 without complaint."""
    lm = request.getfixturevalue(name)
    lm.require_context(32)
    with pytest.raises(Unusable, match=rf"40.*32.*{name}"):
        lm.require_context(40)


def test_what_was_saved_is_what_is_loaded(LL: LanguageModel, folder: Path) -> None:
    again = models.load(folder)
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(again.model(ids).logits, LL.model(ids).logits)
    assert (again.n_layers, again.d_model, again.d_vocab, again.limit) == (3, 16, 64, 32)
    assert (again.bos_id, again.special_ids, again.name) == (1, (0, 1, 2, 3), "ll")
    assert not again.model.training
    assert not any(weight.requires_grad for weight in again.model.parameters())


def test_a_folder_is_described_without_loading_it(LL: LanguageModel, folder: Path) -> None:
    facts = models.describe(folder)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert (facts["n_layers"], facts["d_model"], facts["d_vocab"], facts["max_positions"]) == (3, 16, 64, 32)
    assert facts["parameters"] == sum(weight.numel() for weight in LL.model.parameters())
    assert (facts["bytes"], facts["dtype"]) == (4 * facts["parameters"], "float32")
    assert len(facts["weights_sha256"]) == 64


def test_the_digest_follows_the_weights(LL: LanguageModel, folder: Path, tmp_path: Path) -> None:
    before = models.describe(folder)["weights_sha256"]
    assert models.describe(folder)["weights_sha256"] == before
    models.save_as(folder, tmp_path / "half", torch.bfloat16)
    after = models.describe(tmp_path / "half")
    assert (after["weights_sha256"] != before, after["dtype"]) == (True, "bfloat16")


def test_pickled_weights_are_refused_in_words(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Unusable, match=r"no safetensors weights.*refused"):
        models.load(folder)


def test_code_of_the_models_own_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {
        "auto_map": {"AutoModelForCausalLM": "evil.Evil"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unusable, match="never run"):
        models.load(folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"config\.json"):
        models.load(tmp_path)


def test_models_run_as_stored_on_a_card_and_in_float32_without() -> None:
    assert models.compute_dtype("bfloat16", "cuda:0") == torch.bfloat16
    assert models.compute_dtype("bfloat16", "cpu") == torch.float32
    assert models.compute_dtype("F8_E4M3", "cuda:0") == torch.float32
