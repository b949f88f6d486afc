"""What people open the Monitor for, answered in words on the first screen (1400 × 900), without a click."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import sign_in, visit
from tests.stubs.driver import IS_LOST, StandIn, StandInCard
from tests.system import System

#: Every piece of text that lies in the window, in the order of the page.
ON_SCREEN = """(() => {
  const seen = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const box = range.getBoundingClientRect();
    const parent = walker.currentNode.parentElement;
    if (text && box.width && box.top >= 0 && box.bottom <= innerHeight && parent.checkVisibility()) seen.push(text);
  }
  return seen.join(" ");
})()"""

QUESTIONS = {
    "which card is free?": r"Free now 1 1 of 4\b",
    "which is busy, and with what job, and whose?": r"RTX 3090 busy .*?layer-12 topk · rehearsal .*? · operator",
    "how long still?": r"layer-12 topk · rehearsal \d+ % · \d+ (s|min|h)[\d min]* left",
    "what starts next?": r"Next to start layer-14 topk",
    "why does job layer-14 topk wait?": r"layer-14 topk after layer-12 topk, about \d+ (s|min|h)",
    "is any card lost, and since when?": r"Card 3 of testhost was lost \d+ s ago",
    "how full is each card?": r"(?s)memory [\d.]+ of 24.0 GiB · [\d.]+ free(?:.*?memory [–\d.]+ of 24.0 GiB){2}",
    "which is the hottest?": r"Hottest 71 °C card 0",
    "how much power of the limit?": r"Power 3\d\d of 1\W?050 W",
    "how old is this?": r"live, [01] s",
    "is anything wrong?": r"Health all parts answer 3 lost",
    "what is on the cards that is not ours?": r"Not ours \S*python\S* \S+ 153 MiB on 1",
}


@pytest.fixture(scope="module")
def four(driver_library: Path, tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    cards = [StandInCard(bus=f"00000000:{n + 1:02X}:00.0") for n in range(4)]
    for card, watts, heat in zip(cards, (300, 25, 28, 30), (71, 38, 41, 39), strict=True):
        card.power, card.temperature = (1000 * watts, 350_000), (heat, 93)
    cards[1].processes = [("graphics", os.getpid(), 153)]
    return StandIn(tmp_path_factory.mktemp("standin"), driver_library, cards)


@pytest.fixture(scope="module")
def system(four: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(tmp_path_factory.mktemp("home"), driver=four, time_scale=0.3) as running:
        ahead = {"steps": 50_000, "seconds_per_step": 0.1, "memory_mib": 50}
        running.submit("rehearsal", name="layer-12 topk", gpu=0, **ahead)
        running.submit("rehearsal", name="lens of gemma", gpu=2, **ahead)
        running.submit("rehearsal", name="layer-14 topk", gpu=0, steps=1)
        four.cards[3].faults = {"handle": IS_LOST}
        four.write()
        yield running


def test_twelve_questions(browser: Browser, system: System) -> None:
    with visit(browser, system, sign_in(browser, system)) as open_page:
        page = open_page("/")
        expect(page.locator("[data-part=notices]")).to_contain_text("was lost")
        expect(page.locator("[data-part^=holds]").first).to_contain_text("left")
        expect(page.locator("[data-part=glance]")).to_contain_text("about")
        unanswered = set_of_unanswered(page)
        for _ in range(20):  # a number may be on its way
            if not unanswered:
                break
            page.wait_for_timeout(500)
            unanswered = set_of_unanswered(page)
        assert not unanswered, page.evaluate(ON_SCREEN)


def set_of_unanswered(page: Page) -> set[str]:
    text = " ".join(page.evaluate(ON_SCREEN).split())
    return {question for question, answer in QUESTIONS.items() if not re.search(answer, text)}


@pytest.mark.slow
def test_something_wrong_is_said_there_too(browser: Browser, system: System) -> None:
    with visit(browser, system, sign_in(browser, system)) as open_page:
        page = open_page("/")
        agent = system.kill("agent", signal.SIGSTOP)
        try:
            expect(page.locator("[data-part=glance]")).to_contain_text("agents silent")
        finally:
            os.kill(agent, signal.SIGCONT)
        expect(page.locator("[data-part=glance]")).to_contain_text("all parts answer")
