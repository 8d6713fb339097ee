"""Name the precision with loss scaling, and the keys that only it reads; imports no torch, for the check of a
config.
"""

from __future__ import annotations

from typing import Final

from trainkit.fields import OnlyWith

SCALED: Final = "fp16_mixed"
"""Value of `Precision` with loss scaling."""
KEYS: Final = OnlyWith(
    keys=("initial_scale", "growth_interval", "min_scale", "max_overflows"),
    key="value",
    value=SCALED,
    reason=f"has no effect: only precision={SCALED} scales its loss.",
)
"""The keys of `Precision` about the scale."""
