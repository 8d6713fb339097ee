"""A shard on TPUs that is not keyed, spread or handed over is caught here alone, by a double of torch_xla."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.checks import assert_reference
from tests.contract.stepping import Case, run_rank
from trainkit.strategies import tpu
from trainkit.strategies.base import Numerics, PlanContext
from trainkit.strategies.tpu import Tpu

INSTALL = "In an environment of its own: pip install 'torch==2.9.0' 'torch_xla[tpu]==2.9.0'."


def problems(facts: PlanContext) -> list[str]:
    return [str(problem) for problem in Tpu().validate(facts)]


def test_where_torch_xla_is_missing_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "find_spec", lambda _: None)
    assert problems(PlanContext()) == [f"torch_xla: strategy=tpu needs it, and it is not installed. {INSTALL}"]


class Xla:
    """An importable torch_xla that computes on the CPU, and the calls it got."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        note = self.calls.append
        names = ("", ".runtime", ".core", ".core.xla_model", ".distributed", ".distributed.spmd")
        self.modules: dict[str, Any] = {f"torch_xla{name}": ModuleType(f"torch_xla{name}") for name in names}
        root = self.modules["torch_xla"]
        root.__spec__, root.__version__ = ModuleSpec("torch_xla", None), torch.__version__
        root.device, root.sync = lambda: torch.device("cpu"), lambda: note("sync")
        runtime, spmd = self.modules["torch_xla.runtime"], self.modules["torch_xla.distributed.spmd"]
        runtime.use_spmd, runtime.global_runtime_device_count = lambda: note("spmd"), lambda: 4
        self.modules["torch_xla.core.xla_model"].set_rng_state = lambda key: note(("key", key))
        spmd.Mesh = lambda ids, shape, names: SimpleNamespace(ids=ids, shape=shape, names=names)
        spmd.mark_sharding = self.mark

    def mark(self, tensor: Tensor, mesh: Any, axes: tuple[str | None, ...]) -> None:
        self.calls.append(("mark", tuple(tensor.shape), mesh.shape, axes))


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> Xla:
    fake = Xla()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


CASE = Case(strategy="tpu", global_size=16, micro_size=8, num_steps=3, max_norm=0.05)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.usefixtures("xla")
def test_its_steps_are_those_of_the_reference(optimizer: str) -> None:
    case = replace(CASE, num_steps=10, optimizer=optimizer, resume_at=4)
    assert_reference([run_rank(None, case)], case)


def test_every_step_is_handed_over_and_every_shard_is_keyed_and_spread(xla: Xla) -> None:
    run_rank(None, CASE)
    assert xla.calls[0] == "spmd"
    assert xla.calls.count("sync") == 3
    keys = [call for call in xla.calls if call[0] == "key"]
    assert len(keys) == len(set(keys)) == 5  # shards of 8, 8; 8, 8; and 5, which 4 devices do not share evenly
    assert [call for call in xla.calls if call[0] == "mark"] == [
        call
        for _ in range(4)
        for call in (("mark", (8, 6), (4,), ("samples", None)), ("mark", (8,), (4,), ("samples",)))
    ]


@pytest.mark.usefixtures("xla")
def test_what_xla_cannot_keep_is_refused() -> None:
    order, scale = problems(PlanContext(numerics=Numerics(reproducible=True), precision="fp16_mixed"))
    assert "numerics.reproducible=true: XLA chooses the order of sums itself" in order
    assert "precision=fp16_mixed: TPUs compute in bfloat16" in scale


def test_another_version_and_a_host_without_a_device_are_refused(xla: Xla, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise OSError("libtpu not found")

    monkeypatch.setattr(xla.modules["torch_xla.runtime"], "global_runtime_device_count", none)
    (problem,) = problems(PlanContext())
    assert "finds no device (libtpu not found). On a TPU host set PJRT_DEVICE=TPU" in problem
    xla.modules["torch_xla"].__version__ = "1.13.0"
    (problem,) = problems(PlanContext())
    assert "version 1.13 does not work with torch" in problem


@pytest.mark.engine
@pytest.mark.parametrize("devices", [1, 4])
def test_torch_xla_itself_trains_and_proves(devices: int, tmp_path: Path) -> None:
    python = os.environ.get("TRAINKIT_TEST_XLA")
    if python is None:
        pytest.skip("needs an environment with torch_xla, which takes a torch of its own: TRAINKIT_TEST_XLA=PYTHON")
    environ = os.environ | {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    for words in (("epochs=1",), ("prove",)):
        command = [python, "-m", "trainkit", *words, "strategy=tpu", f"hydra.run.dir={tmp_path}/run"]
        run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        assert (run.returncode, "rounding" in run.stdout or "finished" in run.stdout) == (0, True), run.stderr
