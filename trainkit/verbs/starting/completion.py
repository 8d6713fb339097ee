"""Complete command lines in a shell: verbs and flags by trainkit, choices and keys by Hydra."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Final

from trainkit.errors import ConfigError, Problem
from trainkit.verbs.support.call import Call, parsed, parser_of, verb_of
from trainkit.verbs.support.table import VERBS

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
    verb, words = verb_of(words)
    flags, others, problems = parsed(verb, words)
    if words and words[-1] in [problem.key for problem in problems]:  # the shell completes the value of a flag
        return []
    matches = []
    choices = VERBS if verb is None else VERBS[verb].words
    if not any(word in others for word in choices):
        matches += [word for word in choices if word.startswith(last) and last[:1] != "-"]
    if last.startswith("-"):
        return [f"--{name}" for name in parser_of(verb)[1] if f"--{name}".startswith(last)]
    from trainkit.config.compose.jobs import complete  # noqa: PLC0415 - only where a key or choice is being completed

    overrides = [word for word in others if "=" in word]
    folders = [Path(name).expanduser() for name in flags.get("config-dir", ())]
    return matches + complete(
        " ".join([*overrides, last]) if last else " ".join(overrides) + " ",
        config_dirs=[*call.config_dirs, *(folder for folder in folders if folder.is_dir())],
    )


def _words_of(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that is still open
        return line.split()
