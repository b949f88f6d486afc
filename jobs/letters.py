"""How a message reads: the body of a webhook, subject and text of a mail."""

from __future__ import annotations

from typing import Any

from gpus.shapes import iso
from jobs.models import Message

ENDS = {
    "succeeded": "has succeeded",
    "failed": "has failed",
    "refused": "was refused",
    "cancelled": "was cancelled",
    "held": "is held: a job that it needs ended badly",
}


def body(message: Message) -> dict[str, Any]:
    return {
        "id": str(message.pk),
        "event": message.event,
        "at": iso(message.created_at),
        "text": letter(message)[0],
        **message.payload,
    }


def letter(message: Message) -> tuple[str, str]:
    """Subject and text; the subject in one line, whatever a job is called."""
    if "job" in message.payload:
        return of_job(message.payload["job"])
    if "card" in message.payload:
        card = message.payload["card"]
        return f"miStudio: a card of {card['host']} was lost", f"{card['uuid']}\n{card['detail']}\n"
    return "miStudio: a test", "This is a test message of miStudio. Nothing has happened.\n"


def of_job(job: dict[str, Any]) -> tuple[str, str]:
    name = " ".join(str(job["name"]).split()) or f"{job['kind']} {job['id'][-6:]}"
    reason = f" ({job['failure_reason']})" if job["failure_reason"] else ""
    where = ", ".join(job["gpu_uuids"]) or "no card"
    took = f", after {job['duration_s']:.0f} s" if job["duration_s"] else ""
    lines = (
        f"{name} ({job['kind']}, {job['owner']}) {ENDS[job['status']]}{reason}{took}.",
        f"It ran on {where}{' (simulated)' if job['simulated'] else ''}."
        if job["started_at"]
        else "It did not run.",
        f"More on its page: {job['url']}",
    )
    return f"miStudio: {name} {ENDS[job['status']].partition(':')[0]}{reason}", "\n".join(lines) + "\n"
