"""A resumed run that ends at its old stop, or silently trains with another seed, is caught here alone."""

from pathlib import Path

import pytest
import yaml

from trainkit.config.check import checked
from trainkit.config.compose import compose
from trainkit.config.identity import difference, other_training
from trainkit.config.resume import compose_resumed
from trainkit.config.schema import load_resolved
from trainkit.errors import ConfigError


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A run folder with the config that a run resolved."""
    given = ["recipe=null", "optimizer=sgd", "optimizer.lr=0.3", "batch.micro_size=16", "stop_at_step=5"]
    values = compose(given).values
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def test_the_config_is_that_of_the_run(earlier: Path) -> None:
    composed = compose_resumed(earlier, [])
    assert composed.values["optimizer"]["lr"] == 0.3
    assert composed.values["batch"]["micro_size"] == 16
    assert (composed.values["resume"], composed.run_dir, composed.run_dir_given) == ("auto", earlier, True)
    assert composed.origin("optimizer").where.startswith(f"{earlier}/resolved.yaml:")


def test_another_placement_is_taken(earlier: Path) -> None:
    composed = compose_resumed(earlier, ["strategy=mirrored", "strategy.replicas=3", "stop_at_step=null"])
    assert composed.values["strategy"]["replicas"] == 3
    assert "device" not in composed.values["strategy"]
    assert composed.values["stop_at_step"] is None
    assert other_training(difference(load_resolved(earlier / "resolved.yaml"), composed.cfg), run=earlier) == []


def test_another_training_is_refused_by_name(earlier: Path) -> None:
    composed = compose_resumed(earlier, ["optimizer.lr=0.1", "seed=1"])
    problems = other_training(difference(load_resolved(earlier / "resolved.yaml"), composed.cfg), run=earlier)
    told = [str(problem) for problem in composed.with_origins(ConfigError(problems)).problems]
    assert told[0] == f"seed=1: the run to resume, {earlier}, has 0. Give it the same value. (command line)"
    assert told[1].startswith(f"optimizer.lr=0.1: the run to resume, {earlier}, has 0.3.")


def test_what_ended_the_run_early_does_not_end_it_again(earlier: Path) -> None:
    composed = checked(compose_resumed(earlier, ["recipe=shakespeare", "quiet=true"]))
    assert (composed.values["stop_at_step"], composed.values["quiet"]) == (None, True)
    assert composed.notes == ("recipe=shakespeare has no effect: the run keeps what its own recipe set",)
    assert compose_resumed(earlier, ["stop_at_step=9"]).values["stop_at_step"] == 9
