"""Run a function as one graph of torch.compile that draws no random number.

Before each call, Dynamo evaluates its guards: whether anything that the traced code has read is still as it was. In a
step of a small model they take a fifth of the time. Where only code of the trainer has run since the last call, nothing
that they check can have changed but the arguments, and those are compared here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._C._dynamo.guards import TensorGuards
from torch.nn import functional
from torch.nn.modules.utils import _pair
from torch.utils._pytree import tree_flatten

from trainkit.errors import TrainingError, TrainkitError, chain_of, first_line
from trainkit.numerics.generators import GENERATORS_LOCK, GeneratorStates
from trainkit.strategies.model_transforms import GraphSettings

_POOLS: Final = (functional.max_pool2d, torch.max_pool2d)
_LEAST_ELEMENTS: Final = 1 << 18
"""Number of input elements below which a call of a library operator costs more than a slow kernel."""
_LEAST_CHANNELS: Final = 8
"""Number of channels from which the channels_last kernel is faster, including copies of input and output."""


@torch.library.custom_op(
    "trainkit::pool_maxima", mutates_args=(), device_types="cpu", tags=(torch.Tag.flexible_layout,)
)
def _pool_maxima(  # noqa: PLR0917 - as torch calls an operator
    inputs: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    """Return the maxima and their indices, with the channels last if there are enough of them."""
    pooled: tuple[Tensor, Tensor] = torch.ops.aten.max_pool2d_with_indices(
        inputs.contiguous(memory_format=_format_of(inputs)), kernel, stride, padding, dilation, ceil_mode
    )
    return pooled


def _format_of(images: Tensor) -> torch.memory_format:
    """Return the memory format in which torch's kernels are faster, including a copy of its inputs."""
    last = images.shape[1] >= _LEAST_CHANNELS or not images.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


@torch.library.custom_op(
    "trainkit::grads_of_maxima",
    mutates_args=(),
    device_types="cpu",
    tags=(torch.Tag.needs_fixed_stride_order,),  # else a slow copy of `grads` inside of torch's kernel
)
def _grads_of_maxima(  # noqa: PLR0917 - as above
    grads: Tensor,
    indices: Tensor,
    sizes: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> Tensor:
    """Return the gradients of inputs of these sizes, in the memory format of the indices."""
    inputs = torch.empty(sizes, dtype=grads.dtype, memory_format=_format_of(indices))  # torch reads its sizes alone
    input_grads: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
        grads, inputs, kernel, stride, padding, dilation, ceil_mode, indices
    )
    return input_grads


@_pool_maxima.register_fake
def _(inputs: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    outputs, indices = torch.ops.aten.max_pool2d_with_indices(inputs, *settings)
    form = _format_of(inputs)
    return outputs.contiguous(memory_format=form), indices.contiguous(memory_format=form)


@_grads_of_maxima.register_fake
def _(grads: Tensor, indices: Tensor, sizes: Sequence[int], *_settings: Any) -> Tensor:
    return torch.empty(sizes, dtype=grads.dtype, device=grads.device, memory_format=_format_of(indices))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.sizes, ctx.settings = inputs[0].shape, inputs[1:]


def _backward(ctx: Any, grads: Tensor, _indices: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    grads = grads.contiguous(memory_format=_format_of(indices))
    return _grads_of_maxima(grads, indices, ctx.sizes, *ctx.settings), None, None, None, None, None


_pool_maxima.register_autograd(_backward, setup_context=_save)


def keep_pool_kernels(graph: fx.GraphModule, *, is_joint: bool) -> None:
    """Replace the max pools of a graph for which torch's kernels are faster than compiled ones; the numbers do not
    change.

    Args:
        graph: traced by torch.compile, with example values.
        is_joint: whether the graph holds a backward pass.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _POOLS and _is_slow(node, is_joint=is_joint):
            settings = settings_of(*node.args[1:], **node.kwargs)
            with graph.graph.inserting_before(node):
                pool = graph.graph.call_function(torch.ops.trainkit.pool_maxima.default, (node.args[0], *settings))
                first = graph.graph.call_function(getitem, (pool, 0))
                if node.args[0].meta["example_value"].is_contiguous():  # the nodes that follow rely on it: views
                    first = graph.graph.call_method("contiguous", (first,))
            first.meta.update(node.meta)
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)
    graph.recompile()


def _is_slow(node: fx.Node, *, is_joint: bool) -> bool:
    value = node.args[0].meta.get("example_value") if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(value, Tensor) or value.dim() != 4 or value.device.type != "cpu":
        return False
    if node.kwargs.get("return_indices") or value.numel() < _LEAST_ELEMENTS:
        return False
    return is_joint or not value.is_contiguous()


def settings_of(
    kernel: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False, **_: Any
) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Return the arguments of a pool in the form of the operator; without a stride, it is the kernel size."""
    kernel = [*_pair(kernel)]
    return kernel, [*_pair(stride)] if stride else kernel, [*_pair(padding)], [*_pair(dilation)], ceil_mode


_MOST_GRAPHS: Final = 64
"""Largest number of graphs of one function, for other shapes of a shard or other values in the model's code."""
_MOST_DIRECT: Final = 4
"""Largest number of layouts for which a graph is called directly: a whole shard, and those at the end of an epoch."""


class UntraceableError(Exception):
    """A function cannot be one graph, for the reason of the message; it has not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectCall:
    """A call of a compiled graph with the inputs of an earlier run, but for the arguments."""

    graph: Callable[..., Sequence[Any]]
    inputs: Sequence[Any]
    """The inputs of the graph; None in the place of an argument."""
    places: Sequence[int]
    """The place of each input among `inputs` and then the tensors of the arguments."""
    layout: tuple[Sequence[object], Sequence[Sequence[int]], Sequence[Sequence[int]]]
    """Containers of the arguments for which the graph was compiled; sizes and strides of their tensors."""
    takes: Callable[..., bool]
    """Returns whether a graph for the tensors of its compilation is one for other tensors, in containers as theirs."""
    constants: Sequence[object]
    """The results of the function that are no tensors."""
    results: Sequence[int]
    """The place of each result of the function among the outputs of the graph and then the constants."""

    def __call__(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Return the results of the function for other tensors of this layout."""
        return self.results_of(self.outputs(leaves))

    def outputs(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the outputs of the graph."""
        return self.graph(*map((*self.inputs, *leaves).__getitem__, self.places))

    def results_of(self, outputs: Sequence[Tensor]) -> list[Any]:
        """Return the results of the function for outputs of the graph."""
        return list(map((*outputs, *self.constants).__getitem__, self.results))

    def is_same_as(self, other: DirectCall) -> bool:
        """Return whether another call runs the same graph on the same tensors, but for the arguments."""
        return (
            self.graph is other.graph
            and _KIND(self) == _KIND(other)
            and all(map(operator.is_, self.inputs, other.inputs))
        )

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the graph reads and writes, but for the arguments."""
        return [value for value in self.inputs if isinstance(value, Tensor)]


_KIND: Final = operator.attrgetter("layout", "places", "constants", "results")


class WholeGraph:
    """A function that is compiled at its first call, as a whole, and again for other shapes.

    Guards detect code that behaves differently later. The random operations of a graph are fixed, so its first run
    shows them.

    Args:
        function: the function; its arguments are tensors, and values that contain tensors; it returns a tuple of
            tensors and constants.
        settings: backend and mode of torch.compile.
        device: the device of the tensors.
        is_joint: whether the function computes gradients as well.
        call: makes a direct call with tensors.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Any, ...]],
        settings: GraphSettings,
        device: torch.device,
        *,
        is_joint: bool,
        call: Callable[[DirectCall, Sequence[Tensor]], list[Any]] = DirectCall.__call__,
    ) -> None:
        # slow to import, and most runs need none
        from torch._dynamo import config, exc, lookup_backend  # noqa: PLC0415
        from torch._dynamo.eval_frame import innermost_fn  # noqa: PLC0415

        self._untraceable = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)
        config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
        config.trace_autograd_ops = True
        self._key, self._devices, self._call = settings.key, [device], call
        self._before: GeneratorStates | None = None
        self._drawn: str | None = None
        self._direct: list[DirectCall] = []
        self._runs: list[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] | None = None
        """Graph, inputs and outputs of what runs, while it is recorded."""
        options = {}
        if settings.mode is not None:
            from torch._inductor import list_mode_options  # noqa: PLC0415 - as above

            options = {"config_patches": list_mode_options(settings.mode)}

        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            keep_pool_kernels(graph, is_joint=is_joint)
            # Dynamo makes changes of Python objects after each run of the graph: such a graph is never called directly
            changes_objects = _changes_objects()
            # without the wrapper that keeps Dynamo from tracing it: Dynamo puts one around the function returned here
            compiled: Callable[..., Any] = innermost_fn(lookup_backend(settings.backend)(graph, inputs, **options))
            self._drawn = drawing_operation(graph)
            if self._before is None:
                GENERATORS_LOCK.acquire()  # until the graph has run: other threads also draw from these generators
            self._before = GeneratorStates(self._devices)
            if changes_objects:
                return compiled

            def recorded(*inputs: Any) -> Sequence[Any]:
                outputs: Sequence[Any] = compiled(*inputs)
                if self._runs is not None:
                    self._runs.append((compiled, inputs, outputs))
                return outputs

            return recorded

        self._compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)

    def __call__(self, *args: Any, unchanged: bool = False) -> Sequence[Any]:
        """Run the function.

        Args:
            args: arguments of the function.
            unchanged: whether nothing else that the function reads has changed since the last call.

        Raises:
            UntraceableError: the function cannot be one graph.
            TrainingError: the function draws random numbers.
        """
        if not unchanged:
            self._direct.clear()
            return self._checked(args)
        leaves, containers = _parts_of(args)
        for direct in self._direct:
            if direct.layout[0] == containers and direct.takes(*leaves):
                return self._call(direct, leaves)
        self._runs = []
        try:
            results = self._checked(args)
        finally:
            runs, self._runs = self._runs, None
        if len(runs) != 1 or not _are_apart(leaves):
            return results
        graph, inputs, outputs = runs[0]
        constants = [result for result in results if result is None or isinstance(result, bool | int | float | str)]
        index_of = {id(value): index for index, value in enumerate((*outputs, *constants))}
        if outputs and all(id(result) in index_of for result in results):
            numbers = {id(leaf): number for number, leaf in enumerate(leaves, start=len(inputs))}
            sizes, strides = [list(leaf.shape) for leaf in leaves], [list(leaf.stride()) for leaf in leaves]
            known_dims: Mapping[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
            new = DirectCall(
                graph=graph,
                inputs=[None if id(value) in numbers else value for value in inputs],
                places=[numbers.get(id(value), index) for index, value in enumerate(inputs)],
                layout=(containers, sizes, strides),
                takes=TensorGuards(*leaves, **known_dims).check,
                constants=constants,
                results=[index_of[id(result)] for result in results],
            )
            self._direct = [new, *self._direct[: _MOST_DIRECT - 1]]
        return results

    def _checked(self, args: tuple[Any, ...]) -> Sequence[Any]:
        """Run the function with guards."""
        try:
            results: Sequence[Any] = self._compiled(*args)
        except self._untraceable as error:
            # an error of trainkit, such as a hang, that tracing has wrapped in its own
            if (cause := next((link for link in chain_of(error) if isinstance(link, TrainkitError)), None)) is not None:
                raise cause from None
            raise UntraceableError(first_line(error)) from error
        finally:
            has_drawn = False
            if self._before is not None:  # the first run of a graph
                try:
                    has_drawn = self._before.moved()
                finally:
                    self._before = None
                    GENERATORS_LOCK.release()
        if has_drawn:
            refuse_draws(self._key, self._drawn)
        return results


def _parts_of(args: tuple[Any, ...]) -> tuple[Sequence[Tensor], Sequence[object]]:
    """Return the leaves of some arguments, and their containers."""
    leaves: list[Any] = []
    containers: list[object] = []
    for value in args:
        if isinstance(value, Tensor):
            leaves.append(value)
            containers.append(None)
        elif type(value) in (tuple, list) and all(map(isinstance, value, repeat(Tensor))):
            leaves += value
            containers.append((type(value), len(value)))
        else:
            parts, tree = tree_flatten(value)
            leaves += parts
            containers.append(tree)
    return leaves, containers


def _are_apart(leaves: Sequence[object]) -> bool:
    """Return whether leaves are tensors with strides, of which none occurs twice."""
    strided = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    return len(set(strided)) == len(leaves)


def _changes_objects() -> bool:
    """Return whether the function that Dynamo is tracing changes Python objects that exist outside of it."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # noqa: PLC0415 - slow, and most runs need none
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew  # noqa: PLC0415 - as above

    effects, new = InstructionTranslator.current_tx().output.side_effects, (AttributeMutationNew, ValueMutationNew)
    changed = [variable for variable in effects.id_to_variable.values() if effects.is_modified(variable)]
    return bool(effects.tensor_hooks) or not all(isinstance(variable.mutation_type, new) for variable in changed)


def refuse_draws(key: str, drawn: str | None) -> None:
    """Raise an error that names the source of the random numbers.

    Raises:
        TrainingError: always.
    """
    raise TrainingError(
        f"{key}: {drawn or 'the model or the objective'} draws random numbers, which have no key inside of a graph. "
        f"{'Use compile.mode=default' if key.endswith('=step') else 'Use compile.mode=off'}."
    )


def drawing_operation(graph: fx.GraphModule) -> str | None:
    """Return module and name of the first random operation of a graph; None if there is none."""
    for node in _nodes(graph):
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in {"call_function", "call_method"} and target in _DRAWS and node.kwargs.get("training", True):
            stack = node.meta.get("nn_module_stack") or {}
            path, kind = next(reversed(stack.values()), ("", None))
            if kind is None:
                return f"{target} in the model's own code or the objective"
            name = getattr(kind, "__name__", str(kind))
            return f"the module {path.removeprefix('L[').removesuffix(']')} ({name}), by {target},"
    return None


_DRAWS: Final = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "bernoulli"}
    | {"multinomial", "poisson", "binomial", "gumbel_softmax", "rrelu", "normal_", "uniform_", "random_"}
    | {"bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_", "dropout", "alpha_dropout"}
    | {"feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
)


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes
