"""A private PostgreSQL cluster on a unix socket, started, stopped and asked by tests; a wire to it that can be cut."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1:]
SOCKET = ".s.PGSQL.5432"


class Cluster:
    """Start with `with`; its folder goes with the block."""

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="mspg", dir="/tmp"))
        if os.geteuid() == 0:
            shutil.chown(self.folder, "postgres")
        self.data = self.folder / "data"
        run(BINARIES[0] / "initdb", "-D", self.data, "-A", "trust", "-U", "mistudio")
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop(check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off"
        run(BINARIES[0] / "pg_ctl", "-D", self.data, "-w", "-l", self.folder / "log", "-o", options, "start")

    def stop(self, *, check: bool = True) -> None:
        run(BINARIES[0] / "pg_ctl", "-D", self.data, "-m", "immediate", "stop", check=check)

    @property
    def url(self) -> str:
        return url_at(self.folder)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(host=str(self.folder), user="mistudio", dbname="postgres") as connection:
            return list(connection.execute(query))  # type: ignore[arg-type]


def url_at(folder: Path) -> str:
    return f"postgres://mistudio@{quote(str(folder), safe='')}/postgres"


def run(*command: str | Path, check: bool = True) -> None:
    """PostgreSQL refuses root: there, its own account runs it."""
    words = [str(word) for word in command]
    owner = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    # Not captured: the server that pg_ctl leaves behind would hold the pipe open.
    subprocess.run([*owner, *words], check=check, cwd="/", stdout=subprocess.DEVNULL)


class Wire:
    """A process between a host and its database, at a socket of its own: what is sent through it arrives, until it
    is cut (connections are refused) or silent (nothing answers, as in a network that swallows packets)."""

    def __init__(self, cluster: Cluster) -> None:
        self.target = cluster.folder / SOCKET
        self.folder = Path(tempfile.mkdtemp(prefix="mswire", dir="/tmp"))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Wire:
        self.mend()
        return self

    def __exit__(self, *args: object) -> None:
        self.cut()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return url_at(self.folder)

    def mend(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            return
        listener = self.folder / SOCKET
        listener.unlink(missing_ok=True)
        self.process = subprocess.Popen([sys.executable, __file__, str(listener), str(self.target)])
        while not listener.exists():
            time.sleep(0.02)

    def cut(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def silence(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)


def relay(listener: str, target: str) -> None:
    """Pass bytes on in both directions, for any number of connections."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(listener)
    server.listen(100)
    os.chmod(listener, 0o777)
    peers: dict[socket.socket, socket.socket] = {}
    while True:
        for ready in select.select([server, *peers], [], [])[0]:
            if ready is server:
                ours, theirs = server.accept()[0], socket.socket(socket.AF_UNIX)
                theirs.connect(target)
                peers |= {ours: theirs, theirs: ours}
            elif ready in peers and not pass_on(ready, peers[ready]):
                for end in (ready, peers.pop(ready)):
                    peers.pop(end, None)
                    end.close()


def pass_on(source: socket.socket, target: socket.socket) -> bool:
    try:
        data = source.recv(65536)
        target.sendall(data)
        return bool(data)
    except OSError:
        return False


if __name__ == "__main__":
    relay(*sys.argv[1:])
