"""A layout that trains otherwise and is said to be right, or is blamed on another axis, is caught here alone.

A state that a resumed training forgets is found for the user's own config; that of the optimizer, here alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainkit.cli import main
from trainkit.prove.comparing import Comparison, Numbers
from trainkit.prove.examining import Difference, bitwise, ratio_of
from trainkit.prove.layouts import LayoutProof, differing_axes, meshes, row_of
from trainkit.strategies.core.optimizer import OptimizerStepper

EXPECTED = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
RIGHT = Comparison(name="param/w", verdict="rounding", error=1e-16, first_step=1)
WRONG = Comparison(name="param/w", verdict="different", error=0.5, first_step=1)


def numbers(*comparisons: Comparison, begins: Comparison | None = None) -> Numbers:
    return Numbers(precision="fp64", micro_size=2, steps=(1,), comparisons=comparisons, begins=begins)


def proof(*comparisons: Comparison, **mesh: int) -> LayoutProof:
    sizes = {"replicate": 1, "shard": 1, "pipe": 1, "context": 1, "tensor": 1} | mesh
    return LayoutProof(mesh=sizes, numbers=numbers(*comparisons))


def test_every_mesh_of_a_number_of_ranks_is_tried_once() -> None:
    for ranks, count in ((2, 5), (3, 5), (4, 15), (6, 25), (8, 35)):
        assert len({tuple(mesh.values()) for mesh in meshes(ranks)}) == len(meshes(ranks)) == count
    assert [max(mesh.values()) for mesh in meshes(4)] == [4] * 5 + [2] * 10


@pytest.mark.parametrize(
    ("gradient", "text"),
    [
        (EXPECTED * 2, "is exactly 2 times that of one device, the size of shard and of tensor"),
        (EXPECTED / 4, "is exactly 1/4 times that of one device, the size of replicate"),
        (EXPECTED * 3, "is exactly 3 times that of one device"),
        (EXPECTED * 1.7, "is 1.7 times that of one device"),
        (EXPECTED * 0, "is exactly 0 times that of one device"),
        (EXPECTED.flip(0), "has the elements of that of one device, permuted"),
        (EXPECTED + torch.tensor([0.0, 0.0, 1.0]), "is no multiple of that of one device: relative error 0.27"),
    ],
)
def test_the_ratio_of_a_gradient_names_the_axes_of_that_size(gradient: Tensor, text: str) -> None:
    different = Difference(step=1, actual={"w": gradient}, expected={"w": EXPECTED}, allowed={"w": 1e-12})
    sizes = {"replicate": 4, "shard": 2, "pipe": 1, "tensor": 2}
    assert ratio_of(different, sizes) == f"gradient/w of step 2 {text}"


def test_the_axis_is_that_of_all_layouts_that_differ_and_of_no_other() -> None:
    right = [proof(RIGHT, shard=2), proof(RIGHT, replicate=2), LayoutProof(mesh={"tensor": 4}, refused="no")]
    wrong = [proof(WRONG, tensor=2), proof(WRONG, tensor=2, shard=2)]
    assert differing_axes([*right, *wrong]) == ("tensor",)
    assert differing_axes([*right, proof(RIGHT, tensor=2), proof(WRONG, tensor=2, shard=2)]) == ("shard", "tensor")
    assert differing_axes([*right, proof(WRONG, shard=2)]) == ()
    assert differing_axes(right) == ()


def test_initial_weights_are_compared_bit_by_bit() -> None:
    weights = {"v": EXPECTED, "w": EXPECTED}
    assert bitwise(weights, weights).verdict == "equal"
    begins = bitwise(weights, {**weights, "v": EXPECTED + torch.tensor([1e-15, 0.0, 0.0])})
    assert (begins.name, begins.verdict) == ("initial/v", "different")
    layout = LayoutProof(mesh={"shard": 2}, numbers=numbers(RIGHT, begins=begins))
    assert layout.differs
    assert row_of(layout)["first"] == "initial/v"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "9"], "--layouts=9: must be a whole number, 2 to 8."),
        (["--layouts", "2", "--all"], "--all: has no effect with --layouts"),
        (["--layouts", "2", "strategy=fsdp"], "strategy=fsdp: is strategy=mesh with --layouts. Leave it out."),
        (["--layouts", "2", "strategy.shard=2"], "strategy.shard=2: is set by --layouts to every size. Leave it out."),
        (["--static", "--steps", "3"], "--steps=3: has no effect with --static: which trains nothing."),
        (["strategy=mirrored", "--world", "8"], "--world=8: belongs to --static. Give it too, or leave it out."),
        (["strategy=mirrored", "--json"], "--json: belongs to --layouts and --static. Give it too, or leave it out."),
    ],
)
@pytest.mark.slow
def test_flags_that_do_not_go_together_are_refused(
    words: list[str], message: str, cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", *words]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sum_that_is_added_up_twice_along_tensor_is_found_and_explained(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (cwd / "own/strategy").mkdir(parents=True)
    (cwd / "own/strategy/mesh.yaml").write_text("_target_: tests.end_to_end.wrong.Doubled\n")
    flags = ["--config-dir", "own", "--allow-package", "tests"]
    assert main(["prove", "--layouts", "2", "--steps", "2", *flags]) == 1
    out = capfd.readouterr().out
    assert "  the axis: every layout with tensor above 1 differs, and no other\n" in out
    assert "  the first one: tensor 2, in gradient/layers.0.weight\n" in out
    assert "is exactly 2 times that of one device, the size of tensor\n" in out
    assert "rule 3 (gradient): the sum of the gradients, added up again" in out


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_layout_of_two_ranks_is_one_device_and_what_is_refused_is_said(
    cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", "--layouts", "2", "--steps", "2", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    verdicts = {max(row["mesh"], key=row["mesh"].get): row["verdict"] for row in document["layouts"]}
    assert verdicts.pop("context") == "refused"
    assert set(verdicts.values()) <= {"equal", "rounding"}
    assert all(row["initial"] == 0 for row in document["layouts"] if row["verdict"] != "refused")
    assert "by_position" in document["layouts"][3]["reason"]


DIGITS = ("prove", "--resume", "recipe=digits", "model.hidden=[8]", "--steps", "5")


@pytest.mark.slow
def test_a_resumed_training_has_the_bits_of_the_undisturbed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DIGITS]) == 0
    out = capsys.readouterr().out
    assert "rank 0 is ended by an error in" in out
    assert out.count("equal, every bit") == 2


@pytest.mark.slow
def test_an_optimizer_that_begins_anew_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OptimizerStepper, "restore", lambda *_: None)
    assert main([*DIGITS]) == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 2


@pytest.mark.slow
def test_another_cut_and_another_flag_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DIGITS, "strategy=one_device,mirrored", "strategy.replicas=2"]) == 2
    assert "batch.micro_size: is 64 and 32 for the strategies." in capsys.readouterr().err
    assert main([*DIGITS, "--same-cut"]) == 2
    assert "--same-cut: has no effect with --resume." in capsys.readouterr().err
