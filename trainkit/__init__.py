"""trainkit: one config, the same training anywhere, proven before you pay for it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.api import compose, generate, load, session, train
    from trainkit.trained.predict import predict

__all__ = ["__version__", "compose", "generate", "load", "predict", "session", "train"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return a name of the api, imported on first use: workers and plugins import this package too."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module("trainkit.trained.predict" if name == "predict" else "trainkit.api"), name)


def __dir__() -> list[str]:
    """Return the names that users need."""
    return sorted([*__all__, "testing"])
