"""Files and folders are complete or absent."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs.fields import is_path
from jobs.interp import files
from jobs.interp.errors import Unusable
from jobs.interp.paths import inside


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"old": 1})
    with contextlib.suppress(RuntimeError), files.whole_file(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert files.read_json(tmp_path / "a.json") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_goes_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "source.json").write_text("{}")
    with monkeypatch.context() as killed:
        killed.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        files.remove(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-a"]
    for _ in range(2):  # also what an attempt had left that ended in between, and nothing
        files.remove(tmp_path / "a")
        assert not any(tmp_path.iterdir())


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), files.whole_folder(tmp_path / "a") as temporary:
        (temporary / "half").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for content in ("one", "two"):
        with files.whole_folder(tmp_path / "a") as temporary:
            (temporary / content).write_text(content)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["two"]


def test_tensors_are_written_contiguous(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    files.write_tensors(tmp_path / "a.safetensors", {"x": tensor})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], tensor)


def test_a_tree_is_linked_through_links_and_without_leftovers(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("content")
    source = tmp_path / "snapshot"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "model").symlink_to(tmp_path / "blobs" / "1")
    (source / ".tmp-x").write_text("")
    files.bring(source, tmp_path / "target")
    found = tmp_path / "target" / "sub" / "model"
    assert not found.is_symlink()
    assert found.stat().st_ino == (tmp_path / "blobs" / "1").stat().st_ino
    assert [path.name for path in (tmp_path / "target").rglob("*") if path.is_file()] == ["model"]
    files.bring(source, tmp_path / "copy", copy=True)
    assert (tmp_path / "copy" / "sub" / "model").stat().st_ino != found.stat().st_ino
    files.bring(source, tmp_path / "none", names=["*.safetensors"])
    assert not (tmp_path / "none").exists()


def test_a_digest_follows_names_and_contents(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    one.write_text("1")
    two.write_text("2")
    before = files.digest([one, two])
    assert files.digest([two, one]) == before
    two.write_text("3")
    assert files.digest([one, two]) != before


@pytest.mark.parametrize("text", ["/a", "~/a", "./a", "../a"])
def test_paths_are_told_from_names(text: str) -> None:
    assert is_path(text)
    assert not is_path(text.strip("/.~") + "/b")


def test_links_that_lead_out_are_outside(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "root" / "good").write_text("")
    assert inside(str(tmp_path / "root" / "good"), [tmp_path / "root"]) == tmp_path / "root" / "good"
    for path in ("root/link", "root/../secret", "rootless", "root/missing"):
        with pytest.raises(Unusable):
            inside(str(tmp_path / path), [tmp_path / "root"])
