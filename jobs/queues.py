"""What waits in the broker. Doorbells are taken in milliseconds: a queue that fills has no worker."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from gpus.health import broker_client


def depths(queues: Iterable[str]) -> dict[str, int] | None:
    """Messages that no worker has taken yet, by queue; `None` while the broker does not answer.

    A queue is a list of its own name in Redis, as kombu keeps it where no message has a priority.
    """
    names = list(queues)
    try:
        with broker_client() as client:
            asked = client.pipeline(transaction=False)
            for name in names:
                asked.llen(name)
            return dict(zip(names, asked.execute(), strict=True))
    except (redis.RedisError, OSError):
        return None
