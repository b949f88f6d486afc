"""The style sheet's colours: readable (WCAG AA) on both grounds, in both themes."""

from __future__ import annotations

import re

import pytest
from django.conf import settings

SHEET = (settings.BASE_DIR / "static" / "css" / "mistudio.css").read_text()
TOKENS = {
    name: (light, dark)
    for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", SHEET)
}
TEXT = ("ink", "muted", "accent", "ok", "warn", "bad", "s1", "s2", "s3", "s4", "s5", "s6")
PAIRS = [(text, ground) for text in TEXT for ground in ("panel", "bg")]
PAIRS += [("on-accent", "accent"), ("ink", "warn-bg"), ("ink", "bad-bg"), ("muted", "bad-bg")]
PAIRS += [("panel", f"s{n}") for n in range(1, 7)] + [("panel", "bad")]


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground"), PAIRS)
def test_text_can_be_read(text: str, ground: str, theme: int) -> None:
    one, other = sorted(luminance(TOKENS[name][theme]) for name in (text, ground))
    assert (other + 0.05) / (one + 0.05) >= 4.5


def test_motion_is_off_for_those_who_asked() -> None:
    moving = [line for line in SHEET.splitlines() if "animation:" in line or "transition:" in line]
    assert moving
    assert all("prefers-reduced-motion" in line for line in moving)
