"""`python -m stories NAME`: the story on one_device, and on two strategies of two replicas each.

Each must end, in fp64, in the weights and the metrics of one_device up to rounding. `python -m stories NAME every`
holds the story to the contract under every strategy: proved and resumed, or refused by name.
"""

import importlib
import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

import trainkit
from trainkit import ConfigError
from trainkit.testing import assert_resumes, assert_same_training

HEAD: Final = """# @package _global_
# {doc}
name: {name}
steps: 5
batch: {{global_size: 12, micro_size: 4}}
eval: {{every_steps: 3, batch_size: 5}}
"""
TWO: Final = ("mirrored strategy.replicas=2", "fsdp strategy.replicas=2")
EVERY: Final = (
    *TWO,
    "central_storage strategy.compute_devices=[cpu,cpu]",
    "device_map strategy.devices=[cpu,cpu]",
    "local_sgd strategy.replicas=2 strategy.average_every=2",
    "multi_worker_mirrored",
    "parameter_server strategy.workers=2 strategy.servers=1",
    "pipeline strategy.stages=2",
    "tensor_parallel strategy.degree=2",
    "tpu",
)
OTHER: Final = "this strategy is a different training from that of one_device"


def main(name: str, *, every: bool) -> None:
    story = importlib.import_module(f"stories.{name}")
    with tempfile.TemporaryDirectory() as scratch:
        conf = Path(scratch, "conf")
        (conf / "recipe").mkdir(parents=True)
        text = HEAD.format(doc=(story.__doc__ or "").splitlines()[0], name=name) + story.RECIPE
        (conf / "recipe" / f"{name}.yaml").write_text(text)
        options: dict[str, Any] = {"config_dirs": [conf], "packages": ["stories"]}
        recipe = [f"recipe={name}", "quiet=true", "callbacks=[]", "logger=[]"]
        if every:
            for strategy in EVERY:
                show(f"{strategy.split()[0]}: {outcome(recipe, strategy, options)}")
        else:
            same_results(recipe, Path(scratch), options)


def same_results(recipe: list[str], scratch: Path, options: dict[str, Any]) -> None:
    """Compare what each strategy trains with what one_device trains."""
    metrics, weights = train(recipe, scratch / "one", options)
    for number, strategy in enumerate(TWO):
        try:
            others, other_weights = train([*recipe, *choice(strategy)], scratch / str(number), options)
        except ConfigError as error:
            show(f"{strategy}: refused: {error.problems[0]}")
            continue
        for key, value in metrics.items():
            assert math.isclose(others[key], value, rel_tol=1e-9), f"{strategy}: {key} is {others[key]}, not {value}"
        for key, tensor in weights.items():
            message = f"{strategy}: {key} differs"
            torch.testing.assert_close(other_weights[key], tensor, rtol=1e-9, atol=1e-12, msg=message)
        show(f"{strategy}: as one_device, {metrics}")


def train(keys: list[str], folder: Path, options: dict[str, Any]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    result = trainkit.train(trainkit.compose([*keys, "precision=fp64"], **options), run_dir=folder)
    metrics: dict[str, float] = result["metrics"]
    assert result["status"] == "finished", result
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert "val/loss" in metrics, metrics
    weights = trainkit.load(folder, packages=options["packages"]).state_dict()
    return metrics, {key: tensor.double() for key, tensor in weights.items()}


def outcome(recipe: list[str], strategy: str, options: dict[str, Any]) -> str:
    """Return `proved and resumed`, `resumed` for one that declares itself another training, or the refusal."""
    try:
        assert_resumes([*recipe, *choice(strategy)], **options)
    except ConfigError as error:
        return f"refused: {error.problems[0]}"
    try:
        assert_same_training(recipe, strategies=[strategy], steps=3, **options)
    except ConfigError as error:
        return f"resumed; not proved: {error.problems[0]}"
    except AssertionError as error:
        if OTHER not in str(error):
            raise
        return "resumed; another training by its own statement"
    return "proved and resumed"


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def choice(strategy: str) -> list[str]:
    return f"strategy={strategy}".split()


if __name__ == "__main__":
    main(sys.argv[1], every=sys.argv[2:] == ["every"])
