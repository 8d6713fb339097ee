"""Names that have moved: configs, run folders and imports with old names keep working.

`MODULES`, `NAMES` and `CLASSES` are the only table of old and new names. The old name of a module is an alias, which
looks every name up in the new module. Fingerprints are computed on the old names, so that they do not change when a
class moves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any, Final, Protocol, cast

MODULES: Final[Mapping[str, str]] = {
    "trainkit.data.digits": "trainkit.data.sets.digits",
    "trainkit.data.fashion_mnist": "trainkit.data.sets.fashion_mnist",
    "trainkit.data.image_folder": "trainkit.data.sets.image_folder",
    "trainkit.data.iterable": "trainkit.data.reading.iterable",
    "trainkit.data.synthetic": "trainkit.data.sets.synthetic",
    "trainkit.data.text": "trainkit.data.sets.text",
    "trainkit.data.token_memmap": "trainkit.data.sets.token_memmap",
    "trainkit.engine": "trainkit.trainer",
    "trainkit.run.engines": "trainkit.run.backends",
    "trainkit.run.engines.ray_train": "trainkit.run.backends.ray",
    "trainkit.run.evaluator": "trainkit.run.session.evaluator_main",
    "trainkit.run.worker": "trainkit.run.worker_main",
    "trainkit.strategies.central": "trainkit.strategies.central_storage",
    "trainkit.strategies.forward_backward": "trainkit.strategies.core.step",
    "trainkit.strategies.mirrored": "trainkit.strategies.data_parallel",
    "trainkit.strategies.multi_worker_mirrored": "trainkit.strategies.data_parallel",
    "trainkit.strategies.replica": "trainkit.strategies.core.replica",
    "trainkit.strategies.synchronous": "trainkit.strategies.core.synchronous",
}
"""Old module -> new; modules below an old package are below the new one unless they have a line of their own."""

NAMES: Final[Mapping[str, str]] = {
    "trainkit.objectives.own_loss.OwnLoss": "ModelComputesLoss",
    "trainkit.strategies.base.Bench": "TaskContext",
    "trainkit.strategies.base.Facts": "PlanContext",
    "trainkit.strategies.base.Outcome": "StepOutcome",
    "trainkit.strategies.base.Part": "StagePart",
    "trainkit.strategies.base.Placed": "LocalModel",
    "trainkit.strategies.base.Position": "StepCounter",
    "trainkit.strategies.base.Rule": "UpdateRule",
    "trainkit.strategies.base.Training": "StepContext",
    "trainkit.strategies.base.Update": "UpdateParams",
    "trainkit.strategies.base.Weighing": "LossWeighting",
    "trainkit.strategies.core.replica.Held": "PlacedModel",
    "trainkit.strategies.core.step.Divisor": "LossDivisor",
    "trainkit.strategies.core.step.StepWork": "ShardStep",
}
"""New module and old name of a class -> the new name."""

CLASSES: Final[Mapping[str, str]] = {
    "trainkit.objectives.metrics.TopK": "trainkit.objectives.classification.TopK",
}
"""Old full name of a class that moved without its module -> the new full name."""

_ORIGINAL_TARGETS: Final[Mapping[str, str]] = {
    **{new: old for old, new in CLASSES.items()},
    "trainkit.objectives.own_loss.ModelComputesLoss": "trainkit.objectives.own_loss.OwnLoss",
    "trainkit.strategies.data_parallel.Mirrored": "trainkit.strategies.mirrored.Mirrored",
    "trainkit.strategies.data_parallel.MultiWorkerMirrored": (
        "trainkit.strategies.multi_worker_mirrored.MultiWorkerMirrored"
    ),
}
"""New names whose old name does not follow from the table above."""
_ORIGINAL_MODULES: Final[Mapping[str, str]] = {new: old for old, new in MODULES.items()}


def current_name(path: str) -> str:
    """Return the current dotted name of a class or module; any other text is returned unchanged.

    Example:
        >>> current_name("trainkit.data.digits.Digits"), current_name("torch.optim.SGD")
        ('trainkit.data.sets.digits.Digits', 'torch.optim.SGD')
    """
    moved = _replaced(path, {**MODULES, **CLASSES})
    return f"{moved.rpartition('.')[0]}.{NAMES[moved]}" if moved in NAMES else moved


def original_name(path: str) -> str:
    """Return the first dotted name of a class, on which fingerprints are computed.

    Example:
        >>> original_name("trainkit.data.sets.digits.Digits"), original_name("torch.optim.SGD")
        ('trainkit.data.digits.Digits', 'torch.optim.SGD')
    """
    found = _replaced(path, _ORIGINAL_TARGETS)
    return found if found != path else _replaced(path, _ORIGINAL_MODULES)


def with_current_targets(values: Any) -> Any:
    """Return values of a config in which every `_target_` has its current name."""
    return _renamed(values, current_name)


def with_original_targets(values: Any) -> Any:
    """Return values of a config, nested or by dotted key, in which every `_target_` has its first name."""
    return _renamed(values, original_name)


def _renamed(values: Any, rename: Callable[[str], str]) -> Any:
    if isinstance(values, Mapping):
        return {
            key: rename(item)
            if isinstance(item, str) and str(key).rpartition(".")[2] == "_target_"
            else _renamed(item, rename)
            for key, item in values.items()
        }
    return [_renamed(item, rename) for item in values] if isinstance(values, list | tuple) else values


def _replaced(path: str, table: Mapping[str, str]) -> str:
    """Replace the longest prefix of a dotted name that is in the table; a file may contain names of any length."""
    old = max((old for old in table if f"{path}.".startswith(f"{old}.")), key=len, default="")
    return table[old] + path[len(old) :] if old else path


def moved_attribute(module: str, name: str) -> Any:
    """Return the object that a module once had under this name; for the `__getattr__` of the module.

    Raises:
        AttributeError: the module never had such a name.
    """
    old = f"{module}.{name}"
    home, _, new = current_name(old).rpartition(".")
    if f"{home}.{new}" == old:
        message = f"module {module!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(home), new)


class _HasCode(Protocol):
    """A loader of Python files, as `python -m` uses it."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a module."""


class _Alias(ModuleType):
    """The alias of a module under its old name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        new = import_module(current_name(self.__name__))
        return getattr(new, NAMES.get(f"{new.__name__}.{name}", name))


class _Loader:
    """Make aliases of modules that have moved."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the alias."""
        return _Alias(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Import the new module of an old name."""
        import_module(current_name(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the new module of an old name, for `python -m`."""
        name = current_name(fullname)
        spec = find_spec(name)
        assert spec is not None
        return cast("_HasCode", spec.loader).get_code(name)


class _Finder:
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of an old name; None for any other name."""
        del path, target
        name = current_name(fullname)
        if name == fullname:
            return None
        new = find_spec(name)
        if new is None:
            return None
        is_package = new.submodule_search_locations is not None
        return ModuleSpec(fullname, cast("Any", _Loader()), origin=new.origin, is_package=is_package)


def install() -> None:
    """Let Python import modules by their old names; a second call has no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(cast("Any", _Finder()))
