"""The public names of the classes that a config may name: code moves, these names do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final

_HOMES: Final[Mapping[str, Mapping[str, str]]] = {
    "adapters": {"Ema": "adapters.average", "Float8": "adapters.float8", "Swa": "adapters.average"},
    "callbacks": {
        "Alert": "callbacks.alert", "Confusion": "callbacks.figures",
        "EarlyStop": "callbacks.monitored", "Gpu": "callbacks.gpu", "Histograms": "callbacks.histograms",
        "Measurement": "callbacks.measurement", "Pictures": "callbacks.generated", "Plateau": "callbacks.monitored",
        "Plots": "callbacks.figures", "Profiler": "callbacks.profiler", "Progress": "callbacks.progress",
        "RangeTest": "measuring.range_test", "Sample": "callbacks.generated",
        "SamplePictures": "callbacks.figures",
    },
    "cluster": {
        "Debug": "cluster.debug", "Hardware": "run.estimates.hardware", "Local": "cluster.local",
        "Ray": "run.backends.ray",
        "Spark": "run.backends.spark", "Spec": "cluster.spec", "ThisMachine": "run.estimates.this_machine",
    },
    "data": {
        "BalancedClasses": "data.samplers", "Cifar10": "data.sets.images", "CropAndFlip": "data.batch_transforms",
        "CsvTable": "data.sets.tables", "CutMix": "data.batch_transforms", "Dicts": "data.collates",
        "Digits": "data.sets.images", "FashionMnist": "data.sets.images", "Friedman": "data.sets.synthetic",
        "ImageFiles": "data.sets.images", "ImageFolder": "data.sets.images",
        "JsonLines": "data.sets.json_lines", "Lists": "data.collates", "MixUp": "data.batch_transforms",
        "PadImages": "data.collates", "PadSequences": "data.collates", "PythonSource": "data.sets.text",
        "SparkFrame": "data.sets.spark_frame", "Splits": "data.splits", "Stream": "data.reading.iterable",
        "Synthetic": "data.sets.synthetic", "SyntheticTokens": "data.sets.synthetic", "TextFile": "data.sets.text",
        "TextLines": "data.sets.text", "TokenMemmap": "data.sets.text", "WeightsOf": "data.samplers",
    },
    "models": {
        "ConvNet": "models.convnet", "Ensemble": "models.ensemble", "Gan": "models.gan", "Gpt": "models.gpt",
        "Mlp": "models.mlp", "ResNet": "models.resnet",
    },
    "numerics": {"Precision": "numerics.precision"},
    "objectives": {
        "Adversarial": "objectives.adversarial", "Classification": "objectives.classification",
        "ConfusionMatrix": "objectives.metrics", "Distillation": "objectives.distillation",
        "LanguageModelling": "objectives.language_modelling", "LossPerSample": "objectives.per_sample",
        "ModelComputesLoss": "objectives.own_loss",
        "PerClass": "objectives.metrics", "Regression": "objectives.regression",
    },
    "schedules": {
        "Constant": "numerics.schedules", "Cosine": "numerics.schedules", "InverseSqrt": "numerics.schedules",
        "Linear": "numerics.schedules", "RateRange": "numerics.schedules", "Step": "numerics.schedules",
        "WarmupStableDecay": "numerics.schedules",
    },
    "strategies": {
        "CentralStorage": "strategies.central_storage", "DeviceMap": "strategies.device_map",
        "Fsdp": "strategies.mesh.strategy", "LocalSgd": "strategies.local_sgd", "Mesh": "strategies.mesh.strategy",
        "Mirrored": "strategies.data_parallel.strategy", "MultiWorkerMirrored": "strategies.data_parallel.strategy",
        "OneDevice": "strategies.one_device", "ParameterServer": "strategies.parameter_server",
        "Pipeline": "strategies.mesh.strategy", "TensorParallel": "strategies.mesh.strategy",
        "Tpu": "strategies.tpu",
    },
    "tracking": {
        "Mlflow": "tracking.tracker", "TensorBoard": "callbacks.tensorboard", "Trackio": "tracking.tracker",
        "Wandb": "tracking.tracker",
    },
}  # fmt: skip
"""Package -> class -> the module that defines it, below `trainkit`."""
NAMES: Final[Mapping[str, str]] = {
    f"trainkit.{package}.{kind}": f"trainkit.{home}"
    for package, kinds in _HOMES.items()
    for kind, home in kinds.items()
}
"""Public name -> the module that defines the class."""
_PUBLIC: Final[Mapping[str, str]] = {name.rpartition(".")[2]: name for name in NAMES}
"""Class -> public name; no two have one name."""


def lazy(package: str) -> Callable[[str], type]:
    """Return the `__getattr__` of a package: it imports a class by its public name on first use."""

    def find(name: str) -> type:
        home = NAMES.get(f"{package}.{name}")
        if home is None:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message)
        kind: type = getattr(import_module(home), name)
        return kind

    return find


def path_of(name: str) -> str:
    """Return the full path of a class by its public name; any other name is returned unchanged.

    Example:
        >>> path_of("trainkit.schedules.Cosine"), path_of("torch.optim.SGD")
        ('trainkit.numerics.schedules.Cosine', 'torch.optim.SGD')
    """
    return f"{NAMES[name]}.{name.rpartition('.')[2]}" if name in NAMES else name


def name_of(kind: type | Callable[..., Any]) -> str:
    """Return the name by which a config or a checkpoint records a class: the public one, if it has one.

    Example:
        >>> from fractions import Fraction
        >>> name_of(Fraction)
        'fractions.Fraction'
    """
    public = _PUBLIC.get(kind.__qualname__, "")
    return public if NAMES.get(public) == kind.__module__ else f"{kind.__module__}.{kind.__qualname__}"


def rule_of(name: str) -> str | None:
    """Return what is wrong with the name of a class of trainkit in a config; None for a public one, or of others.

    Example:
        >>> rule_of("trainkit.models.Mlp"), rule_of("trainkit.models.mlp.Mlp")
        (None, 'write trainkit.models.Mlp.')
    """
    if name in NAMES or not name.startswith("trainkit."):
        return None
    kind = name.rpartition(".")[2]
    matches = get_close_matches(kind, _PUBLIC, n=1)
    if not matches:
        return "trainkit has no class of this name for configs."
    return f"write {_PUBLIC[kind]}." if kind in _PUBLIC else f"there is no {kind}. Did you mean {_PUBLIC[matches[0]]}?"
