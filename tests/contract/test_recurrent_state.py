"""State per sample: declared, it equals that of a loop by hand under every strategy; not declared, it is refused.

A state of a sample that another sample reads, or that two replicas add up twice is caught here alone.
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.contract.running import CONF, run, weights
from tests.support.refusing import refused
from tests.support.zoo import Columns, Reader
from trainkit.cli import main
from trainkit.strategies.core.buffers import sample_dims_of

SAME = (
    "model=reader", "data=columns", "objective=classification", "objective.input=[input,column]", "optimizer=sgd",
    "optimizer.momentum=0", "optimizer.lr=0.5", "schedule=constant", "loader.shuffle=false", "batch.global_size=8",
    "steps=7", "eval.every_epochs=null",
)  # fmt: skip
STRATEGIES = {
    "one_device": ("strategy=one_device",),
    "central_storage": ("strategy=central_storage",),
    "device_map": ("strategy=device_map", "strategy.devices=[cpu]"),
    "compile.mode=step": ("compile.mode=step", "compile.backend=aot_eager"),
    "mirrored": ("strategy=mirrored", "strategy.replicas=2"),
    "mirrored, reproducible": ("strategy=mirrored", "strategy.replicas=3", "numerics.reproducible=true"),
    "fsdp": ("strategy=fsdp", "strategy.replicas=2"),
    "tensor_parallel": (
        "strategy=tensor_parallel", "strategy.replicas=1", "strategy.degree=2",
        "strategy.plan={head:rowwise_scattered}",
    ),
    "pipeline": ("strategy=pipeline", "strategy.stages=2", "objective.input=both"),
    "parameter_server": ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=2"),
}  # fmt: skip


def by_hand() -> dict[str, torch.Tensor]:
    """Train over whole batches of eight columns, the last of an epoch with five."""
    model, data = Reader().double(), Columns("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(7):
        batch = [data[index] for index in range(step % 4 * 8, min(step % 4 * 8 + 8, 29))]
        columns, targets = (torch.tensor([sample[key] for sample in batch]) for key in ("column", "target"))
        scores = model(torch.stack([sample["input"] for sample in batch]).double(), columns)
        optimizer.zero_grad()
        functional.cross_entropy(scores, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_declared_state_equals_that_of_a_loop_by_hand(strategy: str, tmp_path: Path) -> None:
    actual, expected = weights(run(tmp_path / "run", *SAME, "batch.micro_size=3", *STRATEGIES[strategy])), by_hand()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_state(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "whole", *SAME, "batch.micro_size=2")
    run(tmp_path / "part", *SAME, "batch.micro_size=2", "stop_at_step=3")
    resumed = run(tmp_path / "resumed", *SAME, "batch.micro_size=2", f"resume={tmp_path / 'part'}")
    assert resumed["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_local_sgd_adds_up_the_state_of_its_replicas(tmp_path: Path) -> None:
    local = ("strategy=local_sgd", "strategy.replicas=2", "strategy.average_every=2", "steps=2", "optimizer.lr=1e-30")
    state = weights(run(tmp_path / "run", *SAME, "batch.micro_size=2", *local))
    expected = weights(run(tmp_path / "one", *SAME, "steps=2", "optimizer.lr=1e-30"))
    assert state["memory.seen"].tolist() == [2] * 8
    assert torch.allclose(state["memory.hidden"], expected["memory.hidden"], rtol=1e-12)


@pytest.mark.parametrize("strategy", ["strategy=one_device", "strategy=mirrored"])
def test_state_that_is_not_declared_is_refused_by_name(strategy: str, tmp_path: Path) -> None:
    first, second = refused(run, tmp_path / "run", *SAME, "batch.micro_size=4", "model.declares=false", strategy)
    assert "has the buffer memory.hidden, and the shards of a step write different indices of its dim 1" in first
    assert "in the class of memory, sample_dims = {'hidden': 1}" in first
    assert "sample_dims = {'seen': 0}" in second


@pytest.mark.parametrize(
    ("settings", "number", "text"),
    [
        (("data.columns=6",), 2, "two shards of one of the first steps write the same index of it"),
        (("strategy=central_storage", "strategy.mode=async"), 1, "strategy.mode=async: "),
    ],
)
def test_state_that_two_shards_write_or_whose_steps_overlap_is_refused(
    settings: tuple[str, ...], number: int, text: str, tmp_path: Path
) -> None:
    problems = refused(run, tmp_path / "run", *SAME, "batch.micro_size=4", *settings)
    assert len(problems) == number
    assert text in problems[0]


@pytest.mark.parametrize(("declared", "text"), [({"hiden": 1}, "no buffer of this name"), ({"hidden": 3}, "(2, 8, 4)")])
def test_a_declaration_that_does_not_fit_is_refused(declared: dict[str, int], text: str) -> None:
    model = Reader().memory
    model.sample_dims = declared  # type: ignore[misc, assignment]
    assert text in refused(sample_dims_of, model)[0]


@pytest.mark.slow
def test_prove_compares_declared_state_with_a_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    proof = ["prove", "--config-dir", str(CONF), "--allow-package", "tests", *SAME, "batch.micro_size=4"]
    proof.append("precision=fp64")
    assert main([*proof, "--steps", "3", "strategy=mirrored", "strategy.replicas=2"]) == 0
    assert main([*proof, "--steps", "3", "strategy=mirrored", "strategy.replicas=2", "model.declares=false"]) == 2
    assert "write different indices of its dim 1" in capsys.readouterr().err
