"""Complete command lines in a shell: verbs and flags by trainkit, choices and keys by Hydra."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainkit.errors import ConfigError, Problem
from trainkit.verbs.support.call import VERBS, Call, module_of, parser_of

_BASH: Final = """\
_trainkit() {
    local words
    words=$(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" "${COMP_WORDS[0]}" -sc query=bash 2>/dev/null)
    local IFS=$'\\n'
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
COMP_WORDBREAKS=${COMP_WORDBREAKS//:}
complete -o nospace -o default -F _trainkit trainkit
"""
_ZSH: Final = "autoload -U +X bashcompinit && bashcompinit\n" + _BASH
_FISH: Final = """\
complete -c trainkit -f -a '(env COMP_LINE=(commandline -cp) trainkit -sc query=fish 2>/dev/null)'
"""
_SCRIPTS: Final = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def answer(request: str, call: Call) -> int:
    """Print the script that installs completion, or the candidates for `COMP_LINE`."""
    action, _, shell = request.partition("=")
    if action not in ("install", "query") or shell not in _SCRIPTS:
        rule = f"must be install=SHELL, with one of {', '.join(_SCRIPTS)}."
        raise ConfigError([Problem(key="--shell-completion", value=request, rule=rule, origin="command line")])
    if action == "install":
        sys.stdout.write(_SCRIPTS[shell])
        return 0
    line = os.environ.get("COMP_LINE", "")
    sys.stdout.write("".join(f"{word}\n" for word in candidates(line, call)))
    return 0


def candidates(line: str, call: Call) -> list[str]:
    """Return the completions of the last word of a command line.

    Example:
        >>> candidates("trainkit pl", Call()), candidates("trainkit plan schedule=lin", Call())
        (['plan'], ['schedule=linear'])
        >>> candidates("trainkit emit sl", Call()), candidates("trainkit emit slurm --ti", Call())
        (['slurm'], ['--time'])
    """
    words = _words_of(line)[1:]
    last = "" if not line or line[-1].isspace() else (words.pop() if words else "")
    words, folders = _without_config_dirs(words)
    if folders and folders[-1] is None:  # the shell completes the name of the folder
        return []
    found = []
    verb = next((word for word in words if word in VERBS), None)
    module = None if verb is None else module_of(verb)
    if module is None:
        found += [name for name in VERBS if name.startswith(last) and "=" not in last]
    elif not any(word in words for word in getattr(module, "WORDS", ())):
        found += [word for word in getattr(module, "WORDS", ()) if word.startswith(last)]
    if last.startswith("-"):
        return [f"--{name}" for name in parser_of(verb)[1] if f"--{name}".startswith(last)]
    from trainkit.config.compose.jobs import complete  # noqa: PLC0415 - only where a key or choice is being completed

    overrides = [word for word in words if "=" in word and not word.startswith("-")]
    given = [Path(name).expanduser() for name in folders if name is not None]
    return found + complete(
        " ".join([*overrides, last]) if last else " ".join(overrides) + " ",
        config_dirs=[*call.config_dirs, *(folder for folder in given if folder.is_dir())],
    )


def _words_of(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that is still open
        return line.split()


def _without_config_dirs(words: Sequence[str]) -> tuple[list[str], list[str | None]]:
    """Return the words without `--config-dir` and its values, and the values; None for a value that is being typed."""
    rest: list[str] = []
    folders: list[str | None] = []
    left = iter(words)
    for word in left:
        if word in ("--config-dir", "-cd"):
            folders.append(next(left, None))
        elif word.startswith("--config-dir="):
            folders.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, folders
