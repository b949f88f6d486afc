"""Data sets of a hub: which files are read, when they are fetched, and what is refused; the hub itself is played."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pyarrow.parquet
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from jobs.interp import hub_data
from jobs.interp.documents import Documents
from jobs.interp.errors import Stopped, Unusable
from tests import hub_server


class Hub:
    """A hub with one data set; remembers what was fetched."""

    def __init__(self, folder: Path, branches: dict[str | None, list[str]], error: Exception | None) -> None:
        self.folder, self.branches, self.error = folder, branches, error
        self.fetched: list[tuple[str, str]] = []
        self.tokens: set[Any] = set()

    def dataset_info(self, _repository: str, *, revision: str | None, **_how: Any) -> Any:
        if self.error:
            raise self.error
        siblings = [SimpleNamespace(rfilename=name, size=100) for name in self.branches[revision]]
        return SimpleNamespace(sha=f"commit-of-{revision}", siblings=siblings)

    def download(self, _repository: str, name: str, *, repo_type: str, revision: str, token: Any) -> str:
        assert repo_type == "dataset"
        self.fetched.append((name, revision))
        self.tokens.add(token)
        path = self.folder / name.replace("/", "-")
        table = pyarrow.table({"text": [f"{name} a", f"{name} b"]})
        pyarrow.parquet.write_table(table, path)
        return str(path)

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda _url, token: None)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def begin(branches: dict[str | None, list[str]], error: Exception | None = None) -> Hub:
        played = Hub(tmp_path, branches, error)
        played.take_over(monkeypatch)
        return played

    return begin


def refusal(error: type[HfHubHTTPError], status: int) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None, status_code=status)
    return error("no", response=response)


TRAIN = ["data/train-00000.parquet", "data/train-00001.parquet"]


def test_only_parquet_of_the_split_is_named_and_nothing_fetched_before_its_turn(play: Any) -> None:
    played = play({None: [*TRAIN, "data/test-00000.parquet", "loader.py", "README.md"]})
    files, commit = hub_data.tables("a/b", None, "train")
    assert ([file.name for file in files], commit) == (
        ["train-00000.parquet", "train-00001.parquet"],
        "commit-of-None",
    )
    documents = Documents(files)
    assert (documents.tokenizer_sha256, played.fetched) == ("", [])
    found = iter(documents)
    assert next(found) == f"{TRAIN[0]} a"
    assert played.fetched == [(TRAIN[0], "commit-of-None")]
    assert len(list(found)) == 3
    assert [name for name, _ in played.fetched] == TRAIN


def test_a_data_set_that_is_a_program_is_read_from_the_conversion(play: Any) -> None:
    play({None: ["loader.py", "data.zip"], hub_data.CONVERTED: ["default/train/0000.parquet"]})
    files, commit = hub_data.tables("a/b", None, "train")
    assert ([file.name for file in files], commit) == (["0000.parquet"], f"commit-of-{hub_data.CONVERTED}")


def test_of_several_configurations_one_must_be_named(play: Any) -> None:
    play({None: ["de/train/0.parquet", "en/train/0.parquet", "en/train/1.parquet"]})
    with pytest.raises(Unusable, match=r"several configurations: de, en\. Name one, as split de/train"):
        hub_data.tables("a/b", None, "train")
    assert len(hub_data.tables("a/b", None, "en/train")[0]) == 2


@pytest.mark.parametrize(
    ("files", "split", "words"),
    [([], "train", "no Parquet files"), (TRAIN, "test", "no split 'test'; it has train")],
)
def test_what_is_not_there_is_said(play: Any, files: list[str], split: str, words: str) -> None:
    play({None: files, hub_data.CONVERTED: []})
    with pytest.raises(Unusable, match=words):
        hub_data.tables("a/b", None, split)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (refusal(GatedRepoError, 401), r"is gated: open .*/datasets/a/b .*put a token of that account.*/me/"),
        (refusal(RepositoryNotFoundError, 401), r"does not exist, or it is private: then put a token.*/me/"),
        (refusal(HfHubHTTPError, 401), r"only to those who are signed in; put a token"),
        (refusal(HfHubHTTPError, 503), "could not be asked about a/b: it answers 503"),
        (httpx2.ConnectError("[Errno 111] refused"), "could not be asked about a/b: ConnectError"),
    ],
)
def test_failures_say_what_to_do(play: Any, error: Exception, words: str) -> None:
    play({}, error)
    with pytest.raises(Unusable, match=words):
        hub_data.tables("a/b", None, "train")


# Who may ------------------------------------------------------------------------------------------------


@pytest.fixture
def closed(served: hub_server.Hub, tmp_path: Path) -> hub_server.Repository:
    """A data set that is gated, on a hub that speaks HTTP."""
    path = tmp_path / "published.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    repository = hub_server.Repository("a/b", {"train.parquet": path}, gated={"hf_ofAlice"})
    served.repositories.append(repository)
    return repository


@pytest.mark.usefixtures("closed")
def test_a_data_set_is_asked_for_with_the_users_token_and_no_other(
    served: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the host's own went along for everybody."""
    monkeypatch.setenv("HF_TOKEN", "hf_ofTheHost")
    with pytest.raises(Unusable, match=r"is gated: open .*/datasets/a/b with your"):
        hub_data.tables("a/b", "main", "train")
    assert {token for _, _, token in served.asked} == {None}
    served.asked.clear()
    files, _ = hub_data.tables("a/b", "main", "train", hub_data.Access("hf_ofAlice"))
    assert list(Documents(files)) == ["a", "b"]
    assert {token for _, _, token in served.asked} == {"Bearer hf_ofAlice"}
    assert "hf_ofAlice" not in repr(files)
    with pytest.raises(Unusable, match="account of the token has no access"):
        hub_data.tables("a/b", "main", "train", hub_data.Access(True))
    assert served.asked[-1][2] == "Bearer hf_ofTheHost"


def test_what_ones_token_has_opened_is_not_opened_to_others_by_the_cache(
    closed: hub_server.Repository,
) -> None:
    files, commit = hub_data.tables("a/b", "main", "train", hub_data.Access("hf_ofAlice"))
    assert list(Documents(files))
    assert commit == closed.commit
    with pytest.raises(Unusable, match="is gated"):
        hub_data.tables("a/b", commit, "train")


# The disk, and stops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_silent_hub(play: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    play({None: TRAIN})

    def full(*_: Any, **__: Any) -> str:
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(Unusable, match="the disk of the cache is full") as error:
        list(Documents(hub_data.tables("a/b", None, "train")[0]))
    assert error.value.reason == "disk_full"  # type: ignore[attr-defined]


def test_room_is_asked_for_before_each_file_that_is_not_here(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {TRAIN[1]: "/cache/there"}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda _, name, **__: here.get(name))
    played, asked = play({None: TRAIN}), []
    access = hub_data.Access(require_room=lambda folder, size, name: asked.append((size, name)))
    documents = iter(Documents(hub_data.tables("a/b", None, "train", access)[0]))
    assert asked == []
    assert len(list(documents)) == 4
    assert asked == [(100, TRAIN[0])] and len(played.fetched) == 2


def test_a_stop_is_heard_while_a_file_is_fetched(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    play({None: TRAIN})
    begun, ended = threading.Event(), threading.Event()

    def silent(*_: Any, **__: Any) -> str:
        begun.set()
        ended.wait(20)
        return ""

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", silent)
    files, _ = hub_data.tables("a/b", None, "train", hub_data.Access(should_stop=begun.is_set))
    start = time.monotonic()
    try:
        with pytest.raises(Stopped):
            next(iter(Documents(files)))
    finally:
        ended.set()
    assert time.monotonic() - start < 5
