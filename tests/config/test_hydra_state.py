"""A program that uses Hydra itself and loses its state to a composition is caught here alone."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_dir, version
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from tests.config.conftest import Write
from trainkit.config.compose import compose
from trainkit.config.compose.jobs import run_job
from trainkit.config.yaml_files import shipped_conf


def state() -> tuple[object, ...]:
    base: Any = Singleton._instances.get(version.VersionBase)
    return (
        GlobalHydra.instance().is_initialized(),
        HydraConfig.instance().cfg,
        base.getbase() if base is not None else None,
        dict(BaseContainer._resolvers),
    )


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the root logger's handlers, and close those that Hydra opened."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()
    root.handlers[:] = before
    root.setLevel(level)


def test_composing_works_inside_a_program_that_uses_hydra_itself() -> None:
    outside = state()
    compose(["recipe=null", "seed=3", "model=absent"])
    assert state() == outside
    with initialize_config_dir(str(shipped_conf()), version_base="1.3"):
        before = state()
        assert compose(["recipe=null", "seed=3"]).values["seed"] == 3
        assert state() == before
        assert GlobalHydra.instance().is_initialized()
    GlobalHydra.instance().clear()


def test_resolvers_of_the_user_survive() -> None:
    OmegaConf.register_new_resolver("double", lambda value: 2 * int(value))
    try:
        assert compose(["recipe=null", "batch.micro_size=${double:4}"]).values["batch"]["micro_size"] == 8
        assert OmegaConf.has_resolver("double")
    finally:
        OmegaConf.clear_resolver("double")


def test_a_job_has_one_hydra_folder_with_the_values_that_were_checked(tmp_path: Path, handlers: None) -> None:
    composed = compose(["recipe=null", "steps=3", "seed=5"])
    before = state()
    assert run_job(composed, tmp_path, lambda: 42) == 42
    assert state() == before
    assert {path.name for path in (tmp_path / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    saved = yaml.safe_load((tmp_path / ".hydra" / "config.yaml").read_text())
    assert (saved["steps"], saved["epochs"], saved["seed"]) == (3, None, 5)
    assert yaml.safe_load((tmp_path / ".hydra" / "overrides.yaml").read_text()) == ["recipe=null", "steps=3", "seed=5"]
    run_job(compose(["recipe=null", "seed=6"]), tmp_path, lambda: None)
    assert yaml.safe_load((tmp_path / ".hydra" / "config.yaml").read_text())["seed"] == 5, "the first job's stay"


def test_hydra_settings_of_files_apply_to_the_job(tmp_path: Path, handlers: None, write_conf: Write) -> None:
    folder = write_conf({"recipe/mine.yaml": "hydra:\n  job: {name: mine}\n  run: {dir: elsewhere}\n"})
    composed = compose(["recipe=mine", "+hydra.job.env_set.TRAINKIT_OF_THE_TEST=7"], config_dirs=[folder])
    assert run_job(composed, tmp_path, lambda: os.environ["TRAINKIT_OF_THE_TEST"]) == "7"
    assert (str(composed.run_dir), composed.run_dir_given) == ("elsewhere", True)
    assert run_job(composed, tmp_path, lambda: HydraConfig.get().job.name) == "mine"
    assert list(tmp_path.glob("*.log")) == []  # train.log takes what the console shows
