"""Train one file, `trainkit train mine.py`: the model, the data and the loss are found in it by their names.

The text of the file decides; nothing of it is imported to find them. What is found becomes the keys that a person would
write: `recipe=null name=mine model=null model._target_=mine.Model ... objective.function=mine.loss`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from trainkit.config.grammar import COMMAND_LINE, key_of, setting
from trainkit.errors import ConfigError, Problem, UnreadableError, refuse
from trainkit.files import read_text, write_atomically


class _Part(NamedTuple):
    noun: str
    names: tuple[str, ...]
    """Names of the class or function."""
    bases: tuple[str, ...]
    """Without such a name, the only class that derives from one of these is meant; for data also one with samples by
    index, whatever it derives from.
    """
    choose: str
    """How a choice of trainkit is named instead."""


_PARTS: Final[Mapping[str, _Part]] = {
    "model": _Part("model", ("Model", "model"), ("Module", "Sequential"), "model=mlp"),
    "data": _Part("data", ("Data", "data"), ("Dataset", "IterableDataset", "TensorDataset"), "data=digits"),
    "objective": _Part("loss", ("Loss", "loss"), ("Objective", "Supervised"), "objective=classification"),
}
Definitions = Mapping[str, ast.ClassDef | ast.FunctionDef]


def arguments_of(file: str, overrides: Sequence[str]) -> tuple[list[str], str]:
    """Return the arguments that train a file, to be followed by those of the user, and the package that they name.

    Raises:
        ConfigError: the file is not Python, cannot be imported by its name, or a part is not found or found twice.
    """
    path = Path(file)
    module = path.with_suffix("").parts
    if path.is_absolute() or not all(map(str.isidentifier, module)):
        rule = "must lie in the current folder or below, each name made of letters, digits and _, to be imported."
        raise ConfigError([Problem(key=file, rule=rule, origin=COMMAND_LINE)])
    try:
        tree = ast.parse(read_text(path, follow=True), filename=file)
    except UnreadableError as error:
        raise ConfigError([Problem(key=file, rule=f"{error.reason}.", origin=COMMAND_LINE)]) from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError([Problem(key=file, rule=f"is no Python: {error}.", origin=COMMAND_LINE)]) from error
    kinds = (ast.ClassDef, ast.FunctionDef)
    defined = {node.name: node for node in tree.body if isinstance(node, kinds)}
    keys = {key_of(line) for line in overrides}
    named_elsewhere = bool(keys & {"recipe", "experiment"})
    arguments = [] if named_elsewhere else ["recipe=null", *([] if "name" in keys else [f"name={module[-1]}"])]
    problems = list[Problem]()
    for group, part in _PARTS.items():
        if keys & {group, f"{group}._target_"}:
            continue
        names = _candidates(part, defined)
        if len(names) == 1:
            dotted = ".".join([*module, names[0]])
            is_function = group == "objective" and isinstance(defined[names[0]], ast.FunctionDef)
            target = "trainkit.objectives.LossPerSample" if is_function else dotted
            # without the default choice, whose keys would be left out one by one
            arguments += [setting(group, None), setting(f"{group}._target_", target)]
            arguments += [setting("objective.function", dotted)] if is_function else []
        elif names:
            rule = f"has several that may be the {part.noun}: {', '.join(names)}. Name one of them {part.names[0]}"
            rule += f", or give {group}._target_={'.'.join([*module, names[-1]])}."
            problems.append(Problem(key=file, rule=rule, origin=COMMAND_LINE))
        elif not named_elsewhere:
            rule = f"has no {part.noun}: no {' or '.join(part.names)}, and no class derived from {part.bases[0]}. "
            rule += f"It defines {', '.join(defined) or 'nothing'}. Write one, or choose one: {part.choose}."
            assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
            if any(isinstance(target, ast.Name) and target.id in part.names for target in assigned):
                rule += f" A {part.noun} that is assigned is not found: write it as a class or a function."
            problems.append(Problem(key=file, rule=rule, origin=COMMAND_LINE))
    refuse(problems)
    return arguments, module[0]


def _candidates(part: _Part, defined: Definitions) -> list[str]:
    if names := [name for name in part.names if name in defined]:
        return names
    indexed = {"__len__", "__getitem__"} if part.noun == "data" else set[str]()
    return [
        name
        for name, node in defined.items()
        if _derives(node, part.bases, defined)
        or (indexed and indexed <= {item.name for item in node.body if isinstance(item, ast.FunctionDef)})
    ]


def _derives(node: ast.ClassDef | ast.FunctionDef, bases: Sequence[str], defined: Definitions) -> bool:
    """Return whether a class derives from one of these, `Module` or `nn.Module`, itself or by a class of the file."""
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).rpartition(".")[2]
        if name in bases or (name != node.name and name in defined and _derives(defined[name], bases, defined)):
            return True
    return False


@contextmanager
def kept_in(folder: Path, file: Path) -> Iterator[None]:
    """Keep a copy of the file in the run's folder, from which a resume in any folder imports it."""
    copy = folder / "code" / file
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(copy, read_text(file, follow=True))
    yield
