"""The reader process: `python -m gpus.reader '<spec>'`. The only place where a backend is called for samples.

JSON lines: a request `{"call": "read", "uuid": "GPU-…"}` on stdin, one answer on stdout, in order. A driver call
may hang for ever; then `gpus.readers` kills this process, which is why it is one, and loads next to nothing.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from contextlib import suppress
from typing import Any

from gpus import backends
from gpus.backends.base import Backend, BackendUnavailable, CardLost, CardSilent

PR_SET_PDEATHSIG = 1


def answer(backend: Backend, request: dict[str, Any]) -> Any:
    if request["call"] == "list":
        return {"cards": [c.as_dict() for c in backend.list_cards()], "unreadable": backend.unreadable}
    if request["call"] == "read":
        return backend.read(request["uuid"]).as_dict()
    if request["call"] == "processes":
        return [process.as_dict() for process in backend.processes(request["uuid"])]
    raise ValueError(f"unknown call {request['call']!r}")


class Server:
    """Makes the backend at the first call, and again after it was unavailable."""

    def __init__(self, spec: backends.Spec) -> None:
        self.spec = spec
        self.backend: Backend | None = None

    def warm(self) -> None:
        """A driver that nobody uses takes a second per card to start: before the first call, whose time is short.
        What goes wrong here goes wrong again at the first call, and is told there."""
        with suppress(Exception):
            self.backend = backends.make(self.spec)

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self.backend = self.backend or backends.make(self.spec)
            return {"ok": answer(self.backend, request)}
        except BackendUnavailable as error:
            self.backend = None
            said = {"error": "unavailable", "reason": error.reason, "repair": error.repair}
            return said | {"stale_library": error.stale_library}
        except CardLost as error:
            return {"error": "lost", "reason": str(error)}
        except CardSilent as error:
            return {"error": "failed", "reason": str(error)}
        except Exception as error:  # one odd card must not end the reader of the others
            return {"error": "failed", "reason": f"{type(error).__name__}: {error}"}


def die_with_parent() -> None:
    """Even in the middle of a call that never returns (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the agent, which ends us in order
    server = Server(json.loads(sys.argv[1]))
    server.warm()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(server.respond(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
