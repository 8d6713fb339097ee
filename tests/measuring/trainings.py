"""Small trainings, and a way to run the turns of a measurement in this process."""

from __future__ import annotations

import time
from pathlib import Path

import trainkit
from trainkit.config.check import checked
from trainkit.config.grammar import replacing
from trainkit.config.schema import RunConfig
from trainkit.errors import TrainkitError
from trainkit.measuring.bench import Candidate, Turn, finished_turn
from trainkit.run.begin import RunRequest
from trainkit.run.runner import train


def config(*overrides: str) -> RunConfig:
    arguments = replacing(["recipe=null", "steps=40"], *overrides)
    return checked(trainkit.compose(arguments, packages=["tests"])).cfg


def candidate(label: str, *overrides: str) -> Candidate:
    return Candidate(label=label, cfg=config(*overrides), num_steps=40)


def run_turn(cfg: RunConfig, folder: Path) -> Turn:
    """Run a turn in this process, which is quicker than to start one."""
    started = time.time()
    train(RunRequest(cfg=cfg, run_dir=folder))
    return finished_turn(folder, started)


def run_training(cfg: RunConfig, folder: Path) -> Turn:
    """Train in this process what a measurement trains in one of its own."""
    try:
        train(RunRequest(cfg=cfg, run_dir=folder))
    except TrainkitError as error:
        return Turn(folder=folder, failure=str(error), error=type(error).__name__)
    return Turn(folder=folder)
