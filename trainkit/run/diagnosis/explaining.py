"""Explain which rule is broken, in the words of docs/numbers.md; never more than the evidence shows."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.run.diagnosis import causes
from trainkit.run.diagnosis.causes import Cause
from trainkit.run.diagnosis.examining import Probed
from trainkit.run.diagnosis.matching import Match, Matching


def explain_probe(probed: Probed) -> Iterator[str]:
    """Yield a line about differing gradients, and a line about differing buffers."""
    if probed.gradients.differences:
        yield from _lines(probed.gradients, "gradient")
    if probed.buffers.differences:
        yield from _lines(probed.buffers, "buffer")


def explain_updates(updates: Matching) -> Iterator[str]:
    """Yield a line about differing updates whose gradients equal those of the plain loop."""
    if updates.differences:
        yield from _lines(updates, "param")
    else:
        yield (
            "not explained: every gradient, and every step taken alone from the candidate's own checkpoint, is that of "
            "a plain loop; the difference is in what a checkpoint does not hold"
        )


def explain_order() -> str:
    """Return the line for numbers that are equal up to rounding although equal bits are promised."""
    return f"explained by: {_named(causes.ORDER)} ({causes.ORDER.page})"


def _lines(matching: Matching, kind: str) -> Iterator[str]:
    found = matching.matches
    if len(found) == 1:
        yield f"explained by: {_named(found[0].cause)}; {_fit(found[0], kind)} ({found[0].cause.page})"
    elif found:
        yield "explained by one of these, which the numbers do not tell apart:"
        yield from (f"  {_named(match.cause)}; {_fit(match, kind)} ({match.cause.page})" for match in found)
    else:
        wrong = {"gradient": "gradients", "buffer": "buffers", "param": "updates, from right gradients,"}[kind]
        yield f"not explained: the {wrong} differ from a plain loop's in a way that no known fault gives; ruled out:"
        yield f"  {'; '.join(dict.fromkeys(cause.words for cause in matching.tested))}"


def _named(cause: Cause) -> str:
    return f"{cause.title}: {cause.words}"


def _fit(match: Match, kind: str) -> str:
    form = f" ({match.form})" if match.form else ""
    return f"{kind}/{match.name} of step {match.step + 1} fits this to {match.error:.1g}{form}"
