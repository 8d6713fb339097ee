"""Evaluate the checkpoints of any run by hand: `python -m trainkit.run.session.evaluator_main RUN [DEVICE]`.

It scores existing and new checkpoints until the training has ended, or no process works in its folder; then it writes
the best checkpoint into the result of the run, which did not wait for it. It may be stopped and restarted: finished
evaluations are not repeated. The run does not depend on it, except that a checkpoint under evaluation is not removed,
and that the best checkpoint is recorded.

Exit codes: those of the exception (`trainkit.errors`); 129, 130 and 143 if it was stopped.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from trainkit.cluster.tasks import Identity, Task
from trainkit.config.schema import NO_RUN, RunConfig, load_resolved
from trainkit.config.targets.allowed import allow_packages
from trainkit.data.splits import validation_splits
from trainkit.errors import ConfigError, Problem, TrainkitError
from trainkit.redaction import masked_output
from trainkit.report.train_log import lasting_output
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.planning.plan import RunPlan, make_plan
from trainkit.run.session.auxiliary import bring_up_to_date, evaluate_checkpoints, training_has_ended
from trainkit.run.signals import EXIT_CODES, StopFlag
from trainkit.trainer.ownership import owner_lives


def main(arguments: list[str]) -> int:
    """Evaluate the run of a folder, on a device if one is named; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.run.session.evaluator_main", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path)
    parser.add_argument("device", metavar="DEVICE", nargs="?", default="cpu")
    parser.add_argument("--allow-package", metavar="PKG", action="append", default=[])
    options = parser.parse_args(arguments)
    packages = [name for names in options.allow_package for name in names.split(",")]
    folder = RunFolder(options.run)
    with masked_output(), lasting_output(), StopFlag() as stop:
        try:
            with allow_packages(packages):
                plan = _plan_of(folder, options.device)
                # in torch's spelling, with a number: torch makes no `cuda` the current device
                task = Task(role="evaluator", index=0, rank=1, device=plan.tasks[0].device)
                is_complete = evaluate_checkpoints(
                    plan,
                    Identity(task=task, num_ranks=2),
                    folder,
                    requested=lambda: stop.requested,
                    on_phase=lambda _phase, _step: None,
                    has_ended=lambda: training_has_ended(folder) or not owner_lives(folder.path / ".lock"),
                )
                if is_complete:
                    current = bring_up_to_date(folder)
                    best = folder.best_and_last()["best"]
                    print(f"All checkpoints of {folder.path} are evaluated. Best: {best or 'none'}.", flush=True)  # noqa: T201
                    if not current and folder.result.exists():
                        print(f"{folder.result} was not changed: another process uses the folder.", flush=True)  # noqa: T201
        except TrainkitError as error:
            print(error, file=sys.stderr)  # noqa: T201 - meant for the terminal
            return error.exit_code
    return EXIT_CODES[stop.requested or "finished"]


def _plan_of(folder: RunFolder, device: str) -> RunPlan:
    """Return the plan of the run for one device: the devices that it was trained on need not exist here."""
    key, origin = str(folder.path), "command line"
    if not folder.resolved.is_file():
        raise ConfigError([Problem(key="RUN", value=key, rule=NO_RUN, origin=origin)])
    # No logger and no callback runs, so that the variables of their secrets need not be set.
    values = {**load_resolved(folder.resolved).to_dict(), "logger": {}, "callbacks": {}}
    cfg = RunConfig.from_dict(values)
    alone = {"_target_": "trainkit.strategies.OneDevice", "device": device}
    plan = make_plan(replace(cfg, strategy=alone, cluster={}))
    if not validation_splits(plan.components.datasets):
        rule = "has no validation split to evaluate on."
        raise ConfigError([Problem(key="RUN", value=key, rule=rule, origin=origin)])
    return plan


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
