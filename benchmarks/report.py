"""Dated results: one markdown file per benchmark, with the machine of the measurement."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("trainkit-torch", "torch", "lightning", "accelerate", "keras", "tensorflow-cpu")


def machine() -> str:
    """Return one line about the machine of the measurement."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{platform.system()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}, {', '.join(versions)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ratio(values: Sequence[float], base: Sequence[float], digits: int = 2) -> str:
    """Return the median of the ratios of interleaved rounds, with their spread."""
    ratios = sorted(a / b for a, b in zip(values, base, strict=True))
    return f"**{statistics.median(ratios):.{digits}f}** ({ratios[0]:.{digits}f} to {ratios[-1]:.{digits}f})"


def write(name: str, title: str, command: str, body: str) -> Path:
    """Write `results/NAME.md` and print it."""
    today = datetime.now(tz=UTC).date().isoformat()
    text = f"# {title}\n\n{today}. {machine()}.\n\n```bash\n{command}\n```\n\n{body}\n"
    path = RESULTS / f"{name}.md"
    path.write_text(text)
    print(text)
    print(f"written to {path}")
    return path
