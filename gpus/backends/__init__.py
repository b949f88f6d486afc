"""Which backend reads the cards of this host, and whether there is a driver at all.

A backend is described by a `Spec`, plain data that crosses to the reader process, so that no reader loads Django.
"""

from __future__ import annotations

import ctypes
from glob import glob
from typing import Any, TypedDict

from gpus.backends.base import Backend, BackendUnavailable

DRIVER_LIBRARY = "libnvidia-ml.so.1"
INSTALL = "Install the NVIDIA driver of this machine; `nvidia-smi` must then list its cards."
NAME_SIZES = "Set MISTUDIO_SIMULATED_GPUS, such as 24GiB,24GiB,80GiB."


class Spec(TypedDict):
    backend: str
    host: str
    home: str
    sizes: list[int]


def spec(name: str | None = None) -> Spec:
    """The backend of the settings as plain data."""
    from django.conf import settings

    return {
        "backend": name or settings.MISTUDIO_GPU_BACKEND,
        "host": settings.MISTUDIO_HOST_NAME,
        "home": str(settings.MISTUDIO_HOME),
        "sizes": list(settings.MISTUDIO_SIMULATED_GPUS),
    }


def make(wanted: Spec) -> Backend:
    """The backend itself. Raises `BackendUnavailable` with the repair."""
    if wanted["backend"] == "simulated":
        from gpus.backends.simulated import SimulatedBackend

        if not wanted["sizes"]:
            raise BackendUnavailable("The backend is “simulated”, but no cards are named.", NAME_SIZES)
        return SimulatedBackend(wanted["home"], wanted["host"], wanted["sizes"])
    if not driver_library():
        raise BackendUnavailable(
            f"There is no {DRIVER_LIBRARY} on this machine: no NVIDIA driver is installed.", INSTALL
        )
    from gpus.backends.nvml import NvmlBackend

    return NvmlBackend()


def get(name: str | None = None) -> Backend:
    """The backend of the settings, or of this name, in this process (short questions such as `lookup`)."""
    return make(spec(name))


def driver_library() -> bool:
    try:
        _load(DRIVER_LIBRARY)
    except OSError:
        return False
    return True


def _load(name: str) -> Any:
    return ctypes.CDLL(name)


def driver_present() -> bool:
    """Whether this machine has, or had, a driver: its library or its device files."""
    return bool(glob("/dev/nvidia[0-9]*") or glob("/dev/nvidiactl")) or driver_library()
