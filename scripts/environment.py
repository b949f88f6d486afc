"""One virtual environment: its Python, the stamps of what was completed in it, and pip running in it."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from pip_wheel import SetupError, find_pip
from voice import Voice

OLDEST, NEWEST = (3, 11), (3, 13)

# Less than this after a pip that failed: the disk is why.
FULL_BYTES = 200 * 1024**2

#: Open folders that are locked while a set-up runs. pip inherits them, so an orphaned pip is waited for.
LOCKS: List[int] = []


def supported(version: Tuple[int, ...]) -> bool:
    return OLDEST <= tuple(version[:2]) <= NEWEST


class Venv:
    """The folder `root/name`. A step is stamped in it when it is complete, and not before."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        self.folder = root / name
        self.python = self.folder / "bin" / "python"
        self.stamps = self.folder / ".setup"
        self.temporary = self.folder / ".tmp"
        self.cache = self.folder / ".cache"

    def version(self) -> Optional[Tuple[int, ...]]:
        """The version of its Python; None when there is none, or a broken one."""
        code = "import sys; assert sys.prefix != sys.base_prefix; print(*sys.version_info[:2])"
        try:
            answer = subprocess.check_output([str(self.python), "-I", "-c", code], stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            return None
        version = tuple(map(int, answer.split()))
        # After an upgrade of the system the same link may lead to a newer Python, with no packages.
        return version if (self.folder / "lib" / "python{}.{}".format(*version)).is_dir() else None

    def sound(self) -> bool:
        return supported(self.version() or (0,))

    def make(self) -> None:
        try:
            import venv
        except ImportError:
            raise SetupError(
                "This Python has no module venv. Install it (`sudo apt-get install python3-venv`), "
                "then run the same command again."
            ) from None
        # clear: what is there is half made, or belongs to a Python that is gone.
        venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(str(self.folder))

    def stamped(self, step: str, digest: str) -> bool:
        try:
            return (self.stamps / step).read_text() == digest
        except OSError:
            return False

    def stamp(self, step: str, digest: str) -> None:
        self.stamps.mkdir(exist_ok=True)
        part = self.stamps / f".{step}"
        part.write_text(digest)
        part.replace(self.stamps / step)

    def pip(self, *arguments: str, program: Optional[Path] = None) -> None:
        """Runs its own pip, or the one in the wheel `program`."""
        how = [str(program)] if program else ["-m", "pip"]
        self.temporary.mkdir(exist_ok=True)
        try:
            run([str(self.python), *how, *arguments], pip_environment(self))
        finally:
            shutil.rmtree(str(self.temporary), ignore_errors=True)

    def drop_half_installed(self) -> None:
        """Forgets packages that a killed pip left half written, so that the next pip writes them again.

        pip's last act on a package is to write RECORD anew, with INSTALLER in it. Folders that start with a
        tilde are packages that it had moved aside.
        """
        for site in self.folder.glob("lib/python*/site-packages"):
            for moved in site.glob("~*"):
                remove(moved)
            for info in site.glob("*.dist-info"):
                if not complete(info):
                    remove(info)


def complete(info: Path) -> bool:
    try:
        return "/INSTALLER," in (info / "RECORD").read_text(encoding="utf-8")
    except OSError:
        return False


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(str(path))
    else:
        path.unlink()


def pip_environment(venv: Venv) -> Dict[str, str]:
    """The user's environment, index settings included, less what would send packages somewhere else."""
    elsewhere = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    environment.update(PIP_USER="0", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    environment["PIP_PROGRESS_BAR"] = "raw"
    # /tmp is often small, and memory; the CUDA build of torch is several GB.
    environment["TMPDIR"] = str(venv.temporary)
    if not home_cache_writable():
        environment["PIP_CACHE_DIR"] = str(venv.cache)
    return environment


def home_cache_writable() -> bool:
    """Whether pip can keep its downloads where it wants to; they make a second try short."""
    if os.environ.get("PIP_CACHE_DIR") or os.environ.get("PIP_NO_CACHE_DIR"):
        return True
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(home, "pip").absolute()
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_uid == os.geteuid() and os.access(str(folder), os.W_OK)


def run(command: List[str], environment: Dict[str, str]) -> None:
    """Runs pip, telling how far it is; it does not outlive a set-up that is interrupted."""
    voice = Voice()
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "universal_newlines": True}
    with subprocess.Popen(command, env=environment, pass_fds=LOCKS, **pipe) as process:
        try:
            voice.listen(process.stdout or ())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        print("\n".join(voice.tail), flush=True)
        raise SetupError(explain(environment["TMPDIR"]))


def explain(folder: str) -> str:
    """Why pip gave up, as far as can be seen from outside; its own lines stand above."""
    again = "then run the same command again; what is complete is kept."
    free = shutil.disk_usage(os.path.dirname(folder)).free
    if free < FULL_BYTES:
        return (
            f"The disk is full ({free / 1e6:.0f} MB free). "
            f"Free some space (the CUDA build of torch takes 6 GB), {again}"
        )
    try:
        find_pip()
    except SetupError as unreachable:
        return str(unreachable)
    return f"pip could not install the requirements; its reason stands above. Repair that, {again}"
