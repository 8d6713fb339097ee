"""Content of the page of the ledger, as JSON: every comparison of `comparisons.jsonl`, the newest one first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

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
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    data = {
        "version": 1,
        "kind": "ledger",
        "title": title,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "sentence": f"{len(rows):,} comparison{'' if len(rows) == 1 else 's'}: {counts}. Their runs trained {trained}.",
        "notes": [f"Only the newest {_MOST:,} are shown."] if len(rows) > _MOST else [],
        "rows": rows[: -_MOST - 1 : -1],
    }
    return make_page(cleaned(data), scripts=SCRIPTS)
