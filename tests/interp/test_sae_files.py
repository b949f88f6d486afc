"""SAEs on disk: a layout that others open, and that says what is true."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.interp.errors import Unusable
from jobs.interp.sae.architectures import TopK
from jobs.interp.sae.files import Metadata, load_sae, save_sae

ORACLE = Path(__file__).parents[2] / ".venv-oracle" / "bin" / "python"
METADATA = Metadata("gpt2", "blocks.1.hook_resid_post", "transformer.h.1", 128, True, True, "english")


@pytest.fixture
def folder(S8: TopK, tmp_path: Path) -> Path:
    save_sae(tmp_path / "sae", S8, METADATA, log10_frequencies=torch.full((24,), -2.0), extra={"seed": 0})
    return tmp_path / "sae"


def test_the_layout_is_saelens_own(folder: Path) -> None:
    weights = load_file(folder / "sae_weights.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    assert shapes == {"W_enc": [8, 24], "b_enc": [24], "W_dec": [24, 8], "b_dec": [8]}
    assert list(load_file(folder / "sparsity.safetensors")) == ["sparsity"]
    config = json.loads((folder / "cfg.json").read_text())
    assert set(config) == {
        "architecture",
        "d_in",
        "d_sae",
        "k",
        "rescale_acts_by_decoder_norm",
        "dtype",
        "device",
        "apply_b_dec_to_input",
        "normalize_activations",
        "reshape_activations",
        "metadata",
    }
    assert (config["architecture"], config["k"], config["apply_b_dec_to_input"]) == ("topk", 4, True)
    assert config["metadata"]["sae_lens_version"].startswith("6.")
    assert config["metadata"]["hook_name"] == "blocks.1.hook_resid_post"


def test_the_files_alone_give_the_reconstruction_by_hand(folder: Path, S8: TopK, X7: torch.Tensor) -> None:
    w = load_file(folder / "sae_weights.safetensors")
    pre = (X7 - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    top = pre.topk(4, dim=1)
    acts = torch.zeros_like(pre).scatter(1, top.indices, top.values.relu())
    torch.testing.assert_close(acts @ w["W_dec"] + w["b_dec"], S8(X7).detach(), atol=1e-4, rtol=1e-5)


def test_what_was_saved_is_what_is_loaded(folder: Path, S8: TopK) -> None:
    again = load_sae(folder)
    assert again.k == 4
    for name, weight in S8.named_parameters():
        assert torch.equal(getattr(again, name), weight)


def test_saelens_selection_by_decoder_norm_is_folded_in(folder: Path, S8: TopK, X32: torch.Tensor) -> None:
    """Their default for TopK selects by value times the length of the direction."""
    config = json.loads((folder / "cfg.json").read_text()) | {"rescale_acts_by_decoder_norm": True}
    (folder / "cfg.json").write_text(json.dumps(config))
    norms = S8.W_dec.norm(dim=1)
    pre = ((X32 - S8.b_dec) @ S8.W_enc + S8.b_enc) * norms
    top = pre.topk(4, dim=1)
    acts = torch.zeros_like(pre).scatter(1, top.indices, top.values.relu())
    expected = (acts / norms) @ S8.W_dec + S8.b_dec
    torch.testing.assert_close(load_sae(folder)(X32), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("architecture", "temporal", "temporal"),
        ("normalize_activations", "layer_norm", "layer_norm"),
    ],
)
def test_what_would_be_applied_wrongly_is_refused(folder: Path, key: str, value: object, words: str) -> None:
    config = json.loads((folder / "cfg.json").read_text()) | {key: value}
    (folder / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(Unusable, match=words):
        load_sae(folder)


PROGRAM = """
import sys, pathlib
from safetensors.torch import load_file, save_file
from sae_lens import SAE
folder = pathlib.Path(sys.argv[1])
x = load_file(folder / "x.safetensors")["x"]
for name in sys.argv[2:]:
    sae = SAE.load_from_disk(str(folder / name))
    acts = sae.encode(x)
    acts = acts.to_dense() if acts.is_sparse else acts
    found = {"acts": acts.detach().contiguous(), "x_hat": sae(x).detach().contiguous()}
    save_file(found, folder / f"{name}.out")
    assert sae.cfg.metadata.hook_name == "blocks.1.hook_resid_post"
"""


@pytest.mark.oracle
@pytest.mark.timeout(300)
def test_saelens_opens_it_and_reconstructs_the_same(tmp_path: Path, S8: TopK, X7: torch.Tensor) -> None:
    """O1 and O8: as trained, and with a scale of 0.31 folded in."""
    if not ORACLE.exists():
        pytest.skip("no .venv-oracle with sae-lens")
    scales = {"plain": 1.0, "folded": 0.31}
    for name, scale in scales.items():
        save_sae(tmp_path / name, S8.folded(scale), METADATA, log10_frequencies=torch.zeros(24))
    save_file({"x": X7}, tmp_path / "x.safetensors")
    done = subprocess.run(
        [ORACLE, "-c", PROGRAM, tmp_path, *scales], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, scale in scales.items():
        theirs = load_file(tmp_path / f"{name}.out")
        reference = S8(scale * X7).detach() / scale
        torch.testing.assert_close(theirs["x_hat"], reference, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(theirs["acts"], S8.encode(scale * X7).detach(), atol=1e-5, rtol=1e-5)
