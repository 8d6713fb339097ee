"""Code of users that an installed wheel trains otherwise by strategy, or cannot train at all, is caught here alone.

The package `stories/` is copied away, and run by the interpreter of an environment that has the wheel alone.
"""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import quick

HERE: Final = Path(__file__).parent
STORIES: Final = sorted(file.stem for file in (HERE / "stories").glob("[a-z]*.py"))
PLAIN: Final = ("recommender", "tabular_weights")
"""Stories of the plain suite: fields by name, and a loss whose weight is counted."""
EVERY: Final = (
    "augmented_images",
    *(
        pytest.param(name, marks=pytest.mark.matrix)
        for name in ("diffusion", "inputs_in_place", "tabular_weights", "transformers_classifier", "translation")
    ),
)
"""Stories that are held to every strategy, one of them by default."""
REFUSED: Final = {("physics", "fsdp"): "reshards parameters after the first backward pass"}
"""(Story, strategy) -> why the strategy refuses it."""
EVERYWHERE: Final = {
    "mirrored": "proved and resumed",
    "fsdp": "proved and resumed",
    "central_storage": "proved and resumed",
    "device_map": "proved and resumed",
    "local_sgd": "resumed; another training by its own statement",
    "multi_worker_mirrored": "proved and resumed",
    "parameter_server": "proved and resumed",
    "pipeline": "refused: objective=",
    "tensor_parallel": "refused: strategy.plan=auto: ",
    "tpu": "refused: torch_xla: ",
}
"""Strategy -> how the result of a story begins."""
EXCEPTIONS: Final = {(name, "pipeline"): "proved and resumed" for name in ("augmented_images", "inputs_in_place")}
"""The stories with an objective that needs outputs and targets alone."""


def parameters() -> list[Any]:
    return [pytest.param(name, marks=[] if name in PLAIN else [pytest.mark.long]) for name in STORIES]


@pytest.fixture
def run_story(installed: Path, cwd: Path, clean_environ: dict[str, str]) -> Callable[..., list[str]]:
    """Runs a story as a user does, and returns what it prints."""
    shutil.copytree(HERE / "stories", cwd / "stories", ignore=shutil.ignore_patterns("__pycache__"))

    def run(*arguments: str, module: str = "stories") -> list[str]:
        command = quick.command(*arguments, module=module, python=installed / "python")
        done = subprocess.run(command, cwd=cwd, env=clean_environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("name", parameters())
def test_a_story_ends_alike_on_one_device_and_on_two_replicas(name: str, run_story: Callable[..., list[str]]) -> None:
    for line in run_story(name):
        strategy, _, result = line.partition(": ")
        reason = REFUSED.get((name, strategy.split()[0]))
        assert result.startswith("as one_device, ") if reason is None else reason in result, line


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EVERY)
def test_a_story_is_proved_and_resumed_by_each_strategy_or_refused_by_name(
    name: str, run_story: Callable[..., list[str]]
) -> None:
    outcomes = dict(line.split(": ", 1) for line in run_story(name, "every"))
    assert outcomes.keys() == EVERYWHERE.keys()
    for strategy, usual in EVERYWHERE.items():
        start = EXCEPTIONS.get((name, strategy), usual)
        assert outcomes[strategy].startswith(start), f"{strategy}: {outcomes[strategy]}"


@pytest.mark.long
def test_a_loop_of_ones_own_ends_alike_on_one_device_and_on_two_ranks(run_story: Callable[..., list[str]]) -> None:
    assert run_story(module="stories._own_loop") == ["mirrored: as one_device", "fsdp: as one_device"]
