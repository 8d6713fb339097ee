"""Continue token sequences with a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.models.gpt import KeyValueCache
from trainkit.models.sampling import Sampling
from trainkit.numerics.generators import hash64, name_id
from trainkit.objectives.fields import scores_of

OnTokens = Callable[[Sequence[int], Sequence[int]], None]
"""Callback that receives the indices of prompts and the next token of each."""


@runtime_checkable
class Cached(Protocol):
    """A language model that caches the keys and values of earlier tokens, such as `Gpt`."""

    context: int
    """Most tokens that the model reads at once."""

    def new_cache(self) -> KeyValueCache:
        """Return an empty cache."""
        ...

    def extend(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """Return (samples, length, tokens) scores of new tokens, and append them to the cache."""
        ...


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_tokens: int,
    seed: int = 0,
    on_tokens: OnTokens = lambda _, __: None,
) -> list[list[int]]:
    """Continue prompts; those of one length are computed as one batch.

    A model with `extend` computes each token once (a key-value cache); one of transformers is continued by its own
    `generate`, and may end a text early; any other computes the whole sequence for each token. Random numbers are keyed
    by (seed, index of the prompt): a text does not depend on the other prompts. Beyond a model's `context`, it reads
    the last `context` tokens.

    Args:
        model: maps (samples, length) int64 tokens to (samples, length, tokens) scores, or to an output with `logits`.
        prompts: the tokens of each prompt, at least one.
        sampling: how the next token is chosen.
        max_tokens: most tokens to add to each.
        seed: seed of the random numbers.
        on_tokens: receives each token as soon as it is known.

    Returns:
        The new tokens of each prompt.

    Raises:
        TrainingError: the model's outputs are not scores of next tokens.

    Example:
        >>> from trainkit.models.gpt import Gpt
        >>> model = Gpt(vocab_size=5, context=8, num_layers=1, num_heads=1, width=4)
        >>> [len(tokens) for tokens in generate(model, [[1, 2], [3]], sampling=Sampling(), max_tokens=3)]
        [3, 3]
    """
    found: list[list[int]] = [[] for _ in prompts]

    def receive(places: Sequence[int], tokens: Sequence[int]) -> None:
        for place, token in zip(places, tokens, strict=True):
            found[place].append(token)
        on_tokens(places, tokens)

    by_transformers = hasattr(model, "generation_config") and hasattr(model, "generate")
    extend = _by_transformers if by_transformers else _by_scores
    with _evaluating(model):
        for places in _batches(prompts, alone=by_transformers and sampling.temperature > 0):
            tokens = torch.tensor([list(prompts[place]) for place in places], device=_device_of(model))
            seeds = [hash64(name_id("generate"), seed, place) for place in places]
            extend(model, tokens, places, receive, sampling=sampling, max_tokens=max_tokens, seeds=seeds)
    return found


def _batches(prompts: Sequence[Sequence[int]], *, alone: bool) -> Iterator[list[int]]:
    """Yield the indices of the prompts of each length, in the order of their first; or each prompt alone."""
    if alone:
        yield from ([place] for place in range(len(prompts)))
        return
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)
    yield from by_length.values()


def _by_scores(
    model: nn.Module,
    tokens: Tensor,
    places: Sequence[int],
    receive: OnTokens,
    *,
    sampling: Sampling,
    max_tokens: int,
    seeds: Sequence[int],
) -> None:
    """Continue prompts by the scores of the next token."""
    generators = [torch.Generator(tokens.device).manual_seed(seed) for seed in seeds]
    next_scores = _next_scores(model)
    for _ in range(max_tokens):
        rows = zip(next_scores(tokens).unbind(), generators, strict=True)
        new = torch.cat([sampling.choose(row[None], generator) for row, generator in rows])
        tokens = torch.cat((tokens, new), dim=1)
        receive(places, new.flatten().tolist())


def _next_scores(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function from (samples, length) tokens, one more at each call, to (samples, tokens) scores."""
    context: int | None = getattr(model, "context", None)
    cached = model if isinstance(model, Cached) else None
    cache = None if cached is None else cached.new_cache()

    def scores(tokens: Tensor) -> Tensor:
        if cached is not None and cache is not None and tokens.shape[1] <= cached.context:
            return cached.extend(tokens[:, cache.length :], cache)[:, -1]
        seen = tokens if context is None else tokens[:, -context:]  # the positions have moved: nothing cached is valid
        outputs = scores_of(model(seen), None)
        if not isinstance(outputs, Tensor) or outputs.dim() != 3 or outputs.shape[:2] != seen.shape:
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise TrainingError(
                f"{type(model).__name__} gives {got} for {tuple(seen.shape)} tokens, and a language model returns "
                "(samples, length, tokens) scores."
            )
        return outputs[:, -1]

    return scores


class _Streamer:
    """Receives tokens from `generate` of transformers: first the prompts, then one per text; a text ends before its end
    token, which padding follows.
    """

    def __init__(self, places: Sequence[int], ends: set[int], receive: OnTokens) -> None:
        self._places, self._ends, self._receive = dict(enumerate(places)), ends, receive
        self._seen_prompts = False

    def put(self, tokens: Tensor) -> None:
        """Receive (samples,) next tokens."""
        if not self._seen_prompts:
            self._seen_prompts = True
            return
        found = tokens.flatten().tolist()
        self._places = {row: place for row, place in self._places.items() if found[row] not in self._ends}
        if self._places:
            self._receive([*self._places.values()], [found[row] for row in self._places])

    def end(self) -> None:
        """Do nothing: the caller returns."""


def _by_transformers(
    model: Any,
    tokens: Tensor,
    places: Sequence[int],
    receive: OnTokens,
    *,
    sampling: Sampling,
    max_tokens: int,
    seeds: Sequence[int],
) -> None:
    """Continue prompts by the model's own `generate`, with the settings of `sampling` alone."""
    drawn = sampling.temperature > 0
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    ends = _end_tokens(model)
    with torch.random.fork_rng(devices=[tokens.device] if tokens.device.type == "cuda" else []):
        torch.manual_seed(seeds[0])
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_tokens,
            do_sample=drawn,
            num_beams=1,
            streamer=_Streamer(places, ends, receive),
            pad_token_id=min(ends, default=0),  # padding of a finished text, which is not used
            **(settings if drawn else {}),
        )


def _end_tokens(model: Any) -> set[int]:
    found = model.generation_config.eos_token_id
    return set(found) if isinstance(found, list | tuple) else set() if found is None else {found}


def _device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
