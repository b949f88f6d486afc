"""Pictures of the pages, for somebody to look at, and the proof that nothing on them is wider than the window.

`MISTUDIO_PICTURES=folder` keeps them there, otherwise they lie in pytest's own folder. In `docs/img` only the pictures
that are there already are taken anew: what the documents show is chosen by hand. All of them, as `docs/img` has them:

    MISTUDIO_PICTURES=docs/img .venv/bin/python -m pytest tests/browser -k faces
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests.browser.palette import shrunk
from tests.environment import PICTURES
from tests.system import ROOT

WIDE, MIDDLE, NARROW, NARROWEST = 1400, 768, 390, 360
LOOKS = [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")]
DOCUMENTS = ROOT / "docs" / "img"
SETTLE_MS = 300  # charts take the new width and the new colours
Shoot = Callable[..., None]


@pytest.fixture
def shoot(tmp_path: Path) -> Shoot:
    """`shoot(page, "monitor-lost")`: wide and at phone width, light and dark; `whole`: also below the fold."""

    def take(page: Page, name: str, *, whole: bool = True) -> None:
        for width, theme in LOOKS:
            show(page, width, theme)
            file = place(tmp_path, f"{name}-{theme}{'-narrow' if width == NARROW else ''}.png")
            raw = page.screenshot(full_page=whole)
            file.write_bytes(shrunk(raw) if file.parent == DOCUMENTS else raw)
        show(page, MIDDLE, "light")
        show(page, NARROWEST, "light")
        show(page, WIDE, "light")

    return take


def show(page: Page, width: int, theme: str) -> None:
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(SETTLE_MS)
    fits(page)


def fits(page: Page) -> None:
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]  # type: ignore[index]


def place(otherwise: Path, name: str) -> Path:
    folder = Path(PICTURES or otherwise).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if folder == DOCUMENTS and not (folder / name).exists():
        return otherwise / name
    return folder / name
