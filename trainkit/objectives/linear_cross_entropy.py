"""Cross entropy of a linear layer, chunk by chunk of rows, so that the scores of all rows never exist at once.

The gradients of the hidden states and of the layer are computed with the loss, while the scores of a chunk exist; the
backward pass only scales them. `torch.nn.functional.linear_cross_entropy` with `options` does the same since torch
2.13; it moves three times the bytes in bfloat16, rounds the sum of the loss to it, and does not support a sharded
vocabulary.

A model declares its output layer by `output_layer()`. While such a model runs in training, the layer returns the loss
of its inputs instead of scores, and the model's own forward passes it on. So the code around the layer keeps working:
hooks that gather its weight or move its inputs, a weight that it shares, compiled code.

Causal models of transformers declare theirs by `get_output_embeddings()`. Some of them change the output of the layer
(a soft cap, a scale), or add a term to the loss: the source of their `forward` is inspected, without running it.

Source: the chunks are those of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

FEW_SCORES: Final = 2**20
"""Up to this many scores are computed at once, with the plain loss and its exact bits."""
CHUNK_BYTES: Final = 256 * 2**20
"""Bytes of the scores of a chunk, if these are at least as many rows as the layer has input features."""


class CutVocabulary(Protocol):
    """The shard of the vocabulary of one rank, and the collectives with the ranks of the other shards."""

    @property
    def start(self) -> int:
        """The first token of this part."""

    def largest(self, tensor: Tensor, /) -> Tensor:
        """Return the elementwise maximum over the parts; collective. The tensor may be overwritten."""

    def total(self, tensor: Tensor, /) -> Tensor:
        """Return the elementwise sum over the parts; collective. The tensor may be overwritten."""


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32  # `torch.promote_types` is a call of torch


ScoreRows = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(scores, targets) -> (losses, gradient of the scores); see `score_rows`."""


def score_rows(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of each row, and its gradient by the scores.

    The probability of every token but the target is rounded to the dtype of the scores, as their gradient is in any
    case. What remains for the target is their sum, in float32 at least, so that it is exact where the target is nearly
    certain. In bfloat16 it reads a score four times and writes a gradient once.

    Args:
        scores: (rows, vocabulary).
        targets: (rows,) int64, each within the vocabulary.

    Returns:
        (rows,) losses in float32, float64 for such scores; (rows, vocabulary) gradients in the dtype of the scores.

    Example:
        >>> losses, gradient = score_rows(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(losses.item(), 4), gradient.tolist()
        (1.3863, [[0.25, 0.25, -0.75, 0.25]])
    """
    sum_dtype, index = _sum_dtype(scores.dtype), targets.unsqueeze(1)
    largest, top = scores.max(dim=1, keepdim=True)
    margin = largest.to(sum_dtype) - scores.gather(1, index).to(sum_dtype)
    shares = scores.softmax(dim=1)
    peak = shares.gather(1, top).to(sum_dtype)
    shares = shares.scatter_(1, index, 0.0)
    rest = shares.sum(dim=1, keepdim=True, dtype=sum_dtype)
    shares = shares.scatter_(1, index, -rest.to(shares.dtype))
    # The share of the largest score is never zero; that of an unlikely target may be.
    losses = torch.where(rest < 0.5, -torch.log1p(-rest), margin - peak.log())
    return losses.squeeze(1), shares


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    score: ScoreRows = score_rows,
    part: CutVocabulary | None = None,
    few: int = FEW_SCORES,
    only_eager: bool = False,
) -> Tensor:
    """Return the sum of the cross entropies of `hidden @ weight.T + bias`; differentiable once.

    The products are in the dtype of `hidden`, or of autocast inside of it; sums are in float32 at least.

    Args:
        hidden: (rows, features).
        weight: (vocabulary, features).
        targets: (rows,) int64.
        bias: (vocabulary,).
        ignore_index: rows with this target do not count.
        score: computes a chunk; a compiled `score_rows`, for example. Not used with `part`.
        part: the part of the vocabulary that `weight` holds; None: all.
        few: up to this many scores, the plain loss computes all at once, which is faster.
        only_eager: whether a compiled graph of the loss may compute it from all scores instead; the node of autograd
            has an attribute of this name.

    Example:
        >>> hidden, weight = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3)
        >>> round(linear_cross_entropy(hidden, weight, torch.tensor([1, -100])).item(), 4)
        1.3863
    """
    targets = targets.to(hidden.device)
    if part is None and hidden.shape[0] * weight.shape[0] <= few:
        scores = functional.linear(hidden, weight, bias)
        exact = scores.to(_sum_dtype(scores.dtype))
        return functional.cross_entropy(exact, targets, reduction="sum", ignore_index=ignore_index)
    dtype, counts = product_dtype(hidden), targets != ignore_index
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, counts, dtype, score, part, only_eager)  # type: ignore[no-untyped-call]
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the loss together with its gradients; `backward` scales them."""

    @staticmethod
    def forward(  # noqa: PLR0917 - `apply` passes by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        counts: Tensor,
        dtype: torch.dtype,
        score: ScoreRows,
        part: CutVocabulary | None,
        only_eager: bool,
    ) -> Tensor:
        """Compute chunk by chunk, with products in `dtype`."""
        ctx.only_eager = only_eager
        sum_dtype = _sum_dtype(dtype)
        needed = ctx.needs_input_grad
        rows, layer = hidden.detach(), weight.detach()
        total = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        by_hidden = torch.empty_like(rows) if needed[0] else None
        by_weight = torch.zeros_like(layer, dtype=sum_dtype) if needed[1] else None
        by_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needed[2] else None
        device = hidden.device.type
        with torch.autocast(device, enabled=False) if _autocasts(device) else nullcontext():
            layer, shift = layer.to(dtype), None if bias is None else bias.detach().to(dtype)
            for chunk in _chunks(rows.shape[0], layer):
                inputs, counted = rows[chunk].to(dtype), counts[chunk]
                classes = targets[chunk].where(counted, 0)
                scores = functional.linear(inputs, layer, shift)
                losses, gradient = score(scores, classes) if part is None else _score_part(scores, classes, part)
                del scores
                total += losses.where(counted, 0.0).sum()
                factor = counted.unsqueeze(1).to(dtype)
                if by_hidden is not None:
                    by_hidden[chunk] = (gradient @ layer) * factor
                if by_weight is not None and sum_dtype is dtype:
                    by_weight.addmm_(gradient.t(), inputs * factor)
                elif by_weight is not None:
                    by_weight += gradient.t() @ (inputs * factor)
                if by_bias is not None:
                    by_bias += (factor.t() @ gradient).squeeze(0)
                del gradient  # before the next chunk
        if by_hidden is not None and part is not None:
            by_hidden = part.total(by_hidden)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(by_hidden, by_weight, by_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients in place: a second backward pass is an error of autograd."""
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if grad is None else grad.mul_(factor).to(dtype) for grad, dtype in pairs), *(None,) * 6


def _score_part(scores: Tensor, targets: Tensor, part: CutVocabulary) -> tuple[Tensor, Tensor]:
    """Compute `score_rows` for the scores of one part of the vocabulary; collective.

    Every rank gets the losses of all rows, and the gradient of its own scores.
    """
    sum_dtype, size = _sum_dtype(scores.dtype), scores.shape[1]
    local = (targets - part.start).unsqueeze(1)
    inside = (local >= 0) & (local < size)
    local = local.where(inside, 0)
    largest, top = scores.max(dim=1, keepdim=True)
    shares = scores.softmax(dim=1)
    own_log_sum = largest.to(sum_dtype) - shares.gather(1, top).to(sum_dtype).log()
    highest = part.largest(own_log_sum.clone())
    log_sum = highest + part.total((own_log_sum - highest).exp()).log()
    shares = shares.mul_((own_log_sum - log_sum).exp())
    shares = shares.scatter_(1, local, shares.gather(1, local).masked_fill(inside, 0.0))
    target = scores.gather(1, local).to(sum_dtype).where(inside, 0.0)
    both = part.total(torch.cat((shares.sum(dim=1, keepdim=True, dtype=sum_dtype), target), dim=1))
    rest, target = both[:, :1], both[:, 1:]
    shares = shares.scatter_(1, local, shares.gather(1, local).where(~inside, -rest.to(shares.dtype)))
    losses = torch.where(rest < 0.5, -torch.log1p(-rest), log_sum - target)
    return losses.squeeze(1), shares


def _chunks(rows: int, layer: Tensor) -> list[slice]:
    """Return equal chunks of rows: of `CHUNK_BYTES`, but no fewer rows than features.

    With fewer, adding up the gradient of the layer would move more bytes than the scores.
    """
    vocabulary, features = layer.shape
    most = max(CHUNK_BYTES // max(vocabulary * layer.element_size(), 1), features, 1)
    size = -(-rows // max(-(-rows // most), 1)) or 1
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of products of a tensor: that of autocast inside of it."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if _autocasts(device) else tensor.dtype


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """The output layer of a model, and the computation of its loss."""

    layer: nn.Linear
    """The layer with its current parameters: a strategy may gather them for the call."""
    score: ScoreRows = score_rows
    """Function that computes a chunk of rows."""
    part: CutVocabulary | None = None
    """The part of the vocabulary that this rank holds; None: all."""

    def loss_sum(self, hidden: Tensor, targets: Tensor, *, ignore_index: int, only_eager: bool) -> Tensor:
        """Sum the cross entropy of (..., features) hidden states against (...) tokens, chunk by chunk of rows.

        Args:
            hidden: on the device of the layer.
            targets: int64, possibly on another device.
            ignore_index: rows with this target do not count.
            only_eager: whether a compiled graph of the loss may compute it from all scores instead.
        """
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            self.layer.weight,
            targets.flatten(),
            bias=self.layer.bias,
            ignore_index=ignore_index,
            score=self.score,
            part=self.part,
            only_eager=only_eager,
        )


_KEEPS: Final[ContextVar[bool]] = ContextVar("keeps_scores", default=False)


@contextmanager
def scores_kept() -> Iterator[None]:
    """Let the models inside return their scores, for inspection."""
    token = _KEEPS.set(True)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def keeps_scores() -> bool:
    """Return whether models return their scores for inspection now."""
    return _KEEPS.get()


def output_layer_of(model: object) -> OutputLayer | None:
    """Return the output layer in which a loss can be computed now; None if scores are needed, or the model declares no
    such layer.

    Evaluation needs scores. A float16 layer keeps them too: the loss scale must multiply its gradients before they are
    rounded.

    Example:
        >>> from trainkit.models.gpt import Gpt
        >>> model = Gpt(vocab_size=8, context=4, num_layers=1, num_heads=1, width=4)
        >>> output_layer_of(model).layer is model.head.output, output_layer_of(model.eval())
        (True, None)
    """
    if not isinstance(model, nn.Module) or not model.training or not torch.is_grad_enabled() or _KEEPS.get():
        return None
    output_layer = _inspected(model)
    is_usable = isinstance(output_layer, OutputLayer) and product_dtype(output_layer.layer.weight) is not torch.float16
    return output_layer if is_usable else None  # type: ignore[return-value]


def reason_for_scores(model: nn.Module) -> str | None:
    """Return why the loss of a model is computed from its scores although it declares an output layer."""
    reason = _inspected(model)
    return reason if isinstance(reason, str) else None


def _inspected(model: nn.Module) -> OutputLayer | str | None:
    """Return the output layer of a model as it is now, with its hooks; the reason, as text, why it cannot be used; None
    if the model declares none.
    """
    layer = offered_by(model)
    if not isinstance(layer, nn.Module):
        return layer
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return f"its output layer is a {type(layer).__name__}"
    part = getattr(vars(layer).get("forward"), "cut_vocabulary", None)
    if part is None and "forward" in vars(layer):
        return "its output layer has another forward"
    around = _AROUND.get(model, ())
    if not around or around[0]() is not layer:
        holders = (module for module in model.modules() if any(inner is layer for inner in module.modules()))
        around = _AROUND[model] = (ref(layer), *map(ref, holders))
    of_all = nn.modules.module
    for module in filter(None, (reference() for reference in around)):
        forward = vars(module).get("forward") if module is not layer else None
        if forward is not None and not getattr(forward, "runs_once", False):
            return f"{type(module).__name__}, which holds its output layer, has another forward"
        hooks = chain(
            module._forward_pre_hooks.values(),  # noqa: SLF001 - has no public name
            module._forward_hooks.values(),  # noqa: SLF001 - as above
            of_all._global_forward_pre_hooks.values(),  # noqa: SLF001 - as above
            of_all._global_forward_hooks.values(),  # noqa: SLF001 - as above
        )
        if not all(map(_is_known, hooks)):
            return f"{type(module).__name__} has a hook that may read scores"
    return OutputLayer(layer, getattr(layer, "compiled_score_rows", score_rows), part)


_AROUND: Final[WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], ...]]] = WeakKeyDictionary()
"""Model -> its output layer, then the modules that hold it."""


def _is_known(hook: object) -> bool:
    """Return whether a hook belongs to torch or trainkit; such hooks leave outputs unchanged."""
    function = hook.func if isinstance(hook, partial) else hook
    name = getattr(function, "__module__", None) or type(function).__module__
    return name.partition(".")[0] in {"torch", "trainkit"}


@contextmanager
def scored_inside(layer: nn.Linear, score: Callable[[Tensor], object]) -> Iterator[None]:
    """Let a layer return the loss of its inputs for the duration of the block."""
    call = _CALLS.get(layer)
    if call is None:
        call = _CALLS[layer] = _Call()
    forward = vars(layer).get("forward")
    call.score = score
    layer.forward = call.run  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        call.score = None
        if forward is None:
            del layer.forward
        else:
            layer.forward = forward  # type: ignore[method-assign]


class _Call:
    """The computation of a layer instead of its scores: one object for all steps, which avoids recompilation."""

    def __init__(self) -> None:
        self.score: Callable[[Tensor], object] | None = None
        self.run = self._run
        if "torch._dynamo" in sys.modules:  # the loop over chunks stays outside of compiled code
            self.run = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def _run(self, hidden: Tensor) -> object:
        assert self.score is not None
        return self.score(hidden)


_CALLS: Final[WeakKeyDictionary[nn.Module, _Call]] = WeakKeyDictionary()


def offered_by(model: nn.Module) -> nn.Module | str | None:
    """Return the output layer that a model declares, or the reason why it cannot be used, or None if it declares
    none.
    """
    kind: Any = type(model)  # a module may have a child of one of these names
    for name in ("output_layer", "get_output_embeddings"):
        if not inspect.isfunction(offer := getattr(kind, name, None)):
            continue
        layer: Any = offer(model)
        if name == "output_layer":
            return layer  # type: ignore[no-any-return]
        if isinstance(layer, nn.Module):
            attribute = next((key for key, child in model.named_children() if child is layer), None)
            passes_on = attribute is not None and _passes_on(kind, attribute)
            return layer if passes_on else f"{kind.__name__} changes the output of its output layer"
    return None


def has_plain_loss(model: object) -> bool:
    """Return whether a model of transformers computes the mean cross entropy of each next label, and nothing else."""
    kind: Any = type(model)
    function = getattr(model, "loss_function", None)
    return getattr(function, "__name__", None) == "ForCausalLMLoss" and _adds_nothing(kind)


@lru_cache
def _passes_on(kind: Any, layer: str) -> bool:
    """Return whether `forward` calls `self.LAYER` once, and uses the result only for its loss and its `logits`."""
    parents = _forward_of(kind)
    attributes = [node for node in parents if _is_self_attribute(node, layer)]
    call = parents[attributes[0]] if len(attributes) == 1 else None
    assignment = parents[call] if isinstance(call, ast.Call) and call.func is attributes[0] else None
    if not isinstance(assignment, ast.Assign) or not isinstance(assignment.targets[0], ast.Name):
        return False
    variable = assignment.targets[0]
    uses = [node for node in parents if isinstance(node, ast.Name) and node.id == variable.id and node is not variable]
    return all(_is_scored(node, parents) or _is_returned(node, parents) for node in uses)


@lru_cache
def _adds_nothing(kind: Any) -> bool:
    """Return whether `forward` assigns None or the result of its loss function to `loss`, and passes it all labels."""
    parents = _forward_of(kind)
    for node in parents:
        if isinstance(node, ast.Name) and node.id == "loss" and isinstance(node.ctx, ast.Store):
            value = getattr(parents[node], "value", None) if isinstance(parents[node], ast.Assign) else None
            is_loss = isinstance(value, ast.Call) and _is_self_attribute(value.func, "loss_function")
            if not is_loss and not (isinstance(value, ast.Constant) and value.value is None):
                return False
        if isinstance(node, ast.Name) and node.id == "labels" and not _is_scored(node, parents):
            over = parents[node]
            if not (isinstance(over, ast.Compare) and isinstance(over.ops[0], ast.Is | ast.IsNot)):
                return False
    return bool(parents)


def _forward_of(kind: Any) -> dict[ast.AST, ast.AST]:
    """Return the nodes of the source of `forward`, each with the node above it; none if there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _is_self_attribute(node: ast.AST, name: str) -> bool:
    """Return whether a node is `self.NAME`."""
    holder = node.value if isinstance(node, ast.Attribute) and node.attr == name else None
    return isinstance(holder, ast.Name) and holder.id == "self"


def _is_scored(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a variable is used as an argument of the loss function, by itself."""
    over = parents[node]
    call = parents[over] if isinstance(over, ast.keyword) else over
    return isinstance(call, ast.Call) and _is_self_attribute(call.func, "loss_function")


def _is_returned(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a variable is used as the result's `logits`, or in `(logits,) + ...`, the result as a tuple."""
    over = parents[node]
    if isinstance(over, ast.Tuple):
        total = parents[over]
        return isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add) and total.left is over
    return isinstance(over, ast.keyword) and over.arg == "logits"
