"""A model is fetched without a card, quantized on one, and used by the kinds after it; and what is refused before."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from safetensors.torch import load_file

from gpus.models import Gpu
from jobs import estimates, registry
from jobs.exceptions import HandedOver, JobRejected
from jobs.interp import extras, models, quantize
from jobs.interp.errors import Unusable
from jobs.models import Job
from tests.conftest import client_of
from tests.kinds.fake import Shelf, run
from tests.kinds.test_pipeline import extract, train
from tests.monitor.test_forms import form_of, signed_in

DOWNLOAD = registry.get("model_download")
GIB = 2**30


@pytest.fixture
def library() -> None:
    pytest.importorskip("bitsandbytes", reason="the extra `quant` is not installed")


def quantized(shelf: Shelf, root: Path, scheme: str) -> tuple[Any, Any, Any]:
    """Both stages, as the engine runs them."""
    asked = {"source": str(root / "LL"), "quantization": scheme}
    with pytest.raises(HandedOver) as order:
        run(DOWNLOAD, shelf, job="download", **asked)
    assert not shelf.items
    return run(DOWNLOAD, shelf, job="download", stage=order.value.stage, **asked)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_a_quantized_model_serves_the_kinds_after_it(shelf: Shelf, import_root: Path, scheme: str) -> None:
    result, context, estimate = quantized(shelf, import_root, scheme)
    made = shelf.named(f"ll-{scheme}")
    assert result == made.manifest | {"artifact": f"ll-{scheme}"}
    assert (result["quantization"]["scheme"], result["modules_quantized"]) == (scheme, 21)
    assert result["parameters"] == models.describe(import_root / "LL")["parameters"]
    assert result["repository"] == "LL" and str(import_root) not in json.dumps(result)
    assert [stage for *_, stage in context.reports] == ["quantize"] * 3
    assert estimate.memory_bytes and estimate.disk_bytes
    assert not any(context.checkpoints.iterdir())
    plain = models.load(import_root / "LL").model.get_input_embeddings().weight
    kept = load_file(made.path / "model.safetensors")["model.embed_tokens.weight"]
    assert kept.equal(plain)

    extracted, *_ = extract(shelf, import_root, model=f"ll-{scheme}")
    assert extracted["model"]["quantization"]["scheme"] == scheme
    trained, *_ = train(shelf, activations=f"ll-{scheme}-text-b1", tokens=1280)
    assert trained["ce_clean"] > 0


@pytest.mark.usefixtures("library")
def test_an_attempt_after_a_crash_goes_on_with_what_was_kept(shelf: Shelf, import_root: Path) -> None:
    """What was fetched is a copy: the folder may change meanwhile."""
    asked = {"source": str(import_root / "LL"), "quantization": "nf4"}
    with pytest.raises(HandedOver):
        run(DOWNLOAD, shelf, job="download", **asked)
    before = models.describe(import_root / "LL")["parameters"]
    (import_root / "LL" / "model.safetensors").write_bytes((0).to_bytes(8, "little"))
    kept = models.describe(shelf.folder / "download" / "checkpoints" / "fetched")
    assert kept["parameters"] == before


@pytest.mark.usefixtures("library")
def test_a_retry_begins_with_what_was_fetched_and_not_with_what_was_packed(
    shelf: Shelf, import_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry is given the newest checkpoint alone; it was the packed weights, which say nothing of their source."""

    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("tests.kinds.fake.FakeContext.artifact", full)
        with pytest.raises(OSError, match="No space"):
            quantized(shelf, import_root, "nf4")
    kept = [path.name for path in (shelf.folder / "download" / "checkpoints").iterdir()]
    assert [name for name in kept if not name.startswith(".")] == ["fetched"]
    asked = {"source": str(import_root / "LL"), "quantization": "nf4"}
    first, *_ = run(DOWNLOAD, shelf, job="download", stage="quantize", **asked)
    # It ended before its job was told: what was fetched is gone, and fetched again.
    second, context, _ = run(DOWNLOAD, shelf, job="download", stage="quantize", **asked)
    assert second == first and not any(context.checkpoints.iterdir())


@pytest.mark.usefixtures("library")
def test_packed_weights_that_others_made_are_taken_as_they_are(shelf: Shelf, import_root: Path) -> None:
    quantize.quantize(import_root / "LL", import_root / "four", "nf4", device="cpu")
    facts, *_ = run(DOWNLOAD, shelf, source=str(import_root / "four"))
    assert facts["quantization"]["scheme"] == "nf4"
    assert facts["parameters"] == models.describe(import_root / "LL")["parameters"]
    with pytest.raises(Unusable, match=r"quantized already \(nf4\); it cannot become float16"):
        run(DOWNLOAD, shelf, source=str(import_root / "four"), dtype="float16")


def test_a_plan_without_quantization_takes_no_card() -> None:
    given = {"source": "demo", "quantization": "none"}
    assert not DOWNLOAD.needs_card(given) and DOWNLOAD.card_stages(given) == ()
    assert DOWNLOAD.card_stages({"source": "demo"}) == ()  # rows of earlier versions
    nf4 = given | {"quantization": "nf4"}
    assert not DOWNLOAD.needs_card(nf4) and DOWNLOAD.card_stages(nf4) == ("quantize",)


# At the submit ------------------------------------------------------------------------------------------


@pytest.fixture
def post(alice: User, three_cards: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    client = client_of(alice)
    return lambda kind="model_download", **body: client.post(f"/api/v1/jobs/{kind}/", body, format="json")


@pytest.mark.django_db
def test_a_library_that_is_not_here_is_told_before_queueing_g56(
    post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    answer = post(source="demo", quantization="nf4")
    assert (answer.status_code, answer.data["code"]) == (400, "missing_extra")
    assert "`python3 scripts/setup.py --quant`" in answer.data["detail"]
    assert answer.data["hint"] == "python3 scripts/setup.py --quant"
    assert not Job.objects.exists()
    assert post(source="demo").status_code == 201


def test_a_quantized_model_is_refused_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kinds.test_params import ACTIVATIONS, MODEL, TRAINING, given

    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    packed = MODEL | {"quantization": {"scheme": "nf4", "weights": 8000, "bytes": 4500, "largest": 512}}
    for kind, inputs, params in (
        ("activation_extraction", given("model", packed), {"model": "m", "sites": [{"block": 0}]}),
        ("sae_training", given("activations", ACTIVATIONS | {"model": packed}), TRAINING),
    ):
        found = registry.get(kind)
        serializer = found.Params(data=params)
        serializer.is_valid(raise_exception=True)
        with pytest.raises(JobRejected, match="bitsandbytes") as refusal:
            found.check(serializer.validated_data, inputs)
        assert refusal.value.reason == "missing_extra"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized already (gptq)"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantized already (int8)"),
    ],
)
def test_what_is_quantized_already_is_refused_before_queueing(
    post: Any, import_root: Path, config: dict[str, Any], words: str
) -> None:
    path = import_root / "LL" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    answer = post(source=str(import_root / "LL"), quantization="nf4")
    assert answer.status_code == 400 and words in answer.data["errors"]["quantization"][0]


@pytest.mark.django_db
def test_two_types_at_once_are_refused(post: Any) -> None:
    answer = post(source="demo", quantization="int8", dtype="float16")
    assert "float16 or as int8, not both" in answer.data["errors"]["dtype"][0]


@pytest.fixture
def huge(import_root: Path) -> str:
    """The headers of 100 billion weights in bfloat16, and no weights."""
    folder = import_root / "huge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    shape = [12_500, 100_000]
    told = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 * shape[0] * shape[1]]}
    header = json.dumps({f"model.layers.{n}.mlp.up_proj.weight": told for n in range(80)}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)


@pytest.mark.django_db
def test_a_plan_that_fits_no_card_is_refused_with_its_numbers_g56(
    post: Any, huge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.estimates.runs_on_cpu", lambda: False)
    answer = post(source=huge, quantization="nf4")
    assert (answer.status_code, answer.data["code"]) == (400, "model_too_large")
    assert 53 * GIB < answer.data["need_bytes"] < 70 * GIB
    assert "The job needs about" in answer.data["detail"]
    assert post(source=huge).status_code == 201  # fetching it takes no card


@pytest.mark.django_db
def test_nothing_to_quantize_is_refused_before_queueing(post: Any, import_root: Path) -> None:
    told = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]}}
    header = json.dumps(told).encode()
    (import_root / "LL" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    answer = post(source=str(import_root / "LL"), quantization="int8")
    assert "no linear layer that bitsandbytes could quantize" in answer.data["errors"]["quantization"][0]


@pytest.mark.django_db
def test_the_form_asks_for_a_card_once_weights_are_to_be_quantized(
    post: Any, alice: User, import_root: Path
) -> None:
    asked = {"source": str(import_root / "LL")}
    client = signed_in(alice)
    plain = client.post("/new/model_download/fit/", {"name": "", **asked}).content.decode()
    nf4 = client.post(
        "/new/model_download/fit/", {"name": "", "quantization": "nf4", **asked}
    ).content.decode()
    assert "it needs no card" in plain and "it needs no card" not in nf4
    assert 'name="gpu"' in nf4
    found = form_of(alice, "model_download", quantization="nf4", **asked).place()
    assert found["estimate"]["breakdown"].keys() >= {"process"}
    assert found["cards"][0]["need_bytes"] == found["estimate"]["memory_bytes"]


def test_a_model_whose_layers_cannot_be_packed_is_refused_after_the_fetch(
    shelf: Shelf, import_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the names of its weights promised layers: the architecture decides."""
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    monkeypatch.setattr(quantize.anatomy, "eligible", lambda model: {})
    with pytest.raises(Unusable, match="no linear layer"):
        run(DOWNLOAD, shelf, source=str(import_root / "LL"), quantization="nf4")


def test_the_estimate_of_the_stage_has_its_process(import_root: Path) -> None:
    serializer = DOWNLOAD.Params(data={"source": str(import_root / "LL"), "quantization": "int8"})
    serializer.is_valid(raise_exception=True)
    found = estimates.estimate(DOWNLOAD, serializer.validated_data, {}, "quantize")
    assert found.memory_bytes == sum(found.breakdown.values())
    assert found.breakdown["process"] == estimates.WORK_BASE_BYTES
