"""The strategies that docs/adding-a-strategy.md shows, for cases of the contract; ranks import them here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tests.contract.stepping import Case
from tests.support import zoo
from trainkit.strategies.base import Strategy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding-a-strategy.md"


def _module(first_line: str) -> dict[str, Any]:
    """Run the block of the page that begins with a line."""
    match = re.search(rf"```python\n({re.escape(first_line)}\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert match is not None
    module: dict[str, Any] = {"__name__": __name__}
    exec(compile(match[1], str(PAGE), "exec", dont_inherit=True), module)
    return module


MyStrategy: type[Strategy] = _module("# trainkit/strategies/my_strategy.py")["MyStrategy"]
SEQUENCE = _module("from collections.abc import Sequence")


@dataclass(frozen=True, kw_only=True)
class Documented(Case):
    """A training by it; `settings` are its fields."""

    strategy: str = "my_strategy"

    def make_strategy(self) -> Strategy:
        """The class of the page."""
        return MyStrategy(**self.settings)


@dataclass(frozen=True, kw_only=True)
class Stretched(Case):
    """A training of sequences of 4 tokens by the strategy that cuts them; `settings` are its fields."""

    strategy: str = "sequence"
    task: str = "tokens"
    samples: Callable[[], zoo.Sentences] | None = zoo.EvenSentences

    def make_model(self) -> nn.Module:
        """The model of the page."""
        model: nn.Module = SEQUENCE["Words"](vocab_size=zoo.TOKENS, context=4)
        return zoo.fill(model)

    def make_strategy(self) -> Strategy:
        """The class of the page."""
        strategy: Strategy = SEQUENCE["SequenceParallel"](**self.settings)
        return strategy
