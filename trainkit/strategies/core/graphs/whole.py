"""Run a function as one graph of torch.compile that draws no random number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import fx

from trainkit.errors import TrainingError, TrainkitError
from trainkit.frames import chain_of, first_line
from trainkit.numerics.generators import GENERATORS_LOCK, GeneratorStates
from trainkit.strategies.core.graphs.pooling import keep_pool_kernels
from trainkit.strategies.step_values import GraphSettings

_MOST_GRAPHS: Final = 64
"""Largest number of graphs of one function, for other shapes of a shard or other values in the model's code."""


class UntraceableError(Exception):
    """A function cannot be one graph, for the reason of the message; it has not run."""


class WholeGraph:
    """A function that is compiled at its first call, as a whole, and again for other shapes.

    Guards detect code that behaves differently later. The random operations of a graph are fixed, so its first run
    shows them.

    Args:
        function: the function; its arguments are tensors, and values that contain tensors.
        settings: backend and mode of torch.compile.
        device: the device of the tensors.
        is_joint: whether the function computes gradients as well.
        wrap: returns the function to call instead of a compiled graph; None: the graph itself is called.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        settings: GraphSettings,
        device: torch.device,
        *,
        is_joint: bool,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        from torch._dynamo import config, exc, lookup_backend  # noqa: PLC0415 - slow to import, and most runs need none

        self._untraceable = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)
        config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
        config.trace_autograd_ops = True
        self._key, self._devices = settings.key, [device]
        self._before: GeneratorStates | None = None
        self._drawn: str | None = None
        options = {}
        if settings.mode is not None:
            from torch._inductor import list_mode_options  # noqa: PLC0415 - as above

            options = {"config_patches": list_mode_options(settings.mode)}

        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            keep_pool_kernels(graph, is_joint=is_joint)
            made: Callable[..., Any] = lookup_backend(settings.backend)(graph, inputs, **options)
            self._drawn = drawing_operation(graph)
            if self._before is None:
                GENERATORS_LOCK.acquire()  # until the graph has run: other threads also draw from these generators
            self._before = GeneratorStates(self._devices)
            return made if wrap is None else wrap(made)

        self._compiled: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True)

    def __call__(self, *args: Any) -> Any:
        """Run the function.

        Raises:
            UntraceableError: the function cannot be one graph.
            TrainingError: the function draws random numbers.
        """
        try:
            found = self._compiled(*args)
        except self._untraceable as error:
            if (own := _own_error(error)) is not None:
                raise own from None
            raise UntraceableError(first_line(error)) from error
        finally:
            has_drawn = self._end_first_run()
        if has_drawn:
            refuse_draws(self._key, self._drawn)
        return found

    def _end_first_run(self) -> bool:
        """Return whether the first run of a graph has drawn random numbers; False after any other run."""
        if self._before is None:
            return False
        try:
            return self._before.moved()
        finally:
            self._before = None
            GENERATORS_LOCK.release()


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


def _own_error(error: BaseException) -> TrainkitError | None:
    """Return the error of trainkit, such as a hang, that tracing has wrapped in its own error."""
    return next((one for one in chain_of(error) if isinstance(one, TrainkitError)), None)
