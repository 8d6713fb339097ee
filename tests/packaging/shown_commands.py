"""The commands that pages show: found by bash itself, and checked without being started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Final
from unittest.mock import patch

from tests.support.installing import ROOT
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.yaml_files import with_config_dirs
from trainkit.errors import ConfigError
from trainkit.fields import Reads
from trainkit.verbs.running.train import expand_folds
from trainkit.verbs.support.call import parse
from trainkit.verbs.support.points import sweep_points

COMPOSING: Final = ("train", "plan", "prove", "bench", "find", "scale", "advise", "emit", "explain")
"""Verbs that compose a config of their own; others read that of a run."""
RECORDING: Final = """\
record() {
  local name variables=()
  for name in "${!TRAINKIT_@}" "${!WANDB_@}"; do variables+=("$name=${!name}"); done
  printf '%s\\0' $((${#variables[@]} + $#)) "${variables[@]}" "$@" >>commands
}
command_not_found_handle() { record "$@"; }
for name in trainkit python python3 pip pytest torchrun ssh .venv/bin/{python,pip,pytest} scripts/check .ci/run; do
  eval "$name() { record $name \\"\\$@\\"; }"
done
"""
"""Bash with no command but its own: it records what it would start."""


def commands(blocks: Sequence[str], folder: Path) -> Iterator[list[str]]:
    """Yield the words of every command of blocks of bash, loops and variables expanded, behind its variables."""
    text = "".join(f"(\n{block}\n)\n" for block in blocks)
    done = subprocess.run(
        ["/bin/bash", "-c", RECORDING + text],
        cwd=folder, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "syntax error" not in done.stderr, done.stderr
    fields = iter((folder / "commands").read_text().split("\0")[:-1])
    for count in fields:
        yield [next(fields) for _ in range(int(count))]


def problem_of(command: Sequence[str]) -> str | None:
    """Return what is wrong with a command, behind the variables that are set for it; None where nothing is."""
    variables = dict(word.split("=", 1) for word in takewhile(re.compile(r"[A-Z_]+=").match, command))
    command = command[len(variables) :]
    unknown = [name for name in variables if name.startswith("TRAINKIT_") and name not in _variables()]
    if command[0].endswith("pip"):
        text = (ROOT / "pyproject.toml").read_text()
        pins = {word: re.sub(r"(==.*)\.0$", r"\1.*", word) for word in command if re.search(r"[<>=]=", word)}
        unknown += [word for word, required in pins.items() if f'"{required}"' not in text]
    elif "trainkit" in command:
        with patch.dict(os.environ, variables):
            return (
                f"no such variable: {unknown}"
                if unknown
                else _problem_of_trainkit(command[command.index("trainkit") + 1 :])
            )
    unknown += [
        word for word in command if re.match(r"(scripts|tests|benchmarks|\.ci)/", word) and not (ROOT / word).exists()
    ]
    unknown += [word for word in command if word.startswith("trainkit.") and find_spec(word) is None]
    return f"there is no {', '.join(unknown)}" if unknown else None


@cache
def _variables() -> set[str]:
    """The variables of the environment that the package names."""
    texts = (file.read_text() for file in (ROOT / "trainkit").rglob("*.py"))
    return {name for text in texts for name in re.findall(r"\bTRAINKIT_\w+", text)}


def _problem_of_trainkit(arguments: Sequence[str]) -> str | None:
    """Parse the arguments of trainkit and, for a verb that has a config of its own, compose and check it."""
    try:
        call, _ = parse(arguments)
        if call.verb not in COMPOSING or "simulate" in call.flags:
            return None
        absent = patch.object(Reads, "rule", return_value=None)  # files that a page only names
        with absent, allow_packages(call.packages), with_config_dirs(call.config_dirs):
            if call.verb == "train" and (call.multirun or "cv.folds" in " ".join(call.overrides)):
                sweep_points(expand_folds(call).overrides, call.config_dirs, call.packages)
            elif call.verb == "plan" and "," not in " ".join(call.overrides):
                call.compose(may_lack="data")
            else:
                call.compose_points()
    except ConfigError as error:
        problems = [problem for problem in error.problems if "Install it: pip install" not in problem.rule]
        return "\n".join(map(str, problems)) or None
    return None


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write the files that a page shows."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Make a folder the current one, which modules are imported from; they are forgotten at the end."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(folder)):
                del sys.modules[name]
