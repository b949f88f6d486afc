"""Several SAEs trained in step on one reading of the data, each to the bits that it would have alone.

A checkpoint is a folder `step_<n>` with `state.json` and a file of tensors for each SAE, complete or absent. An SAE
whose loss is no longer a number is taken back to the last checkpoint and trained no further; the others go on. Where
there is no other, the training ends.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from jobs.interp.errors import NonFinite, Stopped, Unusable
from jobs.interp.files import TEMPORARY, read_json, whole_folder, write_json, write_tensors
from jobs.interp.sae.settings import Settings
from jobs.interp.sae.train import Metrics, Stream, Training, sampled

logger = logging.getLogger(__name__)
#: By the number of the SAE.
All = Mapping[int, Metrics]
LOG_EVERY = 10


class Together:
    """The trainings by number. `lost`: why those that are trained no further are not; one of them without a checkpoint
    is not among the trainings any more."""

    def __init__(
        self,
        trainings: Mapping[int, Training],
        lost: Mapping[int, str] | None = None,
        *,
        log_every: int = LOG_EVERY,
    ) -> None:
        self.trainings, self.lost, self.log_every = dict(trainings), dict(lost or {}), log_every
        self.began, self.tokens = time.monotonic(), 0

    @property
    def going(self) -> dict[int, Training]:
        """Those that are still trained."""
        return {number: training for number, training in self.trainings.items() if number not in self.lost}

    @property
    def step(self) -> int:
        return max(training.step for training in self.trainings.values())

    @property
    def steps(self) -> int:
        return max(training.settings.steps for training in self.trainings.values())

    def run(
        self,
        streams: Mapping[int, Stream],
        checkpoints: Path | None = None,
        *,
        checkpoint_every: int = 500,
        on_progress: Callable[[int, int, All, float], None] = lambda *_: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the last step. `on_progress(step, total, metrics by SAE, tokens per second)` every `log_every` steps
        and at both ends.

        Raises `Stopped` after writing a checkpoint when `should_stop()`, `NonFinite` naming the step of the first loss
        that is not a number when no SAE is left.
        """
        total = self.steps
        while self.step < total:
            try:
                if should_stop():
                    raise Stopped(f"Stopped before step {self.step + 1} of {total}.")
                batches = self._batches(streams)
            except Stopped:
                self._keep(checkpoints)
                raise
            for number, batch in batches.items():
                self.trainings[number].advance(batch)
            self.tokens += max(len(batch) for batch in batches.values())
            if self.step % self.log_every == 0 or self.step in (1, total):
                on_progress(self.step, total, self._read(checkpoints), self._speed())
            if self.step % checkpoint_every == 0 or self.step == total:
                self._keep(checkpoints)

    def save(self, folder: Path) -> None:
        """Write everything that the next step depends on, complete or not at all."""
        with whole_folder(folder) as temporary:
            states = {str(number): training.state() for number, training in self.trainings.items()}
            for number, training in self.trainings.items():
                write_tensors(temporary / f"{number}.safetensors", training.tensors())
            lost = {str(number): words for number, words in self.lost.items()}
            write_json(temporary / "state.json", {"step": self.step, "saes": states, "lost": lost})

    @classmethod
    def resume(
        cls, folder: Path, settings: Sequence[Settings], *, device: str = "cpu", log_every: int = LOG_EVERY
    ) -> Together:
        """The trainings saved in `folder`. Raises `Unusable` when they were made with other settings, or by a version
        that kept one SAE in another form."""
        state = read_json(folder / "state.json")
        if "saes" not in state:
            raise Unusable(
                "The checkpoint is of an earlier version of miStudio, which this one cannot go on from; retry from the "
                "start."
            )
        lost = {int(number): words for number, words in state["lost"].items()}
        numbers = {int(number) for number in state["saes"]} | set(lost)
        if numbers != set(range(len(settings))):
            raise Unusable(f"The checkpoint holds {len(numbers)} SAEs, not {len(settings)}.")
        trainings = {
            int(number): Training.restored(
                settings[int(number)], one, load_file(folder / f"{number}.safetensors"), device=device
            )
            for number, one in state["saes"].items()
        }
        return cls(trainings, lost, log_every=log_every)

    def _batches(self, streams: Mapping[int, Stream]) -> dict[int, Tensor]:
        """The next batch of each SAE where it is trained; what several read is brought there once."""
        found: dict[int, Tensor] = {}
        brought: list[tuple[Tensor, Tensor]] = []
        for number, training in self.going.items():
            batch = streams[number].batch(self.step)
            there = next((moved for seen, moved in brought if seen is batch), None)
            if there is None:
                there = batch.to(training.device)
                brought.append((batch, there))
            found[number] = there
        return found

    def _read(self, checkpoints: Path | None) -> All:
        found: dict[int, Metrics] = {}
        for number, training in self.going.items():
            try:
                found[number] = training.metrics()
            except NonFinite as error:
                self._lose(number, error, checkpoints)
        return found

    def _lose(self, number: int, error: NonFinite, checkpoints: Path | None) -> None:
        """Take a training that went wrong back to its last checkpoint; the last one going takes the run with it."""
        if len(self.going) == 1:
            raise error
        logger.warning("SAE %d: %s", number, error)
        self.lost[number] = str(error)
        broken = self.trainings.pop(number)
        if checkpoints is not None and (kept := saved(checkpoints)):
            state = read_json(kept[-1] / "state.json")["saes"].get(str(number))
            if state and state["step"]:
                tensors = load_file(kept[-1] / f"{number}.safetensors")
                self.trainings[number] = Training.restored(
                    broken.settings, state, tensors, device=broken.device
                )

    def _keep(self, checkpoints: Path | None) -> None:
        for number, training in self.going.items():
            try:
                training.window.require_finite()
            except NonFinite as error:
                self._lose(number, error, checkpoints)
        if checkpoints is not None:
            self.save(checkpoints / f"step_{self.step:09d}")
            logger.info("checkpoint after step %d", self.step)
            for old in saved(checkpoints)[:-2]:
                shutil.rmtree(old)

    def _speed(self) -> float:
        """Tokens per second since the last asking."""
        speed = self.tokens / max(time.monotonic() - self.began, 1e-9)
        self.began, self.tokens = time.monotonic(), 0
        return speed


def saved(checkpoints: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(path for path in checkpoints.glob("step_*") if not path.name.startswith(TEMPORARY))


def begin_or_resume(
    settings: Sequence[Settings],
    streams: Sequence[Stream],
    mean_norms: Sequence[Sequence[float]],
    checkpoints: Path,
    *,
    device: str = "cpu",
) -> Together:
    """Go on from the newest checkpoint, or begin when there is none."""
    if found := saved(checkpoints):
        logger.info("going on from %s", found[-1].name)
        return Together.resume(found[-1], settings, device=device)
    samples = sampled(streams, settings[0])
    begun = [
        Training.begin(one, sample, norms, device=device)
        for one, sample, norms in zip(settings, samples, mean_norms, strict=True)
    ]
    return Together(dict(enumerate(begun)))
