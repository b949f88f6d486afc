"""What is fetched from a hub and what is refused, against a hub of our own that speaks HTTP."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, scan_cache_dir, snapshot_download

from jobs.interp import hub, transfer
from jobs.interp.errors import Stopped, Unusable
from jobs.interp.glance import Memory
from jobs.interp.repository import Listing
from tests.hub_server import Hub, Repository, point_at, sha256

MIB = 2**20
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = {"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}}
TOKEN = "hf_secretOfAlice"


@pytest.fixture
def publish(served: Hub, tmp_path: Path) -> Callable[..., Repository]:
    """A repository `a/b` with files of random bytes, sizes by name; texts as they are."""

    def make(files: dict[str, Any], **how: Any) -> Repository:
        paths = {}
        for name, content in ({"config.json": "{}"} | files).items():
            path = tmp_path / "published" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else os.urandom(content))
            paths[name] = path
        repository = Repository("a/b", paths, **how)
        served.repositories.append(repository)
        return repository

    return make


def same(snapshot: hub.Snapshot, repository: Repository) -> bool:
    return all(
        path.read_bytes() == repository.files[path.name].read_bytes() for path in snapshot.folder.iterdir()
    )


# What is taken ------------------------------------------------------------------------------------------


def test_only_what_a_model_consists_of_is_fetched_from_the_pinned_commit(publish: Any, served: Hub) -> None:
    others = {"pytorch_model.bin": 900, "modeling_evil.py": 7, "onnx/model.safetensors": 500, "README.md": 3}
    consolidated = {"consolidated.safetensors": 800}
    ours = {SHARDS[0]: 3000, SHARDS[1]: 2000, "model.safetensors.index.json": json.dumps(INDEX)}
    repository = publish({**ours, "tokenizer.json": 20, **others, **consolidated})
    snapshot = hub.Fetch("a/b").fetch()
    assert {path.name for path in snapshot.folder.iterdir()} == {*ours, "config.json", "tokenizer.json"}
    assert (snapshot.commit, snapshot.folder.name) == (repository.commit, repository.commit)
    assert same(snapshot, repository)
    resolved = [path for method, path, _ in served.asked if method == "GET" and "/resolve/" in path]
    assert len(resolved) == 5 and all(f"/resolve/{repository.commit}/" in path for path in resolved)


def test_the_cache_is_the_librarys_own(publish: Any, served: Hub, hub_cache: Path) -> None:
    """Its tools see one revision of whole files, and its own download finds nothing left to fetch."""
    publish({"model.safetensors": 5000})
    snapshot = hub.Fetch("a/b").fetch()
    found = scan_cache_dir(hub_cache)
    assert [(repo.repo_id, repo.nb_files, repo.size_on_disk) for repo in found.repos] == [("a/b", 2, 5002)]
    assert not found.warnings and not found.incomplete_files
    before = len(served.sent)
    for how in ({"local_files_only": True}, {"endpoint": served.url, "token": False}):
        folder = Path(snapshot_download("a/b", cache_dir=hub_cache, **how))
        assert (folder / "model.safetensors").samefile(snapshot.folder / "model.safetensors")
    assert len(served.sent) == before


def test_what_others_have_fetched_of_the_commit_is_not_the_models(publish: Any, hub_cache: Path) -> None:
    publish({"model.safetensors": 5000})
    first = hub.Fetch("a/b").fetch()
    theirs = next(hub_cache.glob("*/snapshots/*"))
    (theirs / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    (first.folder / SHARDS[0]).symlink_to(theirs / "consolidated.safetensors")
    again = hub.Fetch("a/b").fetch()
    assert {path.name for path in again.folder.iterdir()} == {"config.json", "model.safetensors"}


def test_the_single_file_is_preferred_to_its_shards(publish: Any) -> None:
    publish(
        {
            "model.safetensors": 9,
            SHARDS[0]: 5,
            SHARDS[1]: 5,
            "model.safetensors.index.json": json.dumps(INDEX),
        }
    )
    names = {file.name for file in hub.Fetch("a/b").plan().files}
    assert names == {"config.json", "model.safetensors"}


def test_a_mirror_that_lists_names_alone_is_asked_for_each_files_header(publish: Any, served: Hub) -> None:
    repository = publish({"model.safetensors": 5000})
    served.names_only = True
    plan = hub.Fetch("a/b").plan()
    named = plan.named("model.safetensors")
    assert named and (named.size, named.etag) == (5000, sha256(repository.files["model.safetensors"]))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": 10}, r"no safetensors.*refused"),
        ({"model.safetensors": 9, "config.json": '{"auto_map": {}}'}, "needs program code of its own"),
        (
            {"consolidated.safetensors": 9},
            r"has consolidated\.safetensors, but neither model\.safetensors nor",
        ),
        (
            {SHARDS[0]: 9, "model.safetensors.index.json": json.dumps(INDEX)},
            r"names 2 files of weights, and 1 are not there, model-00002",
        ),
    ],
)
def test_what_is_no_model_is_refused_before_its_weights_are_fetched(
    publish: Any, served: Hub, files: dict[str, Any], words: str
) -> None:
    publish(files)
    with pytest.raises(Unusable, match=words):
        hub.Fetch("a/b").plan()
    assert not [sent for sent in served.sent if sent.name.endswith((".safetensors", ".bin"))]


# Bytes --------------------------------------------------------------------------------------------------


def test_progress_is_of_bytes_within_files_and_only_rises(publish: Any, served: Hub) -> None:
    publish({"model.safetensors": 4 * MIB})
    served.bytes_per_second, served.cuts = 16 * MIB, [MIB + 7, 5]
    told: list[tuple[int, int, str]] = []
    hub.Fetch("a/b").fetch(lambda *step: told.append(step))
    done = [step[0] for step in told]
    assert done == sorted(done) and done[-1] == 4 * MIB + 2
    assert {total for _, total, _ in told} == {4 * MIB + 2}
    assert len({step for step in done if 2 < step < 4 * MIB}) >= 2


def test_a_cut_body_is_gone_on_with_from_its_last_byte(
    publish: Any, served: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    repository = publish({"model.safetensors": 3 * MIB})
    served.cuts = [100_000, 1, 1_000_000]
    with caplog.at_level("INFO", "jobs.interp"):
        assert same(hub.Fetch("a/b").fetch(), repository)
    assert [record.getMessage() for record in caplog.records] == [
        "a/b model.safetensors: RemoteProtocolError; going on in 0.0 s"
    ] * 3
    weights = [sent for sent in served.sent if sent.name == "model.safetensors"]
    assert [sent.start for sent in weights] == [0, 100_000, 100_001, 1_100_001]
    assert served.served("model.safetensors") == 3 * MIB


def test_a_hub_that_goes_away_in_between_is_waited_for(
    publish: Any, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE", 0.001)
    repository = publish({"model.safetensors": MIB})
    fetch = hub.Fetch("a/b")
    fetch.plan()
    served.cuts, served.answers = [1000], [(503, {})] * 8
    told: list[str] = []
    assert same(fetch.fetch(lambda _done, _total, message: told.append(message)), repository)
    assert "the connection broke; going on in 0 s" in told and not told[-1]


def test_what_an_earlier_download_left_is_gone_on_with(publish: Any, served: Hub) -> None:
    """Another process had ended; then part of what it had left was lost."""
    repository = publish({"model.safetensors": 3 * MIB})
    fetch = hub.Fetch(
        "a/b", should_stop=lambda: bool(served.sent) and served.served("model.safetensors") > MIB
    )
    served.bytes_per_second = 4 * MIB
    with pytest.raises(Stopped):
        fetch.fetch()
    time.sleep(0.05)
    [partial] = (fetch.folder / "blobs").glob("*.incomplete")
    assert partial.stat().st_size >= MIB
    os.truncate(partial, 700_001)
    served.sent.clear()
    served.bytes_per_second = float("inf")
    again = hub.Fetch("a/b")
    again.plan()
    assert again.missing() == 3 * MIB - 700_001
    assert same(again.fetch(), repository)
    assert [(sent.start, sent.count) for sent in served.sent] == [(700_001, 3 * MIB - 700_001)]


def test_a_stop_is_heard_while_the_server_keeps_silent(publish: Any, served: Hub) -> None:
    publish({"model.safetensors": 2 * MIB})
    served.held = threading.Event()
    asked: list[float] = []

    def should_stop() -> bool:
        if served.served("model.safetensors") >= MIB:
            asked.append(time.monotonic())
        return bool(asked)

    with pytest.raises(Stopped):
        hub.Fetch("a/b", should_stop=should_stop).fetch()
    assert time.monotonic() - asked[0] < 0.5


def test_a_server_without_ranges_sends_the_beginning_for_nothing(publish: Any, served: Hub) -> None:
    repository = publish({"model.safetensors": MIB})
    served.ranges, served.cuts = False, [300_000]
    told: list[int] = []
    assert same(hub.Fetch("a/b").fetch(lambda done, *_: told.append(done)), repository)
    assert told == sorted(told)
    assert served.served("model.safetensors") == MIB + 300_000


def test_damaged_bytes_are_found_by_the_digest_and_fetched_again(publish: Any, served: Hub) -> None:
    repository = publish({"model.safetensors": 5000})
    served.damage = 1
    assert same(hub.Fetch("a/b").fetch(), repository)


def test_bytes_that_stay_damaged_are_not_kept(publish: Any, served: Hub, hub_cache: Path) -> None:
    publish({"model.safetensors": 5000})
    served.damage = 2
    with pytest.raises(Unusable, match=r"model\.safetensors arrived damaged twice"):
        hub.Fetch("a/b").fetch()
    assert not [path for path in hub_cache.rglob("*") if path.is_file() and path.stat().st_size >= 5000]


def test_a_file_of_the_cache_with_a_wrong_size_is_fetched_again(publish: Any) -> None:
    repository = publish({"model.safetensors": 5000})
    snapshot = hub.Fetch("a/b").fetch()
    (snapshot.folder / "model.safetensors").resolve().write_bytes(b"short")
    assert same(hub.Fetch("a/b").fetch(), repository)


def test_two_downloads_at_once_share_one_transfer(publish: Any, served: Hub) -> None:
    repository = publish({"model.safetensors": 2 * MIB})
    served.bytes_per_second = 4 * MIB
    told: dict[int, list[tuple[int, int, str]]] = {0: [], 1: []}
    ends: dict[int, hub.Snapshot] = {}

    def run(number: int) -> None:
        ends[number] = hub.Fetch("a/b").fetch(lambda *step: told[number].append(step))

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(ends[0], repository) and same(ends[1], repository)
    assert served.served("model.safetensors") == 2 * MIB
    waited = [message for steps in told.values() for _, _, message in steps if message]
    assert set(waited) == {"another download fetches the same file"}


def test_two_downloads_whose_locks_hold_nobody_off_do_no_harm(
    publish: Any, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems."""
    monkeypatch.setattr("huggingface_hub.utils._fixes.WeakFileLock", lambda *_, **__: nullcontext())
    repository = publish({"model.safetensors": MIB})
    served.bytes_per_second = 4 * MIB
    plan = hub.Fetch("a/b").plan()
    ends: list[hub.Snapshot] = []

    def run() -> None:
        ends.append(hub.Fetch("a/b", listing=plan).fetch())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert [same(end, repository) for end in ends] == [True, True]
    assert len([sent for sent in served.sent if sent.name == "model.safetensors"]) == 2


# Who may, and what the hub says --------------------------------------------------------------------------


def test_a_token_goes_to_the_hub_and_not_to_its_storage(publish: Any, served: Hub) -> None:
    publish({"model.safetensors": 5000}, gated={TOKEN})
    hub.Fetch("a/b", token=TOKEN).fetch()
    assert {authorization for _, _, authorization in served.asked} == {f"Bearer {TOKEN}"}
    stored = [sent for sent in served.sent if sent.name == "model.safetensors"]
    assert [sent.authorization for sent in stored] == [None]


def test_what_ones_token_has_opened_is_not_opened_to_others_by_the_cache(publish: Any) -> None:
    publish({"model.safetensors": 50}, gated={TOKEN})
    hub.Fetch("a/b", token=TOKEN).fetch()
    with pytest.raises(Unusable, match="is gated"):
        hub.Fetch("a/b").fetch()


def test_without_leave_the_hosts_own_token_stays_at_home(
    publish: Any, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish({"model.safetensors": 50})
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub.Fetch("a/b", token=True).plan()  # there is none to use
    monkeypatch.setenv("HF_TOKEN", "hf_ofTheHost")
    hub.Fetch("a/b").fetch()
    assert {authorization for _, _, authorization in served.asked} == {None}
    hub.Fetch("a/b", token=True).plan()
    assert served.asked[-1][2] == "Bearer hf_ofTheHost"


@pytest.mark.parametrize(
    ("how", "token", "words"),
    [
        ({"gated": {"hf_other"}}, False, r"is gated: open http.*/a/b with your.*token of that account.*/me/"),
        ({"gated": {"hf_other"}}, TOKEN, r"account of the token has no access.*/a/b with that account"),
        ({"private": {"hf_other"}}, False, r"does not exist, or it is private: then put a token.*/me/"),
        ({"private": {"hf_other"}}, TOKEN, r"private and the account of the token may not see it"),
        ({"refs": ("v1",)}, False, r"has no branch, tag or commit 'main'; http.*/a/b/refs"),
    ],
)
def test_each_no_has_its_sentence(publish: Any, how: Any, token: Any, words: str) -> None:
    publish({"model.safetensors": 50}, **how)
    with pytest.raises(Unusable, match=words):
        hub.Fetch("a/b", token=token).plan()


REVOKED = {"X-Error-Message": "Invalid credentials in Authorization header"}


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(401, REVOKED)], r"does not know the token.*put a new one on your page here \(/me/\)"),
        ([(403, {})], r"may not read a/b \(403\)"),
        ([(429, {"Retry-After": "900"})], r"too many requests from here \(429\).*come back in 900 s"),
        ([(429, {"RateLimit": '"api";r=0;t=700'})], r"come back in 700 s"),
        ([(503, {})] * 6, r"answers 503 to a/b, 5 times in a row"),
    ],
)
def test_a_hub_that_refuses_is_quoted(publish: Any, served: Hub, answers: Any, words: str) -> None:
    publish({"model.safetensors": 50})
    served.answers = answers
    with pytest.raises(Unusable, match=words):
        hub.Fetch("a/b", token=TOKEN).plan()


def test_a_short_pause_that_the_hub_asks_for_is_kept(publish: Any, served: Hub) -> None:
    repository = publish({"model.safetensors": 50})
    served.answers = [(429, {"Retry-After": "0"}), (502, {})]
    assert same(hub.Fetch("a/b").fetch(), repository)


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(
        Unusable, match=r"127\.0\.0\.1:9 \(HF_ENDPOINT\) could not be reached for a/b.*by its path"
    ):
        hub.Fetch("a/b").plan()


def test_an_offline_host_takes_what_its_cache_has(
    publish: Any, served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = publish({"model.safetensors": 5000, "tokenizer.json": 20})
    hub.Fetch("a/b").fetch()
    asked = len(served.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(hub.Fetch("a/b").fetch(), repository)
    with pytest.raises(Unusable, match=r"offline \(HF_HUB_OFFLINE\), and its cache has no v2 of a/b"):
        hub.Fetch("a/b", "v2").plan()
    assert len(served.asked) == asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    point_at(monkeypatch, "http://127.0.0.1:9")
    assert same(hub.Fetch("a/b", repository.commit).fetch(), repository)


@pytest.mark.parametrize("lacks", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_offline_host_takes_no_half_of_a_model(
    publish: Any, hub_cache: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """As other programs leave it that wanted the configuration or the tokenizer alone."""
    repository = publish({"model.safetensors": 5000, "tokenizer.json": 20})
    hub.Fetch("a/b").fetch()
    (hub_cache / "models--a--b" / "snapshots" / repository.commit / lacks).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unusable, match="its cache has no main of a/b"):
        hub.Fetch("a/b").fetch()


def test_a_pinned_listing_needs_the_hub_for_nothing_that_is_there(publish: Any, served: Hub) -> None:
    """A later attempt, after the branch has moved: the commit is that of the first."""
    repository = publish({"model.safetensors": 5000})
    fetch = hub.Fetch("a/b")
    plan = Listing.of(json.loads(json.dumps(fetch.plan().as_dict())))
    fetch.fetch()
    asked = len(served.asked)
    assert hub.Fetch("a/b", listing=plan).fetch().commit == repository.commit
    assert len(served.asked) == asked


@pytest.mark.parametrize("named", ["../../evil", "a/b", ".hidden"])
def test_a_hub_names_no_place_outside_the_cache(publish: Any, named: str) -> None:
    publish({"model.safetensors": 50}, commit=named)
    with pytest.raises(Unusable, match="no commit and no digest"):
        hub.Fetch("a/b").plan()


# Before a job is queued ----------------------------------------------------------------------------------


def test_a_glance_remembers_what_it_saw(publish: Any, served: Hub) -> None:
    publish({"model.safetensors": 5000})
    now = [0.0]
    memory = Memory(lambda: now[0])
    for _ in range(3):
        listing = memory.glance("a/b", "main")
        assert listing and listing.bytes == 5002
    assert len(served.asked) == 1
    now[0] = 61.0
    assert memory.glance("a/b", "main") and len(served.asked) == 2


def test_a_glance_refuses_only_what_nothing_would_change(publish: Any, served: Hub) -> None:
    publish({"pytorch_model.bin": 5000})
    memory = Memory()
    with pytest.raises(Unusable, match="no safetensors"):
        memory.glance("a/b", "main")
    assert memory.glance("a/private", "main") is None  # a token may open it
    served.answers = [(503, {})]
    assert memory.glance("a/c", "main") is None
    assert memory.glance("a/d", "main") is None  # not asked again for five minutes
    assert [path for _, path, _ in served.asked if "a/d" in path] == []
