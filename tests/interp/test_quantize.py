"""Packed weights against the formulas they stand for, what became of the layers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jobs.interp import anatomy, extras, headers, models, packed, probe, quantize, sizes
from jobs.interp.errors import MissingExtra, Stopped, Unusable
from jobs.interp.models import LanguageModel
from tests.interp.conftest import assert_same_vectors, language_model

bitsandbytes = pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")
GIB = 2**30
#: Dettmers et al. 2023, appendix E: quantiles of a standard normal, each half's scaled to [0, 1].
NF4 = torch.tensor(
    [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302, 0.2461123,
     0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
)  # fmt: skip
LINEAR = "model.layers.1.mlp.down_proj"


def saved(lm: LanguageModel, folder: Path) -> Path:
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(language_model("LL"), tmp_path_factory.mktemp("models") / "ll")


@pytest.fixture(scope="module", params=["int8", "nf4"])
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def made(folder: Path, scheme: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    target = tmp_path_factory.mktemp("packed") / scheme
    return target, quantize.compared(folder, target, scheme, device="cpu")


def unpacked(file: dict[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    """The weights that a file's packed bytes stand for, by the formulas in `packed`'s docstring."""
    if f"{name}.SCB" in file:
        return file[f"{name}.weight"].float() * file[f"{name}.SCB"].float()[:, None] / 127
    both = file[f"{name}.weight"].flatten()
    codes = torch.stack([both >> 4, both & 15], dim=1).flatten()  # the first of two in the upper half
    scales = file[f"{name}.weight.absmax"].float().repeat_interleave(64)
    return (NF4[codes.long()] * scales).reshape(shape)


def test_a_packed_product_is_that_of_the_weights_it_stands_for(
    folder: Path, made: tuple[Path, dict[str, Any]], scheme: str
) -> None:
    layer = models.load(made[0]).model.get_submodule(LINEAR)
    file, original = (load_file(path / "model.safetensors") for path in (made[0], folder))
    weight = unpacked(file, LINEAR, (16, 32))
    x = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0))
    if scheme == "nf4":
        assert_same_vectors(layer(x)[0], (x @ weight.T)[0])
    else:  # inputs are rounded too, a row at a time, and the product is float16
        size = x.abs().amax(-1, keepdim=True)
        x, size = x.half().float(), size.half().float()
        expected = (((x * 127 / size).round() * size / 127) @ weight.T)[0]
        assert ((layer(x)[0] - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 2e-3
    closest = original[f"{LINEAR}.weight"]
    step = closest.abs().max() / 127 if scheme == "int8" else 0.16 * closest.abs().max()
    assert (unpacked(file, LINEAR, (16, 32)) - closest).abs().max() < step


def test_nf4_takes_the_nearest_of_the_sixteen(folder: Path, tmp_path: Path) -> None:
    quantize.quantize(folder, tmp_path / "nf4", "nf4", device="cpu")
    file = load_file(tmp_path / "nf4" / "model.safetensors")
    blocks = load_file(folder / "model.safetensors")[f"{LINEAR}.weight"].reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    expected = NF4[(blocks[..., None] / scales[..., None] - NF4).abs().argmin(-1)] * scales
    assert_same_vectors(unpacked(file, LINEAR, (16, 32)), expected.reshape(16, 32))


def test_what_became_of_the_layers_is_counted_and_told(made: tuple[Path, dict[str, Any]]) -> None:
    target, found = made
    assert (found["modules_quantized"], found["modules_eligible"]) == (21, 21)  # 3 blocks of 7
    left = {role: (part["modules"], part["parameters"]) for role, part in found["left"].items()}
    assert left == {"embeddings": (1, 1024), "norms": (7, 112), "head": (1, 1024)}
    assert all(part["why"] for part in found["left"].values())
    assert found["memory_bytes_after"] < 0.75 * found["memory_bytes_before"]
    assert found["disk_bytes_after"] == headers.Weights.of(target).bytes
    assert found["quantized_on"] == "cpu"


def test_losses_are_nats_per_token_on_the_fixed_text(
    made: tuple[Path, dict[str, Any]], LL: LanguageModel
) -> None:
    for lm, found in ((LL, made[1]["loss_before"]), (models.load(made[0]), made[1]["loss_after"])):
        ids = torch.tensor([[1, *LL.tokenizer(probe.TEXT, add_special_tokens=False)["input_ids"]][:32]])
        with torch.no_grad():
            assert found == pytest.approx(float(lm.model(ids, labels=ids).loss), rel=1e-5)
    assert 0 < abs(made[1]["loss_after"] - made[1]["loss_before"]) < 0.5


def test_a_packed_folder_is_described_by_its_own_numbers(
    folder: Path, made: tuple[Path, dict[str, Any]], scheme: str
) -> None:
    plain, facts = models.describe(folder), models.describe(made[0])
    same = ("parameters", "dtype", "n_layers", "d_model", "d_vocab", "tokenizer_sha256", "architecture")
    assert {key: facts[key] for key in same} == {key: plain[key] for key in same}
    assert plain["quantization"] is None
    weights = 3 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 32)
    size = facts["quantization"].pop("bytes")
    assert facts["quantization"] == {"scheme": scheme, "weights": weights, "largest": 512}
    assert facts["bytes"] == size + 4 * (facts["parameters"] - weights)


def test_transformers_opens_it_by_itself(made: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    theirs, ours = AutoModelForCausalLM.from_pretrained(made[0]), models.load(made[0]).model
    kept = ours.state_dict()
    assert {name: str(weight.dtype) for name, weight in theirs.state_dict().items()} == {
        name: str(weight.dtype) for name, weight in kept.items()
    }
    assert all(torch.equal(weight, kept[name]) for name, weight in theirs.state_dict().items())
    assert len(list(packed.layers(theirs))) == 21


def test_half_types_stay_and_compute_in_what_is_asked(folder: Path, tmp_path: Path, scheme: str) -> None:
    models.save_as(folder, tmp_path / "half", torch.bfloat16)
    quantize.quantize(tmp_path / "half", tmp_path / "packed", scheme, device="cpu")
    file = load_file(tmp_path / "packed" / "model.safetensors")
    assert file["model.norm.weight"].dtype == torch.bfloat16
    assert models.describe(tmp_path / "packed")["dtype"] == "bfloat16"
    for dtype in (torch.float32, torch.bfloat16):
        model = models.load(tmp_path / "packed", dtype=dtype).model
        assert model(torch.tensor([[1, 5]])).logits.dtype == dtype
        assert model.get_submodule(LINEAR).weight.dtype in (torch.int8, torch.uint8)


@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_matrices_the_other_way_round_are_packed_too(tmp_path: Path, form: str, G2: LanguageModel) -> None:
    """GPT-2's Conv1D keeps `[in, out]`; tied embeddings stay."""
    folder = saved(G2, tmp_path / "g2")
    found = quantize.compared(folder, tmp_path / "packed", form, device="cpu")
    assert (found["modules_quantized"], found["modules_eligible"]) == (12, 12)
    assert found["loss_after"] == pytest.approx(found["loss_before"], abs=0.5)
    assert models.describe(tmp_path / "packed")["parameters"] == models.describe(folder)["parameters"]


def test_a_later_attempt_finds_its_work_done(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "nf4"
    quantize.quantize(folder, target, "nf4", device="cpu")
    written = (target / "model.safetensors").stat().st_mtime_ns
    steps: list[str] = []
    with pytest.raises(Stopped, match="loss of the quantized"):
        quantize.compared(
            folder, target, "nf4", device="cpu", on_step=lambda _, what: steps.append(what),
            should_stop=lambda: len(steps) == 2,
        )  # fmt: skip
    assert (target / "model.safetensors").stat().st_mtime_ns == written


def test_blocks_visit_a_card_one_at_a_time(LL: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    for number, block in enumerate(LL.model.model.layers):
        block.to = lambda device, number=number: seen.append((number, str(device)))
    rest: list[tuple[int, str]] = []
    monkeypatch.setattr(
        probe, "_move", lambda modules, device: rest.append((len(list(modules)), str(device)))
    )
    ids = torch.tensor([[1, 5]])
    with probe.visiting(LL.model, "cuda:0"):
        LL.model(ids)
    LL.model(ids)
    assert seen == [(n, device) for n in range(3) for device in ("cuda:0", "cpu")]
    assert rest[0][1] == "cuda:0" and rest[1][1] == "cpu"
    assert rest[0][0] < rest[1][0] == sum(1 for _ in LL.model.modules())


# Refused ------------------------------------------------------------------------------------------------


def change(folder: Path, target: Path, **values: Any) -> Path:
    """A copy of a folder with another configuration."""
    quantize.bring(folder, target, copy=True)
    config = json.loads((target / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "hqq"])
def test_weights_of_another_method_are_refused(folder: Path, tmp_path: Path, method: str) -> None:
    other = change(folder, tmp_path / "other", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(Unusable, match=rf"quantized already \({method}\).*original"):
        quantize.require_quantizable(other, "nf4", "other")
    with pytest.raises(Unusable, match=f"quantized with {method}, which no job here can run"):
        models.load(other)


def test_what_we_quantized_is_not_quantized_again(made: tuple[Path, dict[str, Any]], scheme: str) -> None:
    with pytest.raises(Unusable, match=rf"quantized already \({scheme}\)"):
        quantize.require_quantizable(made[0], "int8", "it")


def test_an_unknown_architecture_is_refused_without_its_code(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Unusable, match=r"no causal language model of the architecture 'novel'.*never run"):
        anatomy.skeleton(change(folder, tmp_path / "novel", model_type="novel", architectures=["Novel"]))
    with pytest.raises(Unusable, match="no causal language model of the architecture 'clip'"):
        anatomy.skeleton(change(folder, tmp_path / "clip", model_type="clip"))
    with pytest.raises(Unusable, match="never run"):
        anatomy.skeleton(change(folder, tmp_path / "own", auto_map={"AutoModelForCausalLM": "x.Y"}))


def test_a_model_without_blocks_that_can_be_found_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(
        MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, state_size=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(Unusable, match=r"No list of transformer blocks found in MambaForCausalLM"):
        models.describe(tmp_path)


def test_a_plan_that_would_touch_the_hosts_memory_is_refused_g56(
    made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 24 * GIB))
    packed.require_room(2 * GIB, "cuda:0")
    with pytest.raises(Unusable, match=r"needs 5\.5 GiB on the card, and 3\.0 GiB are free.*host's memory"):
        packed.require_room(5 * GIB, "cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 24 * GIB))
    monkeypatch.setattr(packed, "require_support", lambda device: None)
    with pytest.raises(Unusable, match="on the card, and"):
        models.load(made[0], device="cuda:0")


def test_a_library_without_kernels_for_the_device_is_told_in_words_g56(
    made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = type("ErrorHandlerMockBNBNativeLibrary", (), {})()
    monkeypatch.setattr(bitsandbytes.cextension, "lib", mock)
    monkeypatch.setattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    with pytest.raises(Unusable, match=r"does not run on 'cpu' here; it offers cuda"):
        models.load(made[0])
    with pytest.raises(Unusable, match="no kernels for CUDA"):
        packed.require_support("cuda:0")


def test_a_library_that_is_not_here_is_told_with_its_command_g56(
    made: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"bitsandbytes.*`python3 scripts/setup\.py --quant`") as refusal:
        models.load(made[0])
    assert refusal.value.hint == "python3 scripts/setup.py --quant"


# Before the weights are loaded --------------------------------------------------------------------------


def test_the_places_that_a_model_lacks_are_named(any_model: LanguageModel) -> None:
    facts = anatomy.facts_of(any_model.model)
    missing = facts["missing_sites"]
    assert list(missing) == (["resid_mid"] if any_model.name == "NX" else [])
    assert all(fact["blocks"] == list(range(facts["n_layers"])) for fact in missing.values())
    assert (facts["n_layers"], facts["n_heads"]) == (len(probe.blocks_of(any_model.model)[1]), 4)
    assert facts["tied_embeddings"] == (any_model.name in ("G2", "GE"))


def test_headers_tell_what_can_be_packed(any_model: LanguageModel, tmp_path: Path) -> None:
    """By their names, as the architecture itself tells it."""
    weights = headers.Weights.of(saved(any_model, tmp_path))
    expected = sorted(module.weight.numel() for module in anatomy.eligible(any_model.model).values())
    assert sorted(weights.linear) == expected
    assert weights.table == (64, 16)
    assert weights.parameters == sum(weight.numel() for weight in any_model.model.parameters())


def test_experts_in_one_tensor_and_bare_tables_are_nothing_to_quantize(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(8, 4),
        "model.layers.0.norm.weight": torch.zeros(4),
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 4, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(4, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert headers.Weights.of(tmp_path).linear == []


def test_a_card_needs_less_than_the_original_takes() -> None:
    """8 billion weights in bfloat16: nf4 fits on a card of 8 GiB, the original does not on one of 12."""
    block = {
        f"model.layers.{n}.{name}.weight": (rows, columns)
        for n in range(32)
        for name, rows, columns in (
            ("self_attn.q_proj", 4096, 4096), ("self_attn.k_proj", 1024, 4096), ("self_attn.v_proj", 1024, 4096),
            ("self_attn.o_proj", 4096, 4096), ("mlp.gate_proj", 14336, 4096), ("mlp.up_proj", 14336, 4096),
            ("mlp.down_proj", 4096, 14336),
        )
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (128_256, 4096), "lm_head.weight": (128_256, 4096)} | block
    tensors = {
        name: {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 2 * shape[0] * shape[1]]}
        for name, shape in shapes.items()
    }
    weights = headers.Weights(tensors)
    needs = [
        sum(sizes.quantizing(weights, scheme, on_cpu=False).values()) / GIB for scheme in ("nf4", "int8")
    ]
    assert 5.5 < needs[0] < 7 < needs[1] < 10.5 < 2 * weights.parameters / GIB
