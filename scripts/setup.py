#!/usr/bin/env python3
"""Sets miStudio up in this folder: `python3 scripts/setup.py [--quant] [--tables] [--dev] [--oracle] [--peers]`.

Makes `.venv`, brings pip into it from its own hash-checked wheel, installs the pinned requirements, and
unpacks the chart library's files. Needs a Python 3.11 to 3.13 and nothing else: no ensurepip, no pip, no
root. Each step is stamped when it is complete: an interrupted set-up goes on where it stopped, and a complete
one is recognised at once.

The files of this folder parse on Python 3.6, so that an old Python gets a sentence and not a SyntaxError.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple

# No __pycache__ beside the scripts: the folder may be shared, or read-only to this user.
sys.dont_write_bytecode = True

from environment import LOCKS, Venv, supported
from pip_wheel import PIP_SHA256, PIP_WHEEL, SetupError, pip_wheel, sha256

ROOT = Path(__file__).resolve().parent.parent
VENDOR = ROOT / ".vendor"

UPLOT = ("uplot-python", "1.1.1", "07c96cc34ff9107c3751fc31dfad48ccd6e86c6deebb8b41d7ec7d9811722208")
UPLOT_MEMBERS = ("uplot/static/uPlot.iife.js", "uplot/static/uPlot.min.css", "*.dist-info/licenses/LICENSE")
UPLOT_FILES = ("uPlot.iife.js", "uPlot.min.css", "LICENSE")

RUN, DEV = "requirements.txt", "requirements-dev.txt"
QUANT, TABLES = "requirements-quant.txt", "requirements-tables.txt"

# With the CPU build of torch 1.7 GB are installed, and the largest wheel is there once more while it is
# unpacked. The CUDA build takes 5.5 GB; which one comes is not known before pip has asked the index.
BASE_BYTES, MORE_BYTES = 3 * 1024**3, 1024**3


class Step:
    """One piece of the set-up: what it is called, whether it is done, and how it is done."""

    def __init__(self, label: str, done: Callable[[], bool], act: Callable[[], None]) -> None:
        self.label, self.done, self.act = label, done, act


# --- what must be true first ------------------------------------------------------------------------------


def require_platform(name: str = sys.platform) -> None:
    if name != "linux":
        raise SetupError(
            f"miStudio runs on Linux (it reads /proc and holds processes by pidfd); this is {name}."
        )


def require_python(version: Tuple[int, ...] = tuple(sys.version_info[:3])) -> None:
    if not supported(version):
        found = ".".join(map(str, version))
        raise SetupError(
            f"miStudio runs on Python 3.11, 3.12 or 3.13; this is Python {found} ({sys.executable}).\n"
            + other_python()
        )


def other_python() -> str:
    """The remedy: a fitting Python that is here already, else where one comes from."""
    for name in ("python3.13", "python3.12", "python3.11"):
        if shutil.which(name) and works([name, "-c", ""]):
            return f"{name} is on this machine: add PYTHON={name}, as in `make demo PYTHON={name}`."
    return (
        "Install one (Debian 12 and 13 and Ubuntu 24.04 bring one: `sudo apt-get install python3`), "
        "then add PYTHON=<its name> to the command."
    )


def works(command: List[str]) -> bool:
    try:
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def require_disk(needed: int) -> None:
    free = shutil.disk_usage(str(ROOT)).free
    if free < needed:
        raise SetupError(
            f"The disk of {ROOT} has {free / 1e9:.1f} GB free; this step needs {needed / 1e9:.1f} GB. "
            "Free some space, or move the folder to another disk, then run the same command again."
        )


# --- the steps --------------------------------------------------------------------------------------------


def steps(
    dev: bool = False,
    oracle: bool = False,
    quant: bool = False,
    tables: bool = False,
    peers: bool = False,
) -> List[Step]:
    main = Venv(ROOT, ".venv")
    packages = (DEV, RUN, QUANT, TABLES) if dev else (RUN,)
    plan = [venv_step(main), pip_step(main), packages_step(main, *packages), uplot_step(main)]
    plan += [packages_step(main, name) for name, asked in ((QUANT, quant), (TABLES, tables)) if asked]
    if oracle:
        other = Venv(ROOT, ".venv-oracle")
        plan += [venv_step(other), pip_step(other), packages_step(other, "requirements-oracle.txt")]
    if peers:
        plan += peers_steps(Venv(ROOT, ".venv-peers"))
    return plan


def peers_steps(venv: Venv) -> List[Step]:
    packages = packages_step(venv, "requirements-peers.txt", "requirements-oracle.txt")
    return [venv_step(venv), pip_step(venv), packages, alone_step(venv, "requirements-peers-alone.txt")]


def alone_step(venv: Venv, name: str) -> Step:
    """Packages whose own requirements would take away what stands there already."""
    digest = digest_of(name)

    def act() -> None:
        venv.pip("install", "--only-binary", ":all:", "--no-deps", "-r", str(ROOT / name))
        venv.stamp(name, digest)

    return Step(f"packages of {name}", lambda: venv.stamped(name, digest), act)


def venv_step(venv: Venv) -> Step:
    return Step(f"Python environment {venv.name}", venv.sound, venv.make)


def pip_step(venv: Venv) -> Step:
    def act() -> None:
        wheel = pip_wheel(VENDOR)
        # A wheel is a zip that Python runs from: pip installs itself.
        venv.pip("install", "--no-index", "--no-deps", "--quiet", str(wheel), program=wheel / "pip")
        venv.stamp("pip", PIP_SHA256)

    return Step(f"pip, from {PIP_WHEEL}", lambda: venv.stamped("pip", PIP_SHA256), act)


def packages_step(venv: Venv, name: str, *included: str) -> Step:
    """Installs the requirement file `name`, and with it the files `included` that it takes in."""
    digest = digest_of(name, *included)

    def act() -> None:
        before = any((venv.stamps / file).exists() for file in (RUN, *included))
        require_disk(MORE_BYTES if before else BASE_BYTES)
        venv.drop_half_installed()
        # Only wheels: a fresh machine has no compiler.
        venv.pip("install", "--only-binary", ":all:", "-r", str(ROOT / name))
        shutil.rmtree(str(venv.cache), ignore_errors=True)
        venv.stamp(name, digest)
        for file in included:
            venv.stamp(file, digest_of(file))

    return Step(f"packages of {name}", lambda: venv.stamped(name, digest), act)


def digest_of(*names: str) -> str:
    """What a step was done from: requirement files, and the kind of machine they were resolved for."""
    content = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in (*names, "constraints.txt"))
    return sha256(f"{platform.machine()}\n{content}".encode())


def uplot_step(venv: Venv) -> Step:
    folder = VENDOR / "uplot"

    def done() -> bool:
        return venv.stamped("uplot", UPLOT[2]) and all((folder / name).is_file() for name in UPLOT_FILES)

    def act() -> None:
        wheels = wheels_module()
        try:
            wheel = wheels.fetch_wheel(*UPLOT, VENDOR, python=str(venv.python))
            wheels.unpack(wheel, UPLOT_MEMBERS, folder)
        except wheels.WheelError as error:
            raise SetupError(str(error)) from None
        venv.stamp("uplot", UPLOT[2])

    return Step("chart library uPlot", done, act)


def wheels_module() -> Any:
    """`jobs/wheels.py` by its path: the package around it may want Django, which need not be there yet."""
    import importlib.util

    path = ROOT / "jobs" / "wheels.py"
    spec: Any = importlib.util.spec_from_file_location("mistudio_wheels", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- doing them -------------------------------------------------------------------------------------------


def set_up(plan: List[Step]) -> None:
    if all(step.done() for step in plan):
        say("Set-up: complete, nothing to do.")
        return
    require_python()
    began = time.monotonic()
    lock()
    say(f"Setting miStudio up in {ROOT}")
    for number, step in enumerate(plan, 1):
        perform(step, f"[{number}/{len(plan)}] {step.label}")
    say(f"Set-up: complete after {time.monotonic() - began:.0f} s.")


def perform(step: Step, place: str) -> None:
    if step.done():
        say(f"{place}: there already")
        return
    say(f"{place} …")
    began = time.monotonic()
    step.act()
    say(f"{place}: done in {time.monotonic() - began:.1f} s")


def lock() -> None:
    """One set-up at a time in one folder: the folder itself is the lock."""
    import fcntl

    LOCKS.append(os.open(str(ROOT), os.O_RDONLY))
    try:
        fcntl.flock(LOCKS[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("Another set-up is at work in this folder; waiting for it.")
        fcntl.flock(LOCKS[0], fcntl.LOCK_EX)
    except OSError:
        say("This disk cannot lock a folder: please run one set-up at a time.")


def say(line: str) -> None:
    print(line, flush=True)


def options(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Sets miStudio up in this folder.")
    parser.add_argument("--quant", action="store_true", help="also what quantized models need")
    parser.add_argument("--tables", action="store_true", help="also what Parquet and Arrow files need")
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument(
        "--oracle", action="store_true", help="also the libraries that results are compared with"
    )
    parser.add_argument("--peers", action="store_true", help="also the libraries that speed is compared with")
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> int:
    chosen = options(arguments)
    # Like Ctrl-C, so that pip is ended with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        require_platform()
        set_up(steps(chosen.dev, chosen.oracle, chosen.quant, chosen.tables, chosen.peers))
    except SetupError as error:
        print(f"\nSet-up stopped. {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nSet-up interrupted. Run the same command to go on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
