"""`trainkit generate RUN --prompt TEXT`: continue texts with the language model of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from trainkit.config.grammar import COMMAND_LINE
from trainkit.errors import ConfigError, Problem
from trainkit.files import read_text
from trainkit.models.sampling_settings import MAX_TOKENS, RULES, broken_settings, temperature_of
from trainkit.verbs.support.call import Call, Flag
from trainkit.verbs.support.weights import checkpoint_flag

if TYPE_CHECKING:
    from trainkit.models.sampling import Sampling

USAGE: Final = "RUN --prompt TEXT"
FLAGS: Final[Mapping[str, Flag]] = {
    "prompt": Flag(help="the beginning of the text; a newline without it", value="TEXT"),
    "prompts": Flag(help="a file with a prompt on each line, computed as one batch", value="FILE"),
    "max-tokens": Flag(help="tokens to add; 200 without it", value="N"),
    "temperature": Flag(help="divides the scores; 0, the most likely token, without it", value="X"),
    "top-k": Flag(help="draw from the N most likely tokens", value="N"),
    "top-p": Flag(help="draw from the most likely tokens that have this probability together", value="X"),
    "seed": Flag(help="seed of the random numbers; 0 without it", value="N"),
    "checkpoint": Flag(help="the checkpoint: last, or best; last without it", value="WHICH"),
    "json": Flag(help="print prompts and texts as JSON"),
}


def run(call: Call) -> int:
    """Print the texts; print that of a single prompt while it is generated."""
    call.check_arity(arguments=1, overrides=False)
    settings = _Settings(call)
    from trainkit.api.texts import Writer  # noqa: PLC0415 - nothing is imported to refuse an argument

    writer = Writer.of(Path(call.arguments[0]).expanduser(), checkpoint=settings.checkpoint, packages=call.packages)
    if left_out := writer.left_out(settings.prompts):
        sys.stderr.write(f"not in the vocabulary, left out: {left_out!r}\n")
    alone = len(settings.prompts) == 1 and "json" not in call.flags
    if alone:
        _write(settings.prompts[0])
    texts = writer.write(
        settings.prompts,
        sampling=settings.sampling(),
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        on_text=(lambda _, piece: _write(piece)) if alone else None,
    )
    if "json" in call.flags:
        found = [{"prompt": prompt, "text": text} for prompt, text in zip(settings.prompts, texts, strict=True)]
        _write(json.dumps({"format": 1, "texts": found}, ensure_ascii=False, indent=2))
    elif not alone:
        _write("\n\n".join(prompt + text for prompt, text in zip(settings.prompts, texts, strict=True)))
    _write("\n")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _flag(name: str) -> str:
    return name.replace("_", "-")


class _Settings:
    """The flags of a call, read and checked together.

    Raises:
        ConfigError: every problem of the flags.
    """

    def __init__(self, call: Call) -> None:
        self._flags, self._problems = call.flags, list[Problem]()
        given = {name: self._number(name) for name in RULES if _flag(name) in call.flags}
        for name, rule in broken_settings(given):
            self._refuse(_flag(name), rule)
        self.max_tokens, self.seed = given.get("max_tokens", MAX_TOKENS), given.get("seed", 0)
        self.top_k, self.top_p, self.temperature = given.get("top_k"), given.get("top_p"), temperature_of(given)
        self.checkpoint = self._checkpoint()
        self.prompts = self._prompts()
        if self._problems:
            raise ConfigError(self._problems)

    def sampling(self) -> Sampling:
        """Return the rule by which tokens are chosen."""
        from trainkit.models.sampling import Sampling  # noqa: PLC0415 - imports torch

        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def _checkpoint(self) -> Literal["best", "last"]:
        try:
            return checkpoint_flag(self._flags)
        except ConfigError as error:
            self._problems += error.problems
            return "last"

    def _number(self, name: str) -> Any:
        """Return the number of a flag; its text if it is none."""
        text = self._flags[_flag(name)]
        try:
            return int(text) if RULES[name][0] is Integral else float(text)
        except ValueError:
            return text

    def _prompts(self) -> list[str]:
        if "prompts" not in self._flags:
            return [self._flags.get("prompt", "\n")]
        if "prompt" in self._flags:
            self._refuse("prompts", "is given together with --prompt. Give one of the two.")
        file = Path(self._flags["prompts"]).expanduser()
        if not file.is_file():
            self._refuse("prompts", "is not a file.")
            return []
        prompts = [line for line in read_text(file, follow=True).splitlines() if line]
        if not prompts:
            self._refuse("prompts", "contains no prompt.")
        return prompts

    def _refuse(self, name: str, rule: str) -> None:
        self._problems.append(Problem(key=f"--{name} {self._flags[name]}", rule=rule, origin=COMMAND_LINE))
