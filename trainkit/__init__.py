"""trainkit: one config, the same training anywhere, proven before you pay for it.

What a person may import is listed here; beside it, `trainkit.testing`, `trainkit.spark` and the names for `_target_`
(`trainkit.names`) stay when code moves. Any other module is internal.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainkit.api import compose, generate, load, session, train
    from trainkit.config.schema import RunConfig
    from trainkit.data.declaration import Declared, image, label
    from trainkit.data.stored import Samples, Stored
    from trainkit.errors import (
        CheckpointError,
        CollectiveMismatchError,
        ConfigError,
        CrashLoopError,
        DataError,
        HangError,
        LinkError,
        OutOfMemoryError,
        Problem,
        StorageError,
        TrainingError,
        TrainkitError,
    )
    from trainkit.fields import (
        Reads,
        a_file,
        a_folder,
        above,
        at_least,
        at_most,
        below,
        cosmetic,
        maths,
        placement,
        secret,
        speed,
        unit,
        within,
    )
    from trainkit.objectives.base import Access, Collective, Loss, Metric, Model, Objective, RunningMean, Supervised
    from trainkit.objectives.metrics import MeanOf, fresh_metrics
    from trainkit.objectives.tables import Result, Table
    from trainkit.strategies.base import StepOutcome
    from trainkit.trained.predict import predict
    from trainkit.trainer.events import Callback, Row, Run

__all__ = [
    "Access", "Callback", "CheckpointError", "Collective", "CollectiveMismatchError", "ConfigError",
    "CrashLoopError", "DataError", "Declared", "HangError", "LinkError", "Loss", "MeanOf", "Metric", "Model",
    "Objective", "OutOfMemoryError", "Problem", "Reads", "Result", "Row", "Run", "RunConfig", "RunningMean",
    "Samples", "StepOutcome", "StorageError", "Stored", "Supervised", "Table", "TrainingError", "TrainkitError",
    "__version__", "a_file", "a_folder", "above", "at_least", "at_most", "below", "compose", "cosmetic",
    "fresh_metrics", "generate", "image", "label", "load", "maths", "placement", "predict", "secret", "session",
    "speed", "train", "unit", "within",
]  # fmt: skip

__version__ = "0.1.0"

_HOMES: Final = {
    "api": "compose generate load session train",
    "trained.predict": "predict",
    "config.schema": "RunConfig",
    "data.declaration": "Declared image label",
    "data.stored": "Samples Stored",
    "errors": "CheckpointError CollectiveMismatchError ConfigError CrashLoopError DataError HangError LinkError "
    "OutOfMemoryError Problem StorageError TrainingError TrainkitError",
    "fields": "Reads a_file a_folder above at_least at_most below cosmetic maths placement secret speed unit within",
    "objectives.base": "Access Collective Loss Metric Model Objective RunningMean Supervised",
    "objectives.metrics": "MeanOf fresh_metrics",
    "objectives.tables": "Result Table",
    "strategies.base": "StepOutcome",
    "trainer.events": "Callback Row Run",
}
"""Module -> the names that it defines."""


def __getattr__(name: str) -> Any:
    """Return a name of the list, imported on first use: workers and plugins import this package too."""
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"trainkit.{home}"), name)


def __dir__() -> list[str]:
    """Return the names that users need."""
    return sorted([*__all__, "testing"])
