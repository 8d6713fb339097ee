"""`trainkit export --to FORMAT`: outputs that differ by one unit more than is allowed are caught here alone."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import trainkit
from tests.contract.running import CONF
from tests.support.zoo import Noisy
from trainkit import cli
from trainkit.errors import ConfigError, MissingExtraError
from trainkit.models.convnet import ConvNet
from trainkit.models.gpt import Gpt
from trainkit.objectives.base import Loss, Model, Objective
from trainkit.objectives.own_loss import ModelComputesLoss
from trainkit.trained import formats
from trainkit.trained.checking import Check, Inputs, NotExportableError, model_inputs, refuse_difference, refuse_draws
from trainkit.trained.formats import FORMATS, example_of, format_named, transformer_of
from trainkit.trained.fresh_process import tensors_of

RUN = ("recipe=null", "steps=20", "callbacks=[]", "logger=[]", "quiet=true")
absent = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(absent), reason=f"not installed (extra onnx): {', '.join(absent)}")
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network on digits, trained for a moment."""
    folder = tmp_path_factory.mktemp("formats") / "run"
    trainkit.train(trainkit.compose([*RUN]), run_dir=folder)
    return folder


def gpt() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    model = Gpt(vocab_size=64, context=16, num_layers=2, num_heads=2, width=32, bias=True).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model, {"tokens": torch.randint(0, 64, (8, 16))}


def convnet() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return ConvNet(in_channels=1, image_size=8, widths=[4, 8], num_classes=3).eval(), {"images": torch.rand(8, 1, 8, 8)}


def huggingface_gpt2() -> tuple[nn.Module, Inputs]:
    import transformers

    torch.manual_seed(0)
    settings = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval(), {"input_ids": torch.randint(0, 64, (8, 16))}


def written(form: str, model: nn.Module, samples: Inputs, folder: Path) -> Check:
    """Write an export of a model without checking it; return how it is checked."""
    if form == "torch_export":
        formats.save_program(formats.export_program(model, example_of(samples)), folder / "model.pt2")
        return Check(form=form, exact=True, request={"positional": True})
    if form == "onnx":
        formats.export_onnx(model, example_of(samples), folder)
        return Check(form=form, exact=False)
    return transformer_of(model).save(folder)


CASES = [
    pytest.param(form, make, layer, marks=marks, id=f"{form}-{make.__name__}")
    for form, make, layer, marks in [
        ("torch_export", convnet, "blocks.1.norm", []),
        ("torch_export", huggingface_gpt2, "transformer.h.1.mlp.c_fc", [needs_transformers, pytest.mark.long]),
        ("onnx", gpt, "blocks.1.mlp.expand", [needs_onnx, pytest.mark.long]),
        ("huggingface", gpt, "blocks.1.mlp.expand", [needs_transformers, pytest.mark.long]),
        ("huggingface", huggingface_gpt2, "transformer.h.1.mlp.c_fc", [needs_transformers, pytest.mark.long]),
    ]
]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("form", "make", "layer"), CASES)
@pytest.mark.slow
def test_an_export_computes_what_the_run_does_and_a_wrong_one_is_refused_with_the_first_layer_that_differs(
    form: str, make: Callable[[], tuple[nn.Module, Inputs]], layer: str, tmp_path: Path
) -> None:
    model, samples = make()
    (tmp_path / "right").mkdir()
    refuse_difference(written(form, model, samples, tmp_path / "right"), model, samples, tmp_path / "right")
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        weight = wrong.get_submodule(layer).weight
        assert isinstance(weight, Tensor)
        weight.view(-1)[0] += 0.1
    (tmp_path / "wrong").mkdir()
    check = written(form, wrong, samples, tmp_path / "wrong")
    with pytest.raises(NotExportableError) as caught:
        refuse_difference(check, model, samples, tmp_path / "wrong")
    text = str(caught.value)
    assert f"the {form} export is refused: for 8 real samples its outputs differ from those of the run" in text
    assert f"The first layer that differs is {layer} (the largest difference is" in text


@pytest.mark.slow
def test_an_exported_program_has_the_bits_of_the_run_at_any_batch_size_and_no_sample_of_the_data(run: Path) -> None:
    assert cli.main(["export", str(run), "--to", "torch_export"]) == 0
    program = torch.export.load(run / "exports/torch_export/model.pt2")
    model = trainkit.load(run)
    for size in (1, 5, 70):
        images = torch.rand(size, 1, 8, 8)
        with torch.no_grad():
            assert torch.equal(program.module()(images), model(images))
    assert program.example_inputs is not None
    assert all(not tensor.any() for tensor in tensors_of(program.example_inputs[0]))
    assert "torch.export.load" in (run / "exports/torch_export/README.md").read_text()


class FixedLength(nn.Module):
    """Scores of texts of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 4), nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.embed(tokens).flatten(1))
        return outputs


def fixed_length() -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    return FixedLength().eval(), {"tokens": torch.randint(0, 64, (8, 4))}


FIXED = "tokens: 4 tokens, and no other number. With a dynamic number, {} refuses the model: "


@pytest.mark.parametrize(
    ("form", "make", "note"),
    [
        ("torch_export", gpt, "tokens: any number of tokens up to 16."),
        ("torch_export", fixed_length, FIXED),
        pytest.param(
            "torch_export", huggingface_gpt2, "input_ids: any number of tokens.",
            marks=[needs_transformers, pytest.mark.long],
        ),
        pytest.param("onnx", gpt, "tokens: any number of tokens up to 16.", marks=[needs_onnx, pytest.mark.long]),
        pytest.param("onnx", fixed_length, FIXED, marks=[needs_onnx, pytest.mark.long]),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_the_number_of_tokens_is_free_where_the_model_allows_it_and_a_note_says_so(
    form: str,
    make: Callable[[], tuple[nn.Module, Inputs]],
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: None,
) -> None:
    model, samples = make()
    monkeypatch.setattr(formats, "real_samples", lambda _cfg, _model: samples)
    trained: Any = SimpleNamespace(cfg=None, model=lambda: model, working=lambda: None)
    assert (FORMATS[form].write(trained, tmp_path).note or "").startswith(note.format(form))
    if form == "torch_export" and make is gpt:
        program = torch.export.load(tmp_path / "model.pt2").module()
        with torch.no_grad():
            assert all(
                torch.equal(program(samples["tokens"][:1, :size]), model(samples["tokens"][:1, :size]))
                for size in (1, 5, 16)
            )


@pytest.mark.slow
def test_a_disk_that_is_full_ends_the_command_with_exit_code_4_and_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    monkeypatch.setattr(formats, "write_bytes", full)
    assert cli.main(["export", str(folder), "--to", "torch_export"]) == 4
    assert "exports/torch_export cannot be written: No space left on device" in capsys.readouterr().err
    assert [*(folder / "exports").iterdir()] == []


def test_what_no_format_can_hold_is_refused_with_its_exit_code(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half/resolved.yaml").write_text((run / "resolved.yaml").read_text())
    cases = [
        (run, "onnxx", 2, "Did you mean onnx?"),
        (tmp_path / "none", "onnx", 2, "is not a run folder"),
        (tmp_path / "half", "torch_export", 4, "has no checkpoint named last"),
        *([(run, "huggingface", 4, "transformers has no class for Mlp")] if find_spec("transformers") else []),
    ]
    for folder, form, code, text in cases:
        assert cli.main(["export", str(folder), "--to", form]) == code
        assert text in capsys.readouterr().err
    monkeypatch.setattr("trainkit.errors.find_spec", lambda name: None if name == "onnxscript" else find_spec(name))
    with pytest.raises(MissingExtraError, match=r'package onnxscript\. Install it: pip install "onnx>'):
        format_named("onnx")


def test_a_model_that_depends_on_its_numbers_is_refused_with_the_first_line_of_the_error() -> None:
    class Branches(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if inputs.sum() > 0 else -inputs

    with pytest.raises(NotExportableError, match="cannot be exported to torch_export with a dynamic batch"):
        formats.export_program(Branches(), {"inputs": torch.zeros(2, 3)})


def test_an_objective_says_which_tensors_are_inputs_and_one_that_reads_more_is_refused() -> None:
    class Reads(Objective):
        def loss(self, model: Model, batch: Any) -> Loss:
            raise NotImplementedError

        def predict(self, model: Model, batch: Any) -> Any:
            return model(model)

    class Net(nn.Module):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **more: Tensor) -> Tensor:
            return input_ids

    ids, mask = torch.zeros(2, 3), torch.ones(2, 3)
    batch = {"attention_mask": mask, "input_ids": ids, "labels": ids}
    assert [*model_inputs(ModelComputesLoss(), Net(), batch)] == ["input_ids", "attention_mask"]
    with pytest.raises(ConfigError, match="objective=Reads: does not call the model with tensors only"):
        model_inputs(Reads(), nn.Linear(2, 2), batch)


class Rounds(nn.Module):
    """Rounds its inputs to parts of a number, if there is one, and adds another."""

    shift: Tensor

    def __init__(self, shift: float, large: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift))
        self.large = large

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs + self.large) - self.large + self.shift


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("times", "refused"), [(16, False), (17, True)])
@pytest.mark.parametrize(
    ("large", "values", "unit"),
    [
        (0.0, [[1.0, 0.5], [0.25, -1.0]], 2.0**-23),  # one in the last place of the largest output, 1
        (1024.0, [[1.0 + 2.0**-15], [0.0]], 2.0**-15),  # what the sum with 1024 rounds away
    ],
    ids=["last_place", "own_rounding"],
)
def test_outputs_may_differ_by_16_units_and_not_by_17(
    times: int, refused: bool, large: float, values: list[list[float]], unit: float, tmp_path: Path
) -> None:
    node = {"_target_": f"{__name__}.Rounds", "shift": times * unit, "large": large}
    save_file({"shift": torch.tensor(times * unit)}, tmp_path / "model.safetensors")
    check = Check(form="safetensors", exact=False, request={"node": node, "path": []})
    message = f"largest difference is {17 * unit:.3g}, and {16 * unit:.3g} is allowed"
    with pytest.raises(NotExportableError, match=re.escape(message)) if refused else contextlib.nullcontext():
        refuse_difference(check, Rounds(0.0, large), {"inputs": torch.tensor(values)}, tmp_path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("draws", r"draws random numbers in evaluation mode \(in 0\): two calls .* differ by 0\."),
        ("counts", r"changes its outputs from call to call: two calls .* differ by 1\."),
    ],
)
def test_a_model_that_draws_in_evaluation_mode_is_refused_by_name(how: str, message: str) -> None:
    model = nn.Sequential(Noisy(how, 3)).eval()
    state = torch.get_rng_state()
    with pytest.raises(NotExportableError, match=message):
        refuse_draws(model, {"input": torch.rand(4, 3, generator=torch.Generator().manual_seed(0))})
    assert torch.equal(torch.get_rng_state(), state)
    refuse_draws(nn.Sequential(Noisy("never", 3), nn.Dropout(0.5)).eval(), {"input": torch.ones(4, 3)})


@pytest.mark.slow
def test_no_format_takes_a_run_whose_model_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_this_process: None
) -> None:
    train = trainkit.compose([*RUN, "model=noisy", "data=digits"], config_dirs=[CONF], packages=["tests"])
    trainkit.train(train, run_dir=tmp_path / "run")
    arguments = ["--config-dir", str(CONF), "--allow-package", "tests"]
    for form in ("safetensors", "torch_export", *([] if absent else ["onnx"])):
        assert cli.main(["export", str(tmp_path / "run"), "--to", form, *arguments]) == 4
        assert "the model draws random numbers in evaluation mode: two calls with the same" in capsys.readouterr().err
        assert not [path for path in (tmp_path / "run" / "exports").rglob("*") if path.is_file()]
