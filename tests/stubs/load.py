"""Cards at work: values of a stand-in driver that change as those of busy cards do."""

from __future__ import annotations

import random
import threading

from tests.stubs.driver import StandIn, StandInCard

SECONDS = 0.1


class Load(threading.Thread):
    """Each card wanders around its share of full load. It alone writes: change the cards, and it follows."""

    def __init__(self, driver: StandIn, shares: list[float]) -> None:
        super().__init__(daemon=True)
        self.driver, self.shares = driver, shares
        self.dice = random.Random(0)
        self.stopped = threading.Event()

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stopped.set()
        self.join()

    def run(self) -> None:
        while not self.stopped.wait(SECONDS):
            for card, share in zip(self.driver.cards, self.shares, strict=False):
                self.wander(card, share)
            self.driver.write()

    def wander(self, card: StandInCard, share: float) -> None:
        now = card.utilization[0] / 100
        load = min(1.0, max(0.0, now + 0.3 * (share - now) + self.dice.gauss(0, 0.05 * (share > 0))))
        limit = card.power[1]
        heat = card.temperature[0] + 0.1 * (36 + 42 * share - card.temperature[0]) + self.dice.gauss(0, 0.4)
        card.utilization = (round(100 * load), round(60 * load))
        card.temperature = (round(heat), card.temperature[1])
        card.power = (round(limit * (0.07 + 0.8 * load)), limit)
