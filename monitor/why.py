"""Why a job has not started, or was refused: what every card says to it at this moment."""

from __future__ import annotations

from typing import Any

from gpus import choice
from jobs import fit, lines
from jobs.board import Board
from jobs.lines import Line
from jobs.models import Job, Status
from jobs.placement import need_bytes

WAITING = (Status.QUEUED, Status.HELD)
#: Refusals that the cards explain; the others are about the parameters.
ABOUT_CARDS = ("card_unavailable", "insufficient_gpu_memory", "model_too_large")


#: What else than a card keeps a job waiting.
BESIDE_THE_CARDS = {
    "after": "Another job must succeed first; the cards are asked after that.",
    "input": "Another job must succeed first; the cards are asked after that.",
    "user_limit": "It starts when another job of its owner has ended, if a card is free then.",
    "kept": "Jobs passed the larger one for ten minutes; until that has started, none behind it starts on its card.",
}
#: Of those before it so many are named.
NAMED = 3


def context(job: Job) -> dict[str, Any] | None:
    """Heading, sentences and rows of the table; `None` where no card has a say."""
    if not has_question(job) or not job.needs_card or job.device == "cpu":
        return None
    board = Board()
    hosts = {slots.gpu.uuid: slots.host.name for slots in board.cards() if slots.gpu}
    return {
        "heading": heading(job),
        "says": says(job),
        "since": (job.waiting_for or {}).get("since"),
        "cards": [card | {"host": hosts[card["uuid"]]} for card in fit.of_job(job, board)],
        "several_hosts": len(set(hosts.values())) > 1,
        "named": named(job),
    }


def has_question(job: Job) -> bool:
    """Without an estimate a refused job would seem to fit everywhere; a broken chain is no question of cards."""
    if job.failure_reason == "input_failed":
        return False
    refused = job.status == Status.REFUSED and job.failure_reason in ABOUT_CARDS
    return job.status in WAITING or (refused and need_bytes(job) is not None)


def named(job: Job) -> bool:
    return not isinstance(choice.wanted(job.gpu_wanted), int)


def heading(job: Job) -> str:
    if job.status == Status.REFUSED:
        return "Where a retry would fit now"
    return "Where it would start" if job.status == Status.HELD else "Why it has not started"


def says(job: Job) -> list[str]:
    """What the table does not say: which cards count, what else must happen first."""
    reason = (job.waiting_for or {}).get("reason")
    sentences = []
    if job.status == Status.HELD:
        sentences.append("It starts when it is released, not before.")
    elif reason in BESIDE_THE_CARDS:
        sentences.append(BESIDE_THE_CARDS[reason])
    if reason == "turn":
        sentences.append(before_it(job))
    sentences.append(which_cards(job))
    if need_bytes(job) is None:
        sentences.append("How much it needs is known once its inputs are made.")
    return sentences


def before_it(job: Job) -> str:
    """`Before it in its line: a, b, c and 408 more.`"""
    ahead = Line.of(job).jobs().filter(lines.ahead_of(job))
    names, more = [str(other) for other in ahead[:NAMED]], ahead.count() - NAMED
    return f"Before it in its line: {', '.join(names)}{f' and {more} more' if more > 0 else ''}."


def which_cards(job: Job) -> str:
    if job.status == Status.REFUSED:
        return "A retry asks for the same again, unless you name another card or auto."
    if named(job):
        return "It asks for the card that is marked, and is never moved to another one by itself."
    return "It takes the card with the most free memory of those that say “now”."
