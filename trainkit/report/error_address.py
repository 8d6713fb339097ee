"""Find the section of docs/errors.md that explains an error; the command line prints the command that shows it.

The page is part of the package, so that the command needs no network and no copy of the repository. An exception has
its section by its class (`TrainkitError.anchor`), a problem of a config by the prefix of its key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from trainkit.config.values import closest
from trainkit.config.yaml_files import shipped_docs
from trainkit.errors import MISSING, ConfigError, MissingExtraError, Problem, TrainkitError, yaml_text
from trainkit.report.schemas.looking import ErrorDocument, ToldProblem

PREFIX: Final = "errors"
"""Prefix of the word that names a section: `trainkit explain errors.SECTION`."""
OTHER_KEYS: Final = "other-keys-and-files"
"""The section of a problem whose subject has no other section: a key that does not exist, a file."""
COMMAND_LINE: Final = "command-line"
TARGETS: Final = "a-target-that-is-refused"
LAUNCH: Final = "cluster-and-launch"
SECTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "length-of-the-run": ("epochs", "steps", "stop_at_step", "stop_after", "stop_after_record"),
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
        "runs-and-resuming": ("resume", "resume_allows", "changes", "init_from", "checkpoint", "run folder", "name"),
        "recipes": ("recipe", "defaults"),
    }
)
"""The sections of problems, each with the prefixes of its keys."""
_SECTION_OF: Final = {first: section for section, keys in SECTIONS.items() for first in keys}
_MOST: Final = 3
"""Number of sections that one line names."""


def error_document(error: TrainkitError) -> ErrorDocument:
    """Return an error as a verb with `--json` prints it.

    Example:
        >>> found = error_document(ConfigError([Problem(key="seed", value=-1, rule="must not be negative.")]))
        >>> found["exit_code"], found["problems"][0]["value"], found["sections"]
        (2, '-1', ['precision-and-reproducibility'])
    """
    problems = error.problems if isinstance(error, ConfigError) else ()
    return ErrorDocument(
        version=1,
        error=type(error).__name__,
        exit_code=error.exit_code,
        message=str(error),
        problems=[
            ToldProblem(
                key=problem.key,
                value=None if problem.value is MISSING else yaml_text(problem.shown_value),
                rule=problem.rule,
                origin=problem.origin,
            )
            for problem in problems
        ],
        sections=anchors(error),
    )


def address_line(error: TrainkitError) -> str:
    """Return the line below an error, with the command that shows its section; for several problems, the first
    sections.

    Example:
        >>> address_line(ConfigError([Problem(key="seed", rule="..."), Problem(key="--k", rule="...")]))
        'More: trainkit explain errors.precision-and-reproducibility errors.command-line'
        >>> address_line(ConfigError([Problem(key="</script>#batch", rule="...")]))
        'More: trainkit explain errors.other-keys-and-files'
    """
    return " ".join(["More: trainkit explain", *(f"{PREFIX}.{name}" for name in anchors(error)[:_MOST])])


def sections() -> dict[str, str]:
    """Return the sections of the page by their anchors, for a terminal: title and text; a link is its text, and the
    name of its section if that is on the page too.
    """
    text = (shipped_docs() / "errors.md").read_text(encoding="utf-8")
    parts = re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]
    return {anchor_of_title(part.partition("\n")[0]): _plain(part) for part in parts}


def section(name: str) -> str:
    """Return one section of the page.

    Raises:
        ConfigError: there is none of this name.
    """
    texts = sections()
    if name not in texts:
        near = closest(name, texts)
        hint = f"Did you mean {PREFIX}.{near}?" if near else f"trainkit explain {PREFIX} lists them."
        raise ConfigError([Problem(key=f"{PREFIX}.{name}", rule=f"no such section. {hint}", origin="command line")])
    return texts[name]


def anchor_of_title(title: str) -> str:
    """Return the anchor of a section's title in Markdown.

    Example:
        >>> anchor_of_title("Out of memory")
        'out-of-memory'
    """
    return re.sub(r"[^a-z0-9 _-]", "", title.strip().lower()).replace(" ", "-")


def _plain(text: str) -> str:
    without_marks = re.sub(r"^<!-- .* -->\n|^```\w*\n", "", text, flags=re.MULTILINE)
    on_this_page = re.sub(r"\[([^\]]*)\]\(#([^)]*)\)", rf"\1 ({PREFIX}.\2)", without_marks)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", on_this_page).strip()


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
