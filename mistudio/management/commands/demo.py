"""`manage.py demo`: the main job for real. A small language model, its activations, an SAE trained on a chosen card.

It does what a user would do, over REST: starts the services unless they run, submits three jobs that wait for
each other, follows them, and says where the results are.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from gpus.backends import driver_present
from mistudio import home
from mistudio.home import take_lock
from monitor.lines import progress_line

MODEL_NAME = "smollm2-135m-instruct"
SIMULATED = "24GiB,24GiB,80GiB"
FINAL = ("succeeded", "failed", "refused", "cancelled")
START_SECONDS = 120.0

EXTRACTION: dict[str, Any] = {
    "sites": [{"block": 8, "site": "resid_post"}],
    "max_tokens": 60_000,
    "context_size": 128,
    "batch_size": 8,
}
TRAINING: dict[str, Any] = {"d_sae": 2304, "k": 32, "tokens": 500_000, "batch_size": 2048, "lr": 0.002}


class Command(BaseCommand):
    help = "Set up, train a sparse autoencoder on a small language model, and leave the dashboard running."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=int(os.environ.get("PORT") or 8000))
        parser.add_argument("--exit", action="store_true", help="end after the result")

    def handle(self, *args: Any, **options: Any) -> None:
        services = None if running() else start_services(options["port"])
        try:
            server = Server(wait_until_ready(services))
            self.show_cards(server)
            jobs = self.submit(server)
            ended = [self.follow(server, job) for job in jobs]
            self.show_result(ended)
            if any(job["status"] != "succeeded" for job in ended):
                raise CommandError("Not every job succeeded.")
            if services and not options["exit"]:
                self.leave_running(server, services)
        finally:
            if services:
                stop(services)

    # The jobs -----------------------------------------------------------------------------------------

    def show_cards(self, server: Server) -> None:
        for card in server.cards():
            label = " (simulated)" if card["simulated"] else ""
            self.say(f"card {card['gpu_id']}: {card['name']}{label} {card['uuid']}")

    def submit(self, server: Server) -> list[dict[str, Any]]:
        """Download unless the model is here; extraction and training named to the freest card."""
        card = server.freest_card()
        gpu = card["uuid"] if card else "auto"
        self.say(f"chosen: {card_line(card)}")
        jobs: list[dict[str, Any]] = []
        model = MODEL_NAME
        if not server.get(f"artifacts/?type=model&name={MODEL_NAME}")["results"]:
            jobs.append(server.submit("model_download", {"source": "demo", "name": "demo model"}))
            model = f"job:{jobs[0]['id']}"
        jobs.append(
            server.submit(
                "activation_extraction", EXTRACTION | {"model": model, "gpu": gpu, "name": "demo activations"}
            )
        )
        source = {"activations": f"job:{jobs[-1]['id']}", "gpu": gpu, "name": "demo SAE"}
        jobs.append(server.submit("sae_training", TRAINING | source))
        return jobs

    def follow(self, server: Server, job: dict[str, Any]) -> dict[str, Any]:
        """A progress line until the job has ended."""
        began = time.monotonic()
        while (job := server.get(f"jobs/{job['id']}/"))["status"] not in FINAL:
            if sys.stdout.isatty():
                self.stdout.write(f"\r\033[K{progress_line(job)}", ending="")
                self.stdout.flush()
            time.sleep(0.5)
        clear = "\r\033[K" if sys.stdout.isatty() else ""
        self.say(f"{clear}{job['kind']}: {job['status']} after {time.monotonic() - began:.0f} s")
        if job["status"] != "succeeded":
            self.say(f"  {job['error']} {job['hint']}")
        return job

    def show_result(self, jobs: list[dict[str, Any]]) -> None:
        training = jobs[-1]
        result = training["result"] or {}
        self.say("")
        for label, value in result_lines(training, result):
            self.say(f"{label:>14}  {value}")

    def leave_running(self, server: Server, services: subprocess.Popen[bytes]) -> None:
        self.say(f"\nThe dashboard runs at {server.url}; the sign-in link stands above. Ctrl-C ends it.")
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            services.wait()
        except KeyboardInterrupt:
            self.say("ending")

    def say(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()


def card_line(card: dict[str, Any] | None) -> str:
    return f"card {card['gpu_id']}, {card['name']}, {card['uuid']}" if card else "no card; the CPU computes"


def result_lines(job: dict[str, Any], result: dict[str, Any]) -> list[tuple[str, str]]:
    sae = next((a for a in job["artifacts"] or [] if a["type"] == "sae"), None)
    folder = settings.MISTUDIO_HOME / "artifacts" / "sae" / sae["id"] if sae else "none"
    card = f"{', '.join(job['gpu_names']) or 'CPU'} {job['gpu_uuid'] or ''}".strip()
    return [
        ("card", card + (" (simulated)" if job["simulated"] else "")),
        ("loss", number(result.get("loss"))),
        ("L0", number(result.get("l0"))),
        ("FVU", number(result.get("fvu"))),
        ("CE recovered", number(result.get("ce_recovered"))),
        ("folder", str(folder)),
    ]


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


# The services -----------------------------------------------------------------------------------------


def ready_file() -> Path:
    return settings.MISTUDIO_HOME / "run" / "ready.json"


def running() -> bool:
    """Whether an `up` serves this data folder already: it holds the lock as long as it lives, however it ends."""
    try:
        take_lock(settings.MISTUDIO_HOME).close()
    except CommandError:
        return True
    return False


def start_services(port: int) -> subprocess.Popen[bytes]:
    """`manage.py up` as a child. Without any driver the demo brings simulated cards; the folder remembers."""
    env = dict(os.environ)
    ready_file().unlink(missing_ok=True)  # of an `up` that did not end in order
    if wants_simulated_cards():
        sizes = env.setdefault("MISTUDIO_SIMULATED_GPUS", SIMULATED)
        env["MISTUDIO_GPU_BACKEND"] = "simulated"
        from mistudio import env as reader

        home.remember(
            settings.MISTUDIO_HOME,
            gpu_backend="simulated",
            simulated_gpus=[reader.parse_size(size) for size in sizes.split(",")],
        )
    return subprocess.Popen(
        [sys.executable, "manage.py", "up", "--port", str(port)], cwd=settings.BASE_DIR, env=env
    )


def wants_simulated_cards() -> bool:
    """Only where nothing else was chosen and no card can be here: `auto` never means simulated."""
    chosen = settings.MISTUDIO_GPU_BACKEND != "auto"
    return not chosen and settings.MISTUDIO_ALLOW_CPU and not driver_present()


def wait_until_ready(services: subprocess.Popen[bytes] | None) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not ready_file().exists():
        if services is not None and services.poll() is not None:
            raise CommandError(
                f"The services ended with status {services.returncode}; see {settings.MISTUDIO_HOME / 'logs'}."
            )
        if time.monotonic() > deadline:
            raise CommandError(f"The services are not ready after {START_SECONDS:.0f} s.")
        time.sleep(0.1)
    return json.loads(ready_file().read_text())["url"]


def stop(services: subprocess.Popen[bytes]) -> None:
    services.terminate()
    try:
        services.wait(20)
    except subprocess.TimeoutExpired:
        services.kill()


class Server:
    """REST, as the operator."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.token = (settings.MISTUDIO_HOME / "operator-token").read_text().strip()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Token {self.token}", "Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise CommandError(f"{path}: {error.read().decode(errors='replace')}") from None
        except OSError as error:
            where = settings.MISTUDIO_HOME / "logs"
            raise CommandError(f"The server at {self.url} does not answer ({error}); see {where}.") from None

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def submit(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.call("POST", f"jobs/{kind}/", body)

    def cards(self) -> list[dict[str, Any]]:
        return self.get("system/gpu-list")["gpus"]

    def freest_card(self) -> dict[str, Any] | None:
        """The card with the most free memory that takes jobs."""
        free = {m["uuid"]: m["memory_free_bytes"] or 0 for m in self.get("system/gpu-metrics")["gpus"]}
        usable = [c for c in self.cards() if c["health"] == "ok" and c["selectable"]]
        return max(usable, key=lambda card: free.get(card["uuid"], 0), default=None)
