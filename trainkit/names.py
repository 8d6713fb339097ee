"""The public names of the classes that a config may name: code moves, these names do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Final

_HOMES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "adapters": {"adapters.average": ("Ema", "Swa"), "adapters.float8": ("Float8",)},
    "callbacks": {
        "callbacks.alerting.alert": ("Alert",), "callbacks.early_stop": ("EarlyStop",),
        "callbacks.figures.confusion": ("Confusion",), "callbacks.figures.histograms": ("Histograms",),
        "callbacks.figures.sample_pictures": ("SamplePictures",), "callbacks.gpu": ("Gpu",),
        "callbacks.measurement": ("Measurement",), "callbacks.pictures": ("Pictures",),
        "callbacks.plateau": ("Plateau",), "callbacks.plots": ("Plots",), "callbacks.profiler": ("Profiler",),
        "callbacks.progress": ("Progress",), "callbacks.sample": ("Sample",), "measuring.range_test": ("RangeTest",),
    },
    "cluster": {
        "cluster.local": ("Local",), "cluster.spec": ("Spec",),
        "run.backends.ray": ("Ray",), "run.backends.spark": ("Spark",),
        "run.estimates.hardware": ("Hardware",), "run.estimates.this_machine": ("ThisMachine",),
    },
    "data": {
        "data.batch_transforms": ("CropAndFlip", "CutMix", "MixUp"),
        "data.collates": ("Dicts", "Lists", "PadImages", "PadSequences"), "data.reading.iterable": ("Stream",),
        "data.samplers": ("BalancedClasses", "WeightsOf"), "data.sets.cifar10": ("Cifar10",),
        "data.sets.digits": ("Digits",), "data.sets.fashion_mnist": ("FashionMnist",),
        "data.sets.image_folder": ("ImageFolder",), "data.sets.json_lines": ("JsonLines",),
        "data.sets.several": ("Splits",), "data.sets.synthetic": ("Synthetic", "SyntheticTokens"),
        "data.sets.tables": ("CsvTable", "Friedman"), "data.sets.text": ("PythonSource", "TextFile"),
        "data.sets.token_memmap": ("TokenMemmap",), "data.sets.unlabelled": ("ImageFiles", "TextLines"),
    },
    "models": {
        "models.convnet": ("ConvNet",), "models.ensemble": ("Ensemble",), "models.gan": ("Gan",),
        "models.gpt": ("Gpt",), "models.mlp": ("Mlp",), "models.resnet": ("ResNet",),
    },
    "numerics": {"numerics.precision": ("Precision",)},
    "objectives": {
        "objectives.adversarial": ("Adversarial",), "objectives.classification": ("Classification",),
        "objectives.confusion": ("ConfusionMatrix", "PerClass"), "objectives.distillation": ("Distillation",),
        "objectives.language_modelling": ("LanguageModelling",), "objectives.own_loss": ("ModelComputesLoss",),
        "objectives.regression": ("Regression",),
    },
    "schedules": {
        "numerics.schedules": (
            "Constant", "Cosine", "InverseSqrt", "Linear", "RateRange", "Step", "WarmupStableDecay",
        ),
    },
    "strategies": {
        "strategies.central_storage.strategy": ("CentralStorage",),
        "strategies.data_parallel.strategy": ("Mirrored", "MultiWorkerMirrored"),
        "strategies.device_map.strategy": ("DeviceMap",), "strategies.fsdp.strategy": ("Fsdp",),
        "strategies.local_sgd.strategy": ("LocalSgd",), "strategies.one_device": ("OneDevice",),
        "strategies.parameter_server.strategy": ("ParameterServer",), "strategies.pipeline.strategy": ("Pipeline",),
        "strategies.tensor_parallel.strategy": ("TensorParallel",), "strategies.tpu": ("Tpu",),
    },
    "tracking": {
        "callbacks.tensorboard": ("TensorBoard",), "tracking.mlflow": ("Mlflow",),
        "tracking.trackio": ("Trackio",), "tracking.wandb": ("Wandb",),
    },
}  # fmt: skip
"""Package -> module -> its classes that a config may name as `trainkit.PACKAGE.Class`."""
NAMES: Final[Mapping[str, str]] = {
    f"trainkit.{package}.{name}": f"trainkit.{home}"
    for package, homes in _HOMES.items()
    for home, names in homes.items()
    for name in names
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
        found: type = getattr(import_module(home), name)
        return found

    return find


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
    near = get_close_matches(kind, _PUBLIC, n=1)
    if not near:
        return "trainkit has no class of this name for configs."
    return f"write {_PUBLIC[kind]}." if kind in _PUBLIC else f"there is no {kind}. Did you mean {_PUBLIC[near[0]]}?"
