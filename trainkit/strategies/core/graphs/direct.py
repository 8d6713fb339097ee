"""Call a compiled graph again without the guards of torch.compile.

Before each call, Dynamo evaluates its guards: whether anything that the traced code has read is still as it was. In a
step of a small model they take a fifth of the time. Where only code of the trainer has run since the last call, nothing
that they check can have changed but the batch, and that is compared here.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from trainkit.strategies.core.graphs.whole import WholeGraph
from trainkit.strategies.step_values import GraphSettings

_MOST_DIRECT: Final = 4
"""Largest number of layouts for which a graph is called directly: a whole shard, and those at the end of an epoch."""
_MOST_WATCHED: Final = 64
"""Largest number of layouts for which the compilation is watched."""

Compiled: TypeAlias = Callable[..., Sequence[Any]]
"""A compiled graph: takes its inputs by position, and returns its outputs."""

_SIDE_EFFECTS: Final = "While compiling, we found certain side effects"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRun:
    """A run of a compiled graph, called by Dynamo."""

    graph: Compiled
    inputs: Sequence[Any]
    outputs: Sequence[Any]


class Recorder:
    """Records the runs of the graphs of a compiled function that may be called directly.

    A function that changes Python objects has no such graph: Dynamo makes these changes after each run of the graph.
    """

    def __init__(self) -> None:
        self._compiled: list[Compiled] = []
        self._pure: list[Compiled] = []
        self._runs: list[GraphRun] | None = None

    def recorded(self, graph: Compiled) -> Compiled:
        """Return a new graph as a function whose runs are recorded."""
        self._compiled.append(graph)

        def run(*inputs: Any) -> Sequence[Any]:
            outputs = graph(*inputs)
            if self._runs is not None:
                self._runs.append(GraphRun(graph=graph, inputs=inputs, outputs=outputs))
            return outputs

        return run

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find out whether the code that is compiled inside changes Python objects; where it is compiled elsewhere, its
        graph is not called directly.
        """
        self._compiled.clear()
        changes: list[str] = []
        with _changes_of_objects(changes):
            yield
        if not changes:
            self._pure += self._compiled

    def start(self) -> None:
        """Record the runs from now on."""
        self._runs = []

    def end(self) -> GraphRun | None:
        """Return the recorded run; None if its graph cannot be called directly."""
        runs, self._runs = self._runs or [], None
        return runs[0] if len(runs) == 1 and any(runs[0].graph is one for one in self._pure) else None


@contextmanager
def _changes_of_objects(found: list[str]) -> Iterator[None]:
    """Add to the list what Dynamo reports of changed Python objects inside; other warnings are passed on."""
    from torch._dynamo import config  # noqa: PLC0415 - slow to import, and most runs need none

    if not hasattr(config, "side_effect_replay_policy"):
        found.append("this torch does not report them")
        yield
        return
    before = config.side_effect_replay_policy
    config.side_effect_replay_policy = "warn"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=_SIDE_EFFECTS)
            yield
    finally:
        config.side_effect_replay_policy = before
    for one in caught:
        if str(one.message).startswith(_SIDE_EFFECTS):
            found.append(str(one.message))
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changing:
    """The arguments of a call that differ between calls."""

    leaves: Sequence[Any]
    """Tensors and other values, without the containers around them."""
    containers: Sequence[Any]
    """The containers of each argument: None for a tensor, the length of a tuple of tensors, or a tree."""

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Changing:
        """Return the parts of some arguments.

        Example:
            >>> Changing.of([(torch.ones(1), torch.ones(2)), torch.ones(3)]).containers
            [2, None]
        """
        leaves: list[Any] = []
        containers: list[Any] = []
        for value in arguments:
            if isinstance(value, Tensor):
                leaves.append(value)
                containers.append(None)
            elif type(value) is tuple and all(isinstance(one, Tensor) for one in value):
                leaves += value
                containers.append(len(value))
            else:
                found, tree = tree_flatten(value)
                leaves += found
                containers.append(tree)
        return cls(leaves=leaves, containers=containers)

    @property
    def layouts(self) -> tuple[Any, ...] | None:
        """The layout of each leaf; None if one is no tensor with strides."""
        if all(isinstance(leaf, Tensor) and leaf.layout is torch.strided for leaf in self.leaves):
            return tuple([_layout_of(leaf) for leaf in self.leaves])
        return None

    @property
    def has_repeated(self) -> bool:
        """Whether a leaf occurs twice."""
        return len(set(map(id, self.leaves))) < len(self.leaves)


class DirectCall:
    """A call of a compiled graph with the inputs of an earlier run, but for the arguments that change.

    Args:
        run: the earlier run.
        changing: the arguments that change, as they were in that run; all leaves are tensors.
        fixed: arguments that must be those of that run.
        result: what the compiled function returned: nested tuples of outputs of the graph, and of constants.
    """

    def __init__(self, run: GraphRun, changing: Changing, fixed: Sequence[Any], result: Any) -> None:
        self._graph, self._fixed = run.graph, tuple(fixed)
        self._containers, self._layouts = changing.containers, [_layout_of(leaf) for leaf in changing.leaves]
        number = {id(leaf): place for place, leaf in enumerate(changing.leaves)}
        self._changing = [(place, number[id(one)]) for place, one in enumerate(run.inputs) if id(one) in number]
        self._inputs = [None if id(one) in number else one for one in run.inputs]
        self._result = _places(result, {id(one): place for place, one in enumerate(run.outputs)})

    @classmethod
    def of(cls, run: GraphRun, changing: Changing, fixed: Sequence[Any], result: Any) -> DirectCall | None:
        """Return the call; None if a leaf is no tensor with strides, or occurs twice, or if a part of the result is
        neither an output of the graph nor a constant.
        """
        known = {id(one) for one in run.outputs}
        is_known = all(id(one) in known if isinstance(one, Tensor) else _is_constant(one) for one in _parts(result))
        has_tensors = changing.layouts is not None and all(isinstance(one, Tensor) for one in run.outputs)
        return cls(run, changing, fixed, result) if is_known and has_tensors and not changing.has_repeated else None

    def fits(self, changing: Changing, fixed: Sequence[Any]) -> bool:
        """Return whether the graph computes the result of these arguments."""
        if changing.containers != self._containers or not all(map(_is_same, fixed, self._fixed)):
            return False
        for leaf, (kind, shape, stride, dtype, device, requires_grad) in zip(
            changing.leaves, self._layouts, strict=True
        ):
            if (
                type(leaf) is not kind
                or leaf.layout is not torch.strided
                or leaf.shape != shape
                or leaf.stride() != stride
                or leaf.dtype is not dtype
                or leaf.device != device
                or leaf.requires_grad is not requires_grad
            ):
                return False
        return not changing.has_repeated

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Return the result for other leaves."""
        return self.result(self.outputs(leaves))

    def outputs(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of the graph for other leaves."""
        inputs = self._inputs.copy()
        for place, number in self._changing:
            inputs[place] = leaves[number]
        return self._graph(*inputs)

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Return the result of the function for these outputs."""
        return _filled(self._result, outputs)

    def is_same_as(self, other: DirectCall) -> bool:
        """Return whether another call runs the same graph on the same tensors, but for the leaves."""
        return (
            self._graph is other._graph
            and self._layouts == other._layouts
            and self._changing == other._changing
            and self._result == other._result
            and all(map(operator.is_, self._inputs, other._inputs))
        )

    def devices(self, leaves: Sequence[Tensor]) -> list[str]:
        """Return the devices of the tensors that the graph reads and writes, in the order of their names."""
        return sorted({str(one.device) for one in (*self._inputs, *leaves) if isinstance(one, Tensor)})

    def addresses(self) -> list[int]:
        """Return the addresses of the tensors that the graph reads and writes, but for the leaves."""
        return [one.data_ptr() for one in self._inputs if isinstance(one, Tensor)]


class RepeatedGraph:
    """A function that is compiled as a whole, and called without guards where nothing that it reads has changed.

    Args:
        function: as in `WholeGraph`; it computes gradients as well.
        settings: as in `WholeGraph`.
        device: as in `WholeGraph`.
        call: makes a direct call on new leaves; None: just calls it.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        settings: GraphSettings,
        device: torch.device,
        call: Callable[[DirectCall, Sequence[Tensor]], Any] | None = None,
    ) -> None:
        self._recorder, self._call = Recorder(), call or (lambda direct, leaves: direct(leaves))
        self._graph = WholeGraph(function, settings, device, is_joint=True, wrap=self._recorder.recorded)
        self._layouts: set[tuple[Any, ...]] = set()
        self._direct: list[DirectCall] = []

    def __call__(self, changing: Sequence[Any], fixed: Sequence[Any], *, unchanged: bool) -> Any:
        """Run the function on `(*changing, *fixed)`.

        Args:
            changing: arguments with tensors that are new in each call.
            fixed: the other arguments.
            unchanged: whether nothing else that the function reads has changed since the last call.

        Raises:
            UntraceableError: as in a call of `WholeGraph`.
            TrainingError: as in a call of `WholeGraph`.
        """
        own = Changing.of(changing)
        if not unchanged:
            self._direct.clear()
            return self._checked(own, (*changing, *fixed))
        for direct in self._direct:
            if direct.fits(own, fixed):
                return self._call(direct, own.leaves)
        self._recorder.start()
        try:
            found = self._checked(own, (*changing, *fixed))
        finally:
            run = self._recorder.end()
        if run is not None and (new := DirectCall.of(run, own, fixed, found)) is not None:
            self._direct = [new, *self._direct[: _MOST_DIRECT - 1]]
        return found

    def _checked(self, changing: Changing, args: Sequence[Any]) -> Any:
        """Run the function with guards, and watch it if layouts that are new may need a new graph."""
        layouts = changing.layouts
        if layouts is None or layouts in self._layouts or len(self._layouts) == _MOST_WATCHED:
            return self._graph(*args)
        self._layouts.add(layouts)
        with self._recorder.watching():
            return self._graph(*args)


@dataclass(frozen=True, slots=True)
class _Output:
    """The place of an output of a graph."""

    place: int


def _parts(result: Any) -> Iterator[Any]:
    """Yield the parts of nested tuples."""
    if type(result) is tuple:
        for one in result:
            yield from _parts(one)
    else:
        yield result


def _is_constant(part: Any) -> bool:
    return part is None or isinstance(part, bool | int | float | str)


def _places(result: Any, places: dict[int, int]) -> Any:
    """Replace each output in nested tuples by its place."""
    if type(result) is tuple:
        return tuple(_places(one, places) for one in result)
    return _Output(places[id(result)]) if isinstance(result, Tensor) else result


def _filled(result: Any, outputs: Sequence[Any]) -> Any:
    """Replace each place in nested tuples by that output."""
    if type(result) is tuple:
        return tuple([_filled(one, outputs) for one in result])
    return outputs[result.place] if type(result) is _Output else result


def _layout_of(leaf: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor for which a graph is compiled."""
    return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is float and one == other)
