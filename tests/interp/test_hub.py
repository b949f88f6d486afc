"""What is fetched from a hub and what is refused; the hub itself is played."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from jobs.interp import hub
from jobs.interp.errors import Stopped, Unusable


class Hub:
    """A hub with one repository; remembers what was asked for."""

    def __init__(self, folder: Path, files: dict[str, int], error: Exception | None = None) -> None:
        self.folder, self.files, self.error = folder, files, error
        self.asked: list[tuple[str, str]] = []

    def model_info(self, _repository: str, *, revision: str | None, files_metadata: bool) -> Any:
        if self.error:
            raise self.error
        assert (revision, files_metadata) == ("main", True)
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in self.files.items()]
        return SimpleNamespace(sha="c0ffee", siblings=siblings)

    def download(self, _repository: str, name: str, *, revision: str) -> str:
        self.asked.append((name, revision))
        path = self.folder / "snapshots" / revision / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        return str(path)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def begin(files: dict[str, int], error: Exception | None = None) -> Hub:
        played = Hub(tmp_path, files, error)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: played)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", played.download)
        return played

    return begin


FILES = {
    "config.json": 10,
    "model-00001-of-00002.safetensors": 100,
    "model-00002-of-00002.safetensors": 100,
    "model.safetensors.index.json": 5,
    "tokenizer.json": 20,
    "pytorch_model.bin": 1000,
    "modeling_evil.py": 7,
    "onnx/model.safetensors": 500,
    "README.md": 3,
}


def test_only_what_a_model_consists_of_is_fetched_from_the_pinned_commit(play: Any, tmp_path: Path) -> None:
    played = play(FILES)
    progress: list[tuple[int, int]] = []
    snapshot = hub.fetch("a/b", "main", on_progress=lambda *step: progress.append(step))
    assert {name for name, _ in played.asked} == set(list(FILES)[:5])
    assert {revision for _, revision in played.asked} == {"c0ffee"}
    assert snapshot == hub.Snapshot(tmp_path / "snapshots" / "c0ffee", "c0ffee")
    assert progress[-1] == (235, 235)


def test_pickled_weights_are_refused_before_anything_is_fetched(play: Any) -> None:
    played = play({"config.json": 10, "pytorch_model.bin": 1000})
    with pytest.raises(Unusable, match=r"no safetensors.*refused"):
        hub.fetch("a/b", "main")
    assert played.asked == []


def test_a_download_stops_between_files(play: Any) -> None:
    played = play(FILES)
    with pytest.raises(Stopped):
        hub.fetch("a/b", "main", should_stop=lambda: len(played.asked) == 2)
    assert len(played.asked) == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError, "HF_TOKEN"),
        (RepositoryNotFoundError, "does not exist"),
        (HfHubHTTPError, "could not be asked"),
    ],
)
def test_failures_say_what_to_do(play: Any, error: type[Exception], words: str) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=401)
    play(FILES, error("no", response=response))
    with pytest.raises(Unusable, match=words):
        hub.fetch("a/b", "main")
