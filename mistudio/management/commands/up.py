"""`manage.py up`: all processes of a single host, its private broker included (contract, section 6)."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connections
from django.utils import timezone
from setproctitle import setproctitle

from gpus.models import Host, Maintenance, Pulse
from gpus.timing import scaled
from jobs import tasks
from jobs.models import ACTIVE, Job
from mistudio import broker, home
from mistudio.supervisor import Service, end_all, procfile
from monitor import signin

READY_SECONDS = 60.0
DEAF_SECONDS = 90.0
END_SECONDS = 13.0  # of the 15 s in which SIGTERM must have ended everything


class Command(BaseCommand):
    help = (
        "Run miStudio on this host: web, agent, workers, beat, and a private broker unless REDIS_URL is set."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=int(os.environ.get("PORT") or 8000))

    def handle(self, *args: Any, **options: Any) -> None:
        setproctitle("mistudio up")
        self.url = f"http://{_shown(settings.MISTUDIO_BIND)}:{options['port']}"
        self.stop_requested = False
        os.environ["CELERY_SKIP_CHECKS"] = "1"  # this command has run them
        os.environ["MISTUDIO_HOME"] = str(
            settings.MISTUDIO_HOME
        )  # absolute, whatever the children's folder is
        lock = home.take_lock(settings.MISTUDIO_HOME)
        self.ready_file().unlink(missing_ok=True)  # of an `up` that was killed
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        require_free_port(settings.MISTUDIO_BIND, options["port"])
        self.written_pids: dict[str, int | None] = {}
        self.broker = self.start_broker()
        call_command("migrate", verbosity=0, interactive=False, stdout=self.stdout)
        self.services = self.make_services(options["port"])
        try:
            for service in self.services:
                service.start()
            self.wait_until_ready()
            self.announce()
            self.supervise()
        finally:
            self.end()
            lock.close()

    def _stop(self, *args: Any) -> None:
        self.stop_requested = True

    # Start --------------------------------------------------------------------------------------------

    def start_broker(self) -> Service | None:
        """The private broker; a REDIS_URL of the user's own is only asked whether it answers."""
        if os.environ.get("REDIS_URL"):
            broker.wait_until_answers(settings.REDIS_URL)
            return None
        path = home.socket_folder(settings.MISTUDIO_HOME) / "broker.sock"
        command = broker.command(path, settings.MISTUDIO_HOME / "run" / "broker")
        service = Service(
            "broker", command, settings.MISTUDIO_HOME / "logs" / "broker.log", settings.BASE_DIR
        )
        service.start()
        broker.wait_until_answers(settings.REDIS_URL, service.process)
        return service

    def make_services(self, port: int) -> list[Service]:
        values = {
            "PORT": str(port),
            "MISTUDIO_BIND": settings.MISTUDIO_BIND,
            "MISTUDIO_HOST_NAME": settings.MISTUDIO_HOST_NAME,
            # Believed only where a proxy is said to stand in front: anybody else could name any address.
            "PROXY_HEADERS": "--proxy-headers" if settings.MISTUDIO_PUBLIC_URL else "",
        }
        logs = settings.MISTUDIO_HOME / "logs"
        commands = procfile(settings.BASE_DIR / "Procfile", values)
        return [
            Service(name, words, logs / f"{name}.log", settings.BASE_DIR) for name, words in commands.items()
        ]

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.stop_requested:
            waiting = [s.name for s in self.services if not s.running()] or self.unready_parts()
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise CommandError(
                    f"Not ready after {READY_SECONDS:.0f} s: {', '.join(waiting)}; see {self.logs()}."
                )
            time.sleep(0.1)

    def unready_parts(self) -> list[str]:
        host = Host.objects.filter(name=settings.MISTUDIO_HOST_NAME).first()
        since = timezone.now() - timedelta(seconds=time.monotonic() - self.services[0].started_at)
        seen = {
            "agent": host.agent_seen_at if host else None,
            "worker": host.worker_seen_at if host else None,
            "worker-cpu": Pulse.objects.filter(name="canary:cpu").values_list("at", flat=True).first(),
        }
        missing = [name for name, at in seen.items() if at is None or at < since]
        return missing + ([] if self.web_answers() else ["web"])

    def web_answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/system/health", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True  # degraded is an answer, too
        except OSError:
            return False

    def write_ready(self) -> None:
        """Who runs, for people and scripts; written again when a process was replaced."""
        pids = {s.name: s.pid for s in self.all_services()}
        if pids != self.written_pids:
            ready = {"url": self.url, "pid": os.getpid(), "processes": pids}
            home.write_private(self.ready_file(), json.dumps(ready))
            self.written_pids = pids

    def all_services(self) -> list[Service]:
        return [*([self.broker] if self.broker else []), *self.services]

    def announce(self) -> None:
        self.say(f"miStudio runs at {self.url}")
        self.say(f"Sign in (once, within 15 minutes): {signin.make_link(self.url)}")
        for one in Maintenance.in_force():
            self.say(f"{one.sentence} (`manage.py maintenance end`)")
        self.say("Ctrl-C ends the services; running jobs go on.")
        self.write_ready()  # last: who waits for this file finds the lines above

    # Run ----------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        looked_at = time.monotonic()
        while not self.stop_requested:
            for service in self.all_services():
                service.tend(self.say)
            self.write_ready()
            if time.monotonic() - looked_at > scaled(10):
                looked_at = time.monotonic()
                self.restart_the_deaf()
            time.sleep(0.2)

    def restart_the_deaf(self) -> None:
        """A worker may live and yet consume nothing after its broker was away, a beat send nothing: pulses tell."""
        signs = {
            "worker": f"canary:{tasks.host_queue(settings.MISTUDIO_HOST_NAME)}",
            "worker-cpu": "canary:cpu",
            "beat": "beat",
        }
        try:
            pulses = dict(Pulse.objects.values_list("name", "at"))
        except OperationalError:
            connections.close_all()
            return
        for service in self.services:
            if service.name in signs and self.is_deaf(service, pulses.get(signs[service.name])):
                self.say(
                    f"{service.name} has not answered for {scaled(DEAF_SECONDS):.0f} s; starting it again"
                )
                service.send(signal.SIGKILL)

    def is_deaf(self, service: Service, heard_at: datetime | None) -> bool:
        limit = scaled(DEAF_SECONDS)
        silent = heard_at is None or (timezone.now() - heard_at).total_seconds() > limit
        return silent and time.monotonic() - service.started_at > limit

    # End ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """In order, within 15 s: first what takes requests and sends, then what carries them."""
        self.ready_file().unlink(missing_ok=True)
        end_all([s for s in self.services if s.running()], END_SECONDS)
        end_all(self.all_services(), 2.0)
        self.say_what_goes_on()

    def say_what_goes_on(self) -> None:
        running = Job.objects.filter(status__in=ACTIVE).select_related("owner")
        for job in running:
            self.say(f"goes on: {job} ({job.kind}, {job.owner}) on {job.gpu_uuid or 'the CPU'}")

    def say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()

    def ready_file(self) -> Path:
        return settings.MISTUDIO_HOME / "run" / "ready.json"

    def logs(self) -> Path:
        return settings.MISTUDIO_HOME / "logs"


def require_free_port(bind: str, port: int) -> None:
    """Refuse now: another server on this port would answer in our place."""
    with socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            raise CommandError(
                f"Port {port} of {bind}: {error.strerror}. Choose another: PORT={port + 1}."
            ) from None


def _shown(bind: str) -> str:
    return "127.0.0.1" if bind in ("0.0.0.0", "::") else bind  # noqa: S104 (compared, not bound)
