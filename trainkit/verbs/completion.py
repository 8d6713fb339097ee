"""Shell completion: verbs and flags by trainkit, choices and keys by Hydra."""

from __future__ import annotations

import os
import sys
from typing import Final

from trainkit.errors import ConfigError, Problem
from trainkit.verbs.call import VERBS, Call

__all__ = ["answer", "candidates"]

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
    """What the last word of a command line can become.

    Example:
        >>> candidates("trainkit pl", Call()), candidates("trainkit plan schedule=lin", Call())
        (['plan'], ['schedule=linear'])
    """
    words = line.split()[1:]
    last = "" if not line or line[-1].isspace() else (words.pop() if words else "")
    found = []
    if not any(word in VERBS for word in words):
        found += [verb for verb in VERBS if verb.startswith(last) and "=" not in last]
    if last.startswith("-"):
        flags = ("--help", "--version", "--multirun", "--config-dir", "--allow-package", "--cfg")
        return [flag for flag in flags if flag.startswith(last)]
    from trainkit.config.compose.jobs import complete  # noqa: PLC0415 - only where a key or choice is being completed

    overrides = [word for word in words if "=" in word]
    return found + complete(
        " ".join([*overrides, last]) if last else " ".join(overrides) + " ", config_dirs=call.config_dirs
    )
