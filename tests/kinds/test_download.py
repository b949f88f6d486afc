"""A model from a hub of our own becomes an artifact: the kind as it is, a small transformers model, real HTTP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from rest_framework.serializers import ValidationError

from jobs import registry
from jobs.exceptions import JobRejected
from jobs.interp import glance, models
from jobs.interp.errors import Unusable
from jobs.kinds.model_download import folder_here, hub_disks
from tests.hub_server import Hub, Repository
from tests.interp.conftest import language_model
from tests.kinds.fake import FakeContext, Shelf, run

DOWNLOAD = registry.get("model_download")
GIB = 2**30
Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def published(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """`owner/Tiny`, three layers in two shards, and a form of the weights that nobody wants."""
    monkeypatch.setattr(glance, "glance", glance.Memory().glance)
    folder = tmp_path / "published"
    tiny = language_model("LL")
    tiny.model.save_pretrained(folder, max_shard_size="20KB")
    tiny.tokenizer.save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    repository = Repository("owner/Tiny", {path.name: path for path in folder.iterdir()})
    served.repositories.append(repository)
    return repository


def test_a_repository_becomes_the_model_that_was_published(
    served: Hub, shelf: Shelf, published: Repository
) -> None:
    facts, context, estimate = run(DOWNLOAD, shelf, source="owner/Tiny")
    made = shelf.named("tiny")
    assert (facts["repository"], facts["revision"]) == ("owner/Tiny", published.commit)
    assert not (made.path / "pytorch_model.bin").exists()
    weights = [path.stat().st_size for path in made.path.glob("*.safetensors")]
    assert len(weights) > 1 and estimate.disk_bytes >= sum(weights)
    tokens = torch.tensor([[1, 5, 9, 12, 7]])
    loaded, original = models.load(made.path).model, language_model("LL").model
    assert torch.equal(loaded(tokens).logits, original(tokens).logits)
    told = [
        (done, total) for done, total, unit, stage in context.reports if (unit, stage) == ("bytes", "fetch")
    ]
    assert told == sorted(told) and told[-1] == (estimate.disk_bytes, estimate.disk_bytes)


def test_files_of_the_cache_get_a_second_name_and_no_copy(
    shelf: Shelf, published: Repository, hub_cache: Path
) -> None:
    run(DOWNLOAD, shelf, source="owner/Tiny")
    blobs = {path.stat().st_ino for path in hub_cache.glob("*/blobs/*")}
    weights = list(shelf.named("tiny").path.glob("*.safetensors"))
    assert weights and all(path.stat().st_ino in blobs and not path.is_symlink() for path in weights)


def test_a_later_attempt_stays_with_the_commit_of_the_first(
    served: Hub, shelf: Shelf, published: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: Disk(100 * GIB, 100 * GIB, 0))
        with pytest.raises(JobRejected):
            run(DOWNLOAD, shelf, source="owner/Tiny")
    first, published.commit = published.commit, "deadbeef" * 5  # the branch has moved on
    published.refs = ("main", first)
    assert run(DOWNLOAD, shelf, source="owner/Tiny")[0]["revision"] == first
    assert run(DOWNLOAD, shelf, job="another", source="owner/Tiny")[0]["revision"] == "deadbeef" * 5


def test_the_disk_is_held_against_what_the_hub_lists(
    served: Hub, shelf: Shelf, published: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100 * GIB, 95 * GIB, 5 * GIB))
    with pytest.raises(
        JobRejected, match=r"Tiny at c0ffee00c0ff needs 0\.0 GiB; 5\.0 GiB.*free, 5\.0 GiB stay"
    ) as no:
        run(DOWNLOAD, shelf, source="owner/Tiny")
    assert no.value.reason == "disk_full"
    assert not [sent for sent in served.sent if sent.name.endswith(".safetensors")]


def test_what_has_arrived_already_needs_no_room(
    served: Hub, shelf: Shelf, published: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(DOWNLOAD, shelf, source="owner/Tiny")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100 * GIB, 95 * GIB, 5 * GIB))
    assert run(DOWNLOAD, shelf, job="again", source="owner/Tiny")[2].disk_bytes == 0


def test_weights_that_other_programs_have_fetched_are_none_of_the_quantizations(
    shelf: Shelf, published: Repository, hub_cache: Path
) -> None:
    """They lie in the same snapshot, and the estimate counted them."""
    asked = {"source": "owner/Tiny", "revision": "main"}
    run(DOWNLOAD, shelf, source="owner/Tiny")
    snapshot = hub_cache / "models--owner--Tiny" / "snapshots" / published.commit
    weights = next(snapshot.glob("*.safetensors"))
    (snapshot / "consolidated.safetensors").write_bytes(weights.read_bytes())
    folder = folder_here(asked)
    assert folder and len(list(folder.glob("*.safetensors"))) == len(list(snapshot.glob("*.safetensors"))) - 1
    shutil.rmtree(folder)
    assert folder_here(asked) is None  # theirs alone


def test_a_link_out_of_the_import_roots_is_not_followed(
    shelf: Shelf, import_root: Path, tmp_path: Path
) -> None:
    """Before, `tokenizer_x` became a file of an artifact that everybody reads."""
    secret, link = tmp_path / "secret-key", import_root / "LL" / "tokenizer_x"
    secret.write_text("s3cret")
    link.symlink_to(secret)
    asked = DOWNLOAD.Params(data={"source": str(import_root / "LL")})
    assert not asked.is_valid()
    assert "tokenizer_x in LL is a link that leads to nothing" in str(asked.errors["source"][0])
    context = FakeContext(shelf, "job", {})
    with pytest.raises(ValidationError, match="tokenizer_x"):  # one that was put there after the submit
        DOWNLOAD.run(context, {"source": str(import_root / "LL"), "dtype": "auto"})
    link.unlink()
    (import_root / "words").write_text("ours")
    link.symlink_to(import_root / "words")
    run(DOWNLOAD, shelf, source=str(import_root / "LL"))
    assert (shelf.named("ll").path / "tokenizer_x").read_text() == "ours"


def test_a_cache_on_another_disk_needs_room_twice(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("one disk only")
    assert hub_disks(10, 4, tmp_path / "cache" / "x", tmp_path) == {tmp_path: 4}
    assert hub_disks(10, 4, other / "cache" / "x", tmp_path) == {other: 4, tmp_path: 10}


def test_what_the_hub_knows_to_be_no_model_is_refused_before_it_is_queued(
    served: Hub, published: Repository
) -> None:
    for name in [name for name in published.files if name.endswith(".safetensors")]:
        del published.files[name]
    with pytest.raises(ValidationError) as no:
        DOWNLOAD.estimate({"source": "owner/Tiny", "revision": "main", "dtype": "auto"}, {})
    assert "no safetensors weights" in str(no.value.detail["source"])


def test_a_silent_hub_costs_the_submit_an_unknown_size(served: Hub, published: Repository) -> None:
    served.answers = [(503, {})]
    params = {"source": "owner/Tiny", "revision": "main", "dtype": "auto"}
    assert DOWNLOAD.estimate(params, {}).disk_bytes is None


def test_a_gated_repository_asks_for_the_owners_token(
    served: Hub, shelf: Shelf, published: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    published.gated = {"hf_ofAlice"}
    with pytest.raises(Unusable, match=r"Tiny is gated: open .*/owner/Tiny with your Hugging Face account"):
        run(DOWNLOAD, shelf, source="owner/Tiny")
    monkeypatch.setattr("tests.kinds.fake.FakeContext.hub_token", lambda _: "hf_ofAlice")
    context = run(DOWNLOAD, shelf, job="again", source="owner/Tiny")[1]
    kept = [path.read_text() for path in context.checkpoints.iterdir()]
    assert "hf_ofAlice" not in json.dumps([kept, context.reports, shelf.named("tiny").manifest], default=str)


@pytest.mark.parametrize("revision", ["../../etc", "a//../b", "-x", "a b", "v1\n", "é", "refs/../x"])
def test_a_revision_names_a_branch_a_tag_or_a_commit(revision: str) -> None:
    asked = DOWNLOAD.Params(data={"source": "a/b", "revision": revision})
    # Django's fields strip a line's end; what is left then is a good name.
    assert asked.is_valid() == (revision == "v1\n")


def test_the_look_before_queueing_loads_no_torch(served: Hub, published: Repository) -> None:
    """It happens in the web."""

    code = (
        "import sys; from jobs.interp.glance import glance; from jobs.interp.hub import Fetch\n"
        "print(glance('owner/Tiny', 'main').bytes, 'torch' in sys.modules)"
    )
    env = os.environ | {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": "0"}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    size, torch_is_there = told.stdout.split()
    assert int(size) > 10_000 and torch_is_there == "False"
