"""The work process: verify the card, run the kind, write the end. It dies with its keeper.

This file and `forkserver` are the only ones of the engine that may touch torch.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import resource
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.db import transaction
from django.utils import timezone
from rest_framework.serializers import ValidationError
from setproctitle import setproctitle

from gpus import backends, publish
from gpus.readings import CardInfo
from jobs import (
    arrival,
    cardloss,
    endings,
    events,
    faults,
    paths,
    peaks,
    processes,
    registry,
    remedies,
    requeue,
)
from jobs.context import WorkContext
from jobs.endings import End
from jobs.exceptions import Fenced, HandedOver, JobRejected, JobStopped
from jobs.interp.errors import Stopped, Unusable
from jobs.journal import figures
from jobs.kind import FINALIZE, Input
from jobs.models import Attempt, Job, Status
from jobs.patience import patiently
from jobs.readiness import sentence_of
from jobs.version import VERSION

logger = logging.getLogger("mistudio.work")

#: Mathematics on the CPU leaves the sampling of cards and the pages their turn.
POLITE = 5
LIBRARIES = ("torch", "transformers", "safetensors", "numpy")


def main(job: Job, attempt: Attempt, gate: int, token: str) -> int:
    """The life of the work; returns its exit status. Waits at `gate` until the keeper has recorded it."""
    processes.die_with_parent(attempt.keeper_pid or 0)
    setproctitle(f"mistudio work {job.kind} {job.pk}")
    if os.read(gate, 1) != b"1":
        return 1
    set_environment(attempt, token)
    logging.getLogger().addHandler(LogFrames(str(job.pk)))
    faulthandler.register(processes.DUMP_SIGNAL, file=2, all_threads=True)
    stop = Stop()
    context: WorkContext | None = None
    end: End | None
    try:
        device = verify_card(job, attempt)
        patiently(lambda: arrival.check_room(job, attempt))
        if not patiently(lambda: start(job, attempt)):
            return 0
        if device == "cpu":
            os.nice(POLITE)
        context = WorkContext(job, attempt, device, stop)
        context.journal.write_beside()
        end = run(context)
    except Fenced as error:
        logger.warning("stopping: %s", error)
        return 0
    except arrival.HandedBack as why:
        logger.warning("back to the queue: %s", why)
        patiently(partial(requeue.handed_back, job, attempt, str(why), why.skip))
        publish.flush(1.0)
        return 0
    except HandedOver as order:
        last_words(context)
        end = End(Status.QUEUED, stage=order.stage)
    except BaseException as error:  # whatever happened is the job's end, told in its row
        reported = bool(context and context.journal.reported)
        last_words(context)
        end = patiently(partial(end_of, job, error, reported=reported))
    patiently(partial(peaks.note, attempt))
    if end is None:
        stop.give_in()
    if end.status == Status.FAILED and (loss := cardloss.behind(attempt, end.error)):
        patiently(partial(requeue.card_lost, job, attempt, loss))
        publish.flush(1.0)
        return 0
    return publish_end(job, attempt, end)


class Stop:
    """True once SIGTERM came. It comes from our keeper, after a cancel or pause, or from somebody else."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._come)

    def _come(self, *args: object) -> None:
        self.requested = True

    def __bool__(self) -> bool:
        return self.requested

    def give_in(self) -> NoReturn:
        """Nobody of ours asked: end by the signal itself, so that the keeper sees a loss and queues again."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise SystemExit(1)


class LogFrames(logging.Handler):
    """Each line of the log also to the pages that follow the job; the file has them all."""

    def __init__(self, job_id: str) -> None:
        super().__init__(logging.INFO)
        self.job_id = job_id

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("gpus."):  # publishing must not speak of itself
            events.log(self.job_id, record.getMessage())


def set_environment(attempt: Attempt, token: str) -> None:
    """The cards by UUID, before CUDA is touched: below the API only UUIDs travel."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(attempt.gpu_uuids)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ[processes.TOKEN_VARIABLE] = token  # for what the work executes


def verify_card(job: Job, attempt: Attempt) -> str:
    """The device that torch shall use, once the cards seen are proven to be those of the lease."""
    if not attempt.gpu_uuids:
        return "cpu"
    on_cuda = not job.simulated and settings.MISTUDIO_TORCH_DEVICE == "cuda"
    seen = _cuda_uuids() if on_cuda else _looked_up(job.simulated)
    patiently(lambda: Attempt.objects.filter(pk=attempt.pk).update(reported_gpu_uuids=seen))
    if seen != attempt.gpu_uuids:
        raise remedies.CardMismatch(
            f"granted {', '.join(attempt.gpu_uuids)}, but the process sees {', '.join(seen) or 'none'}"
        )
    logger.info("card %s verified", ", ".join(seen))
    return "cuda:0" if on_cuda else "cpu"


def _cuda_uuids() -> list[str]:
    """UUIDs of `cuda:0…` as the CUDA runtime reports them, in the driver's spelling: it tells an instance's as bare
    as a card's, so that only the environment knows which of the two a number that it names is."""
    import torch

    named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    prefixes = {uuid[4:].casefold(): uuid[:4] for uuid in named}
    seen = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    return [prefixes.get(uuid.casefold(), "GPU-") + uuid for uuid in seen]


def _looked_up(simulated: bool) -> list[str]:
    """The environment's cards, each found again by the backend's own lookup."""
    backend = backends.get("simulated" if simulated else "nvml")
    named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    cards: list[CardInfo | None] = [backend.lookup(uuid) for uuid in named]
    return [card.uuid for card in cards if card is not None]


def start(job: Job, attempt: Attempt) -> bool:
    """`starting → running`; False when the job was ended meanwhile."""
    faults.point("before_running")
    now = timezone.now()
    with transaction.atomic():
        moved = job.move([Status.STARTING], Status.RUNNING, started_at=job.started_at or now)
        Attempt.objects.filter(pk=attempt.pk, ended_at=None).update(started_at=now if moved else None)
    if moved:
        events.changed(job)
    faults.point("running")
    return moved


def run(context: WorkContext) -> End:
    kind, job = registry.get(context.job.kind), context.job
    began = time.monotonic()
    introduce(context)
    serializer = kind.Params(data=job.params)
    serializer.is_valid(raise_exception=True)
    act = kind.finalize if job.stage == FINALIZE else kind.run
    result = act(context, serializer.validated_data)
    context.journal.store_now()
    seconds = time.monotonic() - began
    logger.info("done in %.1f s; %s", seconds, figures(result))
    record = provenance(context, seconds)
    paths.write_json(paths.job_folder(job) / "manifest.json", record)
    return context.end(result, record)


def introduce(context: WorkContext) -> None:
    """The head of the log: what runs, with which parameters and inputs, where, on which versions."""
    job, attempt = context.job, context.attempt
    cards = ", ".join(f"{n} {u}" for n, u in zip(attempt.gpu_names, attempt.gpu_uuids, strict=True))
    where = f"{cards or 'no card'}; mathematics on {context.device}"
    what = f"{job.kind} ({job.stage})" if job.stage else job.kind
    logger.info("%s, attempt %d, on %s", what, attempt.number, where)
    logger.info("parameters %s", json.dumps(without_folders(job.params)))
    for name, made in context.inputs.items():
        logger.info("%s: %s %s (%s)", name, made.type, made.name, made.id)
    logger.info("miStudio %s, %s", VERSION, ", ".join(f"{n} {v}" for n, v in versions().items()))


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def provenance(context: WorkContext, seconds: float) -> dict[str, Any]:
    """What it takes to make the result again. No secrets, no paths."""
    job = context.job
    return {
        "kind": job.kind,
        "job": str(job.pk),
        "params": without_folders(job.params),
        "inputs": {
            name: {"id": made.id, "manifest_sha256": digest(made)} for name, made in context.inputs.items()
        },
        "version": VERSION,
        "python": platform.python_version(),
        "libraries": versions(),
        "threads": _threads(),
        "cards": job.gpu_uuids,
        "card_names": context.attempt.gpu_names,
        "simulated": job.simulated,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": round(seconds, 3),
    }


def without_folders(value: Any) -> Any:
    """Parameters with the last part of each absolute path: where a file lay is nobody else's business."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def digest(made: Input) -> str:
    return hashlib.sha256(json.dumps(made.manifest, sort_keys=True).encode()).hexdigest()


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else None


def end_of(job: Job, error: BaseException, *, reported: bool) -> End | None:
    """What an exception means for the job: said no, stopped as asked (None: but nobody asked), or broke."""
    if isinstance(error, JobStopped | Stopped):
        return stopped(job)
    if isinstance(error, ValidationError):
        error = JobRejected(sentence_of(error), reason="invalid_input")
    if isinstance(error, Unusable):
        error = JobRejected.of(error)
    if isinstance(error, JobRejected):
        status = Status.FAILED if reported else Status.REFUSED
        return End(status, failure_reason=error.reason, error=str(error), hint=error.hint)
    text = "".join(traceback.format_exception(error))
    logger.error("%s", text)
    reason, words, hint = remedies.of(job, error)
    return End(Status.FAILED, failure_reason=reason, error=words, hint=hint, traceback=text)


def last_words(context: WorkContext | None) -> None:
    """The progress and points of the last seconds: where it stood when it failed is what people look for."""
    if context and context.journal.reported:
        with suppress(Fenced):
            context.journal.store_now()


def stopped(job: Job) -> End | None:
    job.refresh_from_db(fields=["cancel_requested_at", "pause_requested_at"])
    if job.cancel_requested_at:
        return End(Status.CANCELLED)
    return End(Status.PAUSED) if job.pause_requested_at else None


def publish_end(job: Job, attempt: Attempt, end: End) -> int:
    """Write the end and carry it out; the keeper repeats what the database refuses now."""
    try:
        endings.write(job, end)
    except (OSError, ValueError, TypeError) as error:
        logger.exception("the end cannot be written")
        patiently(partial(endings.fail, job, attempt, *endings.reason_of_end(error)))
        return 0
    try:
        endings.complete(job, attempt)
    except Exception:
        logger.exception("the end is written; the keeper completes it")
    publish.flush(1.0)
    return 0
