"""Run a few samples through the model and the objective before anything starts, and explain what does not fit.

A model of at most 50 million parameters runs on the CPU, a larger one on torch's `meta` device, which has shapes and
dtypes but no numbers. An error that only occurs on that device, or only on the CPU, is ignored.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from trainkit.config.targets.allowed import TARGET
from trainkit.data.reading.collate import immovable_in, shape_text, to_device
from trainkit.data.splits import read_sample, size_of
from trainkit.errors import ConfigError, DataError, Problem, TrainkitError, named_first_line, text_of, with_frames
from trainkit.numerics.batch import Positions, Ticket
from trainkit.numerics.generators import GeneratorStates, Untouched
from trainkit.numerics.precision import buffers_apart
from trainkit.objectives.base import Loss, Objective
from trainkit.objectives.classification import ScoredClasses
from trainkit.objectives.linear_cross_entropy import scores_kept
from trainkit.run.planning.build import make_optimizer, named_optimizers
from trainkit.run.planning.plan import RunPlan
from trainkit.strategies.core.buffers import sample_dims_of, sum_problem, written_indices
from trainkit.strategies.core.graphs.shards import shard_problems
from trainkit.strategies.core.optimizer import OptimizerStepper
from trainkit.trained.build import build_model, build_objective

_CHEAP: Final = 50_000_000
"""Up to this number of parameters, the model is run with data."""
_CHEAP_MADE_UP: Final = 1_000_000
"""The same limit for made-up samples, whose values have no meaning."""
_SAMPLES: Final = 4
_HOST: Final = torch.device("cpu")
_LISTED: Final = (
    " A list of numbers becomes one tensor for each place in it: return a tensor (of a Hugging Face dataset: "
    "with_format('torch'))."
)
_DENSE_OPTIMIZERS: Final = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
"""Optimizers that step with any dense gradients. They are not tried: their import takes longer than the check."""
_GROUP: Final = re.compile(r"process group|torch\.distributed", re.IGNORECASE)
_ELSEWHERE: Final = re.compile(r"cuda|triton|'CPU' backend|not implemented for|on CPU|no kernel", re.IGNORECASE)


def refuse_misfits(plan: RunPlan, model: nn.Module) -> None:
    """Refuse data, a model and an objective that do not fit together.

    Args:
        plan: the run.
        model: the model, possibly without data; it is not changed.

    Raises:
        ConfigError: a key or a class must change.
        DataError: a sample must change.
    """
    declared = [name for name, dim in sample_dims_of(model).items() if dim is not None]
    if declared and plan.components.strategy.facts_in(plan.context).is_asynchronous:
        rule = (
            f"the model keeps state per sample ({declared[0]}), and a step must read that of the step before it. Use "
            "strategy.mode=sync."
        )
        raise ConfigError([Problem(key="strategy.mode", value="async", rule=rule)])
    dataset = plan.components.datasets["train"]
    if not hasattr(dataset, "__getitem__"):
        return  # reading a stream twice may cost more than its first error
    with Untouched(seed=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = size_of(dataset)
        tried = num_tried(plan)
        error = _try(plan, model, [index * count // tried for index in range(tried)])
        if error is not None and plan.batch.micro_size > tried:
            # Code that needs a larger batch than a few samples is not refused.
            error = _try(plan, model, range(min(plan.batch.micro_size, count))) and error
    if error is not None:
        raise error


def num_tried(plan: RunPlan) -> int:
    """Return the number of samples that are run first."""
    return max(2, min(_SAMPLES, plan.batch.micro_size))


def _try(plan: RunPlan, model: nn.Module, indices: Sequence[int]) -> TrainkitError | None:
    """Run samples once; return the error of a misfit."""
    samples = [read_sample(plan.components.datasets["train"], index) for index in indices]
    batch = to_device(plan.components.hooks.collate_function(samples, indices), _HOST)
    if any(task.device != _HOST.type for task in plan.tasks) and (fixed := next(immovable_in(batch), None)) is not None:
        return ConfigError([_immovable(plan, fixed)])
    most = _CHEAP_MADE_UP if getattr(plan.components.datasets["train"], "is_declared", False) else _CHEAP
    has_data = sum(param.numel() for param in model.parameters()) <= most
    trial = _Trial(plan=plan, indices=indices, samples=samples, batch=batch, has_data=has_data)
    error = trial.run(model)
    if error is None and trial.updated and (problems := [*per_sample_problems(plan, trial.updated)]):
        return ConfigError(problems)
    return error


def _updated_flag(model: nn.Module, before: Mapping[str, Tensor], dtype: torch.dtype) -> Problem | None:
    """Return the problem of a buffer that a pass has updated, and whose values of several shards have no sum."""
    for name, buffer in model.named_buffers():
        if name in before and not torch.equal(buffer, before[name]):
            if (problem := sum_problem(name, buffer, dtype)) is not None:
                return problem
            rule = f"updates {name}, of bool, in its forward pass, and the results of shards are added up. "
            return Problem(key="model", rule=rule + "Make it a buffer of float32 or int64.")
    return None


def _own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers with dims of modules that are no normalisation of torch."""
    norms = {module for module in model.modules() if isinstance(module, _NormBase)}
    buffers = ((name, model.get_submodule(name.rpartition(".")[0]), buffer) for name, buffer in model.named_buffers())
    return {name: buffer.clone() for name, owner, buffer in buffers if buffer.dim() and owner not in norms}


def _sparse_remedy(sparse: Sequence[str], params: Mapping[str, nn.Parameter]) -> str:
    """Return the advice for an optimizer that cannot step with the gradients of its parameters, if some are sparse."""
    names = [name for name in sparse if name in params]
    if not names:
        return ""
    cause = f" The gradient of {names[0]} is sparse"
    if len(names) < len(params):
        dense = next(name for name in params if name not in names)
        cause += f", that of {dense} is not: optimizers can give each kind its own (docs/optimizers.md)"
    return (
        f"{cause}. Use optimizer=sgd or torch.optim.Adagrad with optimizer.weight_decay=0, or "
        "nn.Embedding(sparse=False); torch.optim.SparseAdam takes sparse gradients alone."
    )


def _immovable(plan: RunPlan, leaf: object) -> Problem:
    """Return the problem of an object in a batch whose tensors would stay in the memory of the host."""
    key, value = ("data.collate", plan.cfg.data.get("collate")) if plan.components.hooks.collate else ("data", None)
    rule = (
        f"puts a {type(leaf).__name__} into the batch, whose tensors are not moved to the device. Tuples, lists, "
        "dicts and dataclasses are, and objects with a method to(device): give it one, or return a dict."
    )
    return Problem(key=key, value=value, rule=rule)


@dataclass
class _Trial:
    """One pass over a few samples."""

    plan: RunPlan
    indices: Sequence[int]
    samples: Sequence[Any]
    batch: Any
    has_data: bool
    """Whether the model has data; otherwise it is on torch's meta device."""
    part: str = "objective"
    """Part that is running: model, objective, or the backward pass of the model."""
    running: list[tuple[str, nn.Module, tuple[Any, ...]]] = field(default_factory=list)
    """Name, module and arguments of the calls that have not returned: after an error, the last one has failed."""
    outputs: Any = None
    updated: tuple[str, ...] = ()
    """Buffers that the pass has changed, without the statistics of torch's normalisations, which are averaged."""
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers of another floating dtype than the parameters."""

    def run(self, model: nn.Module) -> TrainkitError | None:
        """Compute the loss and its gradients; return the error."""
        precision = self.plan.components.precision
        batch = self.batch
        if self.has_data:
            model = precision.adapt(build_model(self.plan.cfg))
            self.tables = dict(buffers_apart(model, precision.model_dtype))
        elif any(param.device.type != "meta" for param in model.parameters()):
            return None
        else:
            batch = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)
        objective = build_objective(self.plan.cfg)
        flags = {
            name: buffer.clone()
            for name, buffer in model.named_buffers()
            if buffer.dtype is torch.bool or sum_problem(name, buffer, precision.master_dtype) is not None
        }
        copies = _own_buffers(model) if self.has_data else {}
        hooks = [hook for name, module in model.named_modules() for hook in self._watching(name, module)]
        try:
            keeping_scores = scores_kept() if objective.takes_hidden else nullcontext()
            with torch.enable_grad(), keeping_scores, precision.autocast(["cpu"]) if self.has_data else nullcontext():
                before = GeneratorStates([])
                loss = objective.loss(model, batch)
            after = dict(model.named_buffers()) if copies else {}
            self.updated = tuple(name for name, buffer in copies.items() if not torch.equal(buffer, after[name]))
            if self.has_data and isinstance(loss, Loss):
                with torch.no_grad():
                    for metric in objective.metrics().values():  # they count the batch, as an evaluation does
                        metric.update(loss, batch)
            problem = _loss_problem(loss, objective, trains=any(param.requires_grad for param in model.parameters()))
            if problem is None and self.has_data:
                _refuse_no_probabilities(loss, objective)
                problem = self._other_weight(loss, objective) or _updated_flag(model, flags, precision.master_dtype)
            if problem is None and self.has_data and loss.loss_sum.requires_grad:
                problem = _other_parameters(loss.loss_sum, model, objective)
                self.part = "model"
                torch.autograd.backward(loss.loss_sum)
                if self.plan.cfg.compile.mode == "step":
                    problem = next(iter(shard_problems(model, has_drawn=before.moved())), problem)
                problem = problem or self._optimizer_problem(model)
        except TrainkitError as error:
            return error if error.exit_code != 1 else self._config_error(text_of(error), error)
        except Exception as error:  # noqa: BLE001 - the user's code may fail in any way
            return self._explained(error)
        finally:
            for hook in hooks:
                hook.remove()
        return None if problem is None else ConfigError([problem])

    def _other_weight(self, loss: Loss, objective: Objective) -> Problem | None:
        """Return the problem of a weight that differs from the one by which a step is divided."""
        per_sample = self.plan.components.weighing.per_sample
        if per_sample is None or math.isclose(float(loss.weight), per_sample * len(self.indices), rel_tol=1e-3):
            return None
        name = type(objective).__name__
        rule = (
            f"{name}.loss gives the weight {float(loss.weight):g} for {len(self.indices)} samples, and "
            f"{name}.weight_per_sample the weight {per_sample:g} for each. Return None from weight_per_sample: then "
            "the weight of each batch is counted."
        )
        return Problem(key="objective", rule=rule)

    def _optimizer_problem(self, model: nn.Module) -> Problem | None:
        """Return the problem of an optimizer that cannot step with the gradients of a small model, or with sparse
        ones.
        """
        cfg, plan = self.plan.cfg, self.plan
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        sparse = [name for name, param in params.items() if param.grad is not None and param.grad.is_sparse]
        if sparse and cfg.numerics.reproducible:  # sums them as dense ones
            for param in params.values():
                param.grad = param.grad if param.grad is None else param.grad.to_dense()
            sparse = []
        if not sparse and sum(param.numel() for param in params.values()) > _CHEAP_MADE_UP:
            return None
        makers = [("optimizer", cfg.optimizer[TARGET], frozenset(params), make_optimizer(cfg, model))]
        if plan.optimizers:
            pairs = zip(plan.optimizers, named_optimizers(cfg, plan.optimizers, model), strict=True)
            makers = [(f"optimizers.{spec.name}", spec.node[TARGET], named.params, named.make) for spec, named in pairs]
        for key, target, names, make in makers:
            members = {name: param for name, param in params.items() if name in names}
            if target in _DENSE_OPTIMIZERS and not any(name in names for name in sparse):
                continue
            try:
                stepper = OptimizerStepper(make(members), list(members.values()))
                stepper.step([param.grad for param in members.values()], 1.0)
                stepper.state(members)
            except TrainkitError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's code may fail in any way
                if self._is_of_this_device(error):
                    continue
                reason = named_first_line(error).rstrip(".")
                rule = with_frames(f"a step with the gradients of this model raised {reason}.", error)
                return Problem(key=f"{key}.{TARGET}", value=target, rule=rule + _sparse_remedy(sparse, members))
        return None

    def _watching(self, name: str, module: nn.Module) -> Sequence[RemovableHandle]:
        """Record the calls of a module."""

        def begin(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self.part = "model"
            self.running.append((name, module, args))

        def end(_module: nn.Module, _args: Any, outputs: Any) -> None:
            self.running.pop()
            if not self.running:
                self.part, self.outputs = "objective", outputs

        return module.register_forward_pre_hook(begin), module.register_forward_hook(end)

    def _explained(self, error: Exception) -> TrainkitError | None:
        misfit: TrainkitError | None = self._width(error) if self.part == "model" else None
        if misfit is not None or self._is_of_this_device(error):
            return misfit
        misfit = self._input_dtype(error) if self.part == "model" else self._class_out_of_range(error)
        texts = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, str)]
        if misfit is None and self.part != "model" and texts:
            odd = f"a field of the samples is text ({texts[0]!r}). Make it a number in the dataset."
            return DataError(with_frames(f"{odd} {self._context(error)}", error))
        return misfit or self._config_error(self._context(error), error)

    def _is_of_this_device(self, error: Exception) -> bool:
        """Return whether the error only occurs on the CPU, on the meta device, or without a process group."""
        text = text_of(error)
        if not self.has_data or isinstance(error, NotImplementedError | MemoryError) or _GROUP.search(text):
            return True
        return _ELSEWHERE.search(text) is not None and any(task.device != "cpu" for task in self.plan.tasks)

    def _inputs(self) -> Sequence[Tensor]:
        """Return the floating tensors that the module of the error was given."""
        args = self.running[-1][2] if self.running else ()
        return [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()]

    def _width(self, error: Exception) -> ConfigError | None:
        """Return the error of a layer whose input has another number of features."""
        expected = getattr(self.running[-1][1], "in_features", None) if self.running else None
        actual = next((tensor.shape[-1] for tensor in self._inputs() if tensor.dim()), expected)
        if actual == expected or expected is None:
            return None
        rule = f"the layer takes {expected} features, and it gets {actual}. Use {actual}, or other data."
        return self._config_error(f"{rule} {self._context(error)}", error, key=self._key_of(expected), value=expected)

    def _input_dtype(self, error: Exception) -> TrainkitError | None:
        """Return the error of a module whose input has another floating dtype than its parameters."""
        computes = self.plan.components.precision.model_dtype
        if self.tables and self.running:
            name, table = next(iter(self.tables.items()))
            rule = (
                f"the model computes in {_name(computes)}, and buffers keep their dtype: {name} is "
                f"{_name(table.dtype)}. Convert it where forward uses it, {name.rpartition('.')[2]}.to(x.dtype), or "
                f"use precision=bf16_mixed. {self._context(error)}"
            )
            return self._config_error(rule, error)
        if all(tensor.dtype is computes for tensor in self._inputs()):
            return None
        rule = (
            f"the model computes in {_name(computes)}, and the input has another dtype. Convert it in the dataset, "
            f"x.float() or x.long(), or choose another precision. {self._context(error)}"
        )
        return DataError(with_frames(rule, error))

    def _class_out_of_range(self, error: Exception) -> TrainkitError | None:
        """Return the error of a target that is no class of the model's."""
        scores = next((leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor) and leaf.dim() > 1), None)
        leaves = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor) and leaf.dtype is torch.int64]
        if not isinstance(error, IndexError) or scores is None:
            return None
        classes, ignored = scores.shape[1], self.plan.cfg.objective.get("ignore_index")
        invalid = [leaf[(leaf < 0) | (leaf >= classes)].tolist() for leaf in leaves]
        target = next((value for values in invalid for value in values if value != ignored), None)
        if target is None:
            return None
        leave = f", or leave it out of the loss by objective.ignore_index={target}"
        leave = leave if "ignore_index" in self.plan.cfg.objective else ""
        if target < 0:
            return DataError(
                f"a target among the samples {_listed(self.indices)} is {target}, and classes are counted from 0. "
                f"Correct the targets of the dataset{leave}."
            )
        rule = f"the model gives {classes} classes, and a target is {target}. Give it {target + 1} or more{leave}."
        return self._config_error(f"{rule} {self._context(error)}", error, key=self._key_of(classes), value=classes)

    def _key_of(self, size: int) -> str:
        """Return the only key of the model that has this size; the group if there is none."""
        keys = [f"model.{key}" for key, value in self.plan.cfg.model.items() if value == size and value is not True]
        return keys[0] if len(keys) == 1 else "model"

    def _config_error(self, rule: str, error: BaseException, *, key: str = "", value: Any = None) -> ConfigError:
        if "." not in key:
            node = self.plan.cfg.model if self.part == "model" or key == "model" else self.plan.cfg.objective
            key, value = f"{key or self.part}.{TARGET}", node[TARGET]
        return ConfigError([Problem(key=key, value=value, rule=with_frames(rule, error))])

    def _context(self, error: BaseException) -> str:
        """Describe the executed code and its failure."""
        gave = "" if self.outputs is None else f" The model gave {shape_text(self.outputs)}."
        path = self.running[-1][0] if self.running else ""
        event = f"the {self.part}{f', in {path},' if path else ''} raised {named_first_line(error)}"
        when = f"With samples {_listed(self.indices)}, the first of them {shape_text(self.samples[0])}"
        sample = self.samples[0]
        parts = sample.values() if isinstance(sample, dict) else sample if isinstance(sample, tuple) else ()
        is_listed = any(isinstance(part, list) and part and isinstance(part[0], int | float) for part in parts)
        return f"{when}, {event}.{gave}{_LISTED if is_listed else ''}"


def _loss_problem(loss: object, objective: Objective, *, trains: bool) -> Problem | None:
    """Return the problem of the result of an objective."""
    name = type(objective).__name__
    if not isinstance(loss, Loss):
        rule = f"{name}.loss returns a {type(loss).__name__}. It must return Loss(loss_sum=..., weight=...)."
        return Problem(key="objective", rule=rule)
    total: object = loss.loss_sum
    if not isinstance(total, Tensor):
        rule = f"{name}.loss gives loss_sum as a {type(total).__name__}. It must be a tensor with its graph."
        return Problem(key="objective", rule=rule)
    if total.dim():
        rule = f"{name}.loss gives loss_sum of shape {tuple(total.shape)}. It must be one number: sum it."
        return Problem(key="objective", rule=rule)
    if trains and not total.requires_grad:
        rule = "the loss does not depend on a parameter that is trained. Is an output detached, or made a number?"
        return Problem(key="objective", rule=rule)
    return None


def _refuse_no_probabilities(loss: Loss, objective: Objective) -> None:
    """Refuse floating targets of classes that are no probabilities: padding of -100 would count in the loss.

    Raises:
        DataError: there is such a target.
    """
    targets = loss.targets
    has_classes = isinstance(objective, ScoredClasses) and isinstance(targets, Tensor)
    if has_classes and targets.is_floating_point() and targets.numel():
        least, most = map(float, targets.aminmax())
        if not (least >= 0 and most <= 1):
            raise DataError(
                f"targets of classes are floating, {least:g} to {most:g}, and probabilities are 0 to 1. Padding of "
                "probabilities would count: give masks of whole numbers, whose padding is ignored, or "
                "data.collate.target_padding=0, which adds nothing to the loss but counts in its weight."
            )


def _other_parameters(total: Tensor, model: nn.Module, objective: Objective) -> Problem | None:
    """Return the problem of a parameter in the graph of a loss that the model does not have: nothing trains it."""
    of_model, visited, nodes = set(map(id, model.parameters())), set[Any](), [total.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [before for before, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in of_model:
            rule = (
                f"the loss of {type(objective).__name__} depends on a parameter of shape {tuple(leaf.shape)} that is "
                "not among model.parameters(), so no optimizer trains it. Make it a part of the model (a list of "
                "layers is an nn.ModuleList), or freeze it by requires_grad_(False)."
            )
            return Problem(key="objective", rule=rule)
    return None


def _listed(indices: Sequence[int]) -> str:
    *first, last = indices
    return f"{', '.join(map(str, first))} and {last}" if len(indices) <= _SAMPLES else f"0 to {last}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_STEPS: Final = 3
"""Steps whose shards are looked at; random indices of one step may be different by chance."""
_SHARDS: Final = 2
"""Shards of each step that are run."""
_OF_SHARD: Final = 8
"""Samples of each shard that are run."""


def per_sample_problems(plan: RunPlan, names: Collection[str]) -> Iterator[Problem]:
    """Yield the problems of buffers whose parts the shards of a step write, and which are not declared; or which are
    declared, and of which two shards write the same part.

    Args:
        plan: the run.
        names: buffers that a forward pass updates.
    """
    steps = [step for step in range(min(_STEPS, plan.num_steps)) if plan.batch.num_shards(step) > 1]
    by_step = [_changes(plan, step, names) for step in steps]
    dims, kind = sample_dims_of(build_model(plan.cfg)), plan.cfg.model.get("_target_")
    for name in names if by_step else ():
        declared = dims.get(name)
        if declared is not None and any(_meet(changes[name], declared) for changes in by_step):
            rule = (
                f"declares dim {declared} of the buffer {name} as that of the samples, and two shards of one of the "
                "first steps write the same index of it. Give each sample of a step an index of its own "
                "(docs/objectives.md#data)."
            )
            yield Problem(key="model._target_", value=kind, rule=rule)
        if name in dims:
            continue
        for dim in range(by_step[0][name][0][1].dim()):
            if all(_is_per_sample(changes[name], dim) for changes in by_step):
                owner, leaf = name.rpartition(".")[::2]
                rule = (
                    f"has the buffer {name}, and the shards of a step write different indices of its dim {dim}, as "
                    f"state of single samples. Buffers are averaged over shards: declare it in the class of "
                    f"{owner or 'the model'}, sample_dims = {{{leaf!r}: {dim}}}, and it is not averaged; or "
                    f"{{{leaf!r}: None}} if it is no such state (docs/objectives.md#recurrent-state)."
                )
                yield Problem(key="model._target_", value=kind, rule=rule)
                break


Change = tuple[int, Tensor, Tensor]
"""Samples of a shard, and a buffer before and after its forward pass."""


def _changes(plan: RunPlan, step: int, names: Collection[str]) -> Mapping[str, Sequence[Change]]:
    """Return what the first shards of a step do to buffers; each starts from the same ones."""
    hooks, dataset, cfg = plan.components.hooks, plan.components.datasets["train"], plan.cfg
    positions = Positions(plan.batch, hooks.order(dataset, plan.batch, seed=cfg.seed, shuffle=cfg.loader.shuffle))
    precision, changes = plan.components.precision, {name: list[Change]() for name in names}
    for shard in range(_SHARDS):
        model, objective = precision.adapt(build_model(cfg)), build_objective(cfg)
        before = {name: buffer.clone() for name, buffer in model.named_buffers() if name in changes}
        indices = positions.indices(Ticket(step, (shard,)))[:_OF_SHARD].tolist()
        samples = [read_sample(dataset, index) for index in indices]
        batch = to_device(hooks.collate_function(samples, indices), torch.device("cpu"))
        keeping_scores = scores_kept() if objective.takes_hidden else nullcontext()
        with torch.enable_grad(), keeping_scores, precision.autocast(["cpu"]):
            objective.loss(model, batch)
        after = dict(model.named_buffers())
        for name, start in before.items():
            changes[name].append((len(indices), start, after[name]))
    return changes


def _is_per_sample(changes: Sequence[Change], dim: int) -> bool:
    """Return whether shards write different indices of a dim, each at most as many as it has samples."""
    counts = [int(written_indices(start, after, dim).sum()) for _, start, after in changes]
    fits = all(0 < count <= size for count, (size, _, _) in zip(counts, changes, strict=True))
    return fits and not _meet(changes, dim)


def _meet(changes: Sequence[Change], dim: int) -> bool:
    """Return whether two shards write the same index of a dim."""
    written = torch.stack([written_indices(start, after, dim) for _, start, after in changes])
    return bool((written.sum(0) > 1).any())
