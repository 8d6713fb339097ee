"""Notes and problems of a plan and its model, before it is trained.

They report keys without (full) effect on the data and the model, and whether the result depends on the cut of a step.

Whether a model or an objective draws random numbers or couples the samples of a shard is found by execution. A shard is
run several times from the same generator states and buffers, each time with other samples at some of its
positions. At the positions that keep their samples, the inputs and outputs of the model must keep their bits, and so
must the gradient of the loss with respect to the outputs, except for rounding. The loss must be a sum over samples: of
the four shards made of two choices of samples for each of two parts, the losses of opposite pairs have equal sums.
Names of layers are not considered. Effects that four samples do not show (a router that drops samples only when it is
full) are not found.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.config.composition import Composition, problems_of_points
from trainkit.config.schema import MonitoredMetric
from trainkit.config.targets.build import resolve_target
from trainkit.data.reading.collate import CollateFunction, collate, parts_of
from trainkit.data.reading.iterable import Stream
from trainkit.data.splits import build_splits, folded, remarks, size_of, test_splits, validation_splits
from trainkit.errors import ConfigError, Problem, listed, named_first_line, refuse
from trainkit.numerics.batch import AT_EQUAL_CUT, CUT_UNKNOWN
from trainkit.numerics.generators import GeneratorStates, Untouched, seed_host
from trainkit.objectives.base import Access, Objective
from trainkit.objectives.fields import named_fields, unused_fields
from trainkit.objectives.linear_cross_entropy import scores_kept
from trainkit.run.planning.build import (
    Components,
    assignment_problems,
    average_of,
    averaged_split,
    conversion_of,
    group_members,
    model_transforms_of,
    optimizer_notes,
    output_name,
    parameter_matches,
    takes_values,
)
from trainkit.run.planning.convolutions import convolution_problems
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.strategies.base import choice_of
from trainkit.strategies.core.graphs.shards import step_problems
from trainkit.strategies.core.refusals import copies_problems, hook_problems
from trainkit.strategies.model_transforms import NO_TRANSFORMS, ModelTransforms, shaping_notes, shaping_problems
from trainkit.strategies.shipped import names_of
from trainkit.strategies.tensors.layouts import layout_problems
from trainkit.trained.build import build_model, build_objective, meta_model

DRAWS: Final = "draws random numbers"
COUPLES: Final = "couples the samples of a shard"
_KEEPS: Final = "keeps statistics of a shard in its buffers"
_UNSTEADY: Final = "returns different numbers when it runs again"
_EITHER: Final = "the model or the objective"
_ROUNDING: Final = 64.0
"""Tolerance, in units in the last place, for sums over a shard in another order."""


@dataclass(frozen=True, kw_only=True)
class Coupling:
    """The known reasons why the result of a training depends on the cut of its steps."""

    findings: tuple[tuple[str, str], ...] = ()
    """(subject, predicate): `("the model", "draws random numbers")`."""
    not_probed: str | None = None
    """Reason why the model was not run (to the end); None if it was, or if the objective declares coupling."""

    @property
    def depends_on_cut(self) -> bool | None:
        """Whether another cut of the steps is a different training; None if unknown."""
        return True if self.findings else None if self.not_probed else False

    @property
    def text(self) -> str:
        """The findings, as a clause.

        Example:
            >>> Coupling(findings=((MODEL, DRAWS), (MODEL, COUPLES))).text
            'the model draws random numbers and couples the samples of a shard'
        """
        subjects = dict.fromkeys(subject for subject, _ in self.findings)
        by_subject = {name: [predicate for subject, predicate in self.findings if subject == name] for name in subjects}
        return ", and ".join(f"{subject} {' and '.join(does)}" for subject, does in by_subject.items())


def probe(
    model: nn.Module, objective: Objective, samples: Sequence[Any], collate: CollateFunction = collate
) -> Coupling:
    """Run a model and an objective on variants of one shard, and compare.

    Args:
        model: a model used only for the probe, on the CPU, in training mode; its parameters are changed.
        objective: an objective used only for the probe.
        samples: an even number of samples of equal shapes; the second half replaces the first.
        collate: makes a batch of samples.

    Returns:
        The findings. The generators of torch (CPU), `random` and NumPy are restored.
    """
    with Untouched(seed=0), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        _vary_constant_parameters(model)
        return _findings(Shard(model, objective, samples, collate))


def _vary_constant_parameters(model: nn.Module) -> None:
    """Change parameters whose elements are all equal: a layer initialised to zero would hide the layers before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.numel() and param.is_floating_point() and bool((param == param.reshape(-1)[0]).all()):
                noise = torch.rand(param.shape, generator=generator).mul_(0.2).sub_(0.1).to(param.dtype)
                param.add_(torch.where(param == 0, noise, noise * param))


def _findings(shard: Shard) -> Coupling:
    """Compare the variants of a shard with the shard itself."""
    base = shard.run()
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*base.outputs, base.total)):
        return Coupling(not_probed="the first outputs or losses are not finite numbers")
    findings = [(subject, DRAWS) for subject in (MODEL, OBJECTIVE) if subject in base.drew]
    second = shard.run()
    if not _equal(base.outputs, second.outputs) or not torch.equal(base.total, second.total):
        return Coupling(findings=(*findings, (_EITHER, _UNSTEADY)))
    runs = {replaced: shard.run(replaced) for replaced in _variants(shard.size)}
    if base.inputs and _equal(base.inputs, runs[frozenset(range(shard.size))].inputs):
        return Coupling(findings=tuple(findings), not_probed="the samples that were tried are all equal")
    # Compare at the positions that keep their samples.
    pairs = [([index for index in range(shard.size) if index not in replaced], run) for replaced, run in runs.items()]
    if not all(_equal(base.inputs, run.inputs, indices) for indices, run in pairs):
        findings.append((OBJECTIVE, COUPLES))
    elif not all(_equal(base.outputs, run.outputs, indices) for indices, run in pairs):
        findings.append((MODEL, COUPLES))
    elif _buffers_depend_on_cut(shard, base, runs):
        findings.append((MODEL, _KEEPS))
    if all(predicate != COUPLES for _, predicate in findings) and (
        not all(_grads_close(base, run, indices) for indices, run in pairs) or not _is_sum(base, runs)
    ):
        findings.append((OBJECTIVE if base.outputs else _EITHER, COUPLES))
    return Coupling(findings=tuple(findings))


def _variants(size: int) -> list[frozenset[int]]:
    """Return sets of positions to replace: every position is replaced while every other is kept; then halves, and all.

    Example:
        >>> [sorted(indices) for indices in _variants(4)]
        [[1, 3], [0, 2], [2, 3], [0, 1], [0, 1, 2, 3]]
    """
    everywhere = frozenset(range(size))
    variants = []
    for bit in range((size - 1).bit_length()):
        chosen = frozenset(index for index in everywhere if index >> bit & 1)
        variants += [chosen, everywhere - chosen]
    return [*variants, everywhere]


def _equal(left: Sequence[Tensor], right: Sequence[Tensor], indices: Sequence[int] | None = None) -> bool:
    """Return whether tensors have equal bits, optionally only at some positions."""
    if indices is not None:
        left, right = [tensor[indices] for tensor in left], [tensor[indices] for tensor in right]
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _close(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors are equal except for rounding in a dtype."""
    if not left.numel():
        return True
    scale = torch.maximum(left.abs().max(), right.abs().max())
    return not bool(((left - right).abs() > _ROUNDING * torch.finfo(dtype).eps * scale).any())


def _grads_close(base: Pass, run: Pass, indices: Sequence[int]) -> bool:
    """Return whether the gradient by the outputs is the same at some positions, except for rounding."""
    pairs = [(left, right) for left, right in zip(base.grads, run.grads, strict=True) if left is not None]
    return all(right is not None and _close(left[indices], right[indices], left.dtype) for left, right in pairs)


def _is_sum(base: Pass, runs: Mapping[frozenset[int], Pass]) -> bool:
    """Return whether the loss of a shard is a sum of contributions of its parts, independent of the other positions.

    The gradient by outputs does not show an auxiliary loss that the model computes from its hidden states.
    """
    everywhere = max(runs, key=len)
    for replaced, run in runs.items():
        if replaced == everywhere:
            continue
        totals = [base.total, runs[everywhere].total, run.total, runs[everywhere - replaced].total]
        rounding = _ROUNDING * torch.finfo(base.total.dtype).eps * float(sum(total.abs() for total in totals))
        if float((totals[0] + totals[1] - totals[2] - totals[3]).abs()) > rounding:
            return False
    return True


def _buffers_depend_on_cut(shard: Shard, base: Pass, runs: Mapping[frozenset[int], Pass]) -> bool:
    """Return whether buffers depend on the samples, and differ from the mean over two halves."""
    whole = runs[frozenset(range(shard.size))].buffers
    moved = [name for name, buffer in base.buffers.items() if not torch.equal(buffer, whole[name])]
    if not moved or shard.size % 2:
        return bool(moved)
    middle = shard.size // 2
    first, second = (shard.run(indices=range(*ends)).buffers for ends in ((0, middle), (middle, shard.size)))
    means = {name: (first[name] + second[name]) / 2 for name in moved}
    return not all(_close(base.buffers[name], mean, mean.dtype) for name, mean in means.items())


MODEL, OBJECTIVE = "the model", "the objective"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The record of one run of a shard."""

    inputs: tuple[Tensor, ...]
    """Inputs of the model that have an element for each sample, with that dim first."""
    outputs: tuple[Tensor, ...]
    """Outputs of the model that have an element for each sample, with that dim first."""
    grads: tuple[Tensor | None, ...]
    """The gradient of the loss with respect to each of these outputs."""
    total: Tensor
    """() the loss that backward would start from, detached."""
    buffers: Mapping[str, Tensor]
    """The floating-point buffers of the model after the pass."""
    drew: frozenset[str]
    """Objects that drew random numbers: MODEL, OBJECTIVE."""


class Shard:
    """A model, an objective, and two samples for each position of a shard.

    Args:
        model: on the CPU, in training mode.
        objective: computes the loss of the shard.
        samples: the samples of the shard, and as many that replace them; all of equal shapes.
        collate: makes a batch of samples.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, samples: Sequence[Any], collate: CollateFunction
    ) -> None:
        self._model, self._objective, self._collate = model, objective, collate
        self.size = len(samples) // 2
        self._first, self._other = samples[: self.size], samples[self.size :]
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(self, replaced: frozenset[int] = frozenset(), indices: Sequence[int] | None = None) -> Pass:
        """Run some positions of the shard, by default all, always from the same buffers and generator states; some use
        their replacement sample.
        """
        indices = range(self.size) if indices is None else indices
        batch = self._collate([(self._other if i in replaced else self._first)[i] for i in indices], indices)
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(self._buffers[name])
        seed_host(0)
        attached, inputs, outputs = list[tuple[Tensor, int]](), list[Tensor](), list[Tensor]()
        drew, states = set[str](), GeneratorStates([])

        def note(subject: str) -> None:
            nonlocal states
            if states.moved():
                drew.add(subject)
            states = GeneratorStates([])

        def before(_model: nn.Module, args: Any, kwargs: Any) -> None:
            note(OBJECTIVE)
            pairs = _by_sample([args, kwargs], len(indices))
            inputs.extend(tensor.detach().movedim(dim, 0).clone() for tensor, dim in pairs)

        def after(_model: nn.Module, _args: Any, output: Any) -> None:
            note(MODEL)
            pairs = list(_by_sample(output, len(indices)))
            attached.extend(pairs)
            outputs.extend(tensor.detach().movedim(dim, 0).clone() for tensor, dim in pairs)

        with ExitStack() as stack:
            stack.callback(self._model.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(self._model.register_forward_hook(after).remove)
            if self._objective.takes_hidden:
                stack.enter_context(scores_kept())
            loss = self._objective.loss(self._model, batch)
            note(OBJECTIVE)
        total = loss.total
        wrt = [tensor for tensor, _ in attached if tensor.requires_grad and total.requires_grad]
        gradients = iter(torch.autograd.grad(total, wrt, allow_unused=True) if wrt else ())
        grads = [(next(gradients) if wrt and tensor.requires_grad else None, dim) for tensor, dim in attached]
        return Pass(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            grads=tuple(None if grad is None else grad.movedim(dim, 0) for grad, dim in grads),
            total=total.detach(),
            buffers={name: t.clone() for name, t in self._model.named_buffers() if t.is_floating_point()},
            drew=frozenset(drew),
        )


def _by_sample(value: Any, size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield tensors with one element per sample, and that dim: the first, or the only one of that size."""
    for tensor in _tensors_in(value):
        dims = [dim for dim, extent in enumerate(tensor.shape) if extent == size]
        if dims and (dims[0] == 0 or len(dims) == 1):
            yield tensor, dims[0]


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in parts_of(value) or ():
        yield from _tensors_in(part)


def is_never_given(_key: str) -> bool:
    """Return False: without a composition, such as in the trainings of `prove`, no key counts as set by the user."""
    return False


def model_problems(plan: RunPlan, model: nn.Module) -> list[Problem]:
    """Return why a run is refused with this model, whoever set its keys: the strategy cannot place the model as
    configured, or batch statistics would be computed over a single sample.
    """
    strategy, device = plan.components.strategy, plan.tasks[0].device
    facts = strategy.facts_in(plan.context)
    shaping = _shaping_of(plan)
    problems = [*layout_problems(model), *strategy.validate_model(model, plan.context)]
    problems += copies_problems(model) if max(len(plan.tasks), plan.num_replicas) > 1 else []
    problems += [] if facts.runs_hooks and plan.cfg.compile.mode == "off" else hook_problems(model)
    problems += assignment_problems(model, plan.optimizers) if plan.optimizers else []
    if (conversion := conversion_of(plan.cfg)) is not None:
        if facts.converts:
            devices = [task.device for task in plan.tasks]
            precision = plan.components.precision.value
            problems += conversion.problems(model, output=output_name(model), devices=devices, precision=precision)
        else:
            choices = names_of(lambda kind: kind.facts.converts)
            name = choice_of(type(strategy))
            rule = f"strategy={name} does not support converted layers. Use convert=none, or {choices}."
            problems.append(Problem(key="convert", value="float8", rule=rule))
    if shaping != NO_TRANSFORMS:
        as_set = "" if facts.compiles == strategy.facts.compiles else ", as its keys are set,"
        name = choice_of(type(strategy)) + as_set
        problems += shaping_problems(model, shaping, compiles=facts.compiles, strategy=name)
        problems += step_problems(model, shaping, plan.context, facts=facts, strategy=name, device=device)
    problems += objective_problems(plan, model)
    if plan.components.precision.compute_dtype is torch.bfloat16:
        problems += convolution_problems(plan, model)
    # torch refuses these classes with a single sample
    statistics = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d) and m.training]
    problems += _single_samples(plan, statistics) if statistics else ()
    return problems


def model_notes(plan: RunPlan, model: nn.Module, is_given: Callable[[str], bool] = is_never_given) -> list[str]:
    """Return notes for the user about the data, about this strategy, and about this model under it, unless the run is
    refused.

    Args:
        plan: the run.
        model: the model, possibly without data.
        is_given: whether the user set a key; a key that others set without effect is noted, not refused.

    Raises:
        ConfigError: the run has `model_problems`, or a key that the user set has no effect.
    """
    strategy = plan.components.strategy
    facts = strategy.facts_in(plan.context)
    keys = [*_longer_warmup(plan), *_without_validation(plan), *_unknown_split(plan), *_unmatched(plan, model)]
    problems = model_problems(plan, model)
    refuse([*problems, *(problem for problem, _ in keys if is_given(problem.key))])
    notes = optimizer_notes(model, plan.optimizers) if plan.optimizers else []
    notes += [note for _, note in keys if note]
    if not validation_splits(datasets := plan.components.datasets):
        notes.append("the data has no validation split: nothing is evaluated, and no checkpoint is the best")
    notes += [
        *_slower_than_fp32(plan),
        *_members(plan, model),
        *_fields_left_out(plan.components),
        *(
            f"the split {name} is not evaluated: only val, test, val_NAME and test_NAME are"
            for name in datasets
            if name not in {"train", *validation_splits(datasets), *test_splits(datasets)}
        ),
        *remarks(datasets.values(), plan.components.hooks),
        *plan.components.objective.notes(model, plan.components.sample),
        *strategy.notes(model, plan.context),
    ]
    if facts.supports_meta_init and len(plan.tasks) > 1 and not takes_values(model):
        notes.append("the model is built whole on every rank: its constructor reads values of its own tensors.")
    shaping = _shaping_of(plan)
    return notes if shaping == NO_TRANSFORMS else [*notes, *shaping_notes(model, shaping)]


def _shaping_of(plan: RunPlan) -> ModelTransforms:
    keeps = plan.components.strategy.facts_in(plan.context).keeps_memory_format
    return model_transforms_of(plan.cfg, plan.tasks[0].device, keeps_format=keeps)


def _slower_than_fp32(plan: RunPlan) -> Iterator[str]:
    """Yield that the processor of a run has no instructions for bfloat16; torch older than 2.13 does not say."""
    able: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    lacks = able.get("architecture") == "x86_64" and not (able["avx512_bf16"] or able["amx_bf16"])
    precision = plan.components.precision
    if lacks and precision.compute_dtype is torch.bfloat16 and all(task.device == "cpu" for task in plan.tasks):
        yield (
            f"precision={precision.value}: this processor has no instructions for bfloat16, and a step takes several "
            "times as long as with precision=fp32."
        )


def _single_samples(plan: RunPlan, statistics: Sequence[nn.Module]) -> Iterator[Problem]:
    """Yield the problems of shards and batches of one sample, which have no batch statistics."""
    for step in {0, plan.batch.steps_per_epoch - 1}:
        smallest = plan.batch.shard_size(step, plan.batch.num_shards(step) - 1)
        if smallest == 1:
            size = plan.batch.batch_size(step)
            rule = (
                f"cuts a batch of {size} samples so that a shard has one, which has no batch statistics "
                f"({type(statistics[0]).__name__}). Use another batch.global_size or batch.micro_size, or "
                "batch.drop_last=true."
            )
            yield Problem(key="batch.micro_size", value=plan.batch.micro_size, rule=rule)
            break
    average, size, others = average_of(plan.cfg), plan.eval_batch_size, size_of(plan.components.datasets["train"]) - 1
    if average is None or not average.counts_statistics or others % size:
        return
    larger = next(n for n in range(size + 1, size + others + 2) if others % n)
    rule = (
        f"leaves one training sample for the last batch in which average={average.name} computes batch statistics, and "
        f"one sample has none ({type(statistics[0]).__name__}). Use {larger}."
    )
    yield Problem(key="eval.batch_size", value=size, rule=rule)


_CHEAP: Final = 50_000_000
"""Up to this number of parameters, train and plan run the model on a few samples."""
_SHARD: Final = 4
"""Samples of the shard that is run: enough for two pairs."""
_LOOKED_AT: Final = 32
"""Number of samples that are searched for samples of one shape."""


def cut_notes(plan: RunPlan, coupling: Callable[[], Coupling]) -> list[str]:
    """Return notes for the user about other numbers of replicas; none if the cut does not depend on the replicas."""
    if not plan.micro_size_depends_on_replicas or plan.components.strategy.facts_in(plan.context).changes_maths:
        return []
    probed = coupling()
    if probed.depends_on_cut:
        only = f"{AT_EQUAL_CUT} (here {plan.batch.micro_size})"
        return [f"{probed.text}: on another number of replicas it is the same training {only}."]
    return [f"{CUT_UNKNOWN}, {probed.not_probed}."] if probed.not_probed else []


def coupling_of(plan: RunPlan, model: nn.Module, *, at_any_size: bool = False) -> Coupling:
    """Find the parts that depend on the cut of the steps: the model, the objective, and the code that `data` names.

    Args:
        plan: the run.
        model: possibly without data: only its parameters are counted.
        at_any_size: whether a model of more than 50 million parameters is run as well.
    """
    probed = _coupling_of_model(plan, model, at_any_size=at_any_size)
    return replace(probed, findings=(*probed.findings, *_coupling_of_data(plan)))


def _coupling_of_data(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield why batches depend on the cut: a collate that changes the shape of a sample next to a larger one."""
    if plan.components.hooks.transform is not None:
        yield "data.batch_transform", "changes the samples of a shard together"
    collate, train = plan.components.hooks.collate, plan.components.datasets["train"]
    if collate is None or not hasattr(train, "__getitem__"):
        return
    with Untouched(seed=0), suppress(Exception):  # the training reports failures
        samples = list({_shape(sample): sample for sample in _some(train)}.values())
        alone = [_widths(collate([sample], [0])) for sample in samples]
        if any(widths != _widths(collate(samples, range(len(samples)))) for widths in alone):
            yield "data.collate", "pads samples to the largest of their shard"


def _widths(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in _tensors_in(batch)]


def _coupling_of_model(plan: RunPlan, model: nn.Module, *, at_any_size: bool) -> Coupling:
    """Run the model of a plan on a few samples of its training data, on the CPU, and find dependence on the cut.

    Model and objective are built again for this, so that those of the training do not change.
    """
    if plan.components.objective.couples_samples:
        return Coupling(findings=((OBJECTIVE, COUPLES),))
    count = sum(param.numel() for param in model.parameters())
    if count > _CHEAP and not at_any_size:
        return Coupling(
            not_probed=f"the model has {count:,} parameters, more than {_CHEAP:,}: trainkit prove probes it"
        )
    try:
        with Untouched(seed=0):
            samples = _samples_of_one_shape(plan.components.datasets["train"])
        if isinstance(samples, str):
            return Coupling(not_probed=samples)
        return probe(build_model(plan.cfg), build_objective(plan.cfg), samples, plan.components.hooks.collate_function)
    except Exception as error:  # noqa: BLE001 - a user's model may fail in any way; training reports it
        return Coupling(not_probed=f"a pass on the CPU failed ({named_first_line(error)})")


def _samples_of_one_shape(dataset: Any) -> list[Any] | str:
    """Return an even number of samples whose shapes are equal, or why there are none."""
    if not hasattr(dataset, "__getitem__"):
        return f"the samples of {type(dataset).__name__} have no indices"
    by_shape: dict[Any, list[Any]] = {}
    for sample in _some(dataset):
        alike = by_shape.setdefault(_shape(sample), [])
        alike.append(sample)
        if len(alike) == 2 * _SHARD:
            return alike
    most = max(by_shape.values(), key=len, default=[])
    if len(most) < 4:
        return f"there are not 4 samples of one shape among the first {sum(map(len, by_shape.values()))}"
    return most[: len(most) // 4 * 4]


def _some(dataset: Any) -> Iterator[Any]:
    """Yield samples spread over the dataset, since neighbours may be similar; the first samples of a stream."""
    if isinstance(dataset, Stream):
        yield from itertools.islice(dataset.from_begin(0), _LOOKED_AT)
        return
    size = size_of(dataset)
    count = min(size, _LOOKED_AT)
    # In bit-reversed order: even the first 8 are far from each other.
    order = sorted(range(count), key=lambda index: f"{index:05b}"[::-1])
    yield from (dataset[index * size // count] for index in order)


def _shape(value: Any) -> Any:
    """Return the properties that samples of one batch must share: types, shapes and dtypes."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value), tuple(value.shape), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _shape(part)) for key, part in value.items())
    return type(value) if (parts := parts_of(value)) is None else tuple(map(_shape, parts))


_SHOWN: Final = 6
"""Names of parameters in a note."""


def _longer_warmup(plan: RunPlan) -> Iterator[tuple[Problem, str]]:
    """Yield the problem of a warmup that is longer than the training."""
    steps, most, warmup = plan.rate.warmup_steps, plan.num_steps, plan.cfg.warmup
    if steps <= most:
        return
    name, value = ("steps", warmup.steps) if warmup.epochs is None else ("epochs", warmup.epochs)
    rule = f"{steps} steps of warmup, and the training has {most}. Use {most} or fewer."
    reached = f"at step {most} the rate is {plan.rate(most - 1):.3g} of {plan.rate.peak:g}"
    note = f"warmup.{name}={value} is {steps} steps: the run ends inside it, {reached}"
    yield Problem(key=f"warmup.{name}", value=value, rule=rule), note


def _without_validation(plan: RunPlan) -> Iterator[tuple[Problem, str]]:
    """Yield the problems of keys that need a metric of a validation split, if the data has none."""
    if validation_splits(plan.components.datasets):
        return
    metric = plan.cfg.eval.metric
    if metric is not None:
        rule = "there is no such metric: the data has no validation split. Leave it out, or use data that has one."
        yield Problem(key="eval.metric", value=metric, rule=rule), f"eval.metric={metric} is left out"
    for name, node in plan.cfg.callbacks.items():
        if getattr(resolve_target(node["_target_"]), "decides_by_figures", False):
            rule = "needs evaluations, and the data has no validation split. Leave it out, or use data that has one."
            yield Problem(key=f"callbacks.{name}", rule=rule), f"callbacks.{name} has no effect"


def _unknown_split(plan: RunPlan) -> Iterator[tuple[Problem, str]]:
    """Yield the problem of a metric of a split that the data does not have; the text lists the splits of the data."""
    metric, names = MonitoredMetric.of(plan.cfg.eval).metric, validation_splits(plan.components.datasets)
    average = average_of(plan.cfg)
    if average is not None:
        names = [*names, *(averaged_split(name, average) for name in names)]
    if not names or metric.partition("/")[0] in names:
        return
    rule = f"the data has the validation splits {', '.join(names)}. Give a metric of one: {names[0]}/loss."
    yield Problem(key="eval.metric", value=metric, rule=rule), f"no checkpoint is the best by {metric}: {rule}"


def _unmatched(plan: RunPlan, model: nn.Module) -> Iterator[tuple[Problem, str]]:
    """Yield the problems of patterns that match no parameter, and of groups whose parameters are in earlier groups."""
    groups = plan.cfg.optimizer.get("groups") or {}
    members, takes = group_members(model, groups), parameter_matches(model)
    trained = [name for names in members.values() for name in names]
    for name, settings in groups.items():
        key = f"optimizer.groups.{name}"
        absent = [pattern for pattern in settings["match"] if not any(takes(param, (pattern,)) for param in trained)]
        for pattern in absent:
            rule = "matches no parameter that is trained. Correct the pattern, or leave it out."
            yield Problem(key=f"{key}.match", value=pattern, rule=rule), ""  # as shipped, they suit many models
        if len(absent) < len(settings["match"]) and not members[name]:
            rule = "holds no parameter: earlier groups match the same parameters. Change the order of the groups."
            yield Problem(key=key, rule=rule), ""


def _members(plan: RunPlan, model: nn.Module) -> Iterator[str]:
    """Yield the parameters of each group."""
    groups = plan.cfg.optimizer.get("groups") or {}
    members = group_members(model, groups)
    count = sum(map(len, members.values()))
    for name in groups:
        params = members[name]
        text = f"{len(params)} of {count} parameters: {listed(params, _SHOWN)}" if params else "no parameter"
        yield f"optimizer.groups.{name} holds {text}"


def objective_problems(plan: RunPlan, model: nn.Module) -> list[Problem]:
    """Return the problems of the objective of a plan: of its terms, its model, and with compiling."""
    objective, compiled = plan.components.objective, plan.cfg.compile.mode
    taken, names = {"loss", *objective.metrics()}, objective.term_names
    problems = [
        Problem(
            key="objective",
            rule=f"{type(objective).__name__} has the term {name!r} in addition to a loss, metric or term of that "
            "name. Give each its own name.",
        )
        for index, name in enumerate(names)
        if name in taken or name in names[:index]
    ]
    problems += objective.validate_model(model, plan.components.sample)
    if compiled != "off" and Access.derivatives in objective.needs:
        subject = f"{type(objective).__name__} {Access.derivatives.value}"
        rule = f"compiles one backward pass, and {subject}, which takes a second. Use compile.mode=off."
        problems.append(Problem(key="compile.mode", value=compiled, rule=rule))
    chosen = plan.cfg.objective.get("cross_entropy")
    if compiled == "step" and chosen in _IN_PARTS and objective.takes_hidden:
        rule = (
            "has no effect with compile.mode=step, whose graphs compute the loss from all scores. Use auto, or "
            "compile.mode=default."
        )
        problems.append(Problem(key="objective.cross_entropy", value=chosen, rule=rule))
    return problems


_IN_PARTS: Final = ("chunked", "liger")
"""Values of `cross_entropy` for a loss that never holds all scores."""


def _fields_left_out(parts: Components) -> list[str]:
    """Return a note about fields that neither the model nor the loss receives."""
    objective = parts.selecting
    if objective is None or parts.example is None:
        return []
    fields = named_fields(parts.example)
    left_out = unused_fields(parts.example, objective.input, objective.target)
    kinds = (Tensor, np.ndarray, np.generic, int, float, list)
    numbers = [name for name in left_out if isinstance(fields[name], kinds)]
    if not numbers:
        return []
    return [
        f"not used, of each sample: {', '.join(numbers)}. objective.input=[NAME,NAME] gives the model several fields."
    ]


def plan_all_points(
    compositions: Sequence[Composition],
    *,
    num_gpus: int | None = None,
    check: Callable[[RunPlan, nn.Module], Sequence[Problem]] = lambda *_: (),
) -> list[int]:
    """Plan all compositions without starting any.

    A point that continues another run is skipped: its auto values come from that run. Points that differ in their seed
    alone are planned once, and a dataset is read once for all consecutive points that use it.

    Args:
        compositions: the points.
        num_gpus: GPUs of the host of each; None: those of this one.
        check: returns further problems of a plan and its model without data, once for each that is planned.

    Returns:
        The number of steps of each training; 0 if it continues another run.

    Raises:
        ConfigError: every problem of every plan, with the points that have it.
        DataError: a dataset is absent, damaged or empty.
    """
    problems: list[list[Problem]] = []
    built: str | None = None
    splits: Mapping[str, Any] = {}
    lengths: list[int] = []
    indices: dict[str, int] = {}
    for index, composition in enumerate(compositions):
        cfg = composition.cfg
        earlier = indices.setdefault(json.dumps(replace(cfg, seed=0).to_dict(), sort_keys=True, default=str), index)
        lengths.append(0 if earlier == index else lengths[earlier])
        problems.append([] if earlier == index else [*problems[earlier]])
        if cfg.resume is not None or earlier != index:
            continue
        try:
            if built != (node := json.dumps(cfg.data, default=str)):
                splits, built = build_splits(cfg.data), node
            plan = make_plan(cfg, num_gpus=num_gpus, splits=folded(splits, cfg.cv))
            lengths[-1] = plan.num_steps
            model = meta_model(plan.cfg)
            model_notes(plan, model, composition.is_given)
            problems[-1] += check(plan, model)
        except ConfigError as error:
            problems[-1] += composition.with_origins(error).problems
    if any(problems):
        raise ConfigError(problems_of_points(compositions, problems))
    return lengths
