"""Data sets of a hub: which files are read, when they are fetched, and what is refused; the hub itself is played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pyarrow.parquet
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from jobs.interp import hub_data
from jobs.interp.documents import Documents
from jobs.interp.errors import Unusable


class Hub:
    """A hub with one data set; remembers what was fetched."""

    def __init__(self, folder: Path, branches: dict[str | None, list[str]], error: Exception | None) -> None:
        self.folder, self.branches, self.error = folder, branches, error
        self.fetched: list[tuple[str, str]] = []

    def dataset_info(self, _repository: str, *, revision: str | None, files_metadata: bool) -> Any:
        if self.error:
            raise self.error
        siblings = [SimpleNamespace(rfilename=name, size=100) for name in self.branches[revision]]
        return SimpleNamespace(sha=f"commit-of-{revision}", siblings=siblings)

    def download(self, _repository: str, name: str, *, repo_type: str, revision: str) -> str:
        assert repo_type == "dataset"
        self.fetched.append((name, revision))
        path = self.folder / name.replace("/", "-")
        table = pyarrow.table({"text": [f"{name} a", f"{name} b"]})
        pyarrow.parquet.write_table(table, path)
        return str(path)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def begin(branches: dict[str | None, list[str]], error: Exception | None = None) -> Hub:
        played = Hub(tmp_path, branches, error)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: played)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", played.download)
        return played

    return begin


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
        (GatedRepoError, "HF_TOKEN"),
        (RepositoryNotFoundError, "does not exist"),
        (HfHubHTTPError, "could not be asked"),
    ],
)
def test_failures_say_what_to_do(play: Any, error: type[Exception], words: str) -> None:
    play({}, error("no", response=SimpleNamespace(headers={}, request=None, status_code=401)))
    with pytest.raises(Unusable, match=words):
        hub_data.tables("a/b", None, "train")
