"""`trainkit prove strategy=a,b OVERRIDES`: is it the same training? Step by step, parameter by parameter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from trainkit.errors import ConfigError, Problem
from trainkit.verbs.call import Call, Flag

if TYPE_CHECKING:
    from trainkit.config.composition import Composition
    from trainkit.run.proof import Comparison, Numbers, Proof

__all__ = ["FLAGS", "USAGE", "run"]

USAGE: Final = "strategy=A[,B...] OVERRIDES"
FLAGS: Final[Mapping[str, Flag]] = {
    "steps": Flag(help="optimizer steps to compare; 10 without", value="N"),
    "all": Flag(help="a line for every parameter, also where all are equal"),
}
_WORDS: Final = {"equal": "equal, every bit", "rounding": "equal to rounding", "different": "DIFFERENT"}


def run(call: Call) -> int:
    """Print a verdict for every strategy compared; 0 where all are equal to rounding, 1 where one differs."""
    call.only()
    steps = _steps(call.flags.get("steps", "10"))
    points = call.compose_points()
    from trainkit.run.proof import prove  # noqa: PLC0415 - imports torch

    candidates = [(_label(point), point.cfg) for point in points]
    proofs = prove(candidates, steps=steps, say=_say)
    lines = [line for proof in proofs for line in _report(proof, every="all" in call.flags)]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(any(proof.numbers.verdict == "different" for proof in proofs))


def _steps(text: str) -> int:
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise ConfigError([Problem(key="--steps", value=text, rule="must be 1 or more steps.", origin="command line")])


def _label(point: Composition) -> str:
    """The strategy and what else the command line set of it."""
    own = [line for line in point.overrides if line.startswith("strategy.")]
    return " ".join([f"strategy={point.choices.get('strategy')}", *own])


def _say(message: str) -> None:
    sys.stderr.write(f"prove: {message}\n")
    sys.stderr.flush()


def _report(proof: Proof, *, every: bool) -> Iterator[str]:
    numbers = proof.numbers
    replicas = f"{proof.replicas} replica{'' if proof.replicas == 1 else 's'}"
    worst = max(numbers.comparisons, key=lambda one: one.error)
    steps = numbers.steps
    yield f"{proof.label}, {replicas}, {max(steps)} steps in {numbers.precision}: {_WORDS[numbers.verdict]}"
    if proof.changes_maths:
        where = "" if len(steps) == max(steps) else f", compared after steps {_listed(steps)}"
        yield f"  this strategy is another training than that of one device, and says so{where}"
    if (first := numbers.first) is not None:
        yield f"  first after step {first.first_step}: {first.name}, relative error {first.error:.2g}"
    elif numbers.verdict == "rounding":
        yield f"  largest relative error {worst.error:.2g}, {worst.name}"
    yield from (f"  {line}" for line in numbers.explanation)
    yield from _counts(numbers.comparisons, "parameters and buffers")
    yield from _gradients(numbers)
    without = [one.name for one in numbers.comparisons if one.no_gradient]
    if without:
        yield f"  no gradient but rounding, held to 1e-8 of the summed learning rates: {', '.join(without)}"
    shown = [one for one in (*numbers.comparisons, *numbers.gradients) if every or one.verdict == "different"]
    width = max((len(one.name) for one in shown), default=0)
    for one in shown:
        since = "" if one.first_step is None else f"  since step {one.first_step}, relative error {one.error:.2g}"
        yield f"    {one.name:<{width}}  {_WORDS[one.verdict]}{since}"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def _gradients(numbers: Numbers) -> Iterator[str]:
    if not numbers.gradients:
        yield "  gradients are not compared: the strategy is another training"
        return
    worst = max(numbers.gradients, key=lambda one: one.error)
    wrong = sum(one.verdict == "different" for one in numbers.gradients)
    found = f"{wrong} DIFFERENT" if wrong else "equal to rounding"
    yield f"  {len(numbers.gradients)} gradients against a plain loop's: {found}"
    yield f"    largest relative error {worst.error:.2g}, {worst.name}"


def _counts(comparisons: Sequence[Comparison], words: str) -> Iterator[str]:
    counts = {verdict: sum(one.verdict == verdict for one in comparisons) for verdict in _WORDS}
    found = ", ".join(f"{count} {_WORDS[verdict]}" for verdict, count in counts.items() if count)
    yield f"  {len(comparisons)} {words}: {found}"
