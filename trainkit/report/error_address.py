"""The section of docs/errors.md that explains an error; the command line prints its address once, below the error.

An exception has its section by its class (`TrainkitError.anchor`), a problem of a config by the beginning of its key.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from trainkit.errors import ConfigError, MissingExtraError, Problem, TrainkitError

PAGE: Final = "docs/errors.md"
OTHER_KEYS: Final = "other-keys-and-files"
"""The section of a problem whose subject is of no other section: a key that does not exist, a file."""
COMMAND_LINE: Final = "command-line"
TARGETS: Final = "a-target-that-is-refused"
LAUNCH: Final = "cluster-and-launch"
SECTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "length-of-the-run": ("epochs", "steps", "stop_at_step"),
        "shards-of-a-step": ("batch",),
        "optimizer-and-learning-rate": ("optimizer", "optimizers", "lr_scaling", "warmup", "schedule", "clip"),
        "model": ("model", "average"),
        "compiling-and-memory": ("compile", "activation_checkpointing", "memory_format"),
        "objective": ("objective",),
        "data-and-loader": ("data", "loader"),
        "strategy": ("strategy",),
        "precision-and-reproducibility": ("precision", "convert", "numerics", "seed"),
        LAUNCH: ("cluster", "elastic", "supervisor", "torch_xla", "store"),
        "evaluation": ("eval", "cv", "predict", "prompt"),
        "callbacks-and-loggers": ("callbacks", "logger", "observer_errors", "log_every_steps", "report_page"),
        "hardware-of-a-plan": ("hardware", "tflops"),
        "sweeps-and-searches": ("sweep", "hydra"),
        "runs-and-resuming": ("resume", "init_from", "checkpoint", "run folder", "name"),
        "recipes": ("recipe", "defaults"),
    }
)
"""The sections of problems, each with the beginnings of its keys."""
_SECTION_OF: Final = {first: section for section, keys in SECTIONS.items() for first in keys}
_MOST: Final = 3
"""Sections that one line names."""


def address_line(error: TrainkitError) -> str:
    """Return the line below an error that names its section; of several problems, the first sections.

    Example:
        >>> address_line(ConfigError([Problem(key="seed", rule="..."), Problem(key="--k", rule="...")]))
        'More: docs/errors.md#precision-and-reproducibility, #command-line'
    """
    return f"More: {PAGE}#{', #'.join(anchors(error)[:_MOST])}"


def anchors(error: TrainkitError) -> list[str]:
    """Return the sections of an error, in the order of its problems, each once."""
    if not isinstance(error, ConfigError) or isinstance(error, MissingExtraError) or not error.problems:
        return [error.anchor]
    return list(dict.fromkeys(map(anchor_of_problem, error.problems)))


def anchor_of_problem(problem: Problem) -> str:
    """Return the section of one problem, by its key.

    Example:
        >>> anchor_of_problem(Problem(key="+strategy.map.embed", rule="..."))
        'strategy'
    """
    key = problem.key.lstrip("+~")
    if key.endswith("_target_") or key.startswith("--allow-package"):
        return TARGETS
    if key.startswith("-"):
        return COMMAND_LINE
    if key.startswith(("TRAINKIT_", "TF_CONFIG")):
        return LAUNCH
    first = key.partition(".")[0].partition("/")[0].partition("=")[0].partition(",")[0]
    return _SECTION_OF.get(first, OTHER_KEYS)
