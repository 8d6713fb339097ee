"""Situations whose advice is another step of the ladder in docs/which-strategy.md are caught here alone.

One for each step is in the long lane, the others are `matrix`.

The language models have 4 layers of a real width and few words, and their devices so much less memory, so that a plan
is quick.
"""

from __future__ import annotations

import json
import shlex

import pytest

from trainkit.cli import main

IMAGES = "recipe=resnet50_imagenet --num-samples=1281167"
TEXT = (
    "recipe=null model=gpt data=synthetic_tokens objective=language_modelling optimizer=adamw model.vocab_size=8000 "
    "data.vocab_size=8000 model.context=1024 data.context=1024 data.num_samples=1280 model.num_layers=4"
)
LARGE = f"{TEXT} model.width=4096 model.num_heads=32 batch.global_size=64"
HALF = f"{LARGE} precision=bf16_mixed"
"""Half of the ways to plan."""
SINGLE = (
    f"{TEXT.removesuffix(' model.num_layers=4')} model.num_layers=2 model.width=4096 model.num_heads=32 "
    "batch.global_size=1 precision=bf16_mixed"
)
HOST = "--devices=8 --hardware=h100_sxm"
MORE = pytest.mark.matrix


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("training", "devices", "strategy", "count"), [
    pytest.param("recipe=digits", HOST, "one_device", 1, id="a small model on a strong host"),
    pytest.param("recipe=digits", "--devices=2 --hardware=laptop", "one_device", 1, id="cores that replicas share"),
    pytest.param(IMAGES, HOST, "mirrored", 8, id="images on a strong host"),
    pytest.param(
        f"{IMAGES} hardware=h100_sxm hardware.within_host.gb_s=0.1", "--devices=8", "one_device", 1,
        id="a link too slow for gradients", marks=MORE,
    ),
    pytest.param(
        f"{HALF} hardware=h100_sxm hardware.memory_gib=12", "--devices=8", "fsdp", 8, id="state that no device holds",
    ),
    pytest.param(
        f"{LARGE} hardware=h100_sxm hardware.memory_gib=11", "--devices=8 --for=cost", "tensor_parallel", 2,
        id="the fewest devices that hold a model", marks=MORE,
    ),
    pytest.param(
        f"{HALF} hardware=h100_sxm hardware.memory_gib=12 hardware.within_host.gb_s=2", "--devices=4", "pipeline", 4,
        id="a link too slow for parameters",
    ),
    pytest.param(
        LARGE, "--devices=4 --hardware=h100_sxm --for=memory", "pipeline", 4, id="the least memory", marks=MORE,
    ),
    pytest.param(SINGLE, "--devices=4 --hardware=h100_sxm", "tensor_parallel", 4, id="one sample a step"),
])  # fmt: skip
def test_a_situation_leads_to_its_step_of_the_ladder(
    training: str, devices: str, strategy: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *shlex.split(f"{training} {devices}"), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert (best["overrides"][0], best["devices"]) == (f"strategy={strategy}", count)
    assert best["reason"].startswith(("the shortest step", "the fewest device seconds", "the least memory"))
    assert main(shlex.split(best["command"])[1:]) == 0
    assert "yes: needs" in capsys.readouterr().out
