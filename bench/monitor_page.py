"""Claim: the Monitor costs its reader < 5 % of a core at eight cards, and its heap stays flat.

    .venv/bin/python -m bench.monitor_page [seconds]

Eight simulated cards at the real clock, an hour of history, a real Chromium. For each mode and two windows: the main
thread's busy time (`TaskDuration` of Chromium's own metrics) while frames come every 2 s. Then two hours of frames are
fed through the page's own handler, its clock moved on with them, and the heap is weighed before and after, both
times after a collection. A main thread that waits for a processor counts as busy: on a machine with other work the
figure is too high, never too low.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import CDPSession, Page, sync_playwright

from tests.browser.conftest import CHROMIUM, FLAGS, sign_in
from tests.browser.past import live_through
from tests.system import System

CARDS = 8
FRAMES = 3600  # two hours of them
#: Lets the bench move the page's clocks; until it does, they are the real ones.
CLOCK = """{
  const time = Date.now, uptime = performance.now.bind(performance);
  window.ahead = 0;
  Date.now = () => time() + window.ahead;
  performance.now = () => uptime() + window.ahead;
}"""
#: Feeds frames that look like the last real one, two seconds apart, with values that wander.
FEED = """(count) => {
  const like = structuredClone(window.last);
  for (let n = 0; n < count; n++) {
    window.ahead += 2000;
    for (const card of like.data.gpus) {
      const values = { utilization_gpu_percent: Math.random() * 100, power_draw_watts: Math.random() * 300 };
      Object.assign(card, { age_s: 0, stale: false, ...values });
    }
    document.dispatchEvent(new CustomEvent("live:frame", { detail: structuredClone(like) }));
  }
}"""
KEEP = """document.addEventListener("live:frame", ({ detail }) => {
  if (detail.channel === "system/gpus" && detail.event === "system:metrics") window.last ??= detail;
})"""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60
    home = Path(tempfile.mkdtemp()) / "home"
    with System(home, cards=",".join(["24GiB"] * CARDS), time_scale=1) as system, sync_playwright() as driver:
        live_through(system, 60, [0.9, 0.5, 0.0])
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        state: Any = sign_in(browser, system)
        context = browser.new_context(storage_state=state, viewport={"width": 1400, "height": 900})
        page = context.new_page()
        page.add_init_script(CLOCK)
        page.goto(system.url)
        page.evaluate(KEEP)
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        for mode in ("Per card", "Aggregated", "Compare"):
            for window in ("5 min", "1 h"):
                busy = load(page, session, mode, window, seconds)
                print(f"{mode:10}  {window:5}  {100 * busy:.1f} % of a core over {seconds:g} s", flush=True)
        for mode in ("Per card", "Aggregated", "Compare"):
            before, after, spent = fed(page, session, mode)
            print(
                f"{mode:10}  {FRAMES} frames: heap {before / 2**20:.2f} → {after / 2**20:.2f} MiB, "
                f"{1000 * spent / FRAMES:.2f} ms a frame",
                flush=True,
            )
        browser.close()


def load(page: Page, session: CDPSession, mode: str, window: str, seconds: float) -> float:
    """The share of a core that the page's main thread takes."""
    for name in (mode, window):
        page.get_by_role("button", name=name, exact=True).click()
    page.wait_for_timeout(5000)
    before = metrics(session)
    page.wait_for_timeout(1000 * seconds)
    after = metrics(session)
    return (after["TaskDuration"] - before["TaskDuration"]) / (after["Timestamp"] - before["Timestamp"])


def fed(page: Page, session: CDPSession, mode: str) -> tuple[float, float, float]:
    """Bytes of heap before and after two hours of frames, and the seconds that they took."""
    page.get_by_role("button", name=mode, exact=True).click()
    page.evaluate(FEED, 600)  # so that the window is full and everything is made
    before = weigh(page, session)
    began = metrics(session)["TaskDuration"]
    for _ in range(FRAMES // 100):
        page.evaluate(FEED, 100)
        page.wait_for_timeout(20)  # as frames do, let the page draw between them
    spent = metrics(session)["TaskDuration"] - began
    return before, weigh(page, session), spent


def weigh(page: Page, session: CDPSession) -> float:
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
        page.wait_for_timeout(200)
    return metrics(session)["JSHeapUsedSize"]


def metrics(session: CDPSession) -> dict[str, float]:
    return {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}


if __name__ == "__main__":
    main()
