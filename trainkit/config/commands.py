"""Build commands that a user can paste into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.config.grammar import is_override
from trainkit.config.secrets import reference
from trainkit.config.targets.allowed import package_arguments
from trainkit.config.yaml_files import config_dir_arguments
from trainkit.redaction import REDACTED, redacted_argument


def printed_command(
    verb: str,
    words: Iterable[str | Path],
    *,
    config_dirs: Sequence[Path] | None = None,
    packages: Sequence[str] | None = None,
) -> str:
    """Return a command of trainkit with the config folders and packages that it needs, quoted for a shell.

    Args:
        verb: the verb; empty for a training.
        words: arguments, flags and overrides. A `Path` is an argument.
        config_dirs: the user's config folders; None for those of the running call.
        packages: the packages that targets may come from; None for those that this process allows.

    Example:
        >>> print(printed_command("evaluate", [Path("out/lr=0.1"), "data.path='my data'"], packages=["mine"]))
        trainkit evaluate --allow-package mine ./out/lr=0.1 'data.path='"'"'my data'"'"''
    """
    flags = [*config_dir_arguments(config_dirs), *package_arguments(packages)]
    return " ".join(map(shell_word, ["trainkit", *([verb] if verb else []), *flags, *words]))


def shell_word(word: str | Path) -> str:
    """Return one word of a command, quoted for a shell, with a reference to a variable in place of a secret.

    Example:
        >>> shell_word("logger.wandb.api_key=k7"), shell_word(Path("~runs"))[-6:]
        ("'logger.wandb.api_key=${oc.env:WANDB_API_KEY}'", "~runs'")
    """
    if isinstance(word, Path):
        return shlex.quote(_argument(word))
    shown = redacted_argument(word) if is_override(word) else word
    key, _, value = shown.partition("=")
    return reference(key) if REDACTED in value and is_override(word) else shlex.quote(shown)


def _argument(path: Path) -> str:
    """Return a path as the command line reads it: not as `key=value`, as a flag or as the home of a user."""
    text = str(path)
    if text.startswith("~"):
        return str(path.absolute())
    return f"./{text}" if is_override(text) or text.startswith("-") else text


def begun_by(environment: Mapping[str, Any]) -> list[str]:
    """Return program and arguments of the command that began a run, from its `environment.json`; empty if not known."""
    argv = (environment.get("begun") or environment).get("argv")
    return [text for text in argv if isinstance(text, str)] if isinstance(argv, list) else []


def repeating_command(environment: Mapping[str, Any]) -> str:
    """Return the command that repeats a run, from its `environment.json`; empty if no file has it.

    Of a run that later commands have continued, it is the command that began it.

    Example:
        >>> repeating_command({"argv": ["/usr/bin/trainkit", "recipe=digits", "callbacks=[]"]})
        "trainkit recipe=digits 'callbacks=[]'"
        >>> repeating_command({"argv": ["/usr/bin/trainkit", "resume", "run"]})
        ''
    """
    argv = begun_by(environment)
    is_ours = bool(argv) and Path(argv[0]).name in ("trainkit", "__main__.py")
    if not argv or (is_ours and argv[1:2] == ["resume"]):
        return ""
    program = "trainkit" if is_ours else f"python {shlex.quote(argv[0])}"
    return " ".join([program, *map(shell_word, argv[1:])])
