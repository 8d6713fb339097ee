"""`trainkit resume RUN [placement overrides]`: continue a run in its own folder, from its last complete checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainkit.errors import ConfigError
from trainkit.verbs.running.train import exit_code
from trainkit.verbs.support.call import Call, Flag

USAGE: Final = "RUN [strategy=... stop_at_step=... and other placement]"
FLAGS: Final[Mapping[str, Flag]] = {}


def run(call: Call) -> int:
    """Resume a run; return the exit code."""
    from trainkit.api import choose_workers  # noqa: PLC0415 - nothing is imported to refuse an argument
    from trainkit.config.check import check_names, checked  # noqa: PLC0415
    from trainkit.config.identity import other_training  # noqa: PLC0415
    from trainkit.config.resume import compose_resumed  # noqa: PLC0415
    from trainkit.config.schema import load_resolved  # noqa: PLC0415
    from trainkit.run.runner import train_composition  # noqa: PLC0415

    call.check_arity(arguments=1)
    folder = Path(call.arguments[0]).expanduser()
    composition = compose_resumed(folder, call.overrides, config_dirs=call.config_dirs, packages=call.packages)
    problems = check_names(composition)
    if problems:
        raise ConfigError(problems)
    # Check this here too: without a checkpoint, a different training would start from scratch in the run.
    problems = other_training(load_resolved(folder / "resolved.yaml"), composition.cfg, run=folder)
    if problems:
        raise composition.with_origins(ConfigError(problems))
    return exit_code(train_composition(checked(composition), choose_workers=choose_workers))
