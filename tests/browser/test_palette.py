"""Pictures with a palette: what a browser draws of them is what it drew before."""

from __future__ import annotations

import base64

from playwright.sync_api import Browser, Page

from tests.browser.palette import pixels, shrunk

HTML = """<body style="margin:0"><h1 style="background:linear-gradient(90deg, #b3271e, #0b6580)">Hjälp, 42 %</h1>"""


def test_a_picture_with_a_palette_is_smaller_and_looks_the_same(browser: Browser) -> None:
    page = browser.new_page(viewport={"width": 400, "height": 120})
    page.set_content(HTML)
    before = page.screenshot()
    after = shrunk(before)
    assert len(after) < len(before)
    difference = abs(pixels(drawn(page, after)).astype(int) - pixels(before).astype(int))
    assert difference.max() < 24
    assert difference.mean() < 1
    page.close()


def drawn(page: Page, raw: bytes) -> bytes:
    address = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
    page.set_content(f'<body style="margin:0"><img style="display:block" src="{address}">')
    page.wait_for_function("document.images[0].complete")
    return page.screenshot()
