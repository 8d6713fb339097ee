"""Continue texts with a language model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit.cluster.host import use_device
from trainkit.config.identity import run_config
from trainkit.config.targets.allowed import allow_packages
from trainkit.data.splits import build_split
from trainkit.errors import ConfigError, Problem, TrainingError, named_first_line, refuse
from trainkit.models.gpt import KeyValueCache
from trainkit.models.sampling import Sampling
from trainkit.numerics.generators import hash64, name_id
from trainkit.objectives.fields import scores_of
from trainkit.trained.build import Which
from trainkit.trained.model import load_model

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
    generated: list[list[int]] = [[] for _ in prompts]

    def receive(indices: Sequence[int], tokens: Sequence[int]) -> None:
        for index, token in zip(indices, tokens, strict=True):
            generated[index].append(token)
        on_tokens(indices, tokens)

    by_transformers = hasattr(model, "generation_config") and hasattr(model, "generate")
    alone, groups = by_transformers and sampling.temperature > 0, dict[int, list[int]]()
    for index, prompt in enumerate(prompts):
        groups.setdefault(index if alone else len(prompt), []).append(index)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    try:
        for indices in groups.values():
            tokens = torch.tensor([list(prompts[index]) for index in indices], device=device)
            seeds = [hash64(name_id("generate"), seed, index) for index in indices]
            if by_transformers:
                _by_transformers(
                    model, tokens, _Streamer(indices, receive), sampling, max_tokens=max_tokens, seed=seeds[0]
                )
            else:
                for new in _by_scores(model, tokens, sampling, max_tokens, seeds):
                    receive(indices, new)
    finally:
        model.train(was_training)
    return generated


def _by_scores(
    model: nn.Module, tokens: Tensor, sampling: Sampling, max_tokens: int, seeds: Sequence[int]
) -> Iterator[list[int]]:
    """Yield the next token of each prompt, by the scores of the model."""
    generators = [torch.Generator(tokens.device).manual_seed(seed) for seed in seeds]
    next_scores = _next_scores(model)
    for _ in range(max_tokens):
        rows = zip(next_scores(tokens).unbind(), generators, strict=True)
        new = torch.cat([sampling.choose(row[None], generator) for row, generator in rows])
        tokens = torch.cat((tokens, new), dim=1)
        yield new.flatten().tolist()


def _next_scores(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function from (samples, length) tokens, one more at each call, to (samples, tokens) scores."""
    context: int | None = getattr(model, "context", None)
    cached = model if isinstance(model, Cached) else None
    cache = None if cached is None else cached.new_cache()

    def scores(tokens: Tensor) -> Tensor:
        if cached is not None and cache is not None and tokens.shape[1] <= cached.context:
            return cached.extend(tokens[:, cache.length :], cache)[:, -1]
        last = tokens if context is None else tokens[:, -context:]  # the positions have moved: nothing cached is valid
        outputs = scores_of(model(last), None)
        if not isinstance(outputs, Tensor) or outputs.dim() != 3 or outputs.shape[:2] != last.shape:
            actual = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise TrainingError(
                f"{type(model).__name__} gives {actual} for {tuple(last.shape)} tokens, and a language model returns "
                "(samples, length, tokens) scores."
            )
        return outputs[:, -1]

    return scores


class _Streamer:
    """Receives tokens from `generate` of transformers: first the prompts, then one per text; a text ends before its end
    token, which padding follows.
    """

    def __init__(self, indices: Sequence[int], receive: OnTokens) -> None:
        self._indices, self._receive = dict(enumerate(indices)), receive
        self._has_prompts = False
        self.ends: set[int] = set()
        """The tokens that end a text."""

    def put(self, tokens: Tensor) -> None:
        """Receive (samples,) next tokens."""
        if not self._has_prompts:
            self._has_prompts = True
            return
        latest = tokens.flatten().tolist()
        self._indices = {row: index for row, index in self._indices.items() if latest[row] not in self.ends}
        if self._indices:
            self._receive([*self._indices.values()], [latest[row] for row in self._indices])

    def end(self) -> None:
        """Do nothing: the caller returns."""


def _by_transformers(
    model: Any, tokens: Tensor, streamer: _Streamer, sampling: Sampling, *, max_tokens: int, seed: int
) -> None:
    """Continue prompts by the model's own `generate`, with the settings of `sampling` alone."""
    drawn = sampling.temperature > 0
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    end = model.generation_config.eos_token_id
    streamer.ends = set(end) if isinstance(end, list | tuple) else set() if end is None else {end}
    with torch.random.fork_rng(devices=[tokens.device] if tokens.device.type == "cuda" else []):
        torch.manual_seed(seed)
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_tokens,
            do_sample=drawn,
            num_beams=1,
            streamer=streamer,
            pad_token_id=min(streamer.ends, default=0),  # padding of a finished text, which is not used
            **(settings if drawn else {}),
        )


OnText = Callable[[int, str], None]
"""Callback that receives the index of a prompt and the next piece of its text."""


@dataclass(frozen=True)
class Writer:
    """A language model with the vocabulary of the data that it was trained on."""

    model: nn.Module
    data: Any
    """The dataset, with `encode(text) -> tokens` and `decode(tokens) -> text`."""

    @classmethod
    def of(cls, run: Path, *, checkpoint: Which, packages: Sequence[str]) -> Writer:
        """Load the model of a run, onto the first GPU if there is one, and the vocabulary of its data.

        Raises:
            ConfigError: `run` is no run folder, or its data has no `encode` and `decode`.
            CheckpointError: there is no such checkpoint, or it is damaged.
            DataError: the data is missing.
        """
        if not (run / "resolved.yaml").is_file():
            rule = "is not a run folder: it has no resolved.yaml. The vocabulary comes from the data of the run."
            raise ConfigError([Problem(key=str(run), rule=rule)])
        cfg = run_config(run)
        with allow_packages(packages):
            model = load_model(run, checkpoint=checkpoint, packages=packages)
            data = build_split(cfg.data, "train")
        lacking = [name for name in ("encode", "decode") if not callable(getattr(data, name, None))]
        if lacking:
            rule = f"has no {' and no '.join(lacking)}: a text needs encode(text) -> tokens, decode(tokens) -> text."
            raise ConfigError([Problem(key="data", value=type(data).__name__, rule=rule)])
        use_device(device := torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        return cls(model.to(device), data)

    def encoded(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of prompts.

        Raises:
            ConfigError: a prompt has no token of the vocabulary.
        """
        tokens = [list(self.data.encode(prompt)) for prompt in prompts]
        refuse(
            Problem(key="prompt", value=repr(prompt), rule="has no token of the model's vocabulary.")
            for prompt, encoded in zip(prompts, tokens, strict=True)
            if not encoded
        )
        return tokens

    def left_out(self, prompts: Sequence[str]) -> str:
        """Return the characters of prompts that the vocabulary does not have, each once."""
        present = {letter for tokens in self.encoded(prompts) for letter in self._decoded(tokens)}
        return "".join(sorted({letter for prompt in prompts for letter in prompt} - present))

    def write(
        self,
        prompts: Sequence[str],
        *,
        sampling: Sampling,
        max_tokens: int,
        seed: int,
        on_text: OnText | None = None,
    ) -> list[str]:
        """Return the continuation of each prompt; arguments as in `trainkit.generate`."""
        encoded = self.encoded(prompts)
        texts = [_GrowingText(self._decoded, tokens) for tokens in encoded]

        def receive(indices: Sequence[int], tokens: Sequence[int]) -> None:
            for index, token in zip(indices, tokens, strict=True):
                texts[index].tokens.append(token)
                if on_text is not None and (piece := texts[index].next_piece()):
                    on_text(index, piece)

        generate(self.model, encoded, sampling=sampling, max_tokens=max_tokens, seed=seed, on_tokens=receive)
        for index, text in enumerate(texts):
            if (rest := text.next_piece(ended=True)) and on_text is not None:
                on_text(index, rest)
        return [text.text for text in texts]

    def _decoded(self, tokens: list[int]) -> str:
        try:
            text: str = self.data.decode(tokens)
        except (IndexError, KeyError, ValueError) as error:
            rule = f"cannot decode token {tokens[-1]} of the model: {named_first_line(error)}. Has the data changed?"
            raise ConfigError([Problem(key="data", value=type(self.data).__name__, rule=rule)]) from error
        return text


class _GrowingText:
    """The text of a growing sequence of tokens, decoded on demand."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode, self.tokens = decode, list(prompt)
        self._start = len(decode(self.tokens))
        self.text = ""

    def next_piece(self, *, ended: bool = False) -> str:
        """Return the new piece of the text; empty while its last character is incomplete, unless the text has ended."""
        text = self._decode(self.tokens)[self._start :]
        if text.endswith("\ufffd") and not ended:
            return ""
        before, self.text = self.text, text
        return text[len(before) :]
