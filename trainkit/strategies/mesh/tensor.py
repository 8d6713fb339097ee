"""Shard the parameters of a model, and exchange activations between its modules.

Parameters become this rank's parts, as plain tensors: the module's own code uses them like any weight. Inputs and
outputs change their layout by DTensor, in the forward pass and, by autograd, in the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from trainkit.errors import TrainingError
from trainkit.numerics.generators import generators_of
from trainkit.strategies.mesh.tensor_plan import MatchedModule, MatchedPlan
from trainkit.strategies.model_transforms.compiling import is_compiled
from trainkit.strategies.tensor_shards import ShardSlice


def cut_parameters(
    model: nn.Module, fit: MatchedPlan, *, rank: int, degree: int, is_first: bool
) -> dict[str, ShardSlice]:
    """Reduce each parameter to the part of this rank.

    Returns:
        The slice of each parameter, by canonical name.
    """
    cuts = {}
    for name, param in model.named_parameters():
        shape, dim = tuple(param.shape), fit.dims.get(name)
        if dim is not None:
            param.data = param.data.chunk(degree, dim)[rank].clone(memory_format=torch.contiguous_format)
        offset = tuple(size * rank if index == dim else 0 for index, size in enumerate(param.shape))
        is_written = is_first and (dim is not None or rank == 0)
        cuts[name] = ShardSlice(offset=offset, size=tuple(param.shape), shape=shape, is_written=is_written)
    return cuts


def exchange_activations(model: nn.Module, fit: MatchedPlan, exchange: Exchange) -> None:
    """Make the modules of a plan change the layout of their inputs and outputs.

    A module that holds some of them, and draws for the parts of activations between them, gets the function with which
    it drops them out: the method `set_tensor_dropout` declares this.
    """
    cut = [match.name for match in fit.chosen if match.style.gives == "cut"]
    for name, holder in model.named_modules():
        declares = getattr(holder, "set_tensor_dropout", None)
        if declares is not None and any(inner.startswith(f"{name}." if name else "") for inner in cut):
            declares(exchange.dropout)
    for match in fit.chosen:
        module: Any = match.module
        module.forward = partial(_forward, match, exchange, module.forward)
        if match.style.name == "colwise_gathered" and isinstance(module, nn.Linear):
            # an objective may compute its loss from the scores of each rank, without gathering them
            module.forward.cut_vocabulary = VocabularyPart(exchange, exchange.rank * module.weight.shape[0])


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose scores one rank computes, and the collectives with the ranks of the other tokens."""

    exchange: Exchange
    start: int
    """The first token of this rank."""

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; collective. The tensor is overwritten."""
        return self.exchange.reduced(tensor, dist.ReduceOp.MAX)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; collective. The tensor is overwritten."""
        return self.exchange.reduced(tensor, dist.ReduceOp.SUM)


class Exchange:
    """Changes the layout of tensors between the ranks of one mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.rank, self.degree = mesh, mesh.get_local_rank(), mesh.size()
        self.watch: DrawWatch | None = None
        """What looks for random numbers in the first forward pass; None after it, and while a whole mask is drawn."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Return this object: a copy of the model is on the same ranks."""
        return self

    def reduced(self, tensor: Tensor, op: Any) -> Tensor:
        """Reduce a tensor over the ranks, in place; collective."""
        dist.all_reduce(tensor, op=op, group=self.mesh.get_group())
        return tensor

    def changed(self, tensor: Tensor, layout: Placement, to: Placement, *, used_by_parts: bool = False) -> Tensor:
        """Return a tensor in another layout.

        Args:
            tensor: the tensor of this rank, in `layout`.
            layout: its layout.
            to: the required layout.
            used_by_parts: whether every rank uses it for its own part of the result, so that gradients are parts of a
                sum.
        """
        spread = DTensor.from_local(tensor, self.mesh, (layout,), run_check=False)
        if layout != to:
            spread = spread.redistribute(placements=(to,))
        changed: Tensor = spread.to_local(grad_placements=(Partial(),) if used_by_parts else None)
        return changed

    def dropout(self, tensor: Tensor, rate: float, dim: int) -> Tensor:
        """Drop out elements of a tensor of which this rank has a part, as one device would.

        The mask is drawn for the whole tensor, on every rank alike; each uses its part.

        Args:
            tensor: this rank's part.
            rate: fraction to drop, in training.
            dim: the dim that is cut.
        """
        size, shape = tensor.shape[dim], list(tensor.shape)
        shape[dim] *= self.degree
        watch, self.watch = self.watch, None  # this draws for a whole tensor
        mask = functional.dropout(tensor.new_ones(shape), rate)
        self.watch = watch
        return tensor * mask.narrow(dim, self.rank * size, size)

    @contextmanager
    def summed_gradients(self, module: nn.Module, leaf: str = "") -> Iterator[None]:
        """Sum the gradients of full parameters over the ranks, each of which uses them for its part of the sequence.

        Args:
            module: the module that uses them, itself or in modules below it.
            leaf: the only parameter; empty: all.
        """
        tables = [inner._parameters for inner in module.modules()]  # noqa: SLF001 - modules read their parameters from it
        entries = [
            (table, name, param)
            for table in tables
            for name, param in table.items()
            if param is not None and leaf in ("", name)
        ]
        try:
            for table, name, param in entries:
                table[name] = self.changed(param, Replicate(), Replicate(), used_by_parts=True)  # type: ignore[assignment]
            yield
        finally:
            for table, name, param in entries:
                table[name] = param


class DrawsWhole(Protocol):
    """What draws for whole activations."""

    watch: DrawWatch | None


_REMEDY: Final = (
    "If it is a Dropout, name it in strategy.plan with the style dropout, or sequence; let other code draw for its "
    "part by set_tensor_dropout (docs/mesh.md#randomness), or set its rate to 0."
)


class DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers that code draws for its part of an activation: every rank would draw the same ones.

    It sees the first forward pass in training, in which compiled modules run eagerly. Later ones cost nothing.

    Args:
        exchange: what draws whole masks.
        devices: the devices whose generators the model uses.
        part: the part of the model whose first pass is seen, a stage; None: the model.
        cut_by: initial value of the attribute.
        remedy: sentence for the message.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: DrawsWhole,
        devices: Sequence[torch.device],
        *,
        part: nn.Module | None = None,
        cut_by: str = "",
        remedy: str = _REMEDY,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cut_by, self._remedy = cut_by, remedy
        """The module since whose output activations are in parts; empty: they are whole."""
        self._model, self._exchange, self._generators = model, exchange, generators_of(devices)
        self._begins = (part or model).register_forward_pre_hook(self._begin)
        self._active, self._eager, self._has_seen = ExitStack(), ExitStack(), False

    def _begin(self, part: nn.Module, _args: object) -> None:
        model = self._model
        if self._has_seen:  # backward has recomputed the blocks of the first pass, eagerly too
            self._begins.remove()
            self._eager.close()
        elif model.training:
            self._has_seen = True
            # removed later: after an error torch calls hooks from the dict itself
            ends = part.register_forward_hook(lambda *_: self._active.close(), always_call=True)
            self._eager.callback(ends.remove)
            self._active.callback(setattr, self._exchange, "watch", None)
            self._exchange.watch = self
            if is_compiled(model):
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))
            self._active.enter_context(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and raise if it has drawn for a part."""
        if self._exchange.watch is None or not self.cut_by or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = [generator.get_state() for generator in self._generators]
        result = func(*args, **(kwargs or {}))
        if not all(map(torch.equal, before, (generator.get_state() for generator in self._generators))):
            holders = (frame.frame.f_locals.get("self") for frame in inspect.stack(0))  # in torch's frames, the module
            drawing = next(holder for holder in holders if isinstance(holder, nn.Module))
            name = {module: name for name, module in self._model.named_modules()}[drawing] or "the model"
            raise TrainingError(
                f"{name} ({type(drawing).__name__}) draws random numbers for activations that {self.cut_by} has cut: "
                f"every rank would draw the same for its part. {self._remedy}"
            )
        return result


def _forward(match: MatchedModule, exchange: Exchange, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a sharded module, in the layouts of its plan."""
    if exchange.watch is not None and match.style.name == "sequence_join":
        exchange.watch.cut_by = ""
    outputs = _compute(match, exchange, inner, *args, **kwargs)
    if exchange.watch is not None:
        exchange.watch.cut_by = "" if match.style.gives == "whole" else match.name
    return outputs


def _compute(match: MatchedModule, exchange: Exchange, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    style, module, inputs = match.style, match.module, args[0]
    if isinstance(module, nn.Dropout) and style.name in ("dropout", "sequence"):
        dim = 1 if style.name == "sequence" else inputs.dim() - 1
        return exchange.dropout(inputs, module.p, dim) if module.training else inputs
    if style.name == "sequence":
        with exchange.summed_gradients(module):
            return inner(*args, **kwargs)
    if style.name == "sequence_split":
        outputs = inner(*args, **kwargs)
        if outputs.shape[1] % exchange.degree:
            raise TrainingError(
                f"{match.name} gives sequences of {outputs.shape[1]}, which {exchange.degree} ranks along tensor do not"
                f" divide: sequence_split needs parts of equal length. Use another length, or a plan without sequence."
            )
        return exchange.changed(outputs, Replicate(), Shard(1))
    if style.name == "sequence_join":
        return inner(exchange.changed(inputs, Shard(1), Replicate()), *args[1:], **kwargs)
    if style.sums:
        return _rowwise(match, exchange, inputs)
    if not isinstance(module, nn.Embedding):  # token ids have no gradient
        takes = Shard(1) if style.takes == "stretch" else Replicate()
        inputs = exchange.changed(inputs, takes, Replicate(), used_by_parts=True)
    outputs = inner(inputs, *args[1:], **kwargs)
    return exchange.changed(outputs, Shard(outputs.dim() - 1), Replicate()) if style.gives == "whole" else outputs


def _rowwise(match: MatchedModule, exchange: Exchange, inputs: Tensor) -> Tensor:
    """Sum the partial results of all ranks, and add the bias, which is not sharded, once."""
    module: Any = match.module
    to = Shard(1) if match.style.gives == "stretch" else Replicate()
    if isinstance(module, nn.Embedding):
        return exchange.changed(_local_rows(module, inputs, exchange.rank), Partial(), to)
    if match.style.takes == "whole":
        inputs = exchange.changed(inputs, Replicate(), Shard(inputs.dim() - 1))
    total = exchange.changed(functional.linear(inputs, module.weight), Partial(), to)
    with exchange.summed_gradients(module, "bias") if match.style.gives == "stretch" else nullcontext():
        return total if module.bias is None else total.add(module.bias)


def _local_rows(module: nn.Embedding, tokens: Tensor, rank: int) -> Tensor:
    """Return the embeddings of the tokens whose rows are on this rank, zeros for the others."""
    count = module.weight.shape[0]
    local = tokens - count * rank
    absent = (local < 0) | (local >= count)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - count * rank if 0 <= padding - count * rank < count else None
    rows = functional.embedding(local.masked_fill(absent, 0), module.weight, padding_idx=padding)
    return rows.masked_fill(absent.unsqueeze(-1), 0.0)
