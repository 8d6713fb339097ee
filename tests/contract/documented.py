"""The strategy that docs/adding-a-strategy.md shows, for cases of the contract; ranks of the pool import it here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.stepping import Case
from trainkit.strategies.base import Strategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-strategy.md"

found = re.search(r"```python\n(# trainkit/strategies/my_strategy.py\n.*?)```", PAGE.read_text(), re.DOTALL)
assert found is not None
page: dict[str, Any] = {"__name__": __name__}
exec(compile(found[1], str(PAGE), "exec", dont_inherit=True), page)
MyStrategy: type[Strategy] = page["MyStrategy"]


@dataclass(frozen=True, kw_only=True)
class Documented(Case):
    """A training by it; `settings` are its fields."""

    strategy: str = "my_strategy"

    def make_strategy(self) -> Strategy:
        """The class of the page."""
        return MyStrategy(**self.settings)
