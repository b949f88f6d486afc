"""What waits in the broker. Doorbells are taken in milliseconds: a queue that fills has no worker."""

from __future__ import annotations

from collections.abc import Iterable

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpus.health import BROKER_SECONDS


def depths(queues: Iterable[str]) -> dict[str, int] | None:
    """Messages that no worker has taken yet, by queue; `None` while the broker does not answer.

    A queue is a list of its own name in Redis, as kombu keeps it where no message has a priority.
    """
    names = list(queues)
    client = redis.Redis.from_url(
        settings.REDIS_URL,
        socket_timeout=BROKER_SECONDS,
        socket_connect_timeout=BROKER_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        asked = client.pipeline(transaction=False)
        for name in names:
            asked.llen(name)
        return dict(zip(names, asked.execute(), strict=True))
    except (redis.RedisError, OSError):
        return None
    finally:
        client.close()
