"""`trainkit prove strategy=a,b OVERRIDES`: compare trainings with one device, as a whole and step by step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from trainkit.config.composition import Composition
from trainkit.config.grammar import COMMAND_LINE, key_of
from trainkit.config.schema import RunConfig
from trainkit.config.values import MOST_PROCESSES
from trainkit.errors import ConfigError, Problem, refuse
from trainkit.prove.comparing import Numbers, Proof, worst
from trainkit.prove.layouts import (
    AXES,
    LayoutProof,
    LayoutsDocument,
    differing_axes,
    mesh_text,
    meshes,
    prove_layouts,
    row_of,
)
from trainkit.prove.proving import prove
from trainkit.prove.resuming import prove_resume
from trainkit.report.tables import row_lines
from trainkit.verbs.support.call import Call
from trainkit.verbs.support.measured import line_printer

if TYPE_CHECKING:
    from trainkit.prove.static import StaticDocument

_WORDS: Final = {"equal": "equal, every bit", "rounding": "equal up to rounding", "different": "DIFFERENT"}
_ANSWERS: Final = {"yes": "yes", "no": "NO", "unknown": "NOT KNOWN"}


_AXIS_OF: Final = {
    "plan": "tensor", "reduce": "replicate", "compression": "replicate",
    **dict.fromkeys(("wrap", "reshard_after_forward", "sync", "offload"), "shard"),
    **dict.fromkeys(("schedule", "virtual_stages", "map"), "pipe"),
}  # fmt: skip
"""Key of strategy=mesh -> the axis without which it has no effect."""


def run(call: Call) -> int:
    """Print both answers about every strategy; return 0 if all are yes, else 1."""
    refuse(problems(call))
    if "layouts" in call.flags:
        return _run_layouts(call)
    if "static" in call.flags:
        return _run_static(call)
    points = call.compose_points()
    if "resume" in call.flags:
        return _run_resume(call, points)
    proofs = prove_points(call, points, steps=call.flags.get("steps", 10), log=line_printer("prove"))
    composed = dict.fromkeys(note for point in points for note in point.notes)
    lines = [line for proof in proofs for line in report_lines(proof, every="all" in call.flags)]
    sys.stdout.write("\n".join([*lines, *(f"note: {note}" for note in composed)]) + "\n")
    return int(not all(proof.holds for proof in proofs))


def prove_points(
    call: Call, points: Sequence[Composition], *, steps: int, log: Callable[[str], None] = lambda _: None
) -> list[Proof]:
    """Return the proof of every candidate.

    Args:
        call: the command; its flag `same-cut` skips the first answer.
        points: the composed and checked candidates.
        steps: optimizer steps to compare.
        log: logs the start of each run.

    Raises:
        ConfigError: a candidate cannot run here, or is the reference itself; names the origins of the keys.
        TrainkitError: a candidate failed.
    """
    common = set.intersection(*(set(point.overrides) for point in points))
    candidates = [(_label(point, common), point.cfg) for point in points]
    try:
        return prove(
            candidates,
            steps=steps,
            same_cut="same-cut" in call.flags,
            command=call.command,
            log=log,
            located=lambda index, error: points[index].with_origins(error),
        )
    except ConfigError as error:
        raise points[0].with_origins(error) from error


def _run_resume(call: Call, points: Sequence[Composition]) -> int:
    """Interrupt and resume a training; return 0 if it ends as the undisturbed one on every placement, else 1."""
    common, steps = set.intersection(*(set(point.overrides) for point in points)), call.flags.get("steps", 10)
    labelled = [(_label(point, common), point.cfg) for point in points]
    try:
        proof = prove_resume(labelled, steps=steps, log=line_printer("prove"))
    except ConfigError as error:
        raise points[0].with_origins(error) from error
    begun = f"{steps} steps in {proof.precision}; {proof.disturbance}; resumed from step {proof.saved}"
    rows = []
    for label, comparisons in proof.resumed.items():
        verdict, largest = worst(comparisons), max(comparisons, key=lambda comparison: comparison.error)
        rows.append([label, _WORDS[verdict], "" if verdict == "equal" else f"{largest.error:.1e} {largest.name}"])
    end = f"  the training ends as the undisturbed one: {'yes' if proof.holds else 'NO'}"
    lines = [begun, *row_lines(["resumed on", "weights", "largest error"], rows), end]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return int(not proof.holds)


def problems(call: Call) -> Iterator[Problem]:
    """Yield the problems of flags together, and of keys that a flag sets."""
    flag = next((name for name in ("layouts", "static") if name in call.flags), None)
    if "resume" in call.flags:
        for name in {"layouts", "static", "same-cut", "all"} & call.flags.keys():
            yield call.problem(name, "has no effect with --resume. Give one of the two.")
    if flag is None:
        for name, owner in (("json", "--layouts and --static"), ("world", "--static")):
            if name in call.flags:
                yield call.problem(name, f"belongs to {owner}. Give it too, or leave it out.")
        return
    if flag == "layouts":
        idle = {"same-cut": "every layout has the same cut", "all": "a layout is one line"}
        idle |= {"static": "which trains. Give one of the two", "world": "whose number is that of the ranks"}
    else:
        idle = dict.fromkeys(("same-cut", "all", "steps"), "which trains nothing")
    for name in idle.keys() & call.flags.keys():
        yield call.problem(name, f"has no effect with --{flag}: {idle[name]}.")
    for line in call.overrides:
        key, value = key_of(line), line.partition("=")[2]
        if key == "strategy" and value != "mesh":
            rule = f"is strategy=mesh with --{flag}. Leave it out."
            yield Problem(key=key, value=value, rule=rule, origin=COMMAND_LINE)
        elif key.removeprefix("strategy.") in AXES and key.startswith("strategy."):
            rule = f"is set by --{flag} to every size. Leave it out."
            yield Problem(key=key, value=value, rule=rule, origin=COMMAND_LINE)


def _config_on(call: Call, mesh: Mapping[str, int]) -> RunConfig:
    """Return the config of a call on a mesh; keys that have no effect there are left out.

    Raises:
        ConfigError: it is refused.
    """
    idle = {f"strategy.{key}" for key, axis in _AXIS_OF.items() if mesh[axis] == 1}
    lines = [line for line in call.overrides if key_of(line) not in {"strategy", *idle}]
    sizes = [f"strategy.{axis}={size}" for axis, size in mesh.items()]
    return replace(call, overrides=(*lines, "strategy=mesh", *sizes)).compose().cfg


def _run_static(call: Call) -> int:
    """Prove order and count of every reduction without training; return 0 if nothing is wrong or unknown, else 1."""
    from trainkit.prove import static  # noqa: PLC0415 - imports torch's compiler: seconds

    world, start = call.flags.get("world", MOST_PROCESSES), time.monotonic()
    proofs, refused = static.prove_static(partial(_config_on, call), world=world, log=line_printer("prove"))
    rows = [
        static.SetRow(
            axes=list(proof.axes), verdict=proof.verdict, sizes=proof.sizes, gradients=proof.gradients,
            bytes=proof.num_bytes, findings=proof.findings, reason=proof.refused or proof.unknown,
        )
        for proof in proofs
    ]  # fmt: skip
    meshes = static.verdicts(proofs, refused, world)
    document = static.StaticDocument(
        version=1, command=call.command, world=world, meshes={str(word): count for word, count in meshes.items()},
        traces=sum(size.get("pipe", 1) for proof in proofs for size in proof.sizes), seconds=time.monotonic() - start,
        holds=not meshes["wrong"] + meshes["unknown"], sets=rows, refused_sizes=dict(refused),
    )  # fmt: skip
    call.show(document, _static_lines(document))
    return int(not document["holds"])


def _static_lines(document: StaticDocument) -> Iterator[str]:
    """Yield one table with a line for each set of axes, the refusals, the findings, and what is proven."""
    rows, meshes = document["sets"], document["meshes"]
    traced = f"{document['traces']} steps traced in {document['seconds']:.0f} s"
    yield f"{traced}, of {len(rows)} sets of axes at sizes 2 and 4"
    table = [
        [
            " x ".join(row["axes"]),
            f"{row['gradients']:,}" if row["sizes"] else "",
            "; ".join(f"{along} {' '.join(f'{count:,}' for count in sizes)}" for along, sizes in row["bytes"].items()),
            f"{len(row['findings']):,}" if row["sizes"] else "",
            row["verdict"] if row["verdict"] in ("proven", "refused") else row["verdict"].upper(),
        ]
        for row in rows
    ]
    yield from row_lines(["axes", "gradients", "bytes summed over, by a rank", "findings", "verdict"], table)
    by_reason = _by_reason(rows, [" x ".join(row["axes"]) for row in rows])
    for size, reason in document["refused_sizes"].items():
        by_reason.setdefault(f"refused: {reason.removeprefix(f'strategy.{size}: ')}", []).append(size)
    for reason, labels in by_reason.items():
        yield f"  {reason}"
        yield f"    {', '.join(labels)}"
    for row in rows:
        yield from (f"  {line}" for line in row["findings"][:_SHOWN])
        if len(row["findings"]) > _SHOWN:
            yield f"  ... and {len(row['findings']) - _SHOWN:,} more of {' x '.join(row['axes'])}"
    counts = ", ".join(f"{count:,} {word}" for word, count in meshes.items() if count)
    yield f"  meshes of powers of two, up to {document['world']:,} ranks: {counts}"
    yield "  order and count of the sums are proven, not values: prove --layouts N compares these on up to 8 ranks"


def _run_layouts(call: Call) -> int:
    """Prove every mesh; return 0 if none differs or fails, else 1."""
    ranks, steps = call.flags["layouts"], call.flags.get("steps", 4)

    def composed(mesh: Mapping[str, int]) -> RunConfig | ConfigError:
        try:
            return _config_on(call, mesh)
        except ConfigError as error:
            return error

    layouts = [(mesh, composed(mesh)) for mesh in meshes(ranks)]
    proofs = list(prove_layouts(layouts, steps=steps, log=line_printer("prove")))
    rows = [row_of(proof) for proof in proofs]
    document = LayoutsDocument(
        version=1, command=call.command, ranks=ranks, steps=steps, holds=not any(proof.differs for proof in proofs),
        differing_axes=list(differing_axes(proofs)), layouts=rows,
    )  # fmt: skip
    call.show(document, _layout_lines(document, proofs))
    return int(not document["holds"])


_SHOWN: Final = 5
"""Findings of a set of axes that are shown; `--json` has all."""
_VERDICTS: Final = {**_WORDS, "refused": "refused", "failed": "FAILED"}


def _layout_lines(document: LayoutsDocument, proofs: Sequence[LayoutProof]) -> Iterator[str]:
    """Yield one table with a line for each layout, the refusals, and the explanation of the first that differs."""
    rows = document["layouts"]
    numbers = next((proof.numbers for proof in proofs if proof.numbers is not None), None)
    cut = "" if numbers is None else f" in {numbers.precision}, all with batch.micro_size={numbers.micro_size}"
    steps = f"{document['steps']} steps{cut}"
    yield f"{len(rows)} layouts of {document['ranks']} ranks, each compared with one_device: {steps}"
    names = ("initial", "losses", "gradients", "weights")
    header = ["layout", "initial weights", *names[1:], "verdict"]
    cells = ([_cell(row[name]) for name in names] for row in rows)  # type: ignore[literal-required]
    table = [[mesh_text(row["mesh"]), *cell, _VERDICTS[row["verdict"]]] for row, cell in zip(rows, cells, strict=True)]
    yield from row_lines(header, table)
    for reason, labels in _by_reason(rows, [mesh_text(row["mesh"]) for row in rows]).items():
        yield f"  {reason}"
        yield f"    {len(labels)} layout{'' if len(labels) == 1 else 's'}: {', '.join(labels)}"
    if document["holds"]:
        yield "  every layout that is not refused trains as one device does: yes"
        return
    wrong = [row for row in rows if row["verdict"] in ("different", "failed")]
    first, axes = wrong[0], document["differing_axes"]
    yield f"  {len(wrong)} of {sum(row['verdict'] != 'refused' for row in rows)} layouts differ"
    if axes:
        yield f"  the axis: every layout with {' and '.join(axes)} above 1 differs, and no other"
    yield f"  the first one: {mesh_text(first['mesh'])}, in {first['first'] or 'its training'}"
    yield from (f"    {line}" for line in (first["ratio"], *first["explanation"]) if line)


def _by_reason(rows: Iterable[Mapping[str, object]], labels: Iterable[str]) -> dict[str, list[str]]:
    """Return verdict and reason -> labels of the rows that have them, in the order of their first rows."""
    by_reason: dict[str, list[str]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row["reason"] is not None:
            by_reason.setdefault(f"{row['verdict']}: {row['reason']}", []).append(label)
    return by_reason


def _cell(error: float | None) -> str:
    return "" if error is None else "equal" if error == 0 else f"{error:.1e}"


def _label(point: Composition, common: Container[str]) -> str:
    """Return the strategy, its keys set on the command line, and the arguments in which the candidate differs."""
    lines = [line for line in point.overrides if not line.startswith("strategy=")]
    shown = [line for line in lines if line.startswith("strategy.") or line not in common]
    return " ".join([f"strategy={point.choices.get('strategy')}", *shown])


def report_lines(proof: Proof, *, every: bool = False) -> Iterator[str]:
    """Yield the printed lines of a proof; with `every`, a line for each parameter."""
    yield f"{proof.label}, {proof.replicas} replica{'' if proof.replicas == 1 else 's'}"
    if (sameness := proof.sameness) is not None:
        yield f"  the same training as one_device, as a user would start them: {_ANSWERS[sameness.verdict]}"
        yield from (f"    {reason}" for reason in sameness.reasons)
        if sameness.remedy is not None:
            yield f"    both are the same training with {sameness.remedy}"
    yield from _second_answer(proof.numbers, every=every)
    yield from (f"  note: {note}" for note in proof.notes)


def _second_answer(numbers: Numbers, *, every: bool) -> Iterator[str]:
    worst = max(numbers.comparisons, key=lambda item: item.error)
    answer = "NO" if numbers.verdict == "different" else f"yes, {_WORDS[numbers.verdict]}"
    yield f"  the same numbers, both with batch.micro_size={numbers.micro_size}: {answer}"
    steps = numbers.steps
    after = "" if len(steps) == max(steps) else f", compared after steps {', '.join(map(str, steps))}"
    yield f"    {max(steps)} step{'' if max(steps) == 1 else 's'} in {numbers.precision}{after}"
    if (first := numbers.first) is not None:
        yield f"    first after step {first.first_step}: {first.name}, relative error {first.error:.2g}"
    elif numbers.verdict == "rounding":
        yield f"    largest relative error {worst.error:.2g}, {worst.name}"
    yield from (f"    {line}" for line in numbers.explanation)
    verdicts = [item.verdict for item in numbers.comparisons]
    counts = (f"{verdicts.count(verdict)} {words}" for verdict, words in _WORDS.items() if verdict in verdicts)
    yield f"    {len(verdicts)} parameters and buffers: {', '.join(counts)}"
    yield from _gradients(numbers)
    without = [item.name for item in numbers.comparisons if item.no_gradient]
    if without:
        yield f"    gradients of rounding only, compared within 1e-8 of the summed learning rates: {', '.join(without)}"
    shown = [item for item in (*numbers.comparisons, *numbers.gradients) if every or item.verdict == "different"]
    width = max((len(item.name) for item in shown), default=0)
    for item in shown:
        since = "" if item.first_step is None else f"  since step {item.first_step}, relative error {item.error:.2g}"
        yield f"      {item.name:<{width}}  {_WORDS[item.verdict]}{since}"


def _gradients(numbers: Numbers) -> Iterator[str]:
    if not numbers.gradients:
        yield "        gradients are not compared: a different training by design, or several optimizers"
        return
    worst = max(numbers.gradients, key=lambda item: item.error)
    wrong = sum(item.verdict == "different" for item in numbers.gradients)
    verdict = f"{wrong} DIFFERENT" if wrong else "equal up to rounding"
    yield f"    {len(numbers.gradients)} gradients compared with a plain loop: {verdict}"
    yield f"      largest relative error {worst.error:.2g}, {worst.name}"
