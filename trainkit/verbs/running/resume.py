"""`trainkit resume RUN [overrides]`: continue a run in its own folder, from its last complete checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from trainkit.errors import ConfigError, Problem
from trainkit.verbs.running.train import exit_code, template_of
from trainkit.verbs.support.call import Call


def run(call: Call) -> int:
    """Resume a run; return the exit code."""
    from trainkit.api import choose_workers  # noqa: PLC0415 - nothing is imported to refuse an argument
    from trainkit.config.check import checked_names, checked_values  # noqa: PLC0415
    from trainkit.config.resume import compose_resumed  # noqa: PLC0415
    from trainkit.run.begin import continued  # noqa: PLC0415
    from trainkit.run.runner import train_composition  # noqa: PLC0415

    folder = Path(call.arguments[0]).expanduser()
    overrides, allowed = list(call.overrides), []
    if "give-up-reproducible" in call.flags:
        allowed.append("not_reproducible")
        if "numerics.reproducible=false" not in overrides:
            overrides.append("numerics.reproducible=false")
    if "new-schedule" in call.flags:
        allowed.append("new_schedule")
    if allowed:
        overrides.append(f"resume_allows=[{','.join(allowed)}]")
    changed = compose_resumed(folder, overrides, config_dirs=call.config_dirs, packages=call.packages)
    composition = checked_names(changed)
    try:
        with template_of(composition):
            composition = checked_values(composition)
            # Check this here too: without a checkpoint, a different training would start from scratch in the run.
            continued(composition.cfg, folder, folder / "checkpoints")
            return exit_code(train_composition(composition, choose_workers=choose_workers))
    except ConfigError as error:
        if type(error) is not ConfigError:
            raise
        raise composition.with_origins(ConfigError(_about_keys(error.problems, composition.given_keys))) from None


def _about_keys(problems: Sequence[Problem], keys: Collection[str]) -> Iterator[Problem]:
    """Yield the problems about keys that the person has given: a choice of a group stands for the keys that it sets.

    The problem of a strategy that cannot keep the guarantee of a reproducible run names the flag that gives it up.
    """
    groups = {key for key in keys if "." not in key}
    by_choice: dict[str, Problem] = {}
    for problem in problems:
        group = problem.key.partition(".")[0]
        if problem.key not in keys and group in groups and "the run to resume" in problem.rule:
            by_choice.setdefault(group, problem)
        elif "numerics.reproducible=true" in f"{problem.key}={str(problem.value).lower()} {problem.rule}":
            rule = f"{problem.rule} To continue the run without that guarantee: --give-up-reproducible."
            yield replace(problem, rule=rule)
        else:
            yield problem
    for group, first in by_choice.items():
        yield Problem(key=group, rule=f"sets {first.key}={first.value}: {first.rule}")
