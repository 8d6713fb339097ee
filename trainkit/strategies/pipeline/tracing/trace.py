"""Record the computation of a model from forward passes without data: the blocks that run, and the code between them.

The passes run on fake tensors, which have shapes and no memory. Calls of blocks are recorded as a whole, and so is each
torch function that the model's own code calls between them. The recording depends on the executed code, not on
declarations: blocks may branch, take several inputs, and be declared in any order. It is valid for inputs of the same
shapes.

The model's own Python code is not run again. So everything that it computes without torch must be the same in every
pass: two passes are compared, and a pass that changes Python objects is refused.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain, zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from trainkit.errors import Problem
from trainkit.frames import named_first_line
from trainkit.numerics.generators import GeneratorStates
from trainkit.numerics.randomness import noting_keys
from trainkit.objectives.base import Supervised
from trainkit.objectives.fields import split_batch
from trainkit.strategies.base import PlanContext
from trainkit.strategies.maps.syntax import Block
from trainkit.strategies.object_snapshot import ObjectSnapshot
from trainkit.strategies.pipeline.stage_assignment import blocks_to_cut
from trainkit.strategies.pipeline.tracing.program import Program, RecordedCall
from trainkit.strategies.pipeline.tracing.python_state import CannotCut, same_constant
from trainkit.strategies.pipeline.tracing.recorder import Recorder, whole_functions


def trace(
    model: nn.Module,
    units: Sequence[Block],
    inputs: Any,
    *,
    device: torch.device,
    autocast: AbstractContextManager[Any],
    grad: bool = True,
) -> Program:
    """Record the computation of a model without computing data; the model is unchanged.

    Args:
        model: the model, possibly (partly) on the meta device.
        units: the blocks of the model, from `blocks_to_cut`.
        inputs: the arguments of the model: tensors, or tuples, lists and dicts of them; only their shapes matter.
        device: the device to compute on.
        autocast: the context of its forward pass.
        grad: whether its forward pass is followed by a backward pass.

    Raises:
        CannotCut: the model needs data during the pass, its outputs are not tensors, or it passes mutable Python
            objects on.
    """
    with _as_it_was(model, device), autocast:
        first, second = (_pass(model, units, inputs, device=device, grad=grad) for _ in range(2))
    _compare(first, second)
    return first


def record(model: nn.Module, units: Sequence[Block], inputs: Any, *, autocast: AbstractContextManager[Any]) -> Program:
    """Record one forward pass of training on the CPU, of a model that `trace` has accepted.

    Args:
        model: as in `trace`.
        units: as in `trace`.
        inputs: as in `trace`.
        autocast: as in `trace`.

    Raises:
        CannotCut: as in `trace`.
    """
    device = torch.device("cpu")
    with _as_it_was(model, device), autocast:
        return _pass(model, units, inputs, device=device, grad=True)


def _pass(model: nn.Module, units: Sequence[Block], inputs: Any, *, device: torch.device, grad: bool) -> Program:
    # Slow to import, and needed only with stages.
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # compiled code runs eagerly
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_log("torch._subclasses.fake_tensor"))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        own = {
            name: torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad
            )
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
        }
        shaped = tree_map(lambda leaf: _without_numbers(leaf, device) if isinstance(leaf, Tensor) else leaf, inputs)
        recorder = Recorder(model, own, shaped, device_type=device.type)
        stack.callback(recorder.release)
        recorder.watch(units)
        stack.enter_context(noting_keys(recorder.note_key))
        stack.enter_context(whole_functions(recorder))
        stack.enter_context(recorder)
        host = GeneratorStates()
        try:
            outputs = functional_call(model, own, (shaped,))
        except CannotCut:
            raise
        except Exception as error:
            raise CannotCut(named_first_line(error).rstrip(".")) from error
        if host.moved():
            raise CannotCut(
                "its forward draws from Python's random or NumPy, which are keyed by shard and not by block"
            )
        return recorder.program(outputs)


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the state that passes change besides tensors: attributes of modules, and the states of random
    generators.
    """
    attributes = ObjectSnapshot(model.named_modules())
    host = GeneratorStates()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        attributes.restore()
        host.restore()


@contextmanager
def _without_log(name: str) -> Iterator[None]:
    """Disable a logger: the error already reports the failure, and torch would log each traceback first."""
    logger = logging.getLogger(name)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _without_numbers(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _compare(first: Program, second: Program) -> None:
    """Refuse a model whose second pass differs from its first."""
    last = "its first block"
    for one, other in zip_longest(first.calls, second.calls):
        if one is None or other is None or not _is_same(one, other):
            raise CannotCut(
                f"two forward passes differ after {last}: its Python code behaves differently in each pass",
                remedy="Compute it from the inputs, or use strategy=mirrored.",
            )
        last = last if one.block is None else one.block
    if not _are_same(first.outputs, second.outputs):
        raise CannotCut(
            "Non-tensor outputs differ between two forward passes",
            remedy="Compute it from the inputs, or use strategy=mirrored.",
        )


def _is_same(one: RecordedCall, other: RecordedCall) -> bool:
    if (one.block, one.modes) != (other.block, other.modes) or not same_constant(one.function, other.function):
        return False
    return _are_same((one.args, one.kwargs, one.outputs), (other.args, other.kwargs, other.outputs))


def _are_same(one: Any, other: Any) -> bool:
    (leaves, spec), (others, shape) = tree_flatten(one), tree_flatten(other)
    return spec == shape and all(map(same_constant, leaves, others))


_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, tuple[Program, ...] | list[Problem]]] = WeakKeyDictionary()


def programs_of(model: nn.Module, context: PlanContext) -> tuple[Program, ...] | list[Problem]:
    """Return the programs of a model for two samples, in training and in evaluation; or the problems why it cannot be
    cut.

    Args:
        model: the model, possibly on the meta device.
        context: provides a sample of the training data; without one, the result is empty.
    """
    sample = context.sample
    if sample is None:
        return ()
    places = ("_backward_hooks", "_backward_pre_hooks")  # have no public names
    for name, module in model.named_modules():
        if any(getattr(module, place) for place in places):
            rule = f"{name} has a backward hook, which a pipeline does not call. Use strategy=fsdp."
            return [Problem(key="model", rule=rule)]
    known = _KNOWN.get(model)
    if known is None or known[0] is not sample:
        _KNOWN[model] = known = sample, _tried(model, _inputs(context))
    return known[1]


def _inputs(context: PlanContext) -> Any:
    """Return the inputs of a batch that holds the sample twice."""
    batch = context.collate([context.sample, context.sample], [0, 0])
    objective = context.objective
    return (objective.split_batch(batch) if isinstance(objective, Supervised) else split_batch(batch))[0]


def _tried(model: nn.Module, given: Any) -> tuple[Program, ...] | list[Problem]:
    # The model here is in float32, for any precision of the run.
    inputs = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
        given,
    )
    units, device = blocks_to_cut(model), torch.device("cpu")
    try:
        training = trace(model, units, inputs, device=device, autocast=nullcontext())
        with _evaluating(model):
            evaluating = trace(model, units, inputs, device=device, autocast=nullcontext(), grad=False)
    except CannotCut as error:
        return [Problem(key="model", rule=f"cannot be cut into stages: {error}. {error.remedy}")]
    return training, evaluating


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in was.items():  # parents before their children, which may differ
            module.train(training)
