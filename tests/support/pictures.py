"""Pictures of screens, kept small: parts of the page that are missing, moved or in other colours differ; fonts do not.

A screen is kept as a PNG of an eighth of its width, of a narrow one a quarter, in which letters are grey areas. It is
alike where few pixels differ by more than what another version of a font changes. Write them anew, after a look at
each, with TRAINKIT_TEST_PICTURES=write.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Final

from PIL import Image, ImageChops, ImageFilter

VISIBLE: Final = 12
"""Difference of a channel, of 255, from which a pixel counts as another one."""
TOLERANCE: Final = 0.01
"""Largest share of other pixels. DejaVu Serif instead of DejaVu Sans makes 0.006, missing lines of the charts 0.017."""


def shrunk(png: bytes) -> Image.Image:
    """Return a screen at the size in which it is kept."""
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    return whole.reduce(8 if whole.width > 1000 else 4)


def difference(one: Image.Image, other: Image.Image) -> float:
    """Return the share of pixels that differ visibly, after a blur of a pixel."""
    if one.size != other.size:
        return 1.0
    blurred = [image.filter(ImageFilter.GaussianBlur(1)) for image in (one, other)]
    channels = ImageChops.difference(*blurred).split()
    largest = ImageChops.lighter(ImageChops.lighter(channels[0], channels[1]), channels[2])
    return float(sum(largest.histogram()[VISIBLE:]) / (one.width * one.height))


def difference_from_kept(path: Path, png: bytes) -> float:
    """Return how much a screen differs from the one that is kept in a file."""
    found = shrunk(png)
    if os.environ.get("TRAINKIT_TEST_PICTURES") == "write":
        found.save(path, optimize=True)
    with Image.open(path) as kept:
        return difference(found, kept.convert("RGB"))
