"""A small server, child of the host's worker, that makes keepers by fork: 20 ms instead of 2 s of imports.

It has Django, torch and transformers imported, one thread, and CUDA untouched; this is checked before each
fork, and where it does not hold the keeper is started as a fresh process, with a warning that names the cause.
Requests arrive over a socket pair whose other end the worker holds: when the worker goes, the server reads
the end of the file and leaves. Its end ends no job: keepers lead sessions of their own.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading

from django.conf import settings

logger = logging.getLogger("mistudio.forkserver")

#: numpy's OpenBLAS starts threads when it is imported, and a process that forks must have one. OpenMP reads its
#: policy when it is loaded: threads that wait spinning made three trainings on two cores four times slower.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


PRELOADED = ("torch", "transformers.models.auto.modeling_auto", "jobs.keeper", "jobs.work")
SEND_SECONDS = 1.0  # a server that reads no more is replaced: the socket's error says so
culprits: list[str] = []  # modules after whose import forking is unsafe; the first one is to blame


class Client:
    """The worker's side. Thread-safe; starts the server at the first request and after its end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.server: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None

    def warm(self) -> None:
        """Start the server now, so that the first job does not wait for its imports."""
        with self.lock:
            self._ensure()

    def request(self, job_id: str, attempt: int) -> None:
        """Ask for a keeper. Returns at once; a server that is still importing reads it when it is ready."""
        if settings.MISTUDIO_JOB_START == "spawn":
            return spawn(job_id, attempt)
        message = json.dumps({"job": job_id, "attempt": attempt}).encode()
        with self.lock:
            try:
                self._ensure().send(message)
            except OSError:
                self._close()
                self._ensure().send(message)

    def _ensure(self) -> socket.socket:
        if self.sock is None or self.server is None or self.server.poll() is not None:
            self._close()
            self._start()
        assert self.sock is not None
        return self.sock

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.server = subprocess.Popen(
                [sys.executable, "manage.py", "forkserver", str(theirs.fileno())],
                cwd=settings.BASE_DIR,
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
            )
        ours.settimeout(SEND_SECONDS)
        self.sock = ours

    def _close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        self.sock = None


def serve(handle: int) -> None:
    """The server's loop, until the worker is gone."""
    sock = socket.socket(fileno=handle)
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped by the kernel
    gc.collect()
    gc.freeze()  # what is there now stays shared between the children
    while message := sock.recv(4096):
        request = json.loads(message)
        start(request["job"], request["attempt"], sock)


def preload() -> None:
    """Import what keepers and works need, and remember the first module after which forking is unsafe."""
    from jobs import registry

    for module in [*PRELOADED, *(f"jobs.kinds.{name}" for name in registry.names())]:
        importlib.import_module(module)
        if unsafe():
            culprits.append(module)
    registry.all_kinds()


def start(job_id: str, attempt: int, sock: socket.socket) -> None:
    reason = unsafe()
    if reason:
        since = culprits[0] if culprits else "something later than our own imports"
        logger.warning("starting %s as a fresh process, 2 s slower: %s, since %s", job_id, reason, since)
        spawn(job_id, attempt)
        return
    if os.fork() == 0:
        become_keeper(job_id, attempt, sock)


def become_keeper(job_id: str, attempt: int, sock: socket.socket) -> None:
    """In the child: forget the server, be a keeper, and never return."""
    try:
        sock.close()
        os.environ.pop("OPENBLAS_NUM_THREADS", None)
        from jobs import keeper

        keeper.main(job_id, attempt)
    except BaseException:
        logger.exception("keeper of %s", job_id)
    finally:
        logging.shutdown()
        os._exit(0)


def spawn(job_id: str, attempt: int) -> None:
    """A keeper as a fresh process: slower, and safe whatever this process has touched."""
    subprocess.Popen(
        [sys.executable, "manage.py", "keeper", job_id, str(attempt)],
        cwd=settings.BASE_DIR,
        env={name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def unsafe() -> str:
    """Why this process must not fork now; empty when it may. A forked child cannot use CUDA that its parent
    touched, and hangs on a lock that another thread of its parent held."""
    threads = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    if len(threads) > 1:
        return f"{len(threads)} threads are running ({', '.join(threads)})"
    if nvidia := _open_devices():
        return f"{nvidia} is open"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    return ""


def _open_devices() -> str:
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            return target
    return ""
