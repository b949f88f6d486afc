"""The three kinds in a row, on a tiny model: what each makes is what the next one takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from jobs import registry
from jobs.exceptions import JobRejected
from jobs.interp import reading
from jobs.interp.errors import Stopped, Unusable
from jobs.interp.hooks import capture
from jobs.interp.sae.files import load_sae
from jobs.interp.sae.splice import Splice, cross_entropies
from jobs.interp.site import Site
from jobs.kind import JobKind
from tests.interp.conftest import language_model
from tests.kinds.fake import FakeContext, Shelf, run

DOWNLOAD, EXTRACT, TRAIN = (
    registry.get(name) for name in ("model_download", "activation_extraction", "sae_training")
)


def extract(shelf: Shelf, root: Path, **params: Any) -> Any:
    given = {"model": "ll", "corpus": str(root / "text.txt"), "sites": [{"block": 1}], "context_size": 16}
    return run(EXTRACT, shelf, job="extract", **(given | {"max_tokens": 2000, "dtype": "float32"} | params))


def train(shelf: Shelf, **params: Any) -> Any:
    given = {"activations": "ll-text-b1", "d_sae": 64, "k": 4, "tokens": 12_800, "batch_size": 64, "lr": 5e-3}
    job = params.pop("job_name", "train")
    return run(TRAIN, shelf, job=job, **(given | {"checkpoint_every": 50} | params))


@pytest.fixture
def model(shelf: Shelf, import_root: Path) -> dict[str, Any]:
    return run(DOWNLOAD, shelf, job="download", source=str(import_root / "LL"))[0]


def test_a_model_becomes_an_artifact_with_its_facts(shelf: Shelf, model: dict[str, Any]) -> None:
    artifact = shelf.named("ll")
    assert artifact.type == "model"
    assert (artifact.path / "model.safetensors").is_file()
    assert (artifact.path / "tokenizer.json").is_file()
    assert (model["architecture"], model["n_layers"], model["d_model"]) == ("LlamaForCausalLM", 3, 16)
    assert (model["d_vocab"], model["max_positions"], model["dtype"]) == (64, 32, "float32")
    assert model == artifact.manifest | {"artifact": "ll"}


def test_a_model_can_be_stored_in_another_type(shelf: Shelf, import_root: Path) -> None:
    facts, context, _ = run(DOWNLOAD, shelf, source=str(import_root / "LL"), dtype="bfloat16")
    weights = load_file(shelf.named("ll").path / "model.safetensors")
    assert facts["dtype"] == "bfloat16"
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert not any(context.checkpoints.iterdir())


def test_the_original_model_is_not_shared_with_its_folder(
    shelf: Shelf, import_root: Path, model: dict[str, Any]
) -> None:
    """Changing the folder later must not change the artifact."""
    (import_root / "LL" / "config.json").write_text("{}")
    assert json.loads((shelf.named("ll").path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.usefixtures("model")
def test_activations_say_how_they_were_made(shelf: Shelf, import_root: Path) -> None:
    result, context, estimate = extract(shelf, import_root)
    artifact = shelf.named("ll-text-b1")
    assert artifact.manifest == result
    assert result["model_artifact"] == shelf.named("ll").id
    assert result["tokens_read"] == 2000
    assert result["tokens"] + result["tokens_dropped"] == 2000
    assert (result["prepend_bos"], result["exclude_special"], result["pad"]) == (True, True, "pad")
    assert (artifact.path / "blocks.1.hook_resid_post" / "shard_00000.safetensors").is_file()
    assert context.reports[-1] == (2000, 2000, "tokens", "extract")
    assert not any(context.checkpoints.iterdir())
    size = sum(file.stat().st_size for file in artifact.path.rglob("*") if file.is_file())
    assert size < 1.2 * estimate.disk_bytes


@pytest.mark.parametrize(("side", "block"), [("left", 1), ("right", 2)])
def test_a_tokenizer_without_pad_runs_and_the_choice_is_recorded_f08(
    shelf: Shelf, import_root: Path, side: str, block: int
) -> None:
    """TKn, prompts of different length in a batch: as each alone, and the vocabulary as it was."""
    lm = language_model("G2", pad_token=None, padding_side=side)
    lm.model.save_pretrained(import_root / "G2")
    lm.tokenizer.save_pretrained(import_root / "G2")
    (import_root / "two.txt").write_text("fbd\n\neaf-iq\n\nab")
    facts, *_ = run(DOWNLOAD, shelf, job="download", source=str(import_root / "G2"))
    corpus, sites = str(import_root / "two.txt"), [{"block": block}]
    asked = {"model": "g2", "corpus": corpus, "sites": sites, "dtype": "float32", "context_size": 16}
    result, *_ = run(EXTRACT, shelf, job="extract", **asked)
    assert result["pad"] == "eos"
    assert facts["d_vocab"] == 64
    shard = (
        shelf.named(f"g2-two-b{block}").path / f"blocks.{block}.hook_resid_post" / "shard_00000.safetensors"
    )
    rows = [[1, 9, 5, 7], [1, 8, 4, 9, 33, 12, 20], [1, 4, 5]]
    alone = [capture(lm.model, [Site(block)], input_ids=torch.tensor([row])) for row in rows]
    expected = torch.cat([found[Site(block)][0, 1:] for found in alone])
    torch.testing.assert_close(load_file(shard)["acts"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("model")
def test_an_uploaded_corpus_gives_what_the_same_file_gives(shelf: Shelf, import_root: Path) -> None:
    text = (import_root / "text.txt").read_bytes()
    files = {"corpus.txt": {"size_bytes": len(text)}}
    folder = FakeContext(shelf, "upload", {}).artifact("corpus", "my-words", {"files": files})
    (folder / "corpus.txt").write_bytes(text)
    from_file, *_ = extract(shelf, import_root)
    uploaded, *_ = run(
        EXTRACT, shelf, job="up", model="ll", corpus="my-words", sites=[{"block": 1}],
        context_size=16, max_tokens=2000, dtype="float32",
    )  # fmt: skip
    assert uploaded["corpus"] == from_file["corpus"] | {"name": "my-words"}
    assert uploaded["corpus_artifact"] == next(i.id for i in shelf.items.values() if i.type == "corpus")
    one, other = (shelf.named(f"ll-{name}-b1").path for name in ("text", "my-words"))
    shard = "blocks.1.hook_resid_post/shard_00000.safetensors"
    assert (one / shard).read_bytes() == (other / shard).read_bytes()


@pytest.mark.usefixtures("model")
def test_an_sae_is_trained_measured_and_exported(shelf: Shelf, import_root: Path) -> None:
    extract(shelf, import_root)
    result, context, _ = train(shelf)
    assert 0 < result["fvu"] < 0.5
    assert result["l0"] <= 4
    assert 0 <= result["dead_fraction"] < 1
    assert 0.3 < result["ce_recovered"] < 1.1
    assert result["heldout_tokens"] > 0
    artifact = shelf.named("ll-text-b1-topk-64-k4")
    assert load_sae(artifact.path).d_sae == 64
    config = json.loads((artifact.path / "cfg.json").read_text())
    assert config["metadata"]["hook_name"] == "blocks.1.hook_resid_post"
    assert config["metadata"]["hf_hook_name"] == "model.layers.1"
    assert config["metadata"]["mistudio"]["fvu"] == result["fvu"]
    assert (
        config["metadata"]["mistudio"]["model"]["weights_sha256"]
        == shelf.named("ll").manifest["weights_sha256"]
    )
    assert load_file(artifact.path / "sparsity.safetensors")["sparsity"].shape == (64,)
    histogram = json.loads((context.out / "firing_histogram.json").read_text())
    assert sum(histogram["counts"]) == 64
    assert {"loss", "fvu", "l0", "dead_fraction", "lr", "tokens_per_s"} == set(context.metrics[-1][1])
    json.dumps([result, artifact.manifest], allow_nan=False)


@pytest.mark.usefixtures("model")
def test_the_exported_sae_works_on_raw_activations(shelf: Shelf, import_root: Path) -> None:
    extract(shelf, import_root)
    result, *_ = train(shelf)
    sae = load_sae(shelf.named("ll-text-b1-topk-64-k4").path)
    folder = shelf.named("ll-text-b1").path / "blocks.1.hook_resid_post"
    x = torch.cat([load_file(path)["acts"] for path in sorted(folder.glob("*"))])
    with torch.no_grad():
        fvu = (sae(x) - x).square().sum() / (x - x.mean(0)).square().sum()
    assert fvu.item() == pytest.approx(result["fvu"], rel=0.5)


@pytest.mark.usefixtures("model")
def test_the_loss_through_the_sae_is_that_of_the_exported_one(shelf: Shelf, import_root: Path) -> None:
    """Stream of another length than the training's, so that a scale forgotten shows."""
    extract(shelf, import_root)
    result, *_ = train(shelf, ce_tokens=500)
    source, sae = shelf.named("ll-text-b1"), load_sae(shelf.named("ll-text-b1-topk-64-k4").path)
    lm = language_model("LL")
    parts = reading.split(reading.Store(source.path / "blocks.1.hook_resid_post"))
    text = reading.heldout_text(source.path, parts.documents, 500).batches(8, lm.pad.id)
    with torch.no_grad():
        [found] = cross_entropies(
            lm,
            [Splice(Site(1), Site(1), sae)],
            text,
            excluded_ids=lm.special_ids,
            limits=dict(zip([Site(1)], parts.norm_limits or (), strict=False)),
        )
    numbers = [result[name] for name in ("ce_clean", "ce_sae", "ce_zero", "ce_recovered", "kl")]
    expected = [found.clean, found.sae, found.zero, found.recovered, found.kl]
    assert numbers == pytest.approx(expected, rel=1e-4)
    assert not 0.8 < result["scale_folded"] < 1.25


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("stop_after", [3, 12])
def test_a_stopped_training_goes_on_to_the_same_weights(
    shelf: Shelf, import_root: Path, tmp_path: Path, stop_after: int
) -> None:
    extract(shelf, import_root)
    train(shelf)
    straight = load_sae(shelf.named("ll-text-b1-topk-64-k4").path)
    for path in (shelf.folder / "train" / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(Stopped):
        train(shelf, stop_after=stop_after)
    train(shelf)
    again = load_sae(shelf.named("ll-text-b1-topk-64-k4").path)
    for name, weight in straight.named_parameters():
        assert torch.equal(weight, getattr(again, name))


@pytest.mark.usefixtures("model")
def test_a_training_that_ended_early_becomes_the_sae_of_its_checkpoint(
    shelf: Shelf, import_root: Path
) -> None:
    extract(shelf, import_root)
    with pytest.raises(Stopped):
        train(shelf, stop_after=8)
    result, _, estimate = train(shelf, finalize=True)
    done, total = result["ended_at_step"], result["steps_total"]
    assert (0 < done < total, total) == (True, 200)
    assert result["ce_recovered"] is not None
    assert estimate.memory_bytes > 0 and "cuda" not in estimate.breakdown
    artifact = shelf.named("ll-text-b1-topk-64-k4")
    config = json.loads((artifact.path / "cfg.json").read_text())
    assert config["metadata"]["mistudio"]["ended_at_step"] == done
    assert artifact.manifest["ended_at_step"] == done
    kept = load_file(max((shelf.folder / "train" / "checkpoints").glob("step_*")) / "0.safetensors")
    torch.testing.assert_close(load_sae(artifact.path).W_dec * result["scale_folded"], kept["W_dec"])


# Several SAEs, and straight from the model ------------------------------------------------------------
VARIANTS = [{"k": 4}, {"k": 2, "d_sae": 32, "name": "small"}, {"lr": 1e-3, "seed": 3}]


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = (load_file(folder / "sae_weights.safetensors") for folder in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.usefixtures("model")
def test_several_saes_from_one_reading_are_each_what_they_are_alone(shelf: Shelf, import_root: Path) -> None:
    extract(shelf, import_root)
    result, context, _ = train(shelf, k=8, variants=VARIANTS, ce_tokens=300, tokens=3200)
    names = [sae["name"] for sae in result["saes"]]
    assert names == ["k 4", "small", "lr 0.001, seed 3"]
    metrics = set(context.metrics[-1][1])
    assert metrics == {"tokens_per_s"} | {
        f"{key}[{name}]" for key in ("loss", "fvu", "l0", "dead_fraction", "lr") for name in names
    }
    made = [shelf.named(sae["artifact"]) for sae in result["saes"]]
    for variant, item, facts in zip(VARIANTS, made, result["saes"], strict=True):
        own = {key: value for key, value in variant.items() if key != "name"}
        alone, *_ = train(
            shelf, job_name=item.id, **({"k": 8} | own), order_seed=0, ce_tokens=300, tokens=3200
        )
        assert same_weights(item.path, shelf.named(alone["artifact"]).path)
        same = ("fvu", "l0", "cosine", "norm_ratio", "ce_recovered", "kl", "dead_fraction", "heldout_tokens")
        assert {key: facts[key] for key in same} == pytest.approx({key: alone[key] for key in same}, rel=1e-9)
        assert item.manifest["name"] == facts["name"]
    histogram = json.loads((context.out / "firing_histogram.json").read_text())
    assert [(one["name"], sum(one["counts"])) for one in histogram["series"]] == list(
        zip(names, (64, 32, 64), strict=True)
    )
    json.dumps([result, *[item.manifest for item in made]], allow_nan=False)


@pytest.mark.usefixtures("model")
def test_several_saes_that_ended_early_are_all_kept(shelf: Shelf, import_root: Path) -> None:
    extract(shelf, import_root)
    with pytest.raises(Stopped):
        train(shelf, variants=VARIANTS[:2], stop_after=8)
    result, *_ = train(shelf, variants=VARIANTS[:2], finalize=True)
    assert {(0 < sae["ended_at_step"] < 200, sae["steps_total"]) for sae in result["saes"]} == {(True, 200)}
    assert [shelf.named(sae["artifact"]).manifest["d_sae"] for sae in result["saes"]] == [64, 32]


@pytest.mark.usefixtures("model")
def test_one_of_several_that_diverges_is_told_and_the_others_are_made(
    shelf: Shelf, import_root: Path
) -> None:
    extract(shelf, import_root)
    variants = [{"k": 4}, {"name": "wild", "lr": 1.0}]
    with pytest.MonkeyPatch.context() as patch:
        break_where_lr_is(1.0, patch)
        result, *_ = train(shelf, variants=variants, checkpoint_every=10)
    good, bad = result["saes"]
    assert "error" not in good and shelf.named(good["artifact"])
    assert "step 26;" in bad["error"]
    assert (bad["ended_at_step"], bad["fvu"] > 0) == (20, True)
    assert load_sae(shelf.named(bad["artifact"]).path).d_sae == 64


def break_where_lr_is(lr: float, patch: pytest.MonkeyPatch) -> None:
    """NaN in the weights of one training after 25 steps."""
    from jobs.interp.sae.train import Training

    inner = Training.advance

    def advance(self: Training, batch: torch.Tensor) -> None:
        if self.settings.lr == lr and self.step == 25:
            with torch.no_grad():
                self.sae.W_dec.fill_(float("nan"))
        inner(self, batch)

    patch.setattr(Training, "advance", advance)


def train_live(shelf: Shelf, root: Path, **params: Any) -> Any:
    given = {"model": "ll", "corpus": str(root / "text.txt"), "site": {"block": 1}, "context_size": 16}
    given |= {"d_sae": 64, "k": 4, "tokens": 6400, "batch_size": 64, "lr": 5e-3, "max_tokens": 2000}
    return run(
        TRAIN, shelf, job=params.pop("job_name", "live"), **(given | {"checkpoint_every": 50} | params)
    )


@pytest.mark.usefixtures("model")
def test_straight_from_the_model_is_as_from_stored_activations(shelf: Shelf, import_root: Path) -> None:
    extract(shelf, import_root)
    stored, *_ = train(shelf, outlier_ratio=None, tokens=6400)
    live, *_ = train_live(shelf, import_root, outlier_ratio=None)
    same = (
        "fvu",
        "l0",
        "ce_clean",
        "ce_sae",
        "ce_recovered",
        "kl",
        "scale_folded",
        "train_tokens",
        "heldout_tokens",
    )
    assert {key: live[key] for key in same} == pytest.approx({key: stored[key] for key in same}, rel=2e-2)
    assert live["train_tokens"] == stored["train_tokens"]
    assert (live["ce_clean"], live["scale_folded"]) == pytest.approx(
        (stored["ce_clean"], stored["scale_folded"]), rel=1e-5
    )
    ours, theirs = (load_sae(shelf.named(result["artifact"]).path) for result in (live, stored))
    assert (ours.W_dec - theirs.W_dec).norm() < 0.02 * theirs.W_dec.norm()
    one, other = (
        json.loads((shelf.named(r["artifact"]).path / "cfg.json").read_text()) for r in (live, stored)
    )
    told = (
        "hook_name",
        "hf_hook_name",
        "context_size",
        "prepend_bos",
        "exclude_special_tokens",
        "dataset_path",
    )
    assert {key: one["metadata"][key] for key in told} == {key: other["metadata"][key] for key in told}
    assert one["metadata"]["mistudio"]["model"] == other["metadata"]["mistudio"]["model"]
    assert live["artifact"] == "ll-text-b1-topk-64-k4"
    assert (shelf.folder / "live" / "checkpoints" / ".measured.json").is_file()


@pytest.mark.usefixtures("model")
def test_straight_from_the_model_goes_on_to_the_same_weights(shelf: Shelf, import_root: Path) -> None:
    straight, *_ = train_live(shelf, import_root, job_name="straight")
    stopped = 40
    with pytest.raises(Stopped):
        train_live(shelf, import_root, stop_after=stopped)
    again, *_ = train_live(shelf, import_root)
    assert same_weights(*(shelf.named(result["artifact"]).path for result in (straight, again)))
    for result in (straight, again):
        assert result["fvu"] == straight["fvu"]


EVERY = [
    {"architecture": "topk", "k": 4},
    {"architecture": "batchtopk", "k": 4},
    {"architecture": "matryoshka_batchtopk", "k": 4},
    {"architecture": "standard", "l1": 0.5},
    {"architecture": "jumprelu", "l0": 0.5},
    {"architecture": "gated", "l1": 0.5},
    {"architecture": "transcoder", "l1": 0.5, "site": {"block": 1, "site": "mlp_in"}},
    {"architecture": "skip_transcoder", "l1": 0.5, "site": {"block": 1, "site": "mlp_out"}},
]


@pytest.mark.usefixtures("model")
def test_every_architecture_is_trained_measured_and_finalized(shelf: Shelf, import_root: Path) -> None:
    """All eight in one job, straight from the model; stopped on the way and made of what there was, too."""
    asked = {"variants": EVERY, "target_l0": 4, "ce_tokens": 300, "tokens": 6400}
    with pytest.raises(Stopped):
        train_live(shelf, import_root, stop_after=60, **asked)
    early, *_ = train_live(shelf, import_root, finalize=True, **asked)
    result, *_ = train_live(shelf, import_root, **asked)
    assert [sae["architecture"] for sae in result["saes"]] == [each["architecture"] for each in EVERY]
    for before, sae in zip(early["saes"], result["saes"], strict=True):
        assert 0 < before["ended_at_step"] < 100
        assert "ended_at_step" not in sae
        loaded = load_sae(shelf.named(sae["artifact"]).path)
        assert (loaded.d_sae, loaded.d_in, loaded.d_out) == (64, 16, 16)
        assert 0 < sae["fvu"] < 0.9, sae
        assert 0 < sae["l0"] < 64
        assert sae["kl"] >= 0 and sae["ce_clean"] > 0
    transcoder = result["saes"][6]
    config = json.loads((shelf.named(transcoder["artifact"]).path / "cfg.json").read_text())
    assert (transcoder["site"], transcoder["site_out"]) == (
        "blocks.1.ln2.hook_normalized",
        "blocks.1.hook_mlp_out",
    )
    assert config["metadata"]["hook_name_out"] == "blocks.1.hook_mlp_out"
    assert config["d_out"] == 16


@pytest.mark.usefixtures("model")
def test_it_stops_while_the_model_reads(shelf: Shelf, import_root: Path) -> None:
    """Before the first step there is nothing to keep, and nothing is broken."""
    with pytest.raises(Stopped):
        train_live(shelf, import_root, stop_after=4)
    assert train_live(shelf, import_root)[0]["fvu"] < 0.5


@pytest.mark.usefixtures("model")
def test_it_stops_while_text_is_read(shelf: Shelf, import_root: Path) -> None:
    with pytest.raises(Stopped, match="while the text was read"):
        train_live(shelf, import_root, stop_after=0)


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize("finalize", [False, True])
def test_another_text_is_not_gone_on_with(shelf: Shelf, import_root: Path, finalize: bool) -> None:
    """Documents are held out by their numbers: one more in front, and those held out were trained on."""
    text = import_root / "text.txt"
    words = text.read_text()
    with pytest.raises(Stopped):
        train_live(shelf, import_root, stop_after=60)
    text.write_text(f"xfbd\n\n{words}")
    with pytest.raises(Unusable, match=r"not the one that this training began with, so .*owner/name@commit"):
        train_live(shelf, import_root, finalize=finalize)
    text.write_text(words)
    assert train_live(shelf, import_root, finalize=finalize)[0]["fvu"] < 1


@pytest.mark.usefixtures("model")
def test_tokens_of_another_tokenizer_are_refused_by_a_live_training(shelf: Shelf, import_root: Path) -> None:
    foreign = import_root / "ids.jsonl"
    foreign.write_text('{"input_ids": [1, 5, 64]}\n' * 40)
    with pytest.raises(Unusable, match="holds the token 64, and the model knows 0 to 63"):
        train_live(shelf, import_root, corpus=str(foreign), field="input_ids")


@pytest.mark.usefixtures("model")
def test_a_stopped_extraction_goes_on(shelf: Shelf, import_root: Path) -> None:
    with pytest.raises(Stopped):
        extract(shelf, import_root, batch_size=2, stop_after=5)
    result, *_ = extract(shelf, import_root, batch_size=2)
    assert result["tokens_read"] == 2000


@pytest.mark.usefixtures("model")
def test_a_model_that_is_gone_is_told_before_the_training(shelf: Shelf, import_root: Path) -> None:
    extract(shelf, import_root)
    del shelf.items[shelf.named("ll").id]
    with pytest.raises(JobRejected, match="was deleted") as refusal:
        train(shelf)
    assert "ce_tokens" in refusal.value.hint
    assert not any((shelf.folder / "train" / "checkpoints").iterdir())
    assert train(shelf, ce_tokens=0)[0]["ce_recovered"] is None


@pytest.mark.parametrize("kind", [DOWNLOAD, EXTRACT, TRAIN])
def test_the_example_is_valid(kind: JobKind) -> None:
    serializer = kind.Params(data=kind.example)
    assert serializer.is_valid(), serializer.errors


def test_the_context_of_these_tests_has_what_the_engine_gives() -> None:
    from jobs.context import WorkContext

    given = {name for name in dir(WorkContext) if not name.startswith("_")}
    assert {name for name in dir(FakeContext) if not name.startswith("_")} <= given
