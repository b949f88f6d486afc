"""How the benchmarks take turns, and which values they believe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import growth, side_by_side


def noting(seen: list[str], name: str) -> Callable[[], float]:
    def side() -> float:
        seen.append(name)
        return float(len(seen))

    return side


def test_every_peer_stands_between_two_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "beside_others", lambda work: (work(), 0.0))
    seen: list[str] = []
    sides = {name: noting(seen, name) for name in ("floor", "ours", "b", "c")}
    found = side_by_side.in_turns(sides, 2, first="ours", once=("floor",))
    assert seen == ["floor", "ours", "b", "ours", "c", "ours"] * 2
    assert found.found["ours"] == [2, 4, 6, 8, 10, 12]
    assert found.median("ours") == 7
    assert found.ratio("ours", "b") == 7 / 6


def test_a_disturbed_value_is_taken_again_and_what_stays_so_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = iter([0.9, 0.4, 0.1, 0.9, 0.7, 0.8])
    monkeypatch.setattr(side_by_side, "beside_others", lambda work: (work(), next(cores)))
    seen: list[str] = []
    found = side_by_side.in_turns({"ours": noting(seen, "ours")}, 2, first="ours")
    assert found.found["ours"] == [3, 5]  # the third try is quiet; of the other three the second is quietest
    assert "1 of 2 beside others, 0.70 cores" in found.lines("tokens/s")[0]


def test_the_exponent_is_the_slope_in_logarithms() -> None:
    points = [growth.Point(size, 3e-6 * size**1.5, 0) for size in (10, 100, 1000)]
    assert growth.exponent(points) == pytest.approx(1.5)


def test_a_new_peak_forgets_the_old_one() -> None:
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    del held
    peak = growth.Peak()
    block = bytearray(16 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert 12 * 2**20 < peak.bytes() < 40 * 2**20
