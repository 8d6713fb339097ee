"""Encode raw pixels as PNG, for images in TensorBoard, without an imaging library."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    r"""Encode 8-bit pixels as a PNG.

    Args:
        pixels: (height, width, 1) grey or (height, width, 3) red, green, blue.

    Example:
        >>> png_bytes(np.zeros((2, 3, 1), np.uint8)).startswith(b"\x89PNG")
        True

    Source: PNG specification, third edition, W3C 2025, sections 5 and 11.
    """
    height, width, channels = pixels.shape
    kind = {1: 0, 3: 2}[channels]
    # Each row starts with the number of its filter: 0, none.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def grid(images: NDArray[np.floating], *, num_columns: int = 8) -> NDArray[np.uint8]:
    """Tile a batch of images, scaled together to the full range of brightness.

    Args:
        images: (count, channels, height, width), 1 or 3 channels, any finite range.
        num_columns: images per row.

    Returns:
        (rows * height, columns * width, channels) pixels, one dark pixel between images.

    Example:
        >>> grid(np.ones((3, 1, 4, 4), np.float32), num_columns=2).shape
        (9, 9, 1)
    """
    count, channels, height, width = images.shape
    columns = min(num_columns, count)
    rows = -(-count // columns)
    low, high = float(images.min()), float(images.max())
    scaled = (images - low) * (255.0 / (high - low) if high > low else 0.0)
    canvas = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), np.uint8)
    for index in range(count):
        top, left = index // columns * (height + 1), index % columns * (width + 1)
        canvas[top : top + height, left : left + width] = scaled[index].transpose(1, 2, 0).round()
    return canvas
