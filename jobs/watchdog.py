"""Ends what ended jobs left on cards. Runs every 60 s on each host's queue, at every job's end, and when a step is due.

Each round reads the cards through the agent, asks whose every process is (`jobs.sights`), and writes one row per
finding. Members of ended attempts are ended after a grace: TERM, 10 s, KILL, 5 s; what is left then is told to people.
Nobody else is ever signalled. No task sleeps: the next step of a row has a due time, and a later round takes it, after
it has read the card and proven the process again. No job and no open attempt is changed; leases in quarantine are ended
when what they wait for has come.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from gpus import procfs
from gpus.models import Host, Pulse, within
from gpus.timing import scaled
from jobs import dispatch, events, lease, ownership, processes
from jobs.models import Lease, WatchdogEvent
from jobs.processes import Process
from jobs.sights import Finding, Key, Look, Sight, card_of, quarantined
from jobs.turns import one_at_a_time

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0
KILL_AFTER_SECONDS = 10.0
GIVE_UP_SECONDS = 5.0
#: A ghost is told when it was there in three rounds.
GHOST_SECONDS = 2 * PERIOD_SECONDS
KEPT = timedelta(days=90)

State = WatchdogEvent.State
#: What a row that is due sends, the state it goes to, and how long until the next step.
LADDER = {
    State.FOUND: (signal.SIGTERM, State.TERM, KILL_AFTER_SECONDS),
    State.TERM: (signal.SIGKILL, State.KILL, GIVE_UP_SECONDS),
}
STUCK = "Still there after SIGKILL (state {}): it is stuck in the kernel, and only a reboot ends it."
UNFORGOTTEN = (
    "The process has gone, and the driver still lists it with its memory: reset the card, or reboot."
)
FORBIDDEN = "It runs as another user and cannot be signalled."


def watch(name: str, only: Iterable[str] | None = None) -> None:
    """One round of the host: of all cards, or of those in `only` (the empty name stands for jobs without a card)."""
    host, _ = Host.objects.get_or_create(name=name)
    with one_at_a_time("watchdog") as mine:
        if mine:
            Round(host, None if only is None else set(only)).run()
            if only is None:
                Pulse.beat(f"watchdog:{name}")


def follow_up(host: Host) -> None:
    """What does not wait for the next round: one that found another under way and was left out, steps that are due,
    and cards that a quarantine closes."""
    if round_missed(host):
        return watch(host.name)
    due = WatchdogEvent.objects.filter(host=host, closed_at=None, due_at__lte=timezone.now())
    cards = {*due.values_list("gpu_uuid", flat=True), *map(card_of, quarantined(host))}
    if cards:
        watch(host.name, cards)


def round_missed(host: Host) -> bool:
    """Beat rings once a period; a tenth more is its own jitter."""
    heard_at = Pulse.objects.filter(name=f"watchdog:{host.name}").values_list("at", flat=True).first()
    return heard_at is not None and not within(heard_at, 1.1 * scaled(PERIOD_SECONDS))


def prune() -> None:
    """Closed rows are kept for 90 days."""
    WatchdogEvent.objects.filter(closed_at__lt=timezone.now() - KEPT).delete()


def key_of(row: WatchdogEvent) -> Key:
    lease_of = row.attempt_id if row.finding == Finding.LEASE else None
    return row.finding, row.gpu_uuid, row.pid, row.start_ticks, lease_of


class Round:
    """What is seen becomes a row, a row that is seen again takes its next step, one that is not is closed."""

    def __init__(self, host: Host, only: set[str] | None) -> None:
        self.host, self.now = host, timezone.now()
        rows = list(WatchdogEvent.objects.filter(host=host, closed_at=None).select_related("attempt__job"))
        self.look = Look(host, only, {row.attempt_id for row in rows if row.attempt_id})
        self.rows = {key_of(row): row for row in rows if self.look.reaches(row.gpu_uuid)}

    def run(self) -> None:
        seen = {sight.key: sight for sight in self.look.sights()}
        for key in self.rows.keys() | seen.keys():
            try:
                self.attend(key, seen.get(key))
            except Exception:  # one that cannot be written must not keep the others from it
                logger.exception("the watchdog at %s", key)
        self.forget_removed_cards()
        self.end_leases()

    def forget_removed_cards(self) -> None:
        """Nobody can be on a card that is not in this host any more."""
        here = self.host.gpus.filter(removed_at=None).values_list("uuid", flat=True)
        rows = WatchdogEvent.objects.filter(host=self.host, closed_at=None).exclude(gpu_uuid="")
        for row in rows.exclude(gpu_uuid__in=list(here)):
            self.close(row, "The card is not in this host any more.", None)

    def attend(self, key: Key, sight: Sight | None) -> None:
        row = self.rows.get(key)
        if row is not None and sight is not None:
            self.follow(row, sight)
        elif row is not None:
            self.not_seen(row)
        elif sight is not None:
            self.rows[key] = self.open(sight)

    # A row's life --------------------------------------------------------------------------------------

    def open(self, sight: Sight) -> WatchdogEvent:
        """A first sight is written down, and never acted upon."""
        if sight.process and sight.attempt:
            ownership.remember(sight.attempt, [sight.process])
        state, due_at = self.begin(sight)
        pid, listed = sight.pid, sight.listed
        row = WatchdogEvent.objects.create(
            host=self.host, finding=sight.finding, state=state, due_at=due_at, gpu_uuid=sight.gpu_uuid, pid=pid,
            start_ticks=sight.start_ticks, attempt=sight.attempt, proof=sight.proof, reason=sight.reason,
            name=(listed.get("name") or (pid and procfs.name_of(pid)) or "")[:200],
            user=(listed.get("user") or (pid and procfs.user_of(pid)) or "")[:100],
            memory_before_bytes=sight.memory_bytes,
        )  # fmt: skip
        events.watchdog(row)
        return row

    def begin(self, sight: Sight) -> tuple[str, datetime | None]:
        if sight.finding in (Finding.LEASE, Finding.GHOST):
            return State.FOUND, None
        if sight.finding != Finding.LEFTOVER or settings.MISTUDIO_WATCHDOG == "report":
            return State.REPORTED, None
        assert sight.attempt is not None and sight.attempt.ended_at is not None
        grace = timedelta(seconds=scaled(settings.MISTUDIO_WATCHDOG_GRACE_SECONDS))
        return State.FOUND, max(self.now, sight.attempt.ended_at + grace)

    def follow(self, row: WatchdogEvent, sight: Sight) -> None:
        before, row.seen_at = row.state, self.now
        if row.term_at is None and row.finding != Finding.LEASE:
            row.memory_before_bytes = sight.memory_bytes
        if row.finding == Finding.GHOST and self.now - row.found_at >= timedelta(
            seconds=scaled(GHOST_SECONDS)
        ):
            row.state = State.REPORTED
        if row.finding == Finding.LEFTOVER and sight.process:
            self.climb(row, sight, sight.process)
        row.save()
        if row.state != before:
            events.watchdog(row)

    def not_seen(self, row: WatchdogEvent) -> None:
        """Neither listed by its card nor held by a lease any more."""
        process = Process(row.pid or 0, row.start_ticks or 0)
        card = self.look.cards.get(row.gpu_uuid)
        if card and row.pid and not card["lists"] and processes.alive(process):
            return  # a card that stopped listing its processes says nothing of them
        if card and row.finding == Finding.LEFTOVER and lease.lists(card["processes"], process):
            self.wait_for_the_card(row)
            return
        after = self.look.alone(row.gpu_uuid) if row.pid is None else 0
        self.close(row, how_it_went(row), None if row.memory_before_bytes is None else after)

    def wait_for_the_card(self, row: WatchdogEvent) -> None:
        """The process has gone, and the card still lists it: the memory is back when it does not."""
        if row.due_at is not None and row.due_at <= self.now:
            self.give_up(row, UNFORGOTTEN)
            row.save()
            events.watchdog(row)

    def close(self, row: WatchdogEvent, outcome: str, memory_after_bytes: int | None) -> None:
        row.state, row.outcome, row.memory_after_bytes = State.GONE, outcome, memory_after_bytes
        row.due_at, row.closed_at = None, timezone.now()
        row.save()
        events.watchdog(row)

    # The ladder ----------------------------------------------------------------------------------------

    def climb(self, row: WatchdogEvent, sight: Sight, process: Process) -> None:
        """The next step, for a process that was proven and read again a moment ago."""
        if settings.MISTUDIO_WATCHDOG == "report" and row.due_at is not None:
            row.state, row.due_at = State.REPORTED, None
        elif row.state == State.REPORTED:  # the setting may be another now
            row.state, row.due_at = self.begin(sight)
        elif row.due_at is None or row.due_at > self.now:
            return
        elif row.state == State.KILL:
            known = procfs.stat(process.pid)
            self.give_up(row, STUCK.format(known.state if known else "unknown"))
        else:
            self.signal(row, process)

    def signal(self, row: WatchdogEvent, process: Process) -> None:
        number, state, seconds = LADDER[State(row.state)]
        if processes.send(process, number):
            logger.warning("%s to %s (%s). %s", number.name, process.pid, row.name, row.reason)
            now = timezone.now()
            row.state, row.due_at = state, now + timedelta(seconds=scaled(seconds))
            row.term_at, row.kill_at = (now, None) if state == State.TERM else (row.term_at, now)
        elif processes.alive(process):
            self.give_up(row, FORBIDDEN)

    def give_up(self, row: WatchdogEvent, outcome: str) -> None:
        """Told once; from now on it is only looked at. Its card stays closed while its lease is in quarantine."""
        row.state, row.due_at, row.outcome = State.FAILED, None, outcome
        logger.error(
            "Process %s (%s) stays on %s. %s %s", row.pid, row.name, row.gpu_uuid, row.reason, outcome
        )

    # Leases in quarantine ------------------------------------------------------------------------------

    def end_leases(self) -> None:
        """They end by the rule of every lease (`jobs.lease`), and the card is open again."""
        for attempt in {held.attempt for held in self.look.leases}:
            lease.end_if_free(attempt)
        waiting = Lease.objects.filter(pk__in=[held.pk for held in self.look.leases], ended_at=None)
        still = set(waiting.values_list("pk", flat=True))
        ended = [held for held in self.look.leases if held.pk not in still]
        for held in ended:
            row = self.rows[str(Finding.LEASE), card_of(held), None, None, held.attempt_id]
            self.close(
                row, "Processes and memory have gone; the card is open.", self.look.alone(card_of(held))
            )
            events.changed(held.attempt.job)
        if ended:
            dispatch.schedule()


def how_it_went(row: WatchdogEvent) -> str:
    if row.finding == Finding.GHOST:
        return "The card accounts for its memory and its load again."
    if row.finding == Finding.LEASE:
        return "The lease has ended."
    if row.pid and row.start_ticks and processes.alive(Process(row.pid, row.start_ticks)):
        return "It lives, and holds the card no more."
    signals = [word for word, at in (("SIGTERM", row.term_at), ("SIGKILL", row.kill_at)) if at]
    return f"Ended by {signals[-1]}." if signals else "It went by itself."
