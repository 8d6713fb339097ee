"""Tags, fingerprints, differences."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest

from trainkit.config.compose import compose
from trainkit.config.identity import difference, fingerprint, maths_keys, tag_of
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError
from trainkit.fields import maths, placement


class Averaging:
    """A strategy of the test that changes the result."""

    changes_maths: ClassVar[bool] = True

    def __init__(self, every: int = 4, compression: Annotated[str, maths(neutral="none")] = "none") -> None: ...


class Elsewhere:
    def __init__(
        self, port: Annotated[int, placement] = 1, compression: Annotated[str, maths(neutral="none")] = "none"
    ) -> None: ...


def cfg(*arguments: str, **changes: Any) -> RunConfig:
    return RunConfig.from_dict({**compose(["recipe=null", *arguments]).values, **changes})


def strategy(name: str, **values: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **values}


@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("seed", "maths"),
        ("name", "cosmetic"),
        ("stop_at_step", "placement"),
        ("loader.num_workers", "speed"),
        ("model.hidden", "maths"),
        ("model._target_", "maths"),
        ("strategy._target_", "placement"),
        ("strategy.device", "placement"),
        ("optimizer.lr", "maths"),
        ("optimizer.groups.no_decay.weight_decay", "maths"),
        ("callbacks.plots._target_", "cosmetic"),
        ("logger.tensorboard.images", "cosmetic"),
        ("nonsense.key", "maths"),
    ],
)
def test_a_key_has_its_tag(key: str, tag: str) -> None:
    assert tag_of(cfg(), tuple(key.split("."))).tag.value == tag


def test_strategies_share_a_fingerprint() -> None:
    assert fingerprint(cfg("strategy=one_device")) == fingerprint(cfg("strategy=mirrored", "strategy.replicas=3"))


def test_a_strategy_that_changes_the_result_has_its_own_fingerprint() -> None:
    plain = fingerprint(cfg())
    assert fingerprint(cfg(strategy=strategy("Averaging"))) != plain


def test_a_neutral_value_is_not_hashed() -> None:
    plain = fingerprint(cfg())
    assert fingerprint(cfg(strategy=strategy("Elsewhere", compression="none", port=9))) == plain
    assert fingerprint(cfg(strategy=strategy("Elsewhere", compression="bf16"))) != plain


@pytest.mark.parametrize(
    "argument",
    [
        "name=x", "log_every_steps=3", "checkpoint.keep_last=5", "eval.every_epochs=2", "stop_at_step=3", "resume=auto",
        "callbacks=[]", "logger=[]", "loader.num_workers=2", "loader.cache=false", "numerics.lanes=4",
        "lr_scaling.rule=sqrt", "warmup.start=base", "precision.initial_scale=2.0", "sweep.name=x",
    ],
)  # fmt: skip
def test_what_cannot_change_the_result_keeps_the_fingerprint(argument: str) -> None:
    assert fingerprint(cfg(argument)) == fingerprint(cfg())


@pytest.mark.parametrize(
    "argument",
    [
        "seed=1", "epochs=2", "batch.global_size=32", "batch.micro_size=8", "batch.drop_last=true", "loader.shuffle=false",  # noqa: E501
        "loader.cache=true", "clip.max_norm=1", "numerics.reproducible=true", "model.dropout=0.1", "optimizer.lr=0.1",
        "optimizer=sgd", "schedule=linear", "precision=fp64", "objective.label_smoothing=0.1", "warmup.steps=3",
        "optimizer.groups={}", "init_from=x",
    ],
)  # fmt: skip
def test_what_changes_the_result_changes_the_fingerprint(argument: str) -> None:
    assert fingerprint(cfg(argument)) != fingerprint(cfg())


def test_numbers_count_by_value() -> None:
    assert fingerprint(cfg("epochs=2")) == fingerprint(cfg("epochs=2.0"))


def test_maths_keys_are_full_names() -> None:
    keys = maths_keys(cfg())
    assert keys["optimizer.lr"] == 0.001
    assert "strategy.device" not in keys


def test_a_difference_says_what_can_matter_first() -> None:
    found = difference(cfg(), cfg("strategy=mirrored", "optimizer.lr=0.1", "name=b"))
    assert next((item.key, item.tag.value) for item in found) == ("optimizer.lr", "maths")
    tags = {item.key: item.tag.value for item in found}
    assert {key for key, tag in tags.items() if tag == "maths"} == {"optimizer.lr"}
    told = {
        "name": "cosmetic",
        "strategy._target_": "placement",
        "strategy.device": "placement",
        "strategy.replicas": "placement",
        "strategy.bucket_mb": "speed",
    }
    assert {key: tags[key] for key in told} == told


@pytest.mark.parametrize("swapped", [False, True])
def test_a_key_that_only_one_run_has_matters_unless_it_is_neutral(swapped: bool) -> None:
    target = f"{__name__}.Elsewhere"
    runs = [cfg(), cfg(strategy={"_target_": target, "port": 1, "compression": "none"})]
    squeezed = [cfg(), cfg(strategy={"_target_": target, "port": 1, "compression": "bf16"})]
    if swapped:
        runs, squeezed = runs[::-1], squeezed[::-1]
    assert [item.key for item in difference(*runs) if item.matters] == []
    assert [item.key for item in difference(*squeezed) if item.matters] == ["strategy.compression"]


def test_equal_runs_have_no_difference() -> None:
    assert difference(cfg(), cfg()) == []


def test_a_run_survives_the_way_through_yaml(tmp_path: Path) -> None:
    import yaml

    run = cfg("optimizer.lr=1e-5", "epochs=0.5")
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(run.to_dict()))
    assert load_resolved(tmp_path / "resolved.yaml") == run


def test_a_resolved_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("sed: 3\nseed: x\n")
    with pytest.raises(ConfigError) as caught:
        load_resolved(tmp_path / "resolved.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        f"sed: no such key. ({tmp_path}/resolved.yaml)",
        f"seed=x: must be a whole number. ({tmp_path}/resolved.yaml)",
    ]
