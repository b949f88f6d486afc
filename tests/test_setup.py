"""`scripts/setup.py`: from a bare Python to a working environment, resumed when interrupted, instant when done.

The tests run copies of the scripts in a folder with a space in its name, with one tiny package of our own on a
package index on loopback. Only the test that brings the real pip asks the user's index.
"""

from __future__ import annotations

import ast
import hashlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a script's module as the script itself does, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(name: str) -> ModuleType:
        module = __import__(name)
        for each in ("setup", "environment", "pip_wheel", "voice"):
            if each in sys.modules:
                monkeypatch.setitem(sys.modules, each, sys.modules[each])
        return module

    yield load
    for each in ("setup", "environment", "pip_wheel", "voice"):
        sys.modules.pop(each, None)


@pytest.fixture
def no_pip_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


# --- a package index on loopback --------------------------------------------------------------------------


class Index:
    """A simple index: `/simple/<name>/` lists files, and every request is remembered with its login."""

    def __init__(self, files: dict[str, bytes] | None = None) -> None:
        self.files: dict[str, bytes] = dict(files or {})
        self.asked: list[tuple[str, str | None]] = []
        index = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.asked.append((self.path, self.headers.get("Authorization")))
                content = index.answer(self.path)
                self.send_response(200 if content is not None else 404)
                self.send_header(
                    "Content-Type", "text/html" if self.path.endswith("/") else "application/zip"
                )
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client was killed
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.host = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.host}/simple"

    def answer(self, path: str) -> bytes | None:
        if not path.endswith("/"):
            return self.files.get(path.rsplit("/", 1)[-1])
        project = path.rstrip("/").rsplit("/", 1)[-1].replace("-", "_")
        names = [name for name in self.files if name.startswith(f"{project}-")]
        return "".join(f'<a href="../../files/{name}">{name}</a>\n' for name in names).encode()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def wheel_of(
    name: str, members: dict[str, str], folder: Path, version: str = "1.0", needs: str = ""
) -> bytes:
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += f"Requires-Dist: {needs}\n" if needs else ""
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


# --- finding pip's wheel ----------------------------------------------------------------------------------


def fake_pip(module: Any, monkeypatch: pytest.MonkeyPatch, content: bytes = b"a wheel") -> bytes:
    monkeypatch.setattr(module, "PIP_SHA256", hashlib.sha256(content).hexdigest())
    return content


@pytest.mark.usefixtures("no_pip_settings")
def test_pip_comes_from_the_index_of_the_environment(
    modules: Any, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules("pip_wheel")
    index.files[module.PIP_WHEEL] = fake_pip(module, monkeypatch)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    wheel = module.pip_wheel(tmp_path / ".vendor")
    assert wheel.read_bytes() == b"a wheel"
    assert [path for path, _ in index.asked] == ["/simple/pip/", f"/files/{module.PIP_WHEEL}"]
    index.asked.clear()
    assert module.pip_wheel(tmp_path / ".vendor") == wheel
    assert index.asked == []


@pytest.mark.usefixtures("no_pip_settings")
def test_pip_comes_from_the_index_of_a_configuration_file(
    modules: Any, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules("pip_wheel")
    index.files[module.PIP_WHEEL] = fake_pip(module, monkeypatch)
    settings = tmp_path / "pip.conf"
    settings.write_text(
        f"[global]\nindex-url = http://127.0.0.1:9/simple\nextra_index_url =\n  {index.url}\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    assert module.pip_wheel(tmp_path / ".vendor").is_file()


@pytest.mark.usefixtures("no_pip_settings")
def test_a_login_in_the_index_is_sent_and_never_shown(
    modules: Any, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules("pip_wheel")
    index.files.clear()
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("127", "me:secret%21@127"))
    with pytest.raises(module.SetupError) as missing:
        module.pip_wheel(tmp_path / ".vendor")
    assert "does not offer" in str(missing.value)
    assert "secret" not in str(missing.value)
    index.files[module.PIP_WHEEL] = fake_pip(module, monkeypatch)
    module.pip_wheel(tmp_path / ".vendor")
    assert {login for _, login in index.asked} == {"Basic bWU6c2VjcmV0IQ=="}


@pytest.mark.usefixtures("no_pip_settings")
def test_pip_comes_from_a_folder_without_any_network(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules("pip_wheel")
    folder = tmp_path / "wheels here"
    folder.mkdir()
    (folder / module.PIP_WHEEL).write_bytes(fake_pip(module, monkeypatch))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    assert module.pip_wheel(tmp_path / ".vendor").is_file()


@pytest.mark.usefixtures("no_pip_settings")
def test_another_file_than_pip_is_refused_with_both_hashes(
    modules: Any, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules("pip_wheel")
    index.files[module.PIP_WHEEL] = b"something else"
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    with pytest.raises(module.SetupError) as refused:
        module.pip_wheel(tmp_path / ".vendor")
    assert module.PIP_SHA256 in str(refused.value)
    assert hashlib.sha256(b"something else").hexdigest() in str(refused.value)
    assert not (tmp_path / ".vendor" / module.PIP_WHEEL).exists()


@pytest.mark.usefixtures("no_pip_settings")
def test_an_unreachable_index_is_a_sentence_with_the_remedy(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = modules("pip_wheel")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(
        module.SetupError, match=r"could not be reached[\s\S]*127\.0\.0\.1:9[\s\S]*PIP_INDEX_URL"
    ):
        module.pip_wheel(tmp_path / ".vendor")


# --- sentences --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "fits"), [((3, 10), 0), ((3, 11), 1), ((3, 13, 9), 1), ((3, 14), 0)])
def test_which_pythons_fit(modules: Any, version: tuple[int, ...], fits: int) -> None:
    assert modules("environment").supported(version) == bool(fits)


def test_a_python_that_does_not_fit_is_named_with_the_remedy(modules: Any) -> None:
    setup = modules("setup")
    with pytest.raises(
        setup.SetupError, match=r"3\.11, 3\.12 or 3\.13; this is Python 3\.14\.1[\s\S]*PYTHON="
    ):
        setup.require_python((3, 14, 1))


def test_a_short_disk_is_named_with_the_remedy(modules: Any) -> None:
    setup = modules("setup")
    with pytest.raises(setup.SetupError, match=r"GB free; this step needs .*Free some space"):
        setup.require_disk(10**18)


def test_another_system_is_named(modules: Any) -> None:
    setup = modules("setup")
    with pytest.raises(setup.SetupError, match="runs on Linux"):
        setup.require_platform("darwin")


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_an_old_python_can_parse_the_scripts(script: Path) -> None:
    ast.parse(script.read_text(encoding="utf-8"), feature_version=(3, 6))
    assert "import annotations" not in script.read_text(encoding="utf-8")


def test_the_voice_tells_what_is_fetched_and_how_far(
    modules: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "Requirement already satisfied: numpy",
        "WARNING: Location 'file:///a' is ignored: it is neither a file nor a directory.",
        "WARNING: Retrying (Retry(total=4)) after connection broken",
        "Collecting torch==2.13.0",
        "  Downloading https://host/a/torch-2.13.0.whl (527 MB)",
        "Progress 0 of 500000000",
        "Progress 500000000 of 500000000",
        "Installing collected packages: numpy, torch",
    ]
    modules("voice").Voice().listen(lines)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "      WARNING: Retrying (Retry(total=4)) after connection broken",
        "      fetching torch-2.13.0.whl, 500 MB: 0 %",
        "      packages to install: 2",
    ]


# --- whole runs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parcels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the index serves: pip, a uPlot and two tiny packages of our own."""
    folder = tmp_path_factory.mktemp("parcels")
    return {
        "pip-26.3-py3-none-any.whl": make_pip(folder),
        "uplot_python-1.1.1-py3-none-any.whl": wheel_of(
            "uplot_python", dict.fromkeys(UPLOT_MEMBERS, "// charts"), folder, "1.1.1"
        ),
        "tiny-1.0-py3-none-any.whl": wheel_of("tiny", {"tiny/__init__.py": "x = 1\n"}, folder),
        "tinier-1.0-py3-none-any.whl": wheel_of("tinier", {"tinier.py": ""}, folder),
    }


@pytest.fixture
def index(parcels: dict[str, bytes]) -> Iterator[Index]:
    served = Index(parcels)
    yield served
    served.close()


@pytest.fixture
def home(parcels: dict[str, bytes], tmp_path: Path) -> Path:
    return bare(tmp_path / "mi studio", parcels)


@pytest.fixture(scope="module")
def ready(parcels: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set up once; the tests get copies."""
    folder = bare(tmp_path_factory.mktemp("ready") / "mi studio", parcels)
    served = Index(parcels)
    done = set_up(folder, served)
    served.close()
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def done_home(ready: Path, tmp_path: Path) -> Path:
    return shutil.copytree(ready, tmp_path / "mi studio", symlinks=True)


def bare(folder: Path, parcels: dict[str, bytes]) -> Path:
    """A copy of the project's set-up with one tiny requirement, which expects the parcels' hashes."""
    shutil.copytree(SCRIPTS, folder / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "jobs").mkdir()
    shutil.copy(ROOT / "jobs" / "wheels.py", folder / "jobs")
    (folder / "constraints.txt").write_text("")
    (folder / "requirements.txt").write_text("tiny==1.0\n")
    (folder / "requirements-dev.txt").write_text(
        "-r requirements.txt\n-r requirements-quant.txt\n-r requirements-tables.txt\n"
    )
    (folder / "requirements-quant.txt").write_text("tinier==1.0\n")
    (folder / "requirements-tables.txt").write_text("")
    swap_hash(folder / "scripts" / "pip_wheel.py", "PIP_SHA256 = ", parcels["pip-26.3-py3-none-any.whl"])
    swap_hash(folder / "scripts" / "setup.py", "UPLOT = ", parcels["uplot_python-1.1.1-py3-none-any.whl"])
    return folder


UPLOT_MEMBERS = (
    "uplot/static/uPlot.iife.js",
    "uplot/static/uPlot.min.css",
    "uplot/__init__.py",
    "uplot_python-1.1.1.dist-info/licenses/LICENSE",
)


def make_pip(folder: Path) -> bytes:
    """The pip that runs these tests, as a wheel again: a Debian Python has no other copy of it."""
    import pip

    package = Path(pip.__file__).parent
    info = next(package.parent.glob("pip-*.dist-info"))
    path = folder / "pip.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted(package.rglob("*")):
            if source.is_file() and source.suffix != ".pyc":
                archive.write(source, source.relative_to(package.parent))
        for name in ("METADATA", "WHEEL", "entry_points.txt"):
            archive.write(info / name, f"{info.name}/{name}")
        archive.writestr(f"{info.name}/RECORD", "")
    return path.read_bytes()


def swap_hash(script: Path, line_start: str, content: bytes) -> None:
    lines = script.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith(line_start):
            old = line.rsplit('"', 2)[1]
            lines[number] = line.replace(old, hashlib.sha256(content).hexdigest())
    script.write_text("".join(lines), encoding="utf-8")


def environment(index: Index, **more: str) -> dict[str, str]:
    """A user whose home cannot be written, and whose index is ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.url, "HOME": "/nonexistent"}
    return {**kept, **ours, "XDG_CACHE_HOME": "", **more}


def set_up(folder: Path, index: Index, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/setup.py", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(index, **more),
        capture_output=True,
        text=True,
        check=False,
    )


def imports(folder: Path, *names: str, venv: str = ".venv") -> bool:
    python = folder / venv / "bin" / "python"
    return subprocess.run([python, "-c", f"import {', '.join(names)}"], check=False).returncode == 0


def test_sets_up_and_the_second_time_does_nothing(done_home: Path, index: Index) -> None:
    home = done_home
    assert imports(home, "tiny", "pip")
    assert sorted(path.name for path in (home / ".vendor" / "uplot").iterdir()) == [
        "LICENSE", "uPlot.iife.js", "uPlot.min.css",
    ]  # fmt: skip
    began = time.monotonic()
    second = set_up(home, index)
    assert second.stdout == "Set-up: complete, nothing to do.\n"
    assert time.monotonic() - began < 1.0  # 0.05 s alone; the machine may be busy
    assert index.asked == []


def test_dev_is_added_later_and_then_covers_all(done_home: Path, index: Index) -> None:
    assert set_up(done_home, index, "--dev").returncode == 0
    assert imports(done_home, "tiny", "tinier")
    assert "nothing to do" in set_up(done_home, index, "--quant").stdout
    assert "nothing to do" in set_up(done_home, index).stdout
    assert "nothing to do" in set_up(done_home, index, "--dev").stdout


@pytest.mark.slow
def test_peers_come_with_one_that_asks_for_what_is_not_there(
    done_home: Path, index: Index, tmp_path: Path
) -> None:
    """dictionary-learning asks for another nnsight than the benchmarks take."""
    asking = wheel_of("lonely", {"lonely.py": ""}, tmp_path, needs="missing")
    index.files["lonely-1.0-py3-none-any.whl"] = asking
    (done_home / "requirements-oracle.txt").write_text("tiny==1.0\n")
    (done_home / "requirements-peers.txt").write_text("-r requirements-oracle.txt\ntinier==1.0\n")
    (done_home / "requirements-peers-alone.txt").write_text("lonely==1.0\n")
    done = set_up(done_home, index, "--peers")
    assert done.returncode == 0, done.stderr
    assert imports(done_home, "tiny", "tinier", "lonely", venv=".venv-peers")
    assert not imports(done_home, "tinier")
    assert "nothing to do" in set_up(done_home, index, "--peers").stdout


def test_an_extra_is_added_later(done_home: Path, index: Index) -> None:
    assert "nothing to do" not in set_up(done_home, index, "--quant").stdout
    assert imports(done_home, "tiny", "tinier")


def test_a_changed_requirement_file_is_installed(done_home: Path, index: Index) -> None:
    (done_home / "requirements.txt").write_text("tiny==1.0\ntinier==1.0\n")
    again = set_up(done_home, index)
    assert "Python environment .venv: there already" in again.stdout
    assert imports(done_home, "tinier")


def test_goes_on_after_a_package_was_not_to_be_had(done_home: Path, index: Index) -> None:
    kept = index.files.pop("tinier-1.0-py3-none-any.whl")
    stopped = set_up(done_home, index, "--dev")
    assert stopped.returncode == 1
    assert "pip could not install the requirements" in stopped.stderr
    index.files["tinier-1.0-py3-none-any.whl"] = kept
    assert set_up(done_home, index, "--dev").returncode == 0
    assert imports(done_home, "tinier")


def test_a_killed_set_up_is_waited_for_and_completed(done_home: Path, index: Index) -> None:
    """SIGKILL of the set-up while its pip works: the next one waits for that pip, then completes."""
    gate, first = blocked_set_up(done_home, index)
    first.kill()
    first.wait()
    second = start(done_home, index)
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    gate.set()
    assert second.wait(60) == 0
    second.stdout.close()
    assert imports(done_home, "tinier")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_set_up_ends_its_pip(number: int, code: int, done_home: Path, index: Index) -> None:
    gate, process = blocked_set_up(done_home, index)
    process.send_signal(number)
    process.communicate(timeout=20)  # pip holds the other end of the pipe: it is gone, too
    gate.set()
    assert process.returncode == code


def blocked_set_up(folder: Path, index: Index) -> tuple[threading.Event, subprocess.Popen[str]]:
    """A set-up whose pip waits for the index until the gate opens."""
    gate, answer = threading.Event(), index.answer

    def slow(path: str) -> bytes | None:
        if path.endswith("/tinier/"):
            gate.wait(30)
        return answer(path)

    index.answer = slow  # type: ignore[method-assign]
    process = start(folder, index)
    until(lambda: any(path.endswith("/tinier/") for path, _ in index.asked))
    return gate, process


def start(folder: Path, index: Index) -> subprocess.Popen[str]:
    """As at a terminal: a shell that runs us in the background ignores Ctrl-C, and children inherit that."""
    command = ["env", "--default-signal=INT", sys.executable, "scripts/setup.py", "--dev"]
    return subprocess.Popen(command, cwd=folder, env=environment(index), stdout=subprocess.PIPE, text=True)


def test_a_half_made_environment_is_made_anew(home: Path, index: Index) -> None:
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "python").symlink_to("/gone/python3.10")
    (home / ".venv" / "left over").touch()
    assert set_up(home, index).returncode == 0
    assert not (home / ".venv" / "left over").exists()
    assert imports(home, "tiny")


def test_a_half_installed_package_is_installed_again(done_home: Path, index: Index) -> None:
    """What a pip leaves that was killed while it wrote a package: metadata, no code, RECORD as in the wheel."""
    site = next((done_home / ".venv" / "lib").glob("python*/site-packages"))
    shutil.rmtree(site / "tiny")
    (site / "tiny-1.0.dist-info" / "RECORD").write_text("tiny/__init__.py,,\n")
    (site / "~iny").mkdir()
    (done_home / ".venv" / ".setup" / "requirements.txt").unlink()
    assert set_up(done_home, index).returncode == 0
    assert imports(done_home, "tiny")
    assert not (site / "~iny").exists()


def test_options_that_would_send_packages_elsewhere_are_set_aside(home: Path, index: Index) -> None:
    target = home / "elsewhere"
    done = set_up(home, index, PIP_USER="1", PIP_TARGET=str(target), PYTHONPATH=str(home))
    assert done.returncode == 0, done.stderr
    assert imports(home, "tiny")
    assert not target.exists()


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@pytest.mark.slow
def test_the_pinned_pip_is_what_the_users_index_offers(tmp_path: Path) -> None:
    """Without ensurepip and without pip: a bare venv gets the real pip, its hash checked."""
    folder = tmp_path / "mi studio"
    shutil.copytree(SCRIPTS, folder / "scripts")
    (folder / "jobs").mkdir()
    shutil.copy(ROOT / "jobs" / "wheels.py", folder / "jobs")
    (folder / "constraints.txt").write_text("sqlparse==0.6.1\n")
    (folder / "requirements.txt").write_text("-c constraints.txt\nsqlparse\n")
    done = subprocess.run(
        [sys.executable, "scripts/setup.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    if "could not be reached" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    assert imports(folder, "sqlparse")
    assert (folder / ".vendor" / "uplot" / "uPlot.iife.js").stat().st_size > 100_000
