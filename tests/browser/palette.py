"""PNG pictures with a palette of 256 colours: a third of their size in the repository, and no eye sees it.

Only what Chromium writes is read (PNG specification, 3rd edition: 8 bits, RGB or RGBA, not interlaced). A few
seconds for a picture of 1400 × 900.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

HEAD = b"\x89PNG\r\n\x1a\n"
COLOURS, COMMONEST = 256, 160


def shrunk(raw: bytes) -> bytes:
    """The same picture with a palette, or as it was where that is not smaller."""
    smaller = with_palette(pixels(raw))
    return smaller if len(smaller) < len(raw) else raw


def pixels(raw: bytes) -> np.ndarray:
    """[height, width, 3], bytes."""
    parts = list(chunks(raw))
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", parts[0][1])
    assert (depth, interlaced) == (8, 0) and kind in (2, 6), "not as Chromium writes it"
    channels = {2: 3, 6: 4}[kind]
    packed = zlib.decompress(b"".join(body for name, body in parts if name == b"IDAT"))
    lines = np.frombuffer(packed, np.uint8).reshape(height, 1 + width * channels)
    above, found = np.zeros(width * channels, np.uint8), []
    for line in lines:
        above = unfiltered(int(line[0]), line[1:], above, channels)
        found.append(above)
    return np.stack(found).reshape(height, width, channels)[..., :3]


def chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(HEAD)
    while at < len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        yield raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]
        at += 12 + length


def unfiltered(kind: int, line: np.ndarray, above: np.ndarray, channels: int) -> np.ndarray:
    """Filters 0 to 4: none, left, above, their mean, and Paeth's choice."""
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line.reshape(-1, channels), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 2:
        return line + above
    here, over = [0] * channels, [0] * channels + above.tolist()
    for n, value in enumerate(line.tolist()):
        left, up, corner = here[n], over[n + channels], over[n]
        guess = (left + up) // 2 if kind == 3 else paeth(left, up, corner)
        here.append((value + guess) & 255)
    return np.array(here[channels:], np.uint8)


def paeth(left: int, up: int, corner: int) -> int:
    """Whichever is nearest to `left + up - corner`; ties in this order."""
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def with_palette(image: np.ndarray) -> bytes:
    height, width, _ = image.shape
    colours, where, counts = np.unique(image.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    colours = colours.astype(np.int64)
    palette = chosen(colours, counts)
    nearest = distances(colours, palette).argmin(1).astype(np.uint8)
    lines = np.zeros((height, 1 + width), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = nearest[where.reshape(-1)].reshape(height, width)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    named = (
        (b"IHDR", header),
        (b"PLTE", palette.astype(np.uint8).tobytes()),
        (b"IDAT", body),
        (b"IEND", b""),
    )
    return HEAD + b"".join(chunk(name, content) for name, content in named)


def chosen(colours: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The commonest, then one by one what is farthest from all chosen ones, common ones sooner."""
    first = np.argsort(-counts)[:COMMONEST]
    found, far = list(first), distances(colours, colours[first]).min(1)
    while len(found) < min(COLOURS, len(colours)):
        found.append(int(np.argmax(far * np.sqrt(counts))))
        far = np.minimum(far, distances(colours, colours[found[-1:]])[:, 0])
    return colours[found]


def distances(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    return ((some[:, None] - others[None]) ** 2).sum(2)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
