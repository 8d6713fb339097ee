"""Cut each sequence over the ranks along `context`: positions and targets alike, attention over the whole of it.

A sequence is divided into 2 N stretches of equal length; rank r of N has stretches r and 2 N - 1 - r. Under a causal
mask a stretch sees all before it, so that every rank computes as much. Keys and values of a layer are gathered when its
attention computes, and gathered again in its backward pass; in between a rank keeps those of its own positions.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map

from trainkit.errors import Problem, TrainingError
from trainkit.numerics.batch import Ticket
from trainkit.objectives.base import Loss, Objective, Supervised
from trainkit.objectives.fields import IGNORED
from trainkit.strategies.base import Batch, StepContext
from trainkit.strategies.collectives import GroupCollective
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.step import ShardStep, weight_on
from trainkit.strategies.mesh.layout import MeshPlace
from trainkit.strategies.mesh.step import ShardedWork
from trainkit.strategies.mesh.tensor import DrawWatch, Exchange, exchange_activations
from trainkit.strategies.mesh.tensor_plan import MatchedPlan

_NAME: Final = "trainkit_context"
"""The name of our attention and of our mask in the registers of transformers."""
_MIXES: Final = (
    *(nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, _ConvNd, _BatchNorm),
)
"""Modules of torch that compute a position from others, or statistics of all."""


class SequenceCut:
    """The stretches of one rank. Outside of a training step no sequence is cut.

    A module that uses positions, or mixes them, declares `set_sequence_cut` and gets this object.

    Args:
        mesh: the ranks along `context`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.rank, self.degree = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self.watch: DrawWatch | None = None
        """What looks for random numbers in the first forward pass; None after it, and while a whole mask is drawn."""
        self.length = 0
        """Positions of the sequences of the shard that is computed; 0: none is cut."""

    @classmethod
    def of(cls, place: MeshPlace) -> SequenceCut | None:
        """Return the stretches of a rank; None if sequences are whole."""
        return cls(place.mesh["context"]) if place.axes.context > 1 else None

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceCut:
        """Return this object: a copy of the model is on the same ranks."""
        return self

    @property
    def is_cut(self) -> bool:
        """Whether activations are parts of sequences now."""
        return self.length > 0

    @property
    def size(self) -> int:
        """Positions of a stretch; those after the last one of the sequence are filled up."""
        return -(-self.length // (2 * self.degree))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Forget the length at the end: an evaluation computes whole sequences."""
        try:
            yield
        finally:
            self.length = 0

    @property
    def stretches(self) -> tuple[int, int]:
        """The numbers of this rank's two stretches."""
        return self.rank, 2 * self.degree - 1 - self.rank

    def positions(self, device: torch.device) -> Tensor:
        """Return (positions of this rank,) int64; of what is filled up, the last position of the sequence."""
        whole = torch.arange(2 * self.degree * self.size, device=device).clamp_(max=self.length - 1)
        return torch.cat([whole[number * self.size :][: self.size] for number in self.stretches])

    def part(self, whole: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """Return this rank's positions of a tensor of a whole sequence."""
        missing = 2 * self.degree * self.size - whole.shape[dim]
        padded = functional.pad(whole, (*(0, 0) * (whole.dim() - 1 - dim), 0, missing), value=fill)
        return torch.cat([padded.narrow(dim, number * self.size, self.size) for number in self.stretches], dim)

    def part_of(self, batch: Batch, objective: Objective) -> Batch:
        """Return a batch with this rank's positions of its inputs and targets; what is filled up does not count.

        Raises:
            TrainingError: inputs and targets are not sequences of one length.
        """
        assert isinstance(objective, Supervised)
        inputs, targets = objective.split_batch(batch)
        shapes = [tuple(value.shape[:2]) if isinstance(value, Tensor) else () for value in (inputs, targets)]
        if shapes[0] != shapes[1] or len(shapes[0]) < 2:
            raise TrainingError(
                f"strategy.context cuts inputs and targets of (samples, length, ...) alike, and they are {shapes[0]} "
                f"and {shapes[1]}. Use strategy.context=1."
            )
        self.length = shapes[0][1]
        ignored = getattr(objective, "ignore_index", IGNORED)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or tuple(leaf.shape[:2]) != shapes[0]:
                return leaf
            return self.part(leaf, fill=ignored if leaf is targets else 0)

        parts: Batch = tree_map(cut, batch)
        return parts

    def dropout(self, tensor: Tensor, rate: float) -> Tensor:
        """Drop out elements of (samples, positions of this rank, ...) as one device would: drawn whole, then cut."""
        return tensor * self._mask((tensor.shape[0], self.length, *tensor.shape[2:]), rate, tensor, 1)

    def _mask(self, shape: Sequence[int], rate: float, like: Tensor, dim: int) -> Tensor:
        watch, self.watch = self.watch, None  # this draws for a whole tensor
        mask = functional.dropout(like.new_ones(shape), rate)
        self.watch = watch
        return self.part(mask, dim)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor:
        """Compute causal attention of this rank's positions over the whole sequence; collective.

        Args:
            queries: (samples, heads, positions of this rank, size).
            keys: the same, possibly with fewer heads.
            values: as keys.
            dropout: rate of dropped weights.
            scale: factor of the products; None: 1 / sqrt(size).
        """
        device = queries.device.type
        if torch.is_autocast_enabled(device):  # float32 on a CPU, as in `models.gpt`
            dtype = torch.float32 if device == "cpu" else torch.get_autocast_dtype(device)
            queries, keys, values = queries.to(dtype), keys.to(dtype), values.to(dtype)
        mask = None
        if dropout:
            mask = self._mask((*queries.shape[:2], self.length, self.length), dropout, queries, 2)
            mask = functional.pad(mask, (0, 2 * self.degree * self.size - self.length))
        with torch.autocast(device, enabled=False):
            mixed: Tensor = _Attention.apply(queries, keys, values, mask, self, scale or queries.shape[-1] ** -0.5)  # type: ignore[no-untyped-call]
        return mixed

    def gathered(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return (2, samples, heads, positions of a rank, size) keys and values of each rank; collective."""
        local = torch.stack([keys, values])
        parts = [torch.empty_like(local) for _ in range(self.degree)]
        dist.all_gather(parts, local, group=self.group)
        return parts

    def of_stretch(self, parts: Sequence[Tensor], number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a stretch, as views."""
        is_late = number >= self.degree
        keys, values = parts[2 * self.degree - 1 - number if is_late else number].chunk(2, 3)[is_late]
        return keys, values

    def scored(self, loss: Loss) -> Loss:
        """Return the loss of this rank's positions.

        Raises:
            TrainingError: it has a mean over the shard.
        """
        if loss.extra is not None:
            raise TrainingError(
                "the objective adds a mean over the shard, of parts of sequences. Use strategy.context=1."
            )
        return loss

    def summed(self, work: ShardStep) -> None:
        """Make loss, weight and terms of a step those of whole sequences, on every rank; collective.

        Raises:
            TrainingError: forward updates a buffer.
        """
        if names := work.replica.buffers.updated_names():
            raise TrainingError(
                f"the forward pass updates the buffer {names[0]}, from a part of each sequence. Use strategy.context=1."
            )
        if work.loss_sum is None:
            return
        device = work.loss_sum.device
        sums = [work.loss_sum, weight_on(work.weight, torch.float64, device), *work.terms.values()]
        flat = torch.stack([value.double().reshape(()) for value in sums])
        group = GroupCollective(rank=self.rank, num_ranks=self.degree, device=device, group=self.group)
        loss_sum, work.weight, *terms = group.sum(flat).unbind()
        work.loss_sum, work.terms = loss_sum.to(work.loss_sum.dtype), dict(zip(work.terms, terms, strict=True))


class _Attention(torch.autograd.Function):
    """Attention of the stretches of one rank over the keys and values of all, stretch by stretch."""

    @staticmethod
    def forward(  # noqa: PLR0917 - `apply` passes by position
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, cut: SequenceCut, scale: float
    ) -> Tensor:
        """Compute both stretches; `mask` has the factors of the weights in this rank's rows."""
        parts, outputs = cut.gathered(keys, values), []
        for stretch, rows, factors in zip(cut.stretches, queries.chunk(2, 2), _halves(mask), strict=True):
            out, log = torch.zeros_like(rows, dtype=_wide(rows)), rows.new_full((), -math.inf, dtype=_wide(rows))
            for number in range(stretch + 1):
                key, value = (_for_each_head(tensor, rows) for tensor in cut.of_stretch(parts, number))
                more, its_log = _block(rows, key, value, scale, number == stretch, _columns(factors, number, rows))
                log_sum = torch.logaddexp(log, its_log)
                out.mul_((log - log_sum).exp().unsqueeze(-1)).add_(more * (its_log - log_sum).exp().unsqueeze(-1))
                log = log_sum
            outputs.append((out.to(rows.dtype), log))
        out, log = (torch.cat(halves, 2) for halves in zip(*outputs, strict=True))
        ctx.cut, ctx.scale = cut, scale
        ctx.save_for_backward(queries, keys, values, out, log, mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gather keys and values again, and return the gradients of this rank's positions."""
        queries, keys, values, out, log, mask = ctx.saved_tensors
        cut: SequenceCut = ctx.cut
        parts = cut.gathered(keys, values)
        grads, by_queries = [torch.zeros_like(part) for part in parts], []
        halves = [tensor.chunk(2, 2) for tensor in (queries, grad, out, log)]
        for stretch, rows, grad_rows, mixed, logs, factors in zip(cut.stretches, *halves, _halves(mask), strict=True):
            total = torch.zeros_like(rows, dtype=_wide(rows))
            for number in range(stretch + 1):
                key, value = (_for_each_head(tensor, rows) for tensor in cut.of_stretch(parts, number))
                columns = _columns(factors, number, rows)
                first, *others = _block_gradients(
                    grad_rows, rows, key, value, mixed, logs, ctx.scale, number == stretch, columns
                )
                total += first
                for of_ranks, by_heads in zip(cut.of_stretch(grads, number), others, strict=True):
                    of_ranks.add_(by_heads.view(*of_ranks.shape[:2], -1, *by_heads.shape[2:]).sum(2))
            by_queries.append(total.to(rows.dtype))
        del parts, key, value
        sums = torch.empty_like(grads[0])
        dist.reduce_scatter(sums, grads, group=cut.group)
        return torch.cat(by_queries, 2), sums[0], sums[1], None, None, None


def _halves(mask: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None, None) if mask is None else mask.chunk(2, 2)


def _columns(factors: Tensor | None, number: int, rows: Tensor) -> Tensor | None:
    return None if factors is None else factors.narrow(3, number * rows.shape[2], rows.shape[2])


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _for_each_head(keys: Tensor, queries: Tensor) -> Tensor:
    """Return keys or values for each head of the queries: several may share one."""
    times = queries.shape[1] // keys.shape[1]
    return keys.repeat_interleave(times, 1) if times > 1 else keys


def _is_fused(queries: Tensor, mask: Tensor | None) -> bool:
    kind = queries.device.type
    on_gpu = kind == "cuda" and queries.dtype is not torch.float64 and queries.shape[-1] % 8 == 0
    return mask is None and (kind == "cpu" or on_gpu)


def _block(  # noqa: PLR0917 - as the kernels take them
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the attention over the keys of a stretch, and the logarithm of the sum of its weights."""
    if not _is_fused(queries, mask):
        weights, log = _weights(queries, keys, scale, causal)
        return (weights if mask is None else weights * mask) @ values.to(weights), log
    if queries.device.type == "cpu":
        out, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - sdpa hides the sums
            queries, keys, values, is_causal=causal, scale=scale
        )
        return out, log
    out, log, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(  # noqa: SLF001 - as above
        queries, keys, values, None, True, is_causal=causal, scale=scale
    )
    return out, log[..., : queries.shape[2]]  # it is filled up to a multiple of 32


def _block_gradients(  # noqa: PLR0917 - as the kernels take them
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
) -> Sequence[Tensor]:
    """Return the gradients of queries, and of keys and values of a stretch; `out` and `log` are those of all keys."""
    if not _is_fused(queries, mask):
        weights, _ = _weights(queries, keys, scale, causal, log)
        factors = torch.ones_like(weights) if mask is None else mask
        grad = grad.to(weights)
        by_weights = grad @ values.to(weights).mT * factors
        by_scores = weights * (by_weights - (grad * out).sum(-1, keepdim=True)) * scale
        return by_scores @ keys.to(weights), by_scores.mT @ queries.to(weights), (weights * factors).mT @ grad
    if queries.device.type == "cpu":
        grads: Sequence[Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # noqa: SLF001
            grad, queries, keys, values, out, log, 0.0, causal, scale=scale
        )
        return grads
    none = torch.zeros((), dtype=torch.int64, device=grad.device)
    filled = functional.pad(log, (0, -log.shape[2] % 32), value=math.inf)
    return torch.ops.aten._scaled_dot_product_efficient_attention_backward(  # type: ignore[no-any-return]  # noqa: SLF001
        grad, queries, keys, values, None, out, filled, none, none, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]


def _weights(
    queries: Tensor, keys: Tensor, scale: float, causal: bool, log: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores = queries.to(_wide(queries)) @ keys.to(_wide(queries)).mT * scale
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    log = scores.logsumexp(-1) if log is None else log
    return (scores - log.unsqueeze(-1)).exp(), log


class CutStep(ShardStep):
    """One try at a step whose sequences are cut over ranks.

    Args:
        cut: the stretches of this rank.
        more: of the other kind of step.
    """

    def __init__(
        self,
        replica: Replica,
        ticket: Ticket,
        batches: Sequence[Batch],
        training: StepContext,
        *,
        cut: SequenceCut,
        **more: Any,
    ) -> None:
        super().__init__(replica, ticket, batches, training, **more)
        self._cut = cut

    def run(self) -> Sequence[Tensor | None]:
        """Return the sums of the step, and make loss and weight those of whole sequences; collective."""
        with self._cut.in_step():
            sums = super().run()
        self._cut.summed(self)
        return sums

    def _forward(self, shard: int, batch: Batch) -> Loss:
        return self._cut.scored(super()._forward(shard, self._cut.part_of(batch, self.training.objective)))


class CutShardedStep(CutStep, ShardedWork):
    """One with sharded parameters."""


def cut_activations(
    model: nn.Module,
    fit: MatchedPlan,
    place: MeshPlace,
    sequences: SequenceCut | None,
    *,
    draws: bool,
    passes_of: Sequence[nn.Module] = (),
) -> None:
    """Cut activations along `tensor` by a plan, and along `context`.

    Args:
        model: the model.
        fit: the modules that are cut along `tensor`.
        place: the place of this rank.
        sequences: the stretches of this rank; None: sequences are whole.
        draws: whether the model may draw random numbers, so that first passes are watched.
        passes_of: the modules, one for each stage, that compute a part of the model at a time; empty: the model.
    """
    watched = (passes_of or [model]) if draws else []
    if fit.chosen:
        exchange = Exchange(place.mesh["tensor"])
        exchange_activations(model, fit, exchange)
        for part in watched:
            DrawWatch(model, exchange, place.devices, part=part)
    if sequences is not None:
        _cut_sequences(model, sequences)
        remedy = "Use dropout() of what set_sequence_cut gets (docs/mesh.md#context), or strategy.context=1."
        for part in watched:
            DrawWatch(model, sequences, place.devices, part=part, cut_by="strategy.context", remedy=remedy)


def _cut_sequences(model: nn.Module, cut: SequenceCut) -> None:
    """Give a model the positions of this rank, and attention over all."""
    for module in model.modules():
        if (declares := getattr(module, "set_sequence_cut", None)) is not None:
            declares(cut)
        if isinstance(module, nn.Dropout) and module.p:
            module.forward = partial(_dropout, module, cut)  # type: ignore[method-assign]
    for module in _transformers_models(model):
        _register_attention(module, cut)


def _dropout(module: nn.Dropout, cut: SequenceCut, inputs: Tensor) -> Tensor:
    if not cut.is_cut or not module.training:
        return functional.dropout(inputs, module.p, module.training)
    return cut.dropout(inputs, module.p)


def _transformers_models(model: nn.Module) -> list[Any]:
    """Return the outermost modules that are models of transformers, without importing it."""
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    outermost: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, kind) and not any(name.startswith(f"{outer}.") or not outer for outer, _ in outermost):
            outermost.append((name, module))
    return [module for _, module in outermost]


def _register_attention(model: Any, cut: SequenceCut) -> None:
    """Let a model of transformers use attention over all ranks, and the positions of this one."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - the model has imported it

    usual, usual_mask = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]

    def attention(module: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Any, **kwargs: Any) -> Any:
        if not cut.is_cut:
            return usual(module, queries, keys, values, mask, **kwargs)
        mixed = cut.attend(queries, keys, values, dropout=kwargs.get("dropout", 0.0), scale=kwargs.get("scaling"))
        return mixed.transpose(1, 2), None

    def with_positions(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not cut.is_cut:
            return None
        inputs = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return args, {**kwargs, "position_ids": cut.positions(inputs.device).unsqueeze(0)}

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, lambda **kwargs: None if cut.is_cut else usual_mask(**kwargs))
    model.set_attn_implementation(_NAME)
    model.register_forward_pre_hook(with_positions, with_kwargs=True)


def model_problems(model: nn.Module, degree: int) -> list[Problem]:
    """Return why the sequences of a model cannot be cut."""

    def problem(rule: str) -> list[Problem]:
        return [Problem(key="strategy.context", value=degree, rule=f"{rule} Use strategy.context=1.")]

    declares = any(hasattr(module, "set_sequence_cut") for module in model.modules())
    others = _transformers_models(model)
    if not declares and not others:
        kind = type(model).__name__
        return problem(f"needs a model that declares set_sequence_cut, or one of transformers, and {kind} is neither.")
    for name, module in model.named_modules():
        if isinstance(module, _MIXES):
            return problem(f"cuts sequences, and {name} ({type(module).__name__}) computes over positions.")
    for module in others:
        config, kind = module.config, type(module).__name__
        layers = {*(getattr(config, "layer_types", None) or ("full_attention",))}
        if not getattr(module, "_supports_attention_backend", False):
            return problem(f"needs attention that can be replaced, and that of {kind} cannot.")
        if config.is_encoder_decoder or "position_ids" not in inspect.signature(module.forward).parameters:
            return problem(f"cuts a causal decoder with position_ids, and {kind} is none.")
        window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        if window or layers != {"full_attention"}:
            return problem(f"computes attention over all earlier positions, and that of {kind} is of another kind.")
    return []
