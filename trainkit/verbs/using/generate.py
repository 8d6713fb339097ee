"""`trainkit generate RUN --prompt TEXT`: continue texts with the language model of a run."""

from __future__ import annotations

import json
import sys
from numbers import Integral
from pathlib import Path
from typing import Any

from trainkit.errors import Problem, refuse
from trainkit.files import read_text
from trainkit.models.sampling import MAX_TOKENS, RULES, Sampling, broken_settings, temperature_of
from trainkit.trained.generate import Writer
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Print the texts; print that of a single prompt while it is generated."""
    problems = list[Problem]()
    options = {name: _number(call, name) for name in RULES if _flag(name) in call.flags}
    problems += [call.problem(_flag(name), rule) for name, rule in broken_settings(options)]
    prompts = _prompts(call, problems)
    refuse(problems)

    writer = Writer.of(
        Path(call.arguments[0]).expanduser(), checkpoint=call.flags.get("checkpoint", "last"), packages=call.packages
    )
    if left_out := writer.left_out(prompts):
        sys.stderr.write(f"not in the vocabulary, left out: {left_out!r}\n")
    alone = len(prompts) == 1 and "json" not in call.flags
    if alone:
        _write(prompts[0])
    texts = writer.write(
        prompts,
        sampling=Sampling(temperature=temperature_of(options), top_k=options.get("top_k"), top_p=options.get("top_p")),
        max_tokens=options.get("max_tokens", MAX_TOKENS),
        seed=options.get("seed", 0),
        on_text=(lambda _, piece: _write(piece)) if alone else None,
    )
    if "json" in call.flags:
        entries = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        _write(json.dumps({"format": 1, "texts": entries}, ensure_ascii=False, indent=2))
    elif not alone:
        _write("\n\n".join(prompt + text for prompt, text in zip(prompts, texts, strict=True)))
    _write("\n")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _number(call: Call, name: str) -> Any:
    """Return the number of a flag; its text if it is none."""
    text = call.flags[_flag(name)]
    try:
        return int(text) if RULES[name][0] is Integral else float(text)
    except ValueError:
        return text


def _prompts(call: Call, problems: list[Problem]) -> list[str]:
    """Return the prompts; add what is wrong with them to the problems."""
    flags = call.flags
    if "prompts" not in flags:
        return [flags.get("prompt", "\n")]
    if "prompt" in flags:
        problems.append(call.problem("prompts", "is given together with --prompt. Give one of the two."))
    file = Path(flags["prompts"]).expanduser()
    if not file.is_file():
        problems.append(call.problem("prompts", "is not a file."))
        return []
    prompts = [line for line in read_text(file, follow=True).splitlines() if line]
    if not prompts:
        problems.append(call.problem("prompts", "contains no prompt."))
    return prompts
