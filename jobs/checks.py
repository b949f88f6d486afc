"""System checks of what would end running jobs: the settings of the service that the worker runs in.

Silent where there is no systemd, where no worker runs, or where it is no service.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from django.conf import settings
from django.core import checks

ASK_SECONDS = 2.0
#: What a unit should say, where its default would end jobs; and what happens else.
WANTED = {
    "KillMode": (("process", "none"), "stopping or restarting it ends every running job"),
    "OOMPolicy": (("continue",), "one job that runs out of memory takes the service, and all jobs, with it"),
}
OPEN_FILES = 4096
HINT = "`manage.py units` writes unit files with the right settings; then `systemctl daemon-reload`."


@checks.register()
def worker_unit(**_: Any) -> list[checks.Warning]:
    return [
        checks.Warning(f"{unit}: {problem}", hint=HINT, id="jobs.W001")
        for unit, of_user in units_of_workers()
        for problem in problems(shown(unit, of_user))
    ]


def units_of_workers() -> set[tuple[str, bool]]:
    """Services in which workers of this host run, and whether they are those of a user's own systemd."""
    if shutil.which("systemctl") is None:
        return set()
    return {unit for pid in workers() if (unit := unit_in(cgroup(pid)))}


def workers() -> Iterator[int]:
    queue = f"gpu.{settings.MISTUDIO_HOST_NAME}"
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "celery" in words and "worker" in words and queue in words:
            yield process.pid


def cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def unit_in(cgroups: str) -> tuple[str, bool] | None:
    """`0::/system.slice/mistudio-worker.service`, or the line `name=systemd` of an older hierarchy."""
    for line in cgroups.splitlines():
        number, controllers, path = line.split(":", 2)
        if controllers not in ("", "name=systemd") or (number != "0" and not controllers):
            continue
        services = re.findall(r"[^/]+\.service", path)
        if services and not services[-1].startswith("user@"):
            return services[-1], services[0].startswith("user@")
    return None


def shown(unit: str, of_user: bool) -> dict[str, str]:
    """What systemd has in force for the unit; nothing where it does not say."""
    command = [
        "systemctl",
        *(["--user"] if of_user else []),
        "show",
        "-p",
        "KillMode,OOMPolicy,LimitNOFILE",
        unit,
    ]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=ASK_SECONDS).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def problems(unit: dict[str, str]) -> Iterator[str]:
    for name, (good, otherwise) in WANTED.items():
        if name in unit and unit[name] not in good:
            yield f"{name} is {unit[name]}, not {good[0]}: {otherwise}."
    limit = unit.get("LimitNOFILE", "infinity")
    if limit.isdigit() and int(limit) < OPEN_FILES:
        yield f"LimitNOFILE is {limit}; jobs with many shards need {OPEN_FILES} or more."
