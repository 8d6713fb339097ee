"""Choose the next token of a text from the scores of a language model; importing this does not import torch.

The settings of a generation, from a flag or from Python, are checked here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final

from trainkit.config.interface import advice
from trainkit.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Generator, Tensor

MAX_TOKENS: Final = 200
"""Tokens to add, if no number is given."""
RULES: Final[Mapping[str, tuple[type, str, Callable[[Any], bool]]]] = {
    "max_tokens": (Integral, "a whole number, 1 or more", lambda number: number >= 1),
    "seed": (Integral, "a whole number, 0 or more", lambda number: 0 <= number < 1 << 63),
    "top_k": (Integral, "a whole number, 1 or more", lambda number: number >= 1),
    "top_p": (Real, "a number above 0, at most 1", lambda number: 0 < number <= 1),
    "temperature": (Real, "a number, 0 or more", lambda number: 0 <= number < math.inf),
}
"""Setting -> its kind, the rule, and whether a number of this kind fits it."""


def broken_settings(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield name and rule of each setting that does not fit, or has no effect beside the others.

    Args:
        settings: the settings that were given, by name.

    Example:
        >>> list(broken_settings({"temperature": -1.0, "top_k": 3}))
        [('temperature', 'must be a number, 0 or more.')]
    """
    yield from out_of_range(settings)
    if temperature_of(settings) == 0:
        remedy = advice("--temperature 0.8", "temperature=0.8")
        for name in ("top_k", "top_p", "seed"):
            if name in settings:
                yield name, f"has no effect: the most likely token is chosen. Add {remedy}."


def out_of_range(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield name and rule of each setting that does not fit by itself."""
    for name, (kind, rule, fits) in RULES.items():
        value = settings.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            yield name, f"must be {rule}."


def temperature_of(settings: Mapping[str, Any]) -> Any:
    """Return the temperature: 1 if only the tokens to draw from are given, 0 if nothing is."""
    return settings.get("temperature", 1.0 if settings.keys() & {"top_k", "top_p"} else 0.0)


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
        settings = {name: value for name, value in vars(self).items() if value is not None}
        if problems := [Problem(key=name, value=settings[name], rule=rule) for name, rule in out_of_range(settings)]:
            raise ConfigError(problems)

    def choose(self, scores: Tensor, generator: Generator | None = None) -> Tensor:
        """Return (samples, 1) int64 tokens for (samples, tokens) scores of any float dtype.

        Args:
            scores: unnormalized logarithms of probabilities.
            generator: a generator on the device of the scores; None: the default one of torch.

        Example:
            >>> import torch
            >>> Sampling().choose(torch.tensor([[0.1, 0.7, 0.2]]))
            tensor([[1]])
        """
        if self.temperature == 0:
            return scores.argmax(-1, keepdim=True)
        scores = scores.float() / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p is not None:  # the most likely token always stays
            ordered, order = scores.sort(descending=True, stable=True)
            chances = ordered.softmax(-1)
            unlikely = chances.cumsum(-1) - chances >= self.top_p
            scores = scores.scatter(-1, order, ordered.masked_fill(unlikely, -math.inf))
        return scores.softmax(-1).multinomial(1, generator=generator)
