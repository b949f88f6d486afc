"""Card history against its own readings, summed up in Python: nothing is lost, doubled, rounded or made up."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, models
from django.utils import timezone

from gpus import history, recorder, rollups, samples
from gpus.models import GpuHour, GpuMinute, GpuSample, GpuSeries
from gpus.recorder import Sample, write
from gpus.samples import HOUR, METRICS, MINUTE, SECOND
from gpus.sampling import Card

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 11, 30, 12, 0, 30, tzinfo=UTC)
NOW_MS = samples.milliseconds(NOW)
COLUMNS = [metric.column for metric in METRICS.values()]
UTILIZATION, MEMORY = "utilization_gpu_percent", "memory_used_bytes"


def reading(at: int, uuid: str = "GPU-a", *values: int | None) -> Sample:
    return Sample(uuid, at, values if values else (500, 2**30, 400, 1000))


def odd_values(dice: random.Random) -> tuple[int | None, ...]:
    """Each value is missing in one reading of five."""
    values = (
        dice.randrange(1001),
        dice.randrange(80 * 2**30),
        dice.randrange(200, 900),
        dice.randrange(7000),
    )
    return tuple(value if dice.random() > 0.2 else None for value in values)


def beat(
    dice: random.Random, start: int, end: int, uuids: Iterable[str] = ("GPU-a", "GPU-b")
) -> list[Sample]:
    """Readings every 2 s, give or take, with holes: single readings, minutes, an hour."""
    made, at = [], start
    while at < end:
        at += dice.choice([1_800, 2_000, 2_000, 2_200] + ([70_000] if dice.random() < 0.005 else []))
        made += [
            Sample(uuid, at + dice.randrange(40), odd_values(dice)) for uuid in uuids if dice.random() > 0.05
        ]
    return [one for one in made if not start + HOUR < one.at < start + 2 * HOUR]


def store(readings: list[Sample]) -> None:
    for at in range(0, len(readings), 5_000):
        write(readings[at : at + 5_000])


def expected(period: int, until: int) -> dict[int, dict[str, Any]]:
    """The roll-up of all stored readings before `until`, by key."""
    groups: dict[int, list[GpuSample]] = defaultdict(list)
    for row in GpuSample.objects.all():
        at = samples.time_of(row.pk)
        if at < until:
            groups[row.pk - at % period].append(row)
    return {key: summed(rows) for key, rows in groups.items()}


def summed(rows: list[GpuSample]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column in COLUMNS:
        said = [value for row in rows if (value := getattr(row, column)) is not None]
        found |= {
            f"{column}_min": min(said, default=None),
            f"{column}_sum": sum(said) if said else None,
            f"{column}_max": max(said, default=None),
            f"{column}_count": len(said),
        }
    return found


def stored(table: type[models.Model]) -> dict[int, dict[str, Any]]:
    return {row.pop("id"): row for row in table._default_manager.values()}


def assert_exact(now: datetime = NOW) -> None:
    until = samples.floor(samples.milliseconds(now) - 10 * SECOND, MINUTE)
    assert stored(GpuMinute) == expected(MINUTE, until)
    assert stored(GpuHour) == expected(HOUR, samples.floor(until, HOUR))


def finish(now: datetime = NOW) -> int:
    """Roll up in the smallest steps there are; how many it took."""
    for number in range(1, 1000):
        if rollups.roll_up(now, seconds=0):
            return number
    raise AssertionError("it never ends")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many transactions where there would be one."""
    monkeypatch.setattr(rollups, "MINUTES_AT_ONCE", 7 * MINUTE)
    monkeypatch.setattr(rollups, "HOURS_AT_ONCE", HOUR)


# Rolling up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_exact_however_it_is_cut(seed: int, small_steps: None) -> None:
    dice = random.Random(seed)
    store(beat(dice, NOW_MS - 5 * HOUR, NOW_MS))
    assert finish() > 20
    assert_exact()
    assert any(row[f"{COLUMNS[0]}_sum"] is not None for row in stored(GpuHour).values())


def test_it_goes_on_as_readings_come(small_steps: None) -> None:
    dice, start = random.Random(4), NOW_MS - 3 * HOUR
    for at in range(start, NOW_MS, 10 * MINUTE):
        store(beat(dice, at, min(at + 10 * MINUTE, NOW_MS), ("GPU-a",)))
        moment = datetime.fromtimestamp((at + 10 * MINUTE) / 1000, UTC)
        rollups.roll_up(min(moment, NOW))
        assert_exact(min(moment, NOW))


def test_running_it_again_changes_nothing() -> None:
    store(beat(random.Random(5), NOW_MS - 3 * HOUR, NOW_MS))
    rollups.roll_up(NOW)
    once = stored(GpuMinute), stored(GpuHour)
    assert rollups.roll_up(NOW)
    GpuSeries.objects.update(minutes_to=0, hours_to=0)
    finish()
    assert (stored(GpuMinute), stored(GpuHour)) == once


@pytest.mark.parametrize("dies_in", ["minutes", "hours"])
def test_an_end_half_way_leaves_nothing_half_done(dies_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store(beat(random.Random(6), NOW_MS - 3 * HOUR, NOW_MS))
    summarize, calls = rollups._summarize, [0]

    def dying(table: Any, *rest: Any) -> None:
        summarize(table, *rest)
        calls[0] += 1
        if table is (GpuMinute if dies_in == "minutes" else GpuHour):
            raise KeyboardInterrupt

    monkeypatch.setattr(rollups, "_summarize", dying)
    with pytest.raises(KeyboardInterrupt):
        rollups.roll_up(NOW)
    assert calls[0]
    assert stored(GpuMinute) == {}
    monkeypatch.setattr(rollups, "_summarize", summarize)
    rollups.roll_up(NOW)
    assert_exact()


def test_late_readings_count() -> None:
    """A host whose agent could not write for minutes, another that was an hour behind."""
    all_of_them = beat(random.Random(7), NOW_MS - 4 * HOUR, NOW_MS)
    late = [one for one in all_of_them if one.uuid == "GPU-b" and one.at > NOW_MS - 12 * MINUTE]
    later = [one for one in all_of_them if one.uuid == "GPU-a" and one.at < NOW_MS - 3 * HOUR]
    store([one for one in all_of_them if one not in late and one not in later])
    rollups.roll_up(NOW)
    for missing in (late, later):
        store(missing)
        rollups.roll_up(NOW)
        assert_exact()
    assert GpuSample.objects.count() == len(all_of_them)


def test_a_clock_that_is_set_back_lives_an_hour_twice() -> None:
    dice = random.Random(8)
    store(beat(dice, NOW_MS - 2 * HOUR, NOW_MS, ("GPU-a",)))
    rollups.roll_up(NOW)
    store(beat(dice, NOW_MS - HOUR, NOW_MS + HOUR, ("GPU-a",)))
    rollups.roll_up(NOW)
    assert_exact()
    rollups.roll_up(NOW + timedelta(hours=1))
    assert_exact(NOW + timedelta(hours=1))
    window = history.query(UTILIZATION, ["GPU-a"], NOW - timedelta(hours=2), NOW, now=NOW)
    assert window.t == sorted(set(window.t))


def test_a_clock_that_is_ahead_and_corrected() -> None:
    """What was rolled up in the future is rolled up again as the present comes by."""
    store([reading(NOW_MS + 2 * HOUR + n * 2_000) for n in range(60)])
    rollups.roll_up(NOW + timedelta(hours=3))
    store(beat(random.Random(9), NOW_MS - 2 * HOUR, NOW_MS, ("GPU-a",)))
    rollups.roll_up(NOW)
    until = samples.floor(NOW_MS - 10 * SECOND, MINUTE)
    now = {pk: row for pk, row in stored(GpuMinute).items() if samples.time_of(pk) < until}
    assert now == expected(MINUTE, until)
    rollups.roll_up(NOW + timedelta(hours=3))
    assert_exact(NOW + timedelta(hours=3))


def test_a_reading_is_stored_once() -> None:
    write([reading(NOW_MS)])
    write([reading(NOW_MS, "GPU-a", 1, 1, 1, 1), reading(NOW_MS + 1)])
    assert [row.utilization_gpu_permille for row in GpuSample.objects.order_by("pk")] == [500, 500]


@pytest.mark.django_db(transaction=True, available_apps=list(settings.INSTALLED_APPS))
def test_no_roll_up_passes_a_reading_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late reading whose transaction is still open: the roll-up waits for it (PostgreSQL), or it for the other."""
    write([reading(NOW_MS - HOUR + n * 2_000) for n in range(100)])
    inserted, rolled = threading.Event(), threading.Event()
    set_back = recorder._set_back

    def slowly(*arguments: Any) -> None:
        inserted.set()
        rolled.wait(0.5)
        set_back(*arguments)

    def late() -> None:
        write([reading(NOW_MS - HOUR + 1_000, "GPU-a", 1000, 1, 1, 1)])
        connection.close()

    monkeypatch.setattr(recorder, "_set_back", slowly)
    writer = threading.Thread(target=late)
    writer.start()
    assert inserted.wait(5)
    rollups.roll_up(NOW)
    rolled.set()
    writer.join()
    rollups.roll_up(NOW)
    assert GpuSample.objects.count() == 101
    assert_exact()


def test_nobody_is_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backlog is worked off in short transactions, and each of them gets on."""
    write([reading(NOW_MS - HOUR, f"GPU-{n}") for n in range(20)])
    monkeypatch.setattr(rollups, "HOLD_SECONDS", 0)
    assert not rollups.roll_up(NOW, seconds=0)
    assert GpuSeries.objects.filter(minutes_to=0).count() == 19
    assert rollups.roll_up(NOW)
    assert_exact()


# Pruning ------------------------------------------------------------------------------------------------


def test_each_table_keeps_its_time() -> None:
    days = {"old": 800, "of last year": 300, "of last week": 7, "of today": 0.1}
    at = {name: NOW_MS - int(age * 24 * HOUR) for name, age in days.items()}
    for moment in at.values():
        write([reading(moment + n * 2_000) for n in range(5)])
    while not rollups.roll_up(NOW):
        pass
    assert rollups.prune(NOW)
    assert times(GpuSample) == {samples.floor(at["of today"], HOUR)}
    assert times(GpuMinute) == {samples.floor(at[name], HOUR) for name in ("of last week", "of today")}
    assert times(GpuHour) == {
        samples.floor(at[name], HOUR) for name in ("of last year", "of last week", "of today")
    }


def times(table: type[models.Model]) -> set[int]:
    keys = table._default_manager.values_list("pk", flat=True)
    return {samples.floor(samples.time_of(key), HOUR) for key in keys}


def test_nothing_goes_that_is_not_rolled_up() -> None:
    write([reading(NOW_MS - 72 * HOUR + n * 600_000) for n in range(400)])
    rollups.prune(NOW)
    assert GpuSample.objects.count() == 400
    rollups.roll_up(NOW)
    rollups.prune(NOW)
    assert times(GpuSample) == set(range(samples.floor(NOW_MS - 48 * HOUR, HOUR), NOW_MS - 6 * HOUR, HOUR))
    assert GpuMinute.objects.count() == 400


def test_it_deletes_in_small_parts_and_within_its_time(django_assert_max_num_queries: Any) -> None:
    store([reading(NOW_MS - 72 * HOUR + n * 2_000) for n in range(3 * rollups.ROWS_AT_ONCE)])
    rollups.roll_up(NOW)
    assert not rollups.prune(NOW, seconds=0)
    assert GpuSample.objects.count() == 2 * rollups.ROWS_AT_ONCE
    assert rollups.prune(NOW)
    assert GpuSample.objects.count() == 0


def test_a_minute_whose_readings_are_gone_is_not_written_again() -> None:
    """A clock that was set back by days: its readings would replace what they are not."""
    old = NOW_MS - 72 * HOUR
    write([reading(old + n * 2_000) for n in range(30)])
    rollups.roll_up(NOW)
    rollups.prune(NOW)
    before = stored(GpuMinute), stored(GpuHour)
    write([reading(old + 11, "GPU-a", 1, 1, 1, 1)])
    rollups.roll_up(NOW)
    assert (stored(GpuMinute), stored(GpuHour)) == before
    assert GpuSample.objects.count() == 0


# Asking -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [7, 300, 2000])
def test_the_answer_does_not_know_when_the_roll_up_ran(points: int) -> None:
    dice = random.Random(10)
    store(beat(dice, NOW_MS - 30 * HOUR, NOW_MS - 29 * HOUR) + beat(dice, NOW_MS - 4 * HOUR, NOW_MS))

    def answers() -> list[history.Window]:
        start = NOW - timedelta(hours=29, minutes=17)
        return [history.query(metric, ["GPU-a", "GPU-b"], start, NOW, points, now=NOW) for metric in METRICS]

    raw = answers()
    rollups.roll_up(NOW - timedelta(minutes=50))
    assert answers() == raw
    rollups.roll_up(NOW)
    assert answers() == raw
    store([reading(NOW_MS - 3 * HOUR + 7, "GPU-b", 1001, 1, 1, 1)])  # sets one of the cards back
    late = answers()
    assert late[0].series["GPU-b"] != raw[0].series["GPU-b"]
    assert [one.series["GPU-a"] for one in late] == [one.series["GPU-a"] for one in raw]
    rollups.roll_up(NOW)
    assert answers() == late


@pytest.mark.parametrize(
    ("hours", "points", "step"),
    [
        (1 / 12, 300, 4),
        (1 / 4, 300, 4),
        (1, 300, 12),
        (1, 2000, 4),
        (6, 300, 120),
        (24, 300, 300),
        (24, 2000, 60),
        (48, 2000, 120),
        (49, 2000, 120),
        (7 * 24, 300, 3600),
        (30 * 24, 300, 10_800),
        (30 * 24, 2000, 1800),
        (36 * 24, 2000, 3600),
        (365 * 24, 300, 2 * 86_400),
        (730 * 24, 2000, 43_200),
        (730 * 24, 1, 730 * 86_400),
    ],
)
def test_the_resolution_follows_window_and_points(hours: float, points: int, step: int) -> None:
    assert history.resolution(NOW - timedelta(hours=hours), NOW, points, NOW) == step


def test_what_is_kept_decides_too() -> None:
    """Five minutes of last week exist by the minute, of last year by the hour."""
    found = [
        history.resolution(NOW - timedelta(days=age), NOW - timedelta(days=age, minutes=-5), 300, NOW)
        for age in (1, 7, 300)
    ]
    assert found == [4, 60, 3600]


def test_a_gap_is_a_gap() -> None:
    """An agent that slept from 20 to 10 minutes ago; a value that the card kept to itself; nothing is 0."""
    awake = [n * 2_000 for n in range(900) if not 300 <= n < 600]
    store([reading(NOW_MS - 30 * MINUTE + at, "GPU-a", 500, None, 400, 1000) for at in awake])
    rollups.roll_up(NOW)
    for points in (30, 450):
        window = history.query(UTILIZATION, ["GPU-a"], NOW - timedelta(minutes=30), NOW, points, now=NOW)
        mean = window.series["GPU-a"].mean
        asleep = [
            NOW.timestamp() - 1200 <= at and at + window.resolution_s <= NOW.timestamp() - 600
            for at in window.t
        ]
        assert [value for value, slept in zip(mean, asleep, strict=True) if slept] == [None] * sum(asleep)
        assert sum(asleep) * window.resolution_s >= 540
        assert mean[1] == mean[-2] == 50.0
    assert set(
        history.query(MEMORY, ["GPU-a"], NOW - timedelta(minutes=30), NOW, now=NOW).series["GPU-a"].max
    ) == {None}
    assert GpuMinute.objects.count() == 21


def test_the_step_under_way_is_there_once_it_holds_something() -> None:
    now = datetime(2026, 11, 30, 12, 0, 1, tzinfo=UTC)
    at = samples.milliseconds(now)
    write([reading(at - n * 2_000) for n in range(1, 30)])
    window = history.query(UTILIZATION, ["GPU-a"], now - timedelta(seconds=40), now, now=now)
    assert window.resolution_s == 4
    assert window.t[-1] == now.timestamp() - 5
    write([reading(at - 100)])
    longer = history.query(UTILIZATION, ["GPU-a"], now - timedelta(seconds=40), now, now=now)
    assert longer.t == [*window.t, window.t[-1] + 4]
    assert None not in longer.series["GPU-a"].mean


def test_cards_share_an_axis_and_units_are_the_metrics_own() -> None:
    write([reading(NOW_MS - 5_000, "GPU-a", 337, 3, 455, 2501), reading(NOW_MS - 9_000, "GPU-b", 0, 0, 0, 0)])
    for metric, a, b in zip(METRICS, (33.7, 3, 45.5, 250.1), (0, 0, 0, 0), strict=True):
        window = history.query(
            metric, ["GPU-a", "GPU-b", "GPU-none"], NOW - timedelta(seconds=20), NOW, now=NOW
        )
        values = {uuid: series.mean for uuid, series in window.series.items()}
        assert {len(one) for one in values.values()} == {len(window.t)}
        assert [value for value in values["GPU-a"] if value is not None] == [a]
        assert [value for value in values["GPU-b"] if value is not None] == [b]
        assert set(values["GPU-none"]) == {None}


def test_years_of_a_large_card_add_up() -> None:
    """288 GB, five times a second, for 600 days are 7 × 10^19 bytes: no 64-bit sum."""
    per_hour, used = 18_000, 288 * 10**9
    first = samples.floor(NOW_MS - 600 * 24 * HOUR, HOUR)
    series = GpuSeries.objects.create(
        uuid="GPU-a", minutes_to=first + 600 * 24 * HOUR, hours_to=first + 600 * 24 * HOUR
    )
    GpuHour.objects.bulk_create(
        GpuHour(id=samples.key(series.pk, first + n * HOUR), memory_used_bytes_min=used, memory_used_bytes_max=used + n,
                memory_used_bytes_sum=used * per_hour, memory_used_bytes_count=per_hour)
        for n in range(600 * 24)
    )  # fmt: skip
    window = history.query(MEMORY, ["GPU-a"], NOW - timedelta(days=600), NOW, points=1, now=NOW)
    assert [value for value in window.series["GPU-a"].mean if value is not None] == [used] * len(window.t)
    assert max(window.series["GPU-a"].max) == used + 600 * 24 - 1


def test_many_cards_share_the_points_of_an_answer() -> None:
    window = history.last(12 * 60, UTILIZATION, [f"GPU-{n}" for n in range(64)], points=2000)
    assert len(window.t) * 64 <= history.MAX_POINTS_TOGETHER


def test_a_query_reads_all_cards_at_once(django_assert_max_num_queries: Any) -> None:
    now = timezone.now()
    store(
        [
            reading(samples.milliseconds(now) - n * 60_000, f"GPU-{card}")
            for card in range(16)
            for n in range(600)
        ]
    )
    rollups.roll_up(now)
    with django_assert_max_num_queries(5):
        window = history.last(9 * 60, UTILIZATION, [f"GPU-{n}" for n in range(16)])
    assert all(value == 50.0 for value in window.series["GPU-15"].mean[:-1])


# On the way there -----------------------------------------------------------------------------------------


def card(uuid: str = "GPU-a", at: datetime | None = NOW, **values: Any) -> Card:
    return Card({"uuid": uuid}, dict.fromkeys(METRICS) | values, at)


def test_what_a_card_says_is_noted_once() -> None:
    """A card that hangs keeps its last reading: it is no second one."""
    unwritten = recorder.Unwritten()
    hot = card(temperature_celsius=45.26, utilization_gpu_percent=12.34)
    unwritten.note([hot, card("GPU-new", at=None)])
    unwritten.note([hot])
    unwritten.write()
    assert GpuSample.objects.values_list(*COLUMNS).get() == (123, None, 453, None)
    assert not unwritten.samples


def test_what_cannot_be_written_now_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten = recorder.Unwritten()
    monkeypatch.setattr(recorder, "AT_ONCE", 7)
    for n in range(20):
        unwritten.note([card(at=NOW + timedelta(seconds=2 * n))])

    def away(readings: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr(recorder, "write", away)
        with pytest.raises(ConnectionError):
            unwritten.write()
    assert len(unwritten.samples) == 20
    unwritten.write()
    assert (GpuSample.objects.count(), len(unwritten.samples)) == (20, 0)


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "UNWRITTEN", 5)
    unwritten = recorder.Unwritten()
    for n in range(9):
        unwritten.note([card(at=NOW + timedelta(seconds=2 * n))])
    assert len(unwritten.samples) == 5


def test_a_reading_that_no_column_takes_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    unwritten = recorder.Unwritten()
    unwritten.note([card(memory_used_bytes=2**80)])
    unwritten.write()
    unwritten.note([card(at=NOW + timedelta(seconds=2), memory_used_bytes=1)])
    unwritten.write()
    assert GpuSample.objects.get().memory_used_bytes == 1
    assert "dropped" in caplog.text


@pytest.mark.skipif(connection.vendor != "sqlite", reason="about SQLite's files")
def test_a_key_is_the_rows_own_number() -> None:
    """No second b-tree beside the table's: `INTEGER PRIMARY KEY`, letter by letter."""
    tables = [table._meta.db_table for table in (GpuSample, GpuMinute, GpuHour)]
    with connection.cursor() as cursor:
        cursor.execute("SELECT tbl_name FROM sqlite_master WHERE type = 'index'")
        assert not set(tables) & {name for (name,) in cursor.fetchall()}
