"""Two trainings with one fingerprint, and one training with two, are caught here alone."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import yaml

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


def test_a_key_has_its_tag() -> None:
    keys = {
        "maths": "seed model.hidden model._target_ optimizer.lr optimizer.groups.no_decay.weight_decay nonsense.key",
        "placement": "stop_at_step strategy._target_ strategy.device",
        "speed": "loader.num_workers",
        "cosmetic": "name callbacks.plots._target_ logger.tensorboard.images",
    }
    run = cfg()
    for tag, names in keys.items():
        assert {name: tag_of(run, tuple(name.split("."))).tag.value for name in names.split()} == dict.fromkeys(
            names.split(), tag
        )
    assert maths_keys(run)["optimizer.lr"] == 0.001
    assert "strategy.device" not in maths_keys(run)


def test_strategies_share_a_fingerprint() -> None:
    assert fingerprint(cfg("strategy=one_device")) == fingerprint(cfg("strategy=mirrored", "strategy.replicas=3"))


def test_a_strategy_that_changes_the_result_has_its_own_fingerprint_unless_its_value_is_neutral() -> None:
    plain = fingerprint(cfg())
    assert fingerprint(cfg(strategy=strategy("Averaging"))) != plain
    assert fingerprint(cfg(strategy=strategy("Elsewhere", compression="none", port=9))) == plain
    assert fingerprint(cfg(strategy=strategy("Elsewhere", compression="bf16"))) != plain


KEEPING = (
    "name=x log_every_steps=3 checkpoint.keep_last=5 eval.every_epochs=2 stop_at_step=3 resume=auto callbacks=[] "
    "logger=[] loader.num_workers=2 loader.cache=false numerics.lanes=4 lr_scaling.rule=sqrt warmup.start=base "
    "precision.initial_scale=2.0 sweep.name=x"
)
CHANGING = (
    "seed=1 epochs=2 batch.global_size=32 batch.micro_size=8 batch.drop_last=true loader.shuffle=false "
    "loader.cache=true clip.max_norm=1 numerics.reproducible=true model.dropout=0.1 optimizer.lr=0.1 optimizer=sgd "
    "schedule=linear precision=fp64 objective.label_smoothing=0.1 warmup.steps=3 optimizer.groups={} init_from=x"
)


def test_what_can_change_the_result_alone_changes_the_fingerprint() -> None:
    plain = fingerprint(cfg())
    assert [argument for argument in KEEPING.split() if fingerprint(cfg(argument)) != plain] == []
    assert [argument for argument in CHANGING.split() if fingerprint(cfg(argument)) == plain] == []
    assert fingerprint(cfg("epochs=2")) == fingerprint(cfg("epochs=2.0")), "numbers count by value"


def test_a_difference_says_what_can_matter_first() -> None:
    found = difference(cfg(), cfg("strategy=mirrored", "optimizer.lr=0.1", "name=b"))
    assert next((item.key, item.tag.value) for item in found) == ("optimizer.lr", "maths")
    tags = {item.key: item.tag.value for item in found}
    assert {key for key, tag in tags.items() if tag == "maths"} == {"optimizer.lr"}
    assert (tags["name"], tags["strategy.replicas"], tags["strategy.bucket_mb"]) == ("cosmetic", "placement", "speed")
    assert difference(cfg(), cfg()) == []


@pytest.mark.parametrize("swapped", [False, True])
def test_a_key_that_only_one_run_has_matters_unless_it_is_neutral(swapped: bool) -> None:
    target = f"{__name__}.Elsewhere"
    runs = [cfg(), cfg(strategy={"_target_": target, "port": 1, "compression": "none"})]
    squeezed = [cfg(), cfg(strategy={"_target_": target, "port": 1, "compression": "bf16"})]
    if swapped:
        runs, squeezed = runs[::-1], squeezed[::-1]
    assert [item.key for item in difference(*runs) if item.matters] == []
    assert [item.key for item in difference(*squeezed) if item.matters] == ["strategy.compression"]


def test_a_run_survives_the_way_through_yaml(tmp_path: Path) -> None:
    run = cfg("optimizer.lr=1e-5", "epochs=0.5")
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(run.to_dict()))
    assert load_resolved(tmp_path / "resolved.yaml") == run


def test_a_resolved_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("sed: 3\nseed: x\n")
    with pytest.raises(ConfigError, match=r"sed: no such key\. .*\n.*seed=x: must be a whole number\. \("):
        load_resolved(tmp_path / "resolved.yaml")
