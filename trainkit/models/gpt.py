"""A decoder-only transformer for language models (Radford et al. 2019), of any size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainkit.errors import ConfigError, Problem
from trainkit.fields import at_least, at_most, below, unit
from trainkit.models.sampling import Sampling


class SequenceCut(Protocol):
    """The positions of each sequence that this rank computes in a training step, where other ranks compute the rest."""

    @property
    def is_cut(self) -> bool:
        """Whether activations are those of some positions now."""

    def positions(self, device: torch.device, /) -> Tensor:
        """Return the numbers of these positions, int64."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, /, *, dropout: float) -> Tensor:
        """Compute causal attention of (samples, heads, positions, size) over all positions; collective."""


class Gpt(nn.Module):
    """Pre-norm transformer with learned positions; the output layer shares the token embedding's weight.

    Its modules are `embed`, then `blocks.0` ..., then `head`: device maps may cut between any two.

    Example:
        >>> model = Gpt(vocab_size=65, context=64, num_layers=4, num_heads=4, width=128)
        >>> sum(p.numel() for p in model.parameters())
        804096
    """

    draws_nothing: ClassVar[bool] = True

    def __init__(
        self,
        *,
        vocab_size: Annotated[int, at_least(1), unit("tokens")],
        context: Annotated[int, at_least(1), unit("tokens")],
        num_layers: Annotated[int, at_least(1), at_most(1_000), unit("blocks")],
        num_heads: Annotated[int, at_least(1), unit("heads")],
        width: Annotated[int, at_least(1), unit("units")],
        dropout: Annotated[float, below(0, 1), unit("a share, 0 to 1")] = 0.0,
        bias: bool = False,
    ) -> None:
        """Build and initialise the layers.

        Args:
            vocab_size: size of the vocabulary.
            context: most tokens of a sample.
            num_layers: number of blocks.
            num_heads: attention heads per block; divides `width`.
            width: embedding size of a token.
            dropout: fraction zeroed after embedding, in attention and after each branch, in [0, 1).
            bias: whether linear layers and norms have a bias.
        """
        super().__init__()
        if width % num_heads:
            rule = f"must divide model.width={width}."
            raise ConfigError([Problem(key="model.num_heads", value=num_heads, rule=rule)])
        self.context = context
        self.embed = _Embedding(vocab_size, context, width, dropout)
        self.blocks = nn.ModuleList(_Block(width, num_heads, dropout, bias=bias) for _ in range(num_layers))
        self.head = _Head(vocab_size, width, bias=bias)
        self._initialise(num_layers)
        self.head.output.weight = self.embed.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (samples, length) int64 to (samples, length, vocab_size) scores of the next token."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden)
        return scores

    def output_layer(self) -> nn.Linear:
        """Return the layer whose outputs are the scores."""
        return self.head.output

    def tensor_plan(self, degree: int) -> dict[str, str]:
        """Return how the layers are sharded over ranks: attention by heads, the rest by rows and columns.

        The vocabulary is cut if `degree` divides it; otherwise embedding and output layer stay whole.

        Example:
            >>> Gpt(vocab_size=65, context=8, num_layers=1, num_heads=2, width=4).tensor_plan(2)["expand"]
            'colwise'
        """
        plan = {"queries_keys_values": "colwise", "expand": "colwise", "project": "rowwise"}
        if self.embed.tokens.num_embeddings % degree == 0:
            plan |= {"embed.tokens": "rowwise", "head.output": "colwise_gathered"}
        return plan

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        *,
        num_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue texts, token by token, without dropout.

        Args:
            tokens: (samples, length) int64, at least one token each.
            num_tokens: number of tokens to add.
            temperature: divides the scores; below 1 favours likely tokens.
            top_k: draw only from the k most likely tokens; None draws from all.
            generator: the random generator, on the device of `tokens`.

        Returns:
            (samples, length + num_tokens) int64.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k)
        was_training = self.training
        self.eval()
        try:
            for _ in range(num_tokens):
                scores = self(tokens[:, -self.context :])[:, -1]
                tokens = torch.cat((tokens, sampling.choose(scores, generator)), dim=1)
        finally:
            self.train(was_training)
        return tokens

    def new_cache(self) -> KeyValueCache:
        """Return an empty cache for `extend`."""
        return KeyValueCache(self.context)

    @torch.no_grad()
    def extend(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Compute the scores of texts whose first tokens are cached, and append the new tokens to the cache.

        The scores are those of `forward` over the whole texts, to rounding; only the new tokens are computed. The model
        must be in evaluation mode.

        Args:
            tokens: (samples, length) int64, the new tokens; with the cached ones at most `context`.
            cache: the cache of the same samples.

        Returns:
            (samples, length, vocab_size) scores of the next token.
        """
        start = cache.length
        hidden = self.embed(tokens, start)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cache, index)
        cache.length = start + tokens.shape[1]
        scores: Tensor = self.head(hidden)
        return scores

    def _initialise(self, num_layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # scale a branch's contribution to the residual stream down with the number of branches
                std = 0.02 / math.sqrt(2 * num_layers) if name.endswith(".project") else 0.02
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)


class KeyValueCache:
    """Keys and values of the tokens that a `Gpt` has read, so that the next token needs the computation of one token
    only.

    It stores 2 x layers x width numbers per token and sample, for `context` tokens from the start.
    """

    def __init__(self, context: int) -> None:
        self.context = context
        self.length = 0
        """Number of cached tokens."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append (samples, heads, length, size) keys and values of a layer; return those of all tokens, as views."""
        samples, heads, length, size = keys.shape
        if index not in self._layers:
            shape = (samples, heads, self.context, size)
            self._layers[index] = (keys.new_empty(shape), values.new_empty(shape))
        end = self.length + length
        for cached, new in zip(self._layers[index], (keys, values), strict=True):
            cached[:, :, self.length : end] = new
        cached_keys, cached_values = self._layers[index]
        return cached_keys[:, :, :end], cached_values[:, :, :end]


class _Embedding(nn.Module):
    draws_nothing: ClassVar[bool] = True

    def __init__(self, vocab_size: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self._cut: SequenceCut | None = None

    def set_sequence_cut(self, cut: SequenceCut) -> None:
        """Embed the positions of this rank."""
        self._cut = cut

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        if self._cut is not None and self._cut.is_cut:
            positions: Tensor = self.positions(self._cut.positions(tokens.device))
        else:
            positions = self.positions.weight[start : start + tokens.shape[1]]
        hidden: Tensor = self.dropout(self.tokens(tokens) + positions)
        return hidden


class _Block(nn.Module):
    draws_nothing: ClassVar[bool] = True

    def __init__(self, width: int, num_heads: int, dropout: float, *, bias: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = _Attention(width, num_heads, dropout, bias=bias)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = _Mlp(width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, cache: KeyValueCache | None = None, index: int = 0) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), cache, index))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(hidden)))
        return hidden + added


_CutDropout = Callable[[Tensor, float, int], Tensor]
"""(part of a tensor, rate, dim that is cut) -> the part, dropped out like that of one device."""


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float, *, bias: bool) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.dropout = dropout
        self._cut_dropout: _CutDropout | None = None
        self._cut: SequenceCut | None = None
        self.tensor_units = dict.fromkeys(("queries_keys_values", "project"), (num_heads, "heads"))
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width, bias=bias)

    def set_tensor_dropout(self, dropout: _CutDropout) -> None:
        """Drop out weights of attention by a function for parts: this rank has some of the heads."""
        self._cut_dropout = dropout

    def set_sequence_cut(self, cut: SequenceCut) -> None:
        """Compute attention of the positions of this rank over those of all."""
        self._cut = cut

    def forward(self, hidden: Tensor, cache: KeyValueCache | None = None, index: int = 0) -> Tensor:
        joined = self.queries_keys_values(hidden)
        # rows are ordered by head, so that a rank's part consists of whole heads, possibly fewer than all
        queries, keys, values = joined.unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4)
        if cache is None:
            rate = self.dropout if self.training else 0.0
            if self._cut is not None and self._cut.is_cut:
                mixed = self._cut.attend(queries, keys, values, dropout=rate)
            else:
                mixed = _attend(queries, keys, values, dropout=rate, cut=self._cut_dropout)
        else:  # new tokens see the cached ones, and those before each
            keys, values = cache.append(index, keys, values)
            length, total = queries.shape[2], keys.shape[2]
            mask = torch.ones(length, total, dtype=torch.bool, device=hidden.device).tril(total - length)
            mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return projected


class _Mlp(nn.Module):
    draws_nothing: ClassVar[bool] = True

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 4 * width, bias=bias)
        self.project = nn.Linear(4 * width, width, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.project(functional.gelu(self.expand(hidden)))
        return projected


class _Head(nn.Module):
    draws_nothing: ClassVar[bool] = True

    def __init__(self, vocab_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.output(self.norm(hidden))
        return scores


def _attend(queries: Tensor, keys: Tensor, values: Tensor, *, dropout: float, cut: _CutDropout | None) -> Tensor:
    """Compute causal attention over (samples, heads, length, size).

    On the CPU inside autocast it stays in float32: the backward of flash attention in bf16 would take half the step
    there, and cost all that autocast gains (measured: 1.04 times the speed of float32, against 1.69).
    """
    if queries.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            queries, keys, values = queries.float(), keys.float(), values.float()
            return _attend(queries, keys, values, dropout=dropout, cut=cut)
    if dropout and cut is not None:  # torch's kernels would draw for the heads of this rank alone
        scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[-1])
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        return cut(scores.masked_fill(later, -math.inf).softmax(-1), dropout, 1) @ values
    return functional.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
