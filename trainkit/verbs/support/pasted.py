"""Build the commands that a verb prints for the user to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from trainkit.config.targets.allowed import package_arguments
from trainkit.config.yaml_files import config_dir_arguments
from trainkit.verbs.support.call import Call


def pasted(call: Call, verb: str, words: Iterable[str]) -> str:
    """Return a command with the config folders and packages of a call; `verb` is empty for a training.

    Example:
        >>> pasted(Call(packages=("mine",)), "plan", ["model=mlp", "--world", "8"])
        'trainkit plan --allow-package mine model=mlp --world 8'
    """
    given = [*config_dir_arguments(call.config_dirs), *package_arguments(call.packages)]
    return shlex.join(["trainkit", *([verb] if verb else []), *given, *words])
