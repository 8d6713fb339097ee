"""Assert the guarantees of trainkit in your own test suite, under pytest or any other runner.

Each function returns if its guarantee holds, and otherwise raises an AssertionError that names the differences. A
config with problems raises ConfigError, a training that fails another TrainkitError. All functions run real trainings
on this machine, in temporary folders.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.config.grammar import key_of
from trainkit.config.interface import called_from
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.yaml_files import with_config_dirs
from trainkit.errors import ConfigError, Problem, refuse
from trainkit.verbs.support.call import Call

if TYPE_CHECKING:
    from trainkit.prove.comparing import Comparison

__all__ = ["assert_resumes", "assert_same_training"]

_SHOWN = 10
"""Largest number of tensors in a message."""


@called_from("python")
def assert_same_training(
    overrides: Sequence[str],
    *,
    strategies: Sequence[str],
    steps: int = 4,
    same_cut: bool = False,
    config_dirs: Sequence[str | Path] = (),
    packages: Sequence[str] = (),
) -> None:
    """Assert that strategies train like one device, as `trainkit prove` compares them.

    Args:
        overrides: arguments as on the command line, `["recipe=mine", "model.width=8"]`.
        strategies: the name of each strategy with its keys, `"mirrored strategy.replicas=2"`.
        steps: optimizer steps to compare.
        same_cut: whether to compare only the numbers, with the same division of the steps into microbatches, instead of
            the two trainings as a user would start them.
        config_dirs: folders of your own YAMLs.
        packages: your own packages that `_target_` may name.

    Raises:
        AssertionError: a strategy is a different training, or its numbers differ; the text is that of `trainkit prove`.
        ConfigError: every problem of the first config that has any.

    Example:
        assert_same_training(["recipe=digits"], strategies=["mirrored strategy.replicas=2", "fsdp strategy.replicas=2"])
    """
    from trainkit.verbs.running.prove import prove_points, report_lines  # noqa: PLC0415 - the verb prints; here only for this function

    if not 1 <= steps <= 1_000_000:
        raise ConfigError([Problem(key="steps", value=steps, rule="must be a whole number, 1 to 1,000,000.")])
    folders = tuple(Path(folder).absolute() for folder in config_dirs)
    flags = {"same-cut": True} if same_cut else {}
    calls = [
        Call(
            verb="prove",
            flags=flags,
            overrides=(*overrides, *_choice_of(strategy)),
            config_dirs=folders,
            packages=tuple(packages),
        )
        for strategy in strategies
    ]
    with allow_packages(packages), with_config_dirs(folders):
        proofs = prove_points(calls[0], [call.compose() for call in calls], steps=steps)
        failed = [
            "\n".join([*report_lines(proof), "", f"To reproduce it: {call.command}"])
            for call, proof in zip(calls, proofs, strict=True)
            if not proof.holds
        ]
    if failed:
        raise AssertionError("\n\n".join(failed))


@called_from("python")
def assert_resumes(
    overrides: Sequence[str],
    *,
    stop_at_step: int | None = None,
    then: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    packages: Sequence[str] = (),
) -> None:
    """Assert that a stopped and resumed training ends with the same weights as an uninterrupted one.

    The weights must be equal up to rounding, and to the bit with `numerics.reproducible=true`. All three trainings run
    in this process if the strategy needs only one: state that your code keeps in a module is then not detected.

    Args:
        overrides: arguments as on the command line; a few steps suffice.
        stop_at_step: the step after which the training is stopped; None: half of the steps.
        then: arguments of the resumed training, `["strategy=mirrored", "strategy.replicas=2"]`.
        config_dirs: folders of your own YAMLs.
        packages: your own packages that `_target_` may name.

    Raises:
        AssertionError: the weights differ; names the tensors and the usual causes.
        ConfigError: every problem of the config.

    Example:
        assert_resumes(["recipe=digits", "epochs=2"], then=["strategy=mirrored", "strategy.replicas=2"])
    """
    from trainkit.api import compose, train  # noqa: PLC0415 - imports torch
    from trainkit.config.check import check_names  # noqa: PLC0415
    from trainkit.config.resume import compose_resumed  # noqa: PLC0415
    from trainkit.prove.comparing import compare  # noqa: PLC0415
    from trainkit.prove.proving import last_weights  # noqa: PLC0415

    folders = tuple(Path(folder).absolute() for folder in config_dirs)
    quiet = [*(line for line in overrides if key_of(line) not in ("quiet", "hydra.run.dir")), "quiet=true"]
    with tempfile.TemporaryDirectory(prefix="trainkit-testing-") as scratch, with_config_dirs(folders):
        whole, parts = Path(scratch, "whole"), Path(scratch, "parts")
        composed = compose(quiet, config_dirs=folders, packages=packages)
        steps = int(train(composed, run_dir=whole)["steps"])
        stop = steps // 2 if stop_at_step is None else stop_at_step
        if not 0 < stop < steps:
            raise AssertionError(f"a training of {steps} steps cannot be stopped after step {stop} and resumed.")
        train(compose([*quiet, f"stop_at_step={stop}"], config_dirs=folders, packages=packages), run_dir=parts)
        resumed = compose_resumed(parts, [*then, "quiet=true"], config_dirs=folders, packages=packages)
        refuse(check_names(resumed))
        train(resumed)
        exact = composed.cfg.numerics.reproducible
        comparisons = list(compare(last_weights(whole), last_weights(parts), exact=exact))
    different = [comparison for comparison in comparisons if comparison.verdict == "different"]
    if different:
        raise AssertionError(_not_resumed(different, len(comparisons), steps=steps, stop=stop))


def _choice_of(strategy: str) -> list[str]:
    """Return the overrides of a strategy given as `NAME KEY=VALUE ...`."""
    name, *keys = shlex.split(strategy)
    return [name if "=" in name else f"strategy={name}", *keys]


def _not_resumed(different: Sequence[Comparison], total: int, *, steps: int, stop: int) -> str:
    shown = [f"  {comparison.name}  relative error {comparison.error:.2g}" for comparison in different[:_SHOWN]]
    more = [f"  and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
    first = (
        f"{steps} steps without a stop and {stop} + {steps - stop} steps with a resume end with different weights: "
        f"{len(different)} of {total} parameters and buffers differ"
    )
    last = (
        "A state that changes the training is missing in the checkpoint. Keep a counter of the model in a buffer, "
        "draw from torch's default generator, and return in `state` what a callback needs."
    )
    return "\n".join([first, *shown, *more, last])
