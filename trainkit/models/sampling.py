"""Choose the next token of a text from the scores of a language model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.errors import ConfigError, Problem
from trainkit.models.sampling_settings import out_of_range


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The rule that chooses the next token: the most likely one, or a random one of the likely ones.

    Top-k sampling is that of Fan et al. 2018 (arXiv:1805.04833), top-p that of Holtzman et al. 2020
    (arXiv:1904.09751).
    """

    temperature: float = 0.0
    """Divisor of the scores; 0 chooses the most likely token, without random numbers."""
    top_k: int | None = None
    """Draw only from the k most likely tokens; None: from all."""
    top_p: float | None = None
    """Draw only from the smallest set of most likely tokens whose probabilities add up to it, in (0, 1]; None: from
    all.
    """

    def __post_init__(self) -> None:
        """Refuse values out of their range: a negative temperature would draw the least likely tokens."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        if problems := [Problem(key=name, value=given[name], rule=rule) for name, rule in out_of_range(given)]:
            raise ConfigError(problems)

    def choose(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return (samples, 1) int64 tokens for (samples, tokens) scores of any float dtype.

        Args:
            scores: unnormalized logarithms of probabilities.
            generator: a generator on the device of the scores; None: the default one of torch.

        Example:
            >>> Sampling().choose(torch.tensor([[0.1, 0.7, 0.2]]))
            tensor([[1]])
        """
        if self.temperature == 0:
            return scores.argmax(-1, keepdim=True)
        scores = scores.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p is not None:
            scores = _nucleus(scores, self.top_p)
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Mask all but the most likely tokens whose probabilities reach `top_p`; the most likely one always stays."""
    ordered, order = scores.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    masked = ordered.masked_fill(before >= top_p, -math.inf)
    return torch.empty_like(scores).scatter_(-1, order, masked)
