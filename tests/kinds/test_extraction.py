"""What an extraction takes for text and for sites, refused at submit where that can be known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from rest_framework.exceptions import ValidationError
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file

from jobs import registry
from jobs.exceptions import JobRejected
from jobs.fields import ArtifactField
from jobs.interp import extras
from jobs.interp.errors import Unusable
from jobs.interp.hooks import capture
from jobs.interp.models import LanguageModel
from jobs.interp.site import HOOKS, Site
from jobs.kinds.activation_extraction import name_of
from tests.interp.conftest import language_model, tokenizer
from tests.interp.test_hub_data import Hub
from tests.interp.test_tokens import chat_tokenizer
from tests.kinds.fake import FakeContext, Shelf, run
from tests.kinds.test_download import GIB, Disk

DOWNLOAD, EXTRACT = registry.get("model_download"), registry.get("activation_extraction")
USER = [{"role": "user", "content": "abc"}]


def downloaded(shelf: Shelf, root: Path, name: str, tk: Any = None) -> LanguageModel:
    """A tiny model as an artifact of its name in small letters."""
    lm = language_model(name)
    lm.model.save_pretrained(root / name)
    (tk or lm.tokenizer).save_pretrained(root / name)
    run(DOWNLOAD, shelf, job=f"download-{name}", source=str(root / name))
    return lm


def extract(shelf: Shelf, corpus: Path | str = "english", model: str = "ll", **params: Any) -> Any:
    given = {
        "model": model,
        "corpus": str(corpus),
        "sites": [{"block": 1}],
        "context_size": 16,
        "dtype": "float32",
    }
    return run(EXTRACT, shelf, job="extract", **(given | {"max_tokens": 2000} | params))[0]


def refusal(shelf: Shelf, **params: Any) -> dict[str, str]:
    with pytest.raises(ValidationError) as found:
        extract(shelf, **params)
    return {field: str(value[0]) for field, value in found.value.detail.items()}


def vectors(shelf: Shelf, name: str, hook: str = "blocks.1.hook_resid_post") -> dict[str, torch.Tensor]:
    return load_file(shelf.named(name).path / hook / "shard_00000.safetensors")


@pytest.fixture
def ll(shelf: Shelf, import_root: Path) -> LanguageModel:
    run(DOWNLOAD, shelf, job="download", source=str(import_root / "LL"))
    return language_model("LL")


# Sites --------------------------------------------------------------------------------------------------
def test_every_site_is_offered(shelf: Shelf, import_root: Path, ll: LanguageModel) -> None:
    sites = [{"block": block, "site": site} for block in (0, 1) for site in HOOKS]
    result = extract(shelf, import_root / "text.txt", sites=sites, max_tokens=500)
    assert {site["hook_name"] for site in result["sites"]} == {Site(**site).hook_name for site in sites}
    assert [site["module"] for site in result["sites"]][1] == "model.layers.0.self_attn"
    assert {site["tokens"] for site in result["sites"]} == {result["tokens"]}


def test_a_place_that_the_model_does_not_have_is_refused_at_submit(shelf: Shelf, import_root: Path) -> None:
    downloaded(shelf, import_root, "NX")
    assert shelf.named("nx").manifest["missing_sites"]["resid_mid"]["blocks"] == [0, 1, 2]
    words = refusal(shelf, model="nx", sites=[{"block": 1, "site": "resid_mid"}])["sites"]
    assert "Block 1 has no resid_mid" in words
    assert "in parallel" in words
    assert "Use resid_pre, attn_out, mlp_out or resid_post" in words


def test_where_the_manifest_does_not_say_it_is_refused_at_the_start(shelf: Shelf, import_root: Path) -> None:
    """A model artifact older than the fact: before the first report, so the job ends refused."""
    downloaded(shelf, import_root, "NX")
    del shelf.named("nx").manifest["missing_sites"]
    with pytest.raises(Unusable, match="in parallel"):
        extract(shelf, import_root / "text.txt", model="nx", sites=[{"block": 1, "site": "resid_mid"}])


def test_models_with_every_place_say_so(shelf: Shelf, import_root: Path, ll: LanguageModel) -> None:
    assert shelf.named("ll").manifest["missing_sites"] == {}


# Text ---------------------------------------------------------------------------------------------------
def test_conversations_are_read_through_the_template_f07(shelf: Shelf, import_root: Path) -> None:
    """TKc, JSON Lines with one user message "abc": exactly one BOS, ids of templating in one step."""
    lm = downloaded(shelf, import_root, "LL", chat_tokenizer())
    corpus = import_root / "chat.jsonl"
    corpus.write_text(json.dumps({"messages": USER}) + "\n")
    result = extract(shelf, corpus, field="messages", exclude_special=False)
    found = vectors(shelf, "ll-chat-b1")
    assert found["ids"].tolist() == [1, 4, 5, 6, 2]
    alone = capture(lm.model, [Site(1)], input_ids=torch.tensor([[1, 4, 5, 6, 2]]))[Site(1)][0]
    torch.testing.assert_close(found["acts"], alone, atol=1e-5, rtol=1e-5)
    assert (result["documents"], result["tokens_read"]) == (1, 5)


def test_conversations_without_a_template_are_refused_before_the_work(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    (import_root / "chat.jsonl").write_text(json.dumps({"messages": USER}) + "\n")
    with pytest.raises(Unusable, match="no chat template; take an instruction-tuned model"):
        extract(shelf, import_root / "chat.jsonl", field="messages")


def test_rows_of_tokens_longer_than_the_context_are_split_and_told_f10(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    """Rows of 12 tokens, context 8: 24 vectors of 24 tokens, two documents, both split."""
    rows = np.arange(4, 28, dtype=np.int32).reshape(2, 12)
    save_numpy({"input_ids": rows}, import_root / "rows.safetensors")
    result = extract(shelf, import_root / "rows.safetensors", context_size=8, prepend_bos=False)
    assert (result["tokens"], result["documents_split"], result["documents"]) == (24, 2, 2)
    assert vectors(shelf, "ll-rows-b1")["ids"].tolist() == list(range(4, 28))


def test_tokens_of_another_tokenizer_are_refused_at_submit(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    rows, own = {"input_ids": np.full((1, 4), 5, "i4")}, shelf.named("ll").manifest["tokenizer_sha256"]
    save_numpy(rows, import_root / "theirs.safetensors", {"tokenizer_sha256": "0" * 64})
    words = refusal(shelf, corpus=import_root / "theirs.safetensors")["corpus"]
    assert "000000000000…; ll has" in words and own[:12] in words
    save_numpy(rows, import_root / "ours.safetensors", {"tokenizer_sha256": own})
    assert extract(shelf, import_root / "ours.safetensors")["tokens"] == 4


def test_tokens_beyond_the_vocabulary_end_the_job(shelf: Shelf, import_root: Path, ll: LanguageModel) -> None:
    save_numpy({"input_ids": np.array([[5, 64]], "i4")}, import_root / "rows.safetensors")
    with pytest.raises(Unusable, match="holds the token 64, and the model knows 0 to 63"):
        extract(shelf, import_root / "rows.safetensors")


def test_a_field_that_is_not_there_is_refused_at_submit(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    (import_root / "a.jsonl").write_text('{"body": "x"}\n')
    assert "no field 'text'; it has body" in refusal(shelf, corpus=import_root / "a.jsonl")["field"]
    (import_root / "b.jsonl").write_text("not json\n")
    assert "Line 1 of b.jsonl is not JSON" in refusal(shelf, corpus=import_root / "b.jsonl")["corpus"]


def test_links_in_a_folder_that_lead_elsewhere_are_refused(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    (import_root / "set").mkdir()
    secret = import_root.parent / "secret.jsonl"
    secret.write_text('{"text": "secret"}\n')
    (import_root / "set" / "a.jsonl").symlink_to(secret)
    assert "not in a folder that jobs may read" in refusal(shelf, corpus=import_root / "set")["corpus"]


def test_files_of_a_cache_are_read_by_the_names_of_their_links(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    """The Hugging Face cache holds links to nameless files."""
    (import_root / "blobs").mkdir()
    (import_root / "blobs" / "0a1b").write_text('{"text": "abc"}\n{"text": "de"}\n')
    (import_root / "snapshot").mkdir()
    (import_root / "snapshot" / "train.jsonl").symlink_to("../blobs/0a1b")
    result = extract(shelf, import_root / "snapshot")
    assert (result["tokens"], result["corpus"]["name"]) == (5, "snapshot")
    assert extract(shelf, import_root / "snapshot" / "train.jsonl")["tokens"] == 5


def test_a_table_is_read_by_its_column(shelf: Shelf, import_root: Path, ll: LanguageModel) -> None:
    table = pyarrow.table({"body": ["abc", "de"]})
    pyarrow.parquet.write_table(table, import_root / "a.parquet")
    assert extract(shelf, import_root / "a.parquet", field="body")["tokens"] == 5
    assert "no column 'text'; it has body" in refusal(shelf, corpus=import_root / "a.parquet")["field"]


def test_without_the_package_a_table_is_a_missing_extra(
    shelf: Shelf, import_root: Path, ll: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _name: None)
    (import_root / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(JobRejected, match="Parquet and Arrow files need pyarrow") as found:
        extract(shelf, import_root / "a.parquet")
    assert (found.value.reason, found.value.hint) == ("missing_extra", "python3 scripts/setup.py --tables")


def test_an_uploaded_corpus_of_json_lines_is_read(shelf: Shelf, ll: LanguageModel) -> None:
    folder = FakeContext(shelf, "upload", {}).artifact("corpus", "mine", {"files": {"corpus.jsonl": {}}})
    (folder / "corpus.jsonl").write_text('{"text": "abc"}\n')
    assert extract(shelf, "mine")["corpus"]["name"] == "mine"
    with pytest.raises(ValidationError, match="no field 'body'"):
        extract(shelf, "mine", field="body")


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a/b/c", "hf:../b", "hf:a/b@", "hf:a/b c", "hf:https://x.y/z"]
)
def test_a_data_set_of_the_hub_is_spelled_with_its_owner(name: str) -> None:
    serializer = EXTRACT.Params(data={"model": "m", "sites": [{"block": 0}], "corpus": name})
    assert not serializer.is_valid()
    assert "hf:owner/name" in str(serializer.errors["corpus"][0])


def test_a_data_set_of_the_hub_needs_pyarrow_at_the_submit(
    ll: LanguageModel, shelf: Shelf, monkeypatch: Any
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _name: None)
    with pytest.raises(JobRejected, match="need pyarrow"):
        extract(shelf, "hf:owner/name@main")


def test_a_data_set_of_the_hub_is_read_file_by_file(
    ll: LanguageModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played = Hub(tmp_path, {"v1": ["train-0.parquet", "train-1.parquet", "train-2.parquet"]}, None)
    played.take_over(monkeypatch)
    monkeypatch.setattr("tests.kinds.fake.FakeContext.hub_token", lambda _: "hf_ofAlice")
    result = extract(shelf, "hf:owner/name@v1", max_tokens=256)
    assert played.tokens == {"hf_ofAlice"}
    assert (result["corpus"]["name"], result["corpus"]["documents"]) == ("owner/name@commit-of-v1", 6)
    assert shelf.named("ll-name-commit-of-v1-b1")
    assert [name for name, _ in played.fetched][-3:] == [
        "train-0.parquet",
        "train-1.parquet",
        "train-2.parquet",
    ]


def test_a_file_of_the_hub_that_the_disk_has_no_room_for_is_not_fetched(
    ll: LanguageModel, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played = Hub(tmp_path, {"v1": ["train-0.parquet"]}, None)
    played.take_over(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100 * GIB, 95 * GIB, 5 * GIB))
    with pytest.raises(JobRejected, match=r"train-0\.parquet of the data set needs .* are free") as no:
        extract(shelf, "hf:owner/name@v1", max_tokens=256)
    assert (no.value.reason, played.fetched) == ("disk_full", [])


@pytest.mark.parametrize(
    ("corpus", "name"),
    [
        ("owner/name@0123456789ab", "ll-name-0123456789ab-b1"),
        ("Märchen (alt) [2]..neu.txt", "ll-M-rchen-alt-2-.neu-b1"),
        ("x" * 200, "ll-" + "x" * 117),
        ("y" * 116 + " b", "ll-" + "y" * 116),  # nothing but a letter or digit at the end
    ],
)
def test_jobs_can_refer_to_the_name_of_every_extraction(corpus: str, name: str) -> None:
    made = name_of("ll", corpus, [Site(1)])
    assert ArtifactField("activations").run_validation(made) == made == name


# Rows and what is told ----------------------------------------------------------------------------------
def test_packing_is_told_and_fills_rows(shelf: Shelf, import_root: Path, ll: LanguageModel) -> None:
    parted, packed = (extract(shelf, import_root / "text.txt", packing=packing) for packing in (False, True))
    assert (parted["packing"], packed["packing"]) == (False, True)
    assert 125 <= packed["rows"] <= 127  # a row may end one word early rather than with a BOS
    assert parted["rows"] > packed["rows"]


def test_exclusions_of_the_default_run_and_none_f23(
    shelf: Shelf, import_root: Path, ll: LanguageModel
) -> None:
    """LL without exclusions: every token read has its vector; with them exactly the special ones are missing."""
    everything = extract(shelf, import_root / "text.txt", exclude_special=False, max_tokens=300)
    some = extract(shelf, import_root / "text.txt", max_tokens=300)
    assert everything["tokens"] == everything["tokens_read"] == some["tokens_read"] == 300
    assert some["tokens_dropped"] == some["rows"] == 300 - some["tokens"]


def test_the_digest_is_that_of_what_was_read(shelf: Shelf, import_root: Path, ll: LanguageModel) -> None:
    """Not of the whole file, which may be larger than anybody reads."""
    from jobs.interp import corpora

    whole = extract(shelf, import_root / "text.txt", max_tokens=100_000)["corpus"]
    assert whole["sha256"] == corpora.open_corpus(str(import_root / "text.txt")).sha256
    assert whole["documents"] == 60
    part = extract(shelf, import_root / "text.txt", max_tokens=256)["corpus"]
    assert part["documents"] < 60 and part["sha256"] != whole["sha256"]


def test_where_a_single_row_does_not_fit_shorter_rows_are_suggested() -> None:
    params = {"context_size": 4096, "batch_size": 16}
    assert EXTRACT.suggest("out_of_memory", params) == {"context_size": 2048}
    assert EXTRACT.suggest("host_out_of_memory", params) == {"batch_size": 8}
    assert EXTRACT.suggest("out_of_memory", {"context_size": 3}) == {}


def test_a_tokenizer_with_more_words_than_the_model_is_told(shelf: Shelf, import_root: Path) -> None:
    tk = tokenizer()
    tk.add_tokens([f"w{number}" for number in range(40)])
    downloaded(shelf, import_root, "LL", tk)
    (import_root / "a.txt").write_text("abc w39")
    with pytest.raises((Unusable, JobRejected), match="the model knows 0 to 63"):
        extract(shelf, import_root / "a.txt")
