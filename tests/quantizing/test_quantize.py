"""`trainkit quantize`: what is written is what was measured, and it is loaded again to the bit."""

from __future__ import annotations

import copy
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import trainkit
from trainkit import cli
from trainkit.data.sets.digits import Digits
from trainkit.errors import CheckpointError, ConfigError, MissingExtraError
from trainkit.exporting.inputs import Inputs
from trainkit.models.convnet import ConvNet
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.quantizing.formats import FORMATS, format_named, quantize, restore
from trainkit.quantizing.measuring import latency, share_of_weights
from trainkit.run.folder.quantize import quantize_run

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (extra quantize)")
RUN = ("recipe=null", "steps=60", "callbacks=[]", "logger=[]", "quiet=true", "eval.metric=val/accuracy")
CONV = ("model=convnet", "model.image_size=8", "model.widths=[32,64]", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network, trained on digits."""
    folder = tmp_path_factory.mktemp("conv") / "run"
    trainkit.train(trainkit.compose([*RUN, *CONV]), run_dir=folder)
    return folder


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(vocab_size=64, context=16, num_layers=1, num_heads=2, width=48).eval()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet(in_channels=1, image_size=8, widths=[8], num_classes=3).eval()


def inputs_of(model: nn.Module) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    if isinstance(model, Gpt):
        return {"tokens": torch.randint(0, 64, (5, 16), generator=generator)}
    return {"images": torch.rand(5, 1, 8, 8, generator=generator)}


def outputs_of(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**inputs)
    return found


@needs_torchao
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("make", [gpt, convnet])
@pytest.mark.slow
def test_a_model_that_is_built_anew_takes_the_numbers_of_the_file_to_the_bit(make: Any, to: str) -> None:
    model, form = make(), format_named(to)
    inputs = inputs_of(model)
    own = outputs_of(model, inputs)
    quantized = form.quantize(copy.deepcopy(model), to, [inputs])
    torch.manual_seed(7)
    other = type(model)(**arguments(model)).eval()
    facts = yaml.safe_load(yaml.safe_dump({**quantized.facts, "layers": list(quantized.layers)}))
    restored = form.restore(other, to, quantized.tensors.__getitem__, facts)
    assert torch.equal(outputs_of(restored, inputs), outputs_of(quantized.model, inputs))
    error = (outputs_of(restored, inputs) - own).abs().max() / own.abs().max()
    assert 0 < error < (0.3 if to == "int4_weight" else 0.05)


def arguments(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, Gpt):
        return {"vocab_size": 64, "context": 16, "num_layers": 1, "num_heads": 2, "width": 48}
    return {"in_channels": 1, "image_size": 8, "widths": [8], "num_classes": 3}


class Placed(nn.Module):
    """Makes a tensor of its own on the device of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(4, 8), nn.Linear(8, 2)

    def forward(self, values: Tensor) -> Tensor:
        made = torch.arange(values.shape[1], device=values.device)
        return self.layer(values + self.places(made))  # type: ignore[no-any-return]


@needs_torchao
def test_a_graph_that_moves_makes_its_own_tensors_on_the_new_device() -> None:
    graph: Any = quantize(Placed().eval(), "int8_static", [{"values": torch.rand(2, 4, 8)}]).model
    assert "device(type='cpu')" in graph.graph.code
    graph.to("meta")
    assert "device(type='cpu')" not in graph.graph.code
    assert "device(type='meta')" in graph.graph.code


@needs_torchao
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.slow
def test_the_transposed_layers_of_a_gpt2_are_quantized_as_linear_layers_and_loaded_again(to: str) -> None:
    import transformers

    settings: Any = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "use_cache": False}
    config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model, other = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
    inputs = {"input_ids": torch.randint(0, 64, (5, 16))}
    done = quantize(copy.deepcopy(model), to, [inputs])
    places = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert [*done.layers] == [*(f"transformer.h.0.{place}" for place in places), "lm_head"]
    assert share_of_weights(model, done.layers)["linear"] == 1.0
    facts = yaml.safe_load(yaml.safe_dump({**done.facts, "layers": list(done.layers)}))
    restored = restore(other, to, done.tensors.__getitem__, facts)
    with torch.no_grad():
        own, found, again = (one(**inputs)["logits"] for one in (model, done.model, restored))
    assert torch.equal(found, again)
    assert 0 < (found - own).abs().max() / own.abs().max() < (0.3 if to == "int4_weight" else 0.05)


@needs_torchao
def test_only_layers_whose_inputs_fill_groups_of_32_get_four_bits_and_the_share_counts_them() -> None:
    model = Mlp(in_features=64, hidden=[40, 32], out_features=10).eval()
    quantized = format_named("int4_weight").quantize(copy.deepcopy(model), "int4_weight", [])
    assert quantized.layers == ("layers.0", "layers.4")
    assert quantized.tensors["layers.0.weight.qdata"].shape == (40, 32)
    share = share_of_weights(model, quantized.layers)
    assert share["linear"] == (64 * 40 + 32 * 10) / (64 * 40 + 40 * 32 + 32 * 10)


@needs_torchao
@pytest.mark.slow
def test_convolutions_in_eight_bits_are_small_as_good_and_loaded_as_they_were_measured(
    conv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = quantize_run(conv, to="int8_static", calibrate=100)
    assert done.layers == ("blocks.0.conv", "blocks.1.conv", "head.2")
    config = yaml.safe_load((done.folder / "config.yaml").read_text())
    original, result = (config["quantized"]["measured"][name] for name in ("original", "result"))
    assert (done.folder / "model.safetensors").stat().st_size == result["num_bytes"]
    assert result["num_bytes"] < 0.35 * original["num_bytes"]  # the header of a small file counts
    assert abs(result["metrics"]["val/accuracy"] - original["metrics"]["val/accuracy"]) <= 0.01
    split = Digits(split="val")
    images, labels = (torch.stack([torch.as_tensor(split[i][place]) for i in range(len(split))]) for place in (0, 1))
    right = (trainkit.load(done.folder)(images).argmax(-1) == labels).double().mean()
    assert right.item() == pytest.approx(result["metrics"]["val/accuracy"], abs=1e-12)
    assert cli.main(["evaluate", str(done.folder), "--json"]) == 0
    evaluated = json.loads(capsys.readouterr().out)["metrics"]
    assert {name: evaluated[name] for name in result["metrics"]} == result["metrics"]
    assert [*result["latency_s"]] == ["1", "64"]
    assert "int8_static" in (done.folder / "README.md").read_text()


@needs_torchao
@pytest.mark.slow
def test_the_command_replaces_its_own_folder_and_changes_nothing_else_of_the_run(
    conv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in conv.rglob("*") if path.is_file() and "quantized" not in path.parts}
    del before[conv / ".lock"]
    for _ in range(2):
        assert cli.main(["quantize", str(conv), "--to", "int8_weight"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert [path.name for path in sorted((conv / "quantized/int8_weight").iterdir())] == [
        ".owner", "README.md", "config.yaml", "model.safetensors",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "1 layer quantized: 100.0% of the weights of linear layers, 11.9% of all parameters" in out


@needs_torchao
@pytest.mark.slow
def test_a_changed_file_and_a_description_of_another_model_are_refused(conv: Path) -> None:
    folder = quantize_run(conv, to="int8_static", calibrate=8).folder
    weights, config = folder / "model.safetensors", folder / "config.yaml"
    content, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        trainkit.load(folder)
    weights.write_bytes(content)
    for old, new, reason in [
        ("- 32\n  - 64", "- 32\n  - 32", "is torch"),
        ("quantize_per_tensor_default:", "other:", "quantize_per_tensor_default"),
        ("      - 8\n      - 8\n", "      - 8\n      - 80000000000\n", "not a list of lengths"),
        ("to: int8_static", "to: int8_other", "which is none of"),
    ]:
        assert old in text
        config.write_text(text.replace(old, new, 1))
        with pytest.raises(CheckpointError, match=reason):
            trainkit.load(folder)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--to", "int8_weights"), 2, "--to int8_weights: is not a format. Did you mean int8_weight?"),
        ((), 2, "--to: is missing: the format: int8_weight, int8_dynamic, int4_weight or int8_static."),
        (
            ("--to", "int8_static", "--calibrate", "0"),
            2,
            "--calibrate 0: must be a whole number of samples, 1 or more.",
        ),
        (("--to", "int8_static", "--checkpoint", "first"), 2, "--checkpoint first: must be best or last."),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    arguments: tuple[str, ...], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["quantize", str(tmp_path), *arguments]) == code
    assert text in capsys.readouterr().err


@needs_torchao
@pytest.mark.parametrize(
    ("kind", "to", "code", "text"),
    [
        ("missing", "int8_weight", 2, "is not a run folder: it has no resolved.yaml."),
        ("half-written", "int8_weight", 4, "has no checkpoint named last."),
        ("foreign", "int8_weight", 2, "stranger is not among the packages that models may come from"),
        ("whole", "int8_weight --calibrate 8", 2, "has no effect: int8_weight observes no activations. Leave it out."),
    ],
)
def test_folders_that_are_no_whole_runs_are_refused(
    kind: str, to: str, code: int, text: str, conv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = conv if kind == "whole" else tmp_path / "run"
    if kind in ("half-written", "foreign"):
        run.mkdir()
        resolved = (conv / "resolved.yaml").read_text()
        foreign = resolved.replace("trainkit.models.ConvNet", "stranger.Net")
        (run / "resolved.yaml").write_text(foreign if kind == "foreign" else resolved)
    assert cli.main(["quantize", str(run), "--to", *to.split()]) == code
    assert text in capsys.readouterr().err
    assert not (run / "quantized" / to).exists() or kind == "whole"


@needs_torchao
def test_a_model_without_linear_layers_is_refused_with_the_format_that_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"the model has none\. int8_static quantizes convolutions too"):
        format_named("int8_weight").quantize(nn.Sequential(nn.Conv2d(1, 2, 3)), "int8_weight", [])


def test_an_absent_torchao_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    install = r'Install it: pip install "torch>=2\.12" "torchao>=0\.18"'
    with pytest.raises(MissingExtraError, match=rf"needs the package torchao\. {install}"):
        format_named("int8_weight")


def test_the_latency_of_64_samples_is_measured_even_where_a_split_has_fewer() -> None:
    sizes: list[int] = []

    class Counts(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            sizes.append(len(inputs))
            return inputs

    ticks = iter(range(100))
    found = latency(Counts(), {"inputs": torch.zeros(3, 1)}, clock=lambda: float(next(ticks)))
    assert (found, {*sizes}) == ({1: 1.0, 64: 1.0}, {1, 64})
