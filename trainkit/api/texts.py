"""Continue texts with the language model of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainkit.cluster.host import use_device
from trainkit.config.identity import run_config
from trainkit.config.targets.allowed import allow_packages
from trainkit.data.splits import build_split
from trainkit.errors import ConfigError, Problem
from trainkit.inference.generation import generate
from trainkit.models.sampling import Sampling
from trainkit.run.folder.model_file import load_model

OnText = Callable[[int, str], None]
"""Callback that receives the index of a prompt and the next piece of its text."""


@dataclass(frozen=True)
class Writer:
    """A language model with the vocabulary of the data that it was trained on."""

    model: nn.Module
    data: Any
    """The dataset, with `encode(text) -> tokens` and `decode(tokens) -> text`."""

    @classmethod
    def of(cls, run: Path, *, checkpoint: Literal["best", "last"], packages: Sequence[str]) -> Writer:
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
        problems = [
            Problem(key="prompt", value=repr(prompt), rule="has no token of the model's vocabulary.")
            for prompt, found in zip(prompts, tokens, strict=True)
            if not found
        ]
        if problems:
            raise ConfigError(problems)
        return tokens

    def left_out(self, prompts: Sequence[str]) -> str:
        """Return the characters of prompts that the vocabulary does not have, each once."""
        kept = {letter for tokens in self.encoded(prompts) for letter in self._decoded(tokens)}
        return "".join(sorted({letter for prompt in prompts for letter in prompt} - kept))

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

        def receive(places: Sequence[int], tokens: Sequence[int]) -> None:
            for place, token in zip(places, tokens, strict=True):
                texts[place].add(token)
                if on_text is not None and (piece := texts[place].next_piece()):
                    on_text(place, piece)

        generate(self.model, encoded, sampling=sampling, max_tokens=max_tokens, seed=seed, on_tokens=receive)
        for place, text in enumerate(texts):
            if (rest := text.next_piece(ended=True)) and on_text is not None:
                on_text(place, rest)
        return [one.text for one in texts]

    def _decoded(self, tokens: list[int]) -> str:
        try:
            text: str = self.data.decode(tokens)
        except (IndexError, KeyError, ValueError) as error:
            rule = (
                f"cannot decode token {tokens[-1]} of the model: {type(error).__name__}: {error}. Has the data changed?"
            )
            raise ConfigError([Problem(key="data", value=type(self.data).__name__, rule=rule)]) from error
        return text


class _GrowingText:
    """The text of a growing sequence of tokens, decoded on demand."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode, self._tokens = decode, list(prompt)
        self._start = len(decode(self._tokens))
        self.text = ""

    def add(self, token: int) -> None:
        """Append a token."""
        self._tokens.append(token)

    def next_piece(self, *, ended: bool = False) -> str:
        """Return the new piece of the text; empty while its last character is incomplete, unless the text has ended."""
        text = self._decode(self._tokens)[self._start :]
        if text.endswith("\ufffd") and not ended:
            return ""
        before, self.text = self.text, text
        return text[len(before) :]
