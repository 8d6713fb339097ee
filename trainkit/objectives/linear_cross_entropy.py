"""Cross entropy of a linear layer, chunk by chunk of rows, so that the scores of all rows never exist at once.

The gradients of the hidden states and of the layer are computed with the loss, while the scores of a chunk exist; the
backward pass only scales them. `torch.nn.functional.linear_cross_entropy` with `options` does the same since torch
2.13; it moves three times the bytes in bfloat16, rounds the sum of the loss to it, and does not support a sharded
vocabulary.

Source: the chunks are those of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final, Protocol

import torch
from torch import Tensor
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
    wide, places = _sum_dtype(scores.dtype), targets.unsqueeze(1)
    largest, top = scores.max(dim=1, keepdim=True)
    margin = largest.to(wide) - scores.gather(1, places).to(wide)
    shares = scores.softmax(dim=1)
    peak = shares.gather(1, top).to(wide)
    shares = shares.scatter_(1, places, 0.0)
    rest = shares.sum(dim=1, keepdim=True, dtype=wide)
    shares = shares.scatter_(1, places, -rest.to(shares.dtype))
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
        wide = _sum_dtype(dtype)
        needed = ctx.needs_input_grad
        rows, layer = hidden.detach(), weight.detach()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        by_hidden = torch.empty_like(rows) if needed[0] else None
        by_weight = torch.zeros_like(layer, dtype=wide) if needed[1] else None
        by_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
        device = hidden.device.type
        with torch.autocast(device, enabled=False) if _autocasts(device) else nullcontext():
            layer, shift = layer.to(dtype), None if bias is None else bias.detach().to(dtype)
            for chunk in _chunks(rows.shape[0], layer):
                given, counted = rows[chunk].to(dtype), counts[chunk]
                own = targets[chunk].where(counted, 0)
                scores = functional.linear(given, layer, shift)
                losses, gradient = score(scores, own) if part is None else _score_part(scores, own, part)
                del scores
                total += losses.where(counted, 0.0).sum()
                factor = counted.unsqueeze(1).to(dtype)
                if by_hidden is not None:
                    by_hidden[chunk] = (gradient @ layer) * factor
                if by_weight is not None and wide is dtype:
                    by_weight.addmm_(gradient.t(), given * factor)
                elif by_weight is not None:
                    by_weight += gradient.t() @ (given * factor)
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
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if grad is None else grad.mul_(factor).to(dtype) for grad, dtype in found), *(None,) * 6


def _score_part(scores: Tensor, targets: Tensor, part: CutVocabulary) -> tuple[Tensor, Tensor]:
    """Compute `score_rows` for the scores of one part of the vocabulary; collective.

    Every rank gets the losses of all rows, and the gradient of its own scores.
    """
    wide, size = _sum_dtype(scores.dtype), scores.shape[1]
    places = (targets - part.start).unsqueeze(1)
    here = (places >= 0) & (places < size)
    places = places.where(here, 0)
    largest, top = scores.max(dim=1, keepdim=True)
    shares = scores.softmax(dim=1)
    own_log_sum = largest.to(wide) - shares.gather(1, top).to(wide).log()
    highest = part.largest(own_log_sum.clone())
    log_sum = highest + part.total((own_log_sum - highest).exp()).log()
    shares = shares.mul_((own_log_sum - log_sum).exp())
    shares = shares.scatter_(1, places, shares.gather(1, places).masked_fill(here, 0.0))
    target = scores.gather(1, places).to(wide).where(here, 0.0)
    both = part.total(torch.cat((shares.sum(dim=1, keepdim=True, dtype=wide), target), dim=1))
    rest, target = both[:, :1], both[:, 1:]
    shares = shares.scatter_(1, places, shares.gather(1, places).where(~here, -rest.to(shares.dtype)))
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
