"""SAEs on disk: a layout that others open, and that says what is true."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.interp.errors import Unusable
from jobs.interp.sae.architectures import TopK, Weights
from jobs.interp.sae.files import Metadata, load_sae, save_sae
from jobs.interp.sae.options import NAMES
from tests.interp.conftest import assert_same_vectors
from tests.interp.dense_saes import pair, random_sae

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


def changed(folder: Path, **values: object) -> None:
    config = json.loads((folder / "cfg.json").read_text()) | values
    (folder / "cfg.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", NAMES)
def test_every_architecture_comes_back_as_it_was_exported(architecture: str, tmp_path: Path) -> None:
    sae = random_sae(architecture, torch.float32)
    x, y = pair(sae)
    sae.backward(x, y, Weights(0.1, torch.zeros(24, dtype=torch.bool)))  # gives batch forms a threshold
    folded = sae.folded(0.31)
    save_sae(tmp_path, folded, METADATA)
    again = load_sae(tmp_path)
    assert type(again) is type(folded)
    torch.testing.assert_close(again(7 * x), folded(7 * x), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in folded.state_dict().items())


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("standard", {"W_enc": [8, 24], "b_enc": [24], "W_dec": [24, 8], "b_dec": [8]}),
        ("jumprelu", {"W_enc": [8, 24], "b_enc": [24], "W_dec": [24, 8], "b_dec": [8], "threshold": [24]}),
        (
            "gated",
            {"W_enc": [8, 24], "W_dec": [24, 8], "b_dec": [8], "b_gate": [24], "b_mag": [24], "r_mag": [24]},
        ),
        ("transcoder", {"W_enc": [8, 24], "b_enc": [24], "W_dec": [24, 6], "b_dec": [6]}),
        (
            "skip_transcoder",
            {"W_enc": [8, 24], "b_enc": [24], "W_dec": [24, 6], "b_dec": [6], "W_skip": [6, 8]},
        ),
    ],
)
def test_weights_are_named_as_saelens_names_them(
    architecture: str, names: dict[str, list[int]], tmp_path: Path
) -> None:
    save_sae(tmp_path, random_sae(architecture), METADATA)
    weights = load_file(tmp_path / "sae_weights.safetensors")
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == names
    config = json.loads((tmp_path / "cfg.json").read_text())
    assert config["apply_b_dec_to_input"] is ("transcoder" not in architecture)
    assert config.get("d_out") == (6 if "transcoder" in architecture else None)


@pytest.mark.parametrize("architecture", ["batchtopk", "matryoshka_batchtopk"])
def test_batch_forms_are_exported_as_jumprelu(architecture: str, tmp_path: Path) -> None:
    sae = random_sae(architecture)
    sae.backward(*pair(sae), Weights(0.0, torch.zeros(24, dtype=torch.bool)))
    save_sae(tmp_path, sae.folded(0.31), replace(METADATA, training_architecture=architecture))
    config = json.loads((tmp_path / "cfg.json").read_text())
    assert (config["architecture"], config["metadata"]["training_architecture"]) == ("jumprelu", architecture)
    threshold = load_file(tmp_path / "sae_weights.safetensors")["threshold"]
    assert threshold.tolist() == pytest.approx([sae.threshold.item()] * 24)


@pytest.mark.parametrize("architecture", ["topk", "standard", "jumprelu", "gated"])
def test_an_sae_that_does_not_centre_its_input_does_the_same_here(architecture: str, tmp_path: Path) -> None:
    """As Gemma Scope's: the shift goes into the encoder's bias."""
    sae = random_sae(architecture, torch.float32)
    save_sae(tmp_path, sae, METADATA)
    changed(tmp_path, apply_b_dec_to_input=False)
    x, _ = pair(sae)
    torch.testing.assert_close(load_sae(tmp_path)(x), sae(x + sae.b_dec), atol=1e-5, rtol=1e-5)


def test_a_topk_comes_back_with_its_k_f28(tmp_path: Path, X32: torch.Tensor) -> None:
    sae = random_sae("topk", torch.float32)
    save_sae(tmp_path, sae, METADATA)
    assert (load_sae(tmp_path).encode(X32) > 0).sum(1).max() == 4


def test_a_transcoder_that_asks_for_subtraction_is_refused_f29(tmp_path: Path) -> None:
    save_sae(tmp_path, random_sae("transcoder"), METADATA)
    changed(tmp_path, apply_b_dec_to_input=True)
    with pytest.raises(Unusable, match="subtracted from its input, where it has no meaning"):
        load_sae(tmp_path)


def test_weights_of_another_form_are_named(tmp_path: Path) -> None:
    save_sae(tmp_path, random_sae("standard"), METADATA)
    changed(tmp_path, architecture="jumprelu")
    with pytest.raises(Unusable, match="not those of a jumprelu with 24 latents: threshold differ"):
        load_sae(tmp_path)


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
    assert sae.cfg.normalize_activations == "none"
"""


@pytest.mark.oracle
@pytest.mark.timeout(300)
def test_saelens_opens_it_and_reconstructs_the_same(tmp_path: Path) -> None:
    """O1 and O8, of every architecture, with a scale of 0.31 folded in: no normalisation is left over."""
    if not ORACLE.exists():
        pytest.skip("no .venv-oracle with sae-lens")
    saes = {name: random_sae(name, torch.float32) for name in NAMES}
    expected = {}
    x = 7 * pair(saes["topk"])[0]
    for name, sae in saes.items():
        sae.backward(*pair(sae), Weights(0.1, torch.zeros(24, dtype=torch.bool)))
        save_sae(tmp_path / name, sae.folded(0.31), METADATA, log10_frequencies=torch.zeros(24))
        with torch.no_grad():
            expected[name] = sae.exported()(0.31 * x) / 0.31, sae.exported().encode(0.31 * x)
    save_file({"x": x}, tmp_path / "x.safetensors")
    done = subprocess.run(
        [ORACLE, "-c", PROGRAM, tmp_path, *saes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, (x_hat, acts) in expected.items():
        theirs = load_file(tmp_path / f"{name}.out")
        assert_same_vectors(theirs["x_hat"], x_hat)
        torch.testing.assert_close(theirs["acts"], acts, atol=1e-5, rtol=1e-5)
