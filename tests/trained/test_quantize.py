"""`trainkit quantize`: a file that is loaded as another model than the measured one is caught here alone."""

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
from trainkit.data.sets.images import Digits
from trainkit.errors import CheckpointError, ConfigError, MissingExtraError
from trainkit.models.convnet import ConvNet
from trainkit.models.gpt import Gpt
from trainkit.models.mlp import Mlp
from trainkit.trained.checking import Inputs
from trainkit.trained.quantize import latency, quantize_run, share_of_weights
from trainkit.trained.quantized import FORMATS, quantize, refuse_format, restore

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed (extra quantize)")
RUN = ("recipe=null", "steps=60", "callbacks=[]", "logger=[]", "quiet=true", "eval.metric=val/accuracy")
CONV = ("model=convnet", "model.image_size=8", "model.widths=[32,64]", "optimizer.lr=0.01")


@pytest.fixture(scope="module")
def conv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network, trained on digits."""
    folder = tmp_path_factory.mktemp("conv") / "run"
    trainkit.train(trainkit.compose([*RUN, *CONV]), run_dir=folder)
    return folder


GPT = {"vocab_size": 64, "context": 16, "num_layers": 1, "num_heads": 2, "width": 48}
NET = {"in_channels": 1, "image_size": 8, "widths": [8], "num_classes": 3}
GPT2 = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "use_cache": False}


def model_and_inputs(kind: str, seed: int) -> tuple[nn.Module, Inputs]:
    """Return a model of some kind, and inputs for it."""
    torch.manual_seed(seed)
    if kind == "convnet":
        return ConvNet(**NET).eval(), {"images": torch.rand(5, 1, 8, 8)}  # type: ignore[arg-type]
    if kind == "gpt":
        return Gpt(**GPT).eval(), {"tokens": torch.randint(0, 64, (5, 16))}  # type: ignore[arg-type]
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(0, 64, (5, 16))}


def outputs_of(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        outputs: Any = model(**inputs)
    return outputs if isinstance(outputs, Tensor) else outputs["logits"]


@needs_torchao
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("kind", ["gpt", "convnet", "gpt2"])
@pytest.mark.slow
def test_a_model_that_is_built_anew_takes_the_numbers_of_the_file_to_the_bit(kind: str, to: str) -> None:
    model, inputs = model_and_inputs(kind, 0)
    expected = outputs_of(model, inputs)
    quantized = quantize(copy.deepcopy(model), to, [inputs])
    facts = yaml.safe_load(yaml.safe_dump({**quantized.facts, "layers": list(quantized.layers)}))
    restored = restore(model_and_inputs(kind, 7)[0], to, quantized.tensors.__getitem__, facts)
    assert torch.equal(outputs_of(restored, inputs), outputs_of(quantized.model, inputs))
    error = (outputs_of(restored, inputs) - expected).abs().max() / expected.abs().max()
    assert 0 < error < (0.3 if to == "int4_weight" else 0.05)
    if kind == "gpt2":  # whose layers are transposed
        names = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
        assert [*quantized.layers] == [*(f"transformer.h.0.{name}" for name in names), "lm_head"]
        assert share_of_weights(model, quantized.layers)["linear"] == 1.0


class Placed(nn.Module):
    """Makes a tensor of its own on the device of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.layer = nn.Embedding(4, 8), nn.Linear(8, 2)

    def forward(self, values: Tensor) -> Tensor:
        positions = torch.arange(values.shape[1], device=values.device)
        return self.layer(values + self.places(positions))  # type: ignore[no-any-return]


@needs_torchao
def test_a_graph_that_moves_makes_its_own_tensors_on_the_new_device() -> None:
    graph: Any = quantize(Placed().eval(), "int8_static", [{"values": torch.rand(2, 4, 8)}]).model
    assert "device(type='cpu')" in graph.graph.code
    graph.to("meta")
    assert "device(type='cpu')" not in graph.graph.code
    assert "device(type='meta')" in graph.graph.code


@needs_torchao
def test_the_ranges_of_activations_are_those_of_all_calibration_batches() -> None:
    model, samples = nn.Sequential(nn.Linear(4, 2)).eval(), torch.linspace(-1, 1, 8).reshape(2, 4)
    batches = [{"input": samples}, {"input": 10 * samples}]
    first, all_batches = (
        quantize(copy.deepcopy(model), "int8_static", inputs).facts["activations"]["quantize_per_tensor_default"][0]
        for inputs in (batches[:1], batches)
    )
    assert all_batches == pytest.approx(10 * first)


@needs_torchao
def test_only_layers_whose_inputs_fill_groups_of_32_get_four_bits_and_the_share_counts_them() -> None:
    model = Mlp(in_features=64, hidden=[40, 32], out_features=10).eval()
    quantized = quantize(copy.deepcopy(model), "int4_weight", [])
    assert quantized.layers == ("layers.0", "layers.4")
    assert quantized.tensors["layers.0.weight.qdata"].shape == (40, 32)
    assert share_of_weights(model, quantized.layers)["linear"] == (64 * 40 + 32 * 10) / (64 * 40 + 40 * 32 + 32 * 10)


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
    images, labels = (torch.stack([torch.as_tensor(split[i][part]) for i in range(len(split))]) for part in (0, 1))
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


@pytest.mark.slow
@needs_torchao
@pytest.mark.parametrize(
    ("kind", "arguments", "code", "text"),
    [
        ("missing", "--to int8_weights", 2, "Did you mean int8_weight?"),
        ("missing", "", 2, "--to: is missing"),
        ("missing", "--to int8_static --calibrate 0", 2, "--calibrate=0: "),
        ("missing", "--to int8_static --checkpoint first", 2, "--checkpoint=first: "),
        ("missing", "--to int8_weight", 2, "is not a run folder"),
        ("half-written", "--to int8_weight", 4, "has no checkpoint named last"),
        ("foreign", "--to int8_weight", 2, "stranger is not among the packages"),
        ("whole", "--to int8_weight --calibrate 8", 2, "observes no activations"),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    kind: str, arguments: str, code: int, text: str, conv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = conv if kind == "whole" else tmp_path / "run"
    if kind in ("half-written", "foreign"):
        run.mkdir()
        resolved = (conv / "resolved.yaml").read_text()
        foreign = resolved.replace("trainkit.models.ConvNet", "stranger.Net")
        (run / "resolved.yaml").write_text(foreign if kind == "foreign" else resolved)
    assert cli.main(["quantize", str(run), *arguments.split()]) == code
    assert text in capsys.readouterr().err
    assert kind == "whole" or not (run / "quantized").exists()


@needs_torchao
def test_a_model_without_linear_layers_is_refused_with_the_format_that_takes_it() -> None:
    with pytest.raises(ConfigError, match=r"the model has none\. int8_static quantizes convolutions too"):
        quantize(nn.Sequential(nn.Conv2d(1, 2, 3)), "int8_weight", [])


def test_an_absent_torchao_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r'Install it: pip install "torch>=2\.12" "torchao>=0\.18"'):
        refuse_format("int8_weight")


def test_the_latency_of_64_samples_is_measured_even_where_a_split_has_fewer() -> None:
    sizes: list[int] = []

    class Counts(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            sizes.append(len(inputs))
            return inputs

    ticks = iter(range(100))
    seconds = latency(Counts(), {"inputs": torch.zeros(3, 1)}, clock=lambda: float(next(ticks)))
    assert (seconds, {*sizes}) == ({1: 1.0, 64: 1.0}, {1, 64})
