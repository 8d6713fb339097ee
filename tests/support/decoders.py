"""A decoder as transformers has them: embedding, layers and norm are parts of one child."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.zoo import LENGTH, TOKENS, fill

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """A decoder as transformers has them: embedding, layers and norm are parts of one child, and the head another."""

    def __init__(self, *, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.transformer = Trunk(layers, width)
        self.lm_head = nn.Linear(width, TOKENS, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        fill(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) int64 -> (samples, length, tokens)."""
        scores: Tensor = self.lm_head(self.transformer(tokens))
        return scores


class Trunk(nn.Module):
    """All but the head."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        self.ln_f = nn.LayerNorm(width)
        self.h = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) int64 -> (samples, length, width)."""
        hidden = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        for layer in self.h:
            hidden = layer(hidden, mask=mask)
        normed: Tensor = self.ln_f(hidden)
        return normed


class Layer(nn.Module):
    """Attention over earlier tokens, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        """(samples, length, width) -> the same."""
        query, value = self.query(hidden), self.value(hidden)
        return hidden + functional.scaled_dot_product_attention(query, hidden, value, attn_mask=mask)
