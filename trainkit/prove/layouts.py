"""Prove every mesh of a number of ranks for one training: `trainkit prove --layouts N`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Final, Literal

from typing_extensions import TypedDict

from trainkit.config.schema import RunConfig
from trainkit.errors import ConfigError, TrainkitError, first_line
from trainkit.prove.comparing import Numbers
from trainkit.prove.examining import ratio_of
from trainkit.prove.proving import Candidate, Reference, bare, scratch
from trainkit.run.planning.plan import make_plan

AXES: Final = ("replicate", "shard", "pipe", "context", "tensor")


def meshes(num_ranks: int) -> list[dict[str, int]]:
    """Return every mesh of a number of ranks, axis -> size; those with fewer axes first.

    Example:
        >>> len(meshes(2)), len(meshes(4)), len(meshes(8)), meshes(2)[0]
        (5, 15, 35, {'replicate': 2, 'shard': 1, 'pipe': 1, 'context': 1, 'tensor': 1})
    """
    divisors = [size for size in range(num_ranks, 0, -1) if num_ranks % size == 0]
    whole = [sizes for sizes in product(divisors, repeat=len(AXES)) if prod(sizes) == num_ranks]
    return [dict(zip(AXES, sizes, strict=True)) for sizes in sorted(whole, key=lambda sizes: sum(n > 1 for n in sizes))]


def mesh_text(mesh: Mapping[str, int]) -> str:
    """Return the axes of a mesh with several ranks.

    Example:
        >>> mesh_text({"replicate": 2, "shard": 1, "tensor": 4})
        'replicate 2 x tensor 4'
    """
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)


LayoutVerdict = Literal["equal", "rounding", "different", "refused", "failed"]


class LayoutRow(TypedDict):
    """One mesh; errors are the largest relative ones, null where nothing was compared."""

    mesh: dict[str, int]
    """Axis -> number of ranks."""
    verdict: LayoutVerdict
    """`equal`: every bit; `rounding`: within the tolerance; `refused`: the strategy does not take it."""
    initial: float | None
    """Error of the initial weights: 0, as every bit must be equal."""
    losses: float | None
    """Error of the losses."""
    gradients: float | None
    """Error of the gradients, each named parameter against a plain loop."""
    weights: float | None
    """Error of parameters and buffers, after every step."""
    reason: str | None
    """Why it is refused, or how it failed."""
    first: str | None
    """The first tensor that differs: `initial/...`, `gradient/...`, `loss`, `param/...` or `buffer/...`."""
    ratio: str | None
    """By which number the first differing gradient differs."""
    explanation: list[str]
    """The rule that it breaks."""


class LayoutsDocument(TypedDict):
    """Output of `trainkit prove --layouts N --json`."""

    version: Literal[1]
    """Version of this document."""
    command: str
    """The command."""
    ranks: int
    """Number of ranks of each layout."""
    steps: int
    """Optimizer steps that were compared."""
    holds: bool
    """Whether every layout that is not refused trains as one device does."""
    differing_axes: list[str]
    """The fewest axes that all differing layouts have together, and no other tried one; empty if there are none."""
    layouts: list[LayoutRow]
    """Every mesh of this number of ranks; those with fewer axes first."""


def row_of(proof: LayoutProof) -> LayoutRow:
    """Return the row of a proof."""
    numbers = proof.numbers
    row = LayoutRow(
        mesh=dict(proof.mesh), verdict=proof.verdict, initial=None, losses=None, gradients=None, weights=None,
        reason=proof.refused or proof.failed, first=None, ratio=proof.ratio, explanation=[],
    )  # fmt: skip
    if numbers is None:
        return row
    losses, begins = ((item,) if item is not None else () for item in (numbers.losses, numbers.begins))
    parts = {"initial": begins, "gradients": numbers.gradients, "losses": losses, "weights": numbers.comparisons}
    wrong = [comparison for part in parts.values() for comparison in part if comparison.verdict == "different"]
    for name, part in parts.items():
        row[name] = max((comparison.error for comparison in part), default=None)  # type: ignore[literal-required]
    row["first"] = wrong[0].name if wrong else None
    row["explanation"] = list(numbers.explanation)
    return row


@dataclass(frozen=True, kw_only=True)
class LayoutProof:
    """How a mesh trains, compared with one device."""

    mesh: Mapping[str, int]
    """Axis -> size."""
    numbers: Numbers | None = None
    """None: it is refused, or failed."""
    refused: str | None = None
    """Why the strategy does not take this model and config."""
    failed: str | None = None
    """The error that ended its training."""
    ratio: str | None = None
    """By which number the first differing gradient differs."""

    @property
    def verdict(self) -> LayoutVerdict:
        """The verdict in one word."""
        if self.numbers is None:
            return "refused" if self.refused is not None else "failed"
        return self.numbers.verdict

    @property
    def differs(self) -> bool:
        """Whether it was tried, and does not train as one device does."""
        return self.failed is not None or (self.numbers is not None and self.numbers.verdict == "different")


def prove_layouts(
    layouts: Sequence[tuple[Mapping[str, int], RunConfig | ConfigError]],
    *,
    steps: int,
    log: Callable[[str], None] = lambda _: None,
) -> Iterator[LayoutProof]:
    """Compare each layout with one device, at the smallest cut of all and in float64 if the model allows it.

    Args:
        layouts: mesh -> checked config, or the refusal of it.
        steps: optimizer steps.
        log: receives a line when a run begins.

    Yields:
        A proof for each, in their order; a layout that the strategy refuses is said to be refused.

    Raises:
        ConfigError: all are refused; the problems are those of the first.
        TrainkitError: the reference failed.
    """
    judged: list[Candidate | ConfigError] = []
    for mesh, cfg in layouts:
        try:
            if isinstance(cfg, ConfigError):
                raise cfg
            plan = make_plan(bare(cfg, steps))
            judged.append(Candidate(label=mesh_text(mesh), plan=plan, started=plan, sameness=None, notes=()))
        except ConfigError as error:
            judged.append(error)
    tried = [candidate for candidate in judged if isinstance(candidate, Candidate)]
    if not tried:
        raise next(error for error in judged if isinstance(error, ConfigError))
    with scratch() as folder:
        reference = Reference.of(tried, folder, log)
        for number, ((mesh, _), candidate) in enumerate(zip(layouts, judged, strict=True)):
            if isinstance(candidate, ConfigError):
                yield LayoutProof(mesh=mesh, refused="; ".join(map(str, candidate.problems)))
                continue
            log(f"{number + 1} of {len(layouts)}: {candidate.label}")
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                try:
                    numbers, probed = reference.numbers(candidate, Path(temporary) / "run", is_layout=True)
                except ConfigError as error:  # found when the model was built
                    yield LayoutProof(mesh=mesh, refused="; ".join(map(str, error.problems)))
                    continue
                except TrainkitError as error:
                    yield LayoutProof(mesh=mesh, failed=first_line(error))
                    continue
            different = None if probed is None else probed.difference
            ratio = None if different is None else ratio_of(different, mesh)
            yield LayoutProof(mesh=mesh, numbers=numbers, ratio=ratio)


def differing_axes(proofs: Sequence[LayoutProof]) -> tuple[str, ...]:
    """Return the fewest axes that all differing layouts have, and no other tried one together; empty: there are none.

    Example:
        >>> proofs = [LayoutProof(mesh={"shard": 2, "tensor": 1}, numbers=None, failed=None)]
        >>> proofs += [LayoutProof(mesh={"shard": 1, "tensor": 2}, failed="it ended")]
        >>> differing_axes(proofs)
        ('tensor',)
    """
    tried = [proof for proof in proofs if proof.refused is None]
    wrong = [proof for proof in tried if proof.differs]
    shared = [axis for axis in AXES if wrong and all(proof.mesh.get(axis, 1) > 1 for proof in wrong)]
    for count in range(1, len(shared) + 1):
        for chosen in combinations(shared, count):
            if all(proof.differs for proof in tried if all(proof.mesh.get(axis, 1) > 1 for axis in chosen)):
                return chosen
    return ()
