"""`trainkit capabilities [STRATEGY ...]`: which features each strategy takes, and why it refuses the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainkit.advising.capabilities import ALIASES, FEATURES, STRATEGIES, capabilities
from trainkit.config.grammar import refusal
from trainkit.config.values import nearest
from trainkit.report.schemas.looking import Capability
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Plan each feature under the strategies, and print the answers."""
    columns = {name: name.partition(":")[0].partition(",")[0] for name in STRATEGIES}
    wanted = [ALIASES.get(word, word) for word in call.arguments]
    for word in wanted:
        if word not in (*columns, *columns.values()):
            raise refusal(word, f"no such strategy. {nearest(word, dict.fromkeys([*columns.values(), *ALIASES]))}")
    chosen = {
        name: [*given] for name, given in STRATEGIES.items() if not wanted or name in wanted or columns[name] in wanted
    }
    found = [*capabilities(chosen)]
    features = {name.replace("`", ""): [*given] for name, given in FEATURES.items()}
    document = {"version": 1, "strategies": chosen, "features": features, "capabilities": found}
    call.show(document, _lines(found))
    return 0


def _lines(found: Sequence[Capability]) -> Iterator[str]:
    """Yield for each feature the strategies that take it, and the reasons of the others."""
    width = max(len(one["strategy"]) for one in found)
    for feature in dict.fromkeys(one["feature"] for one in found):
        yield feature
        for one in (one for one in found if one["feature"] == feature):
            answer = {True: "yes", False: f"no   {one['reason']}", None: "-    it has no such key"}[one["supported"]]
            yield f"  {one['strategy']:<{width}}  {answer}"
