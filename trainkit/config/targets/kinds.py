"""The kinds of classes that each place of the config accepts, checked before a target is called.

A class of the six packages has a kind by its base classes, or by the module that defines it. Classes and functions of a
package that the user allowed are of any kind: that package is trusted.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType, ModuleType, UnionType
from typing import Any, Final

from trainkit.config.targets.allowed import ALLOWED_PACKAGES, own_code, root_of
from trainkit.config.values import plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of classes that a config may name."""

    name: str
    """The name in messages."""
    bases: tuple[str, ...] = ()
    """Full names of base classes: a class that has one of them is of this kind."""
    home: str = ""
    """A module: a public class defined in it or below it is of this kind if it has all `methods`."""
    methods: tuple[str, ...] = ()

    def holds(self, target: type) -> bool:
        """Return whether a class is of this kind."""
        if any(_full_name(base) in self.bases for base in target.__mro__):
            return True
        if not self.home or not _within(target.__module__, (self.home,)):
            return False
        return all(any(name in vars(base) for base in target.__mro__) for name in self.methods)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The kinds and classes that a place of the config accepts."""

    kinds: tuple[Kind, ...]
    """The accepted kinds."""
    classes: tuple[type, ...] = ()
    """The accepted classes and their subclasses; empty accepts any class of these kinds."""
    place: str = ""
    """The name of the place in messages."""
    remedy: str = ""
    """Advice on what to write instead."""


_MODEL: Final = Kind(name="torch.nn.Module", bases=("torch.nn.modules.module.Module",))
_DATASET: Final = Kind(
    name="dataset",
    bases=("torch.utils.data.dataset.Dataset",),
    home="trainkit.data",
    methods=("__len__", "__getitem__"),
)
_CALLBACK: Final = Kind(name="trainkit Callback", bases=("trainkit.trainer.events.Callback",))
_CONFIG: Final = Kind(
    name="transformers PretrainedConfig",
    bases=tuple(f"transformers.configuration_utils.{name}" for name in ("PretrainedConfig", "PreTrainedConfig")),
)
_TOKENIZER: Final = Kind(
    name="transformers tokenizer", bases=("transformers.tokenization_utils_base.PreTrainedTokenizerBase",)
)
TORCH_SCHEDULER: Final = Kind(
    name="torch.optim.lr_scheduler.LRScheduler", bases=("torch.optim.lr_scheduler.LRScheduler",)
)
_GROUP_KINDS: Final[Mapping[str, Kind]] = {
    "model": _MODEL,
    "data": _DATASET,
    "objective": Kind(name="trainkit Objective", bases=("trainkit.objectives.base.Objective",)),
    "optimizer": Kind(name="torch.optim.Optimizer", bases=("torch.optim.optimizer.Optimizer",)),
    "schedule": Kind(name="trainkit schedule", home="trainkit.numerics.schedules", methods=("__call__",)),
    "strategy": Kind(name="trainkit Strategy", bases=("trainkit.strategies.base.Strategy",)),
    "precision": Kind(name="trainkit Precision", bases=("trainkit.numerics.precision.Precision",)),
    "average": Kind(name="trainkit Average", bases=("trainkit.adapters.average.Average",)),
    "convert": Kind(name="trainkit conversion", bases=("trainkit.adapters.float8.Float8",)),
    "cluster": Kind(name="trainkit Cluster", bases=("trainkit.cluster.base.Cluster",)),
    "hardware": Kind(name="trainkit Hardware", bases=("trainkit.run.estimates.hardware.HardwareChoice",)),
    "callbacks": _CALLBACK,
    "logger": _CALLBACK,
}
_NESTED: Final = (
    Kind(name="metric", bases=("torchmetrics.metric.Metric", "trainkit.objectives.base.Metric")),
    Kind(name="torch.utils.data.Sampler", bases=("torch.utils.data.sampler.Sampler",)),
    Kind(name="torchvision transform", home="torchvision.transforms", methods=("__call__",)),
    Kind(name="source of a stream", home="trainkit.data.sets", methods=("__iter__", "read")),
    _CONFIG,
    _TOKENIZER,
)
"""Kinds that occur only inside another node."""
_CALLED: Final = ("__call__",)
_HOOK_KINDS: Final = {
    "data.collate": (
        Kind(name="collate", home="trainkit.data.collates", methods=_CALLED),
        Kind(name="data collator of transformers", home="transformers.data.data_collator", methods=_CALLED),
    ),
    "data.batch_transform": (Kind(name="batch transform", home="trainkit.data.batch_transforms", methods=_CALLED),),
    "data.sampler": (Kind(name="function from a dataset to weights", home="trainkit.data.samplers", methods=_CALLED),),
}
_REMEDIES: Final = {
    "data.sampler": "Name one of your own, or trainkit.data.BalancedClasses; for the order of the dataset use "
    "loader.shuffle=false.",
}
ANY_KIND: Final = Expected(kinds=tuple(dict.fromkeys((*_GROUP_KINDS.values(), TORCH_SCHEDULER, *_NESTED))))
"""Expectation of a place without an annotation: any kind."""
PLACES: Final[Mapping[str, Expected]] = {
    **{group: Expected(kinds=(kind,), place=group) for group, kind in _GROUP_KINDS.items()},
    "schedule": Expected(kinds=(_GROUP_KINDS["schedule"], TORCH_SCHEDULER), place="schedule"),
    **{key: Expected(kinds=kinds, place=key, remedy=_REMEDIES.get(key, "")) for key, kinds in _HOOK_KINDS.items()},
}
"""Group of the config, or key of `data` that names code -> the kinds that its nodes must have."""

_HOMES: Final[Mapping[str, tuple[str, ...]]] = {
    "torch": (
        "torch.nn",
        "torch.optim",
        "torch.utils.data.dataset",
        "torch.utils.data.sampler",
        "torch.utils.data.distributed",
    )
}
"""Package -> the modules whose classes may be named; torch's data pipes, for example, unpickle the files that they
read.
"""
_UNPICKLES: Final = ("torchvision.datasets.lsun.",)
"""Classes that unpickle additional files without a checksum."""
_AUTO: Final[Mapping[str, Kind]] = {
    "transformers.models.auto.auto_factory._BaseAutoModelClass": _MODEL,
    "transformers.models.auto.configuration_auto.AutoConfig": _CONFIG,
    "transformers.models.auto.tokenization_auto.AutoTokenizer": _TOKENIZER,
}
"""Classes of transformers that have no kind themselves -> the kind of the objects that their builders make."""
_BUILDERS: Final[Mapping[str, str]] = {
    "torchvision": " and the builders of torchvision.models.list_models()",
    "timm": " and timm.create_model",
    "transformers": " and from_config and from_pretrained of its models, configs and tokenizers",
}


@lru_cache(maxsize=1024)  # a run asks hundreds of times
def target_problem(path: str, target: Any, expected: Expected = ANY_KIND) -> str | None:
    """Return why the target of a path in an allowed package must not be called at its place; None if it may be."""
    package, home = root_of(path), _home_of(target)
    if _is_builder_of_transformers(target):
        home = package  # a class of the user's package inherits these methods; their arguments are checked
    if root_of(home) != package:
        where = f"is defined in {home}" if home else "is defined in no module"
        return f"{where}, not in {package}. Name it where it is defined."
    if package not in ALLOWED_PACKAGES:
        return None
    if not isinstance(target, type):
        built = _built_kind(path, target)
        if built is None:
            return (
                f"is a function; of {package} a config may name classes{_BUILDERS.get(package, '')} only. {own_code()}"
            )
        return _misplaced(built, expected)
    return _class_problem(package, target, expected)


def _class_problem(package: str, target: type, expected: Expected) -> str | None:
    if not _within(target.__module__, _HOMES.get(package, (package,))):
        return f"is defined in {target.__module__}, which no config may name. {own_code()}"
    if _full_name(target).startswith(_UNPICKLES):
        return f"unpickles files, which can run any code in them. {own_code()}"
    if not any(kind.holds(target) for kind in expected.kinds):
        return _unfit(expected)
    if expected.classes and not issubclass(target, expected.classes):
        return _unfit(expected)
    return None


def _misplaced(built: Kind | type, expected: Expected) -> str | None:
    """Return why the result of a builder does not fit its place; None if it does."""
    if isinstance(built, type):
        return _class_problem(root_of(built.__module__), built, expected)
    accepted = [kind for kind in expected.kinds if not expected.classes or any(map(kind.holds, expected.classes))]
    return None if built in accepted else _unfit(expected)


def _unfit(expected: Expected) -> str:
    if expected.classes:
        return f"is no {' or '.join(kind.__name__ for kind in expected.classes)}, which this key takes."
    if expected.place:
        return f"is no {expected.kinds[0].name}, which {expected.place} needs. {expected.remedy}".rstrip()
    return f"is not of a kind that a config may name. {own_code()}"


def _built_kind(path: str, target: Any) -> Kind | type | None:
    """Return the kind or class of the object that a builder of the six packages makes; None for any other function."""
    if path == "timm.create_model":
        return _MODEL
    if _is_builder_of_transformers(target):
        owner = target.__self__
        auto = (kind for base in owner.__mro__ if (kind := _AUTO.get(_full_name(base))) is not None)
        is_of_kind = _MODEL.holds(owner) or _CONFIG.holds(owner) or _TOKENIZER.holds(owner)
        return owner if is_of_kind else next(auto, None)
    if root_of(path) == "torchvision":
        from importlib import import_module  # noqa: PLC0415 - torchvision is slow, and one of the six

        models = import_module("torchvision.models")
        name = getattr(target, "__name__", "")
        if name in models.list_models() and models.get_model_builder(name) is target:
            return _MODEL
    return None


def _is_builder_of_transformers(target: Any) -> bool:
    return (
        isinstance(target, MethodType)
        and isinstance(target.__self__, type)
        and target.__name__ in ("from_config", "from_pretrained")
        and root_of(target.__func__.__module__) == "transformers"
    )


def argument_problem(path: str, target: Any, node: Mapping[str, Any]) -> tuple[str, Any, str] | None:
    """Return the argument that would make an allowed target run or unpickle a downloaded or local file.

    Returns:
        The key, its value and the problem.
    """
    if path == "timm.create_model":
        return next(_timm_problems(node), None)
    if _is_builder_of_transformers(target) or root_of(path) == "transformers":
        return next(_transformers_problems(node), None)
    return None


def _timm_problems(node: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    name = node.get("model_name")
    if not isinstance(name, str) or ":" in name or "/" in name:
        rule = "must be a name of timm.list_models(): a model from a hub or a folder can be anyone's."
        yield "model_name", name, rule
    for key in ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay"):
        if node.get(key):
            rule = "timm unpickles the file that it names, which can run any code in it. Use init_from."
            yield key, node[key], rule


def _transformers_problems(node: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any, str]]:
    for name, value in node.items():
        key = f"{path}{name}"
        if name in ("trust_remote_code", "use_kernels") and value is not False and value is not None:
            yield key, value, f"runs code that is downloaded. {own_code()}"
        if "_implementation" in str(name) and isinstance(value, str) and "/" in value:
            yield key, value, f"a name with / is a kernel that is downloaded and run. {own_code()}"
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, Mapping):
            yield from _transformers_problems(inner, f"{key}.")


def keys_set_as_attributes(target: Any) -> tuple[str, ...]:
    """Return the keys that a config class of transformers takes beyond its signature: properties that can be set.

    `num_labels` is one: the constructor sets other arguments as attributes.
    """
    if not isinstance(target, type) or not _CONFIG.holds(target):
        return ()
    settable = (name for base in target.__mro__ for name, value in vars(base).items() if getattr(value, "fset", None))
    return tuple(dict.fromkeys(name for name in settable if not name.startswith("_")))


def expected_by(hint: Any) -> Expected:
    """Return what a parameter accepts by its annotation; any kind where the annotation leaves it open.

    Example:
        >>> expected_by(Any) is ANY_KIND, expected_by(dict[str, Any]) is ANY_KIND, expected_by(int).classes
        (True, True, (<class 'int'>,))
    """
    members = list(_classes_in(hint))
    classes = tuple(item for item in members if item is not None)
    return ANY_KIND if not classes or len(classes) < len(members) else Expected(kinds=ANY_KIND.kinds, classes=classes)


def _classes_in(hint: Any) -> Iterator[type | None]:
    """Yield the classes of an annotation, and None for a part that accepts anything."""
    hint = plain(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal or hint in (None, type(None), Ellipsis):
        return
    if isinstance(origin, type) and not _is_container(origin) and origin is not UnionType:
        yield origin  # Dataset[Tensor]
    elif origin is Callable:
        yield None
    elif arguments:
        mapping = isinstance(origin, type) and issubclass(origin, Mapping)
        for argument in arguments[1:] if mapping else arguments:
            yield from _classes_in(argument)
    else:
        is_open = hint in (Any, object) or not isinstance(hint, type) or getattr(hint, "_is_protocol", False)
        yield None if is_open or _is_container(hint) else hint


def _is_container(kind: type) -> bool:
    return kind.__module__ == "collections.abc" or issubclass(kind, list | tuple | dict | set | frozenset)


def _home_of(target: Any) -> str:
    """Return the module that defines a class or function; for any other object, the module of its class."""
    if isinstance(target, ModuleType):
        return target.__name__
    function = target.__func__ if isinstance(target, MethodType) else target
    module = getattr(function, "__module__", None)
    return module if isinstance(module, str) else ""


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _within(module: str, homes: tuple[str, ...]) -> bool:
    return any(f"{module}.".startswith(f"{home}.") for home in homes)
