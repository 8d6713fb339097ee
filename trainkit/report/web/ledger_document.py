"""Content of the page of the ledger, as JSON: every comparison of `comparisons.jsonl`, the newest one first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from trainkit.report.curves import number
from trainkit.report.numbers import duration
from trainkit.report.schemas.looking import PairedComparison
from trainkit.report.web.page import cleaned, make_page

SCRIPTS: Final = ("dom.js", "paper.js", "ledger.js")
_MOST: Final = 1_000
"""Largest number of comparisons: the newest."""


def ledger_page(rows: Sequence[PairedComparison], title: str) -> str:
    """Return the page, with the newest 1,000 comparisons.

    Args:
        rows: the comparisons, the first one first.
        title: the path of the ledger.
    """
    kinds = Counter(row["answer"] if row["answer"] in ("better", "worse") else "undecided or equal" for row in rows)
    trained = duration(sum(number(row["seconds"]) or 0.0 for row in rows))
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    newest = [_row(row) for row in reversed(rows[-_MOST:])]
    sizes: dict[str, float] = {}
    for row in newest:
        bounds = [abs(one) for one in (row["low"], row["high"]) if one is not None]
        sizes[row["metric"]] = max([sizes.get(row["metric"], 0.0), *bounds])
    data = {
        "version": 1,
        "kind": "ledger",
        "title": title,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "sentence": f"{len(rows):,} comparison{'' if len(rows) == 1 else 's'}: {told}. Their runs trained {trained}.",
        "notes": [f"Only the newest {_MOST:,} are shown."] if len(rows) > _MOST else [],
        "rows": newest,
        "sizes": sizes,
    }
    return make_page(cleaned(data), scripts=SCRIPTS)


def _row(found: PairedComparison) -> dict[str, Any]:
    """Return a comparison as a row of the page: `low` and `high` are null where nothing is concluded."""
    low, high = (number(bound) for bound in found["interval"])
    keys: Sequence[Mapping[str, Any]] = found["differences"]
    return {
        **{name: found[name] for name in ("time", "metric", "answer", "line")},
        "a": found["a"]["name"],
        "b": found["b"]["name"],
        "keys": [f"{one['key']}: {one['left']} -> {one['right']}" for one in keys],
        "difference": number(found["difference"]),
        "low": low,
        "high": high,
        "pairs": len(found["pairs"]),
        "seconds": number(found["seconds"]),
        "remarks": [*(f"pairing is broken: {text}" for text in found["unpaired"]), *found["remarks"]],
    }
