"""What miStudio runs on: the database, the broker, and its own processes."""

from __future__ import annotations

from collections.abc import Iterator

import redis
from django.conf import settings
from django.db import Error, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.models import Model

from gpus import health
from gpus.models import Host
from jobs import postman
from jobs.models import Message
from mistudio.doctor import Finding, note, ok, wrong

START = "Start miStudio: `make run`, or `manage.py up`."


def answers() -> bool:
    try:
        connection.ensure_connection()
    except Error:
        return False
    return True


def database() -> Iterator[Finding]:
    try:
        connection.ensure_connection()
    except Error as error:
        yield wrong(
            f"the database does not answer: {error}", "Look at DATABASE_URL, and whether its server runs."
        )
        return
    yield ok(f"{connection.display_name} {'.'.join(map(str, connection.get_database_version()))} answers")
    executor = MigrationExecutor(connection)
    if not started():
        yield note("it is empty: nothing has run here yet", START)
    elif waiting := executor.migration_plan(executor.loader.graph.leaf_nodes()):
        yield wrong(
            f"{len(waiting)} migrations are not applied", "manage.py migrate (`up` does it at its start)"
        )
    if connection.vendor == "sqlite":
        yield from sqlite()


def started(model: type[Model] = Host) -> bool:
    """Whether the tables are there: `up` and `migrate` make them."""
    return model._meta.db_table in connection.introspection.table_names()


def sqlite() -> Iterator[Finding]:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA quick_check(1)")
        said = cursor.fetchone()[0]
        cursor.execute("PRAGMA journal_mode")
        mode = cursor.fetchone()[0]
    if said != "ok":
        yield wrong(f"the database file is damaged: {said}", "Stop miStudio and restore a backup.")
    if mode != "wal":
        yield wrong(
            f"SQLite's journal is {mode}, not WAL", "Is the data folder on a disk that cannot map memory?"
        )


def broker() -> Iterator[Finding]:
    try:
        with health.broker_client() as client:
            info = client.info()
    except (redis.RedisError, OSError) as error:
        yield note(
            f"the broker does not answer: {error}", f"{START} With REDIS_URL set: look after that server."
        )
        return
    yield ok(f"{info.get('server_name', 'redis')} {info['redis_version']} answers")
    if info.get("maxmemory_policy", "noeviction") != "noeviction":
        yield wrong(
            f"the broker evicts what it carries ({info['maxmemory_policy']})",
            "Set maxmemory-policy noeviction.",
        )
    if not info.get("aof_enabled"):
        yield note(
            "the broker keeps nothing over a restart",
            "No job is lost by that; appendonly yes spares its messages.",
        )


def processes() -> Iterator[Finding]:
    if not answers():
        yield note("what runs is told by the database, which does not answer")
        return
    if not (started() and Host.objects.exists()):
        yield note("nothing has run here yet", START)
        return
    state = health.state()
    for name, good in health.good(state["checks"]).items():
        value = state["checks"][name]  # type: ignore[literal-required]
        if not good:
            yield wrong(f"{name}: {value}", f"{START} The page Health and logs/ in the data folder say more.")
        elif value is not None:
            yield ok(f"{name}: {value}")
    for host in Host.objects.exclude(backend_error=""):
        yield wrong(f"the agent of {host} says: {host.backend_error}", "See “Driver and cards” on that host.")


def messages() -> Iterator[Finding]:
    """Whether people hear of the ends of their jobs."""
    if not (settings.MISTUDIO_WEBHOOK_URL or settings.MISTUDIO_EMAIL_URL):
        yield note("none are sent", "MISTUDIO_WEBHOOK_URL or MISTUDIO_EMAIL_URL, if you want to be told.")
        return
    if not (answers() and started(Message)):
        yield note("set up; nothing has run here yet", START)
        return
    found = postman.summary()
    says = f"{found['failing']} wait after a failure, {found['given_up']} were given up in 7 days"
    if found["last_error"]:
        yield wrong(
            f"{says}: {found['last_error']}", "Look after the receiver, then `manage.py notify --test`."
        )
    else:
        yield ok(says)
