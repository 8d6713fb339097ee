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
    names = [ALIASES.get(word, word) for word in call.arguments]
    for word in names:
        if word not in (*columns, *columns.values()):
            raise refusal(word, f"no such strategy. {nearest(word, dict.fromkeys([*columns.values(), *ALIASES]))}")
    chosen = {
        name: [*lines] for name, lines in STRATEGIES.items() if not names or name in names or columns[name] in names
    }
    answers = [*capabilities(chosen)]
    features = {name.replace("`", ""): [*lines] for name, lines in FEATURES.items()}
    document = {"version": 1, "strategies": chosen, "features": features, "capabilities": answers}
    call.show(document, _lines(answers))
    return 0


def _lines(answers: Sequence[Capability]) -> Iterator[str]:
    """Yield for each feature the strategies that take it, and the reasons of the others."""
    width = max(len(entry["strategy"]) for entry in answers)
    for feature in dict.fromkeys(entry["feature"] for entry in answers):
        yield feature
        for entry in (entry for entry in answers if entry["feature"] == feature):
            texts = {True: "yes", False: f"no   {entry['reason']}", None: "-    it has no such key"}
            yield f"  {entry['strategy']:<{width}}  {texts[entry['supported']]}"
