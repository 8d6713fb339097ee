"""The formats that a trained model is exported to, each written and checked by one function.

A new format is one entry of `FORMATS`: the text of the model card about loading, and a function that receives a
`TrainedModel` and an empty folder. `trainkit.trained.export.write_export` adds the description and the model card, and
puts the folder in its place only when the function has returned: a format that fails its check raises CheckpointError,
and its files are removed.
"""

from __future__ import annotations

import inspect
import io
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from trainkit.config.grammar import refusal
from trainkit.config.schema import RunConfig
from trainkit.config.targets.allowed import root_of, targets_in
from trainkit.config.values import nearest
from trainkit.errors import CheckpointError, ConfigError, DataError, named_first_line, require_packages
from trainkit.files import bytes_needed, num_bytes, refuse_full
from trainkit.models.gpt import Gpt
from trainkit.numerics.copies import copied
from trainkit.numerics.generators import Untouched
from trainkit.strategies.reducers.shared_memory import available_bytes
from trainkit.strategies.tensor_shards import meta_of
from trainkit.trained.build import meta_model, model_with
from trainkit.trained.checking import (
    Check,
    Inputs,
    NotBuiltError,
    NotExportableError,
    quiet,
    real_samples,
    refuse_difference,
)
from trainkit.trained.fresh_process import tensors_of
from trainkit.trained.model import WEIGHTS, checkpoint_keys
from trainkit.trainer.checkpoint.tensors import Loaded, bytes_of, write_bytes, write_stream
from trainkit.trainer.manifest import FileRecord


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """The model of a run with the weights of one of its checkpoints."""

    cfg: RunConfig
    """The config of the run; a secret in it may be redacted."""
    weights: Loaded
    """The verified checkpoint; its tensors are read on access."""
    which: str
    """`last` or `best`, the checkpoint of the run; `average`, the averaged weights in the last one."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the run for the description: `run`, `command`, `fingerprint`, `metrics`; values of JSON."""
    working: Callable[[], None] = lambda: None
    """Callback that the export calls repeatedly, to show that the process does not hang."""

    def model(self) -> nn.Module:
        """Return the whole model with these weights: on the CPU, in evaluation mode, in the dtype that was trained."""
        return model_with(self.cfg, self.weights.tensors).eval()


@dataclass(frozen=True, kw_only=True)
class Written:
    """The files that a format has written, and a note about them for the user."""

    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """Size and SHA-256 of those files whose bytes were hashed as they were written; the others are read again."""
    note: str | None = None
    """A sentence for the screen and the model card: how the files were checked, which sizes they take."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of an exported model."""

    loading: str
    """Instructions for loading the files, in Markdown."""
    write: Callable[[TrainedModel, Path], Written]
    """Function that writes the model into an empty folder, without folders below it.

    It raises CheckpointError if the weights are damaged, or the model cannot be written in this format; the message
    contains the reason.
    """
    packages: Sequence[str] = ()
    """Packages of the extra of its name that it needs."""


def format_named(name: str) -> Format:
    """Return a format.

    Raises:
        ConfigError: there is no such format, or a package that it needs is not installed.
    """
    if name not in FORMATS:
        raise refusal(f"--to {name}", f"is not a format. {nearest(name, FORMATS)}")
    require_packages(FORMATS[name].packages, key=f"--to {name}", extra=name)
    return FORMATS[name]


def _refuse_lack_of_room(model: nn.Module, file: Path) -> None:
    """Refuse a file of all tensors of a model if it does not fit; errors of the library that writes it name no file."""
    refuse_full(file, bytes_needed({id(tensor): tensor for tensor in model.state_dict().values()}.values()))


# safetensors: whole tensors under the names of the model's `state_dict`, in one file


def write_weights(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.safetensors`, one tensor after the other: the whole model is never in memory.

    Only a model with a `state_dict` of its own making is built whole, because its hooks convert the tensors.
    """
    names, tensors = _sources(trained)
    if absent := sorted({key for key in names.values() if key not in tensors}):
        folder = trained.weights.checkpoint.folder
        raise CheckpointError(f"{folder} is a checkpoint of another model: {absent[0]} is missing there.")
    metas = {name: meta_of(tensors, key) for name, key in names.items()}
    kinds = {name: (meta.dtype, tuple(meta.shape)) for name, meta in metas.items()}

    def read(name: str) -> Tensor:
        trained.working()
        return tensors[names[name]]

    room = bytes_needed(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in kinds.values())
    refuse_full(draft / WEIGHTS, room)
    record = write_stream(draft / WEIGHTS, kinds, read)
    trained.working()
    return Written(files={WEIGHTS: record})


def _sources(trained: TrainedModel) -> tuple[Mapping[str, str], Mapping[str, Tensor]]:
    """Return name in the model's `state_dict` -> key of its tensor, and the tensors by these keys, read on access.

    Raises:
        NotExportableError: the `state_dict` holds entries that a checkpoint does not have.
    """
    keys = checkpoint_keys(meta_model(trained.cfg))
    if keys is not None:
        return keys, trained.weights.tensors
    state: dict[str, Any] = trained.model().state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            rule = "is extra state of a module, which a checkpoint does not hold"
            raise NotExportableError(f"the model cannot be exported: {name} of its state_dict {rule}.")
    return {name: name for name in state}, state


_COPIES: Final = 4
"""Models in memory while outputs are compared: two in either process."""


def write_checked_weights(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.safetensors`, and check it: each tensor must be that of the checkpoint, and a process without
    trainkit must compute the bits of the run.

    Raises:
        NotExportableError: a tensor or an output is not that of the run; the text names the first layer.
    """
    written = write_weights(trained, draft)
    _refuse_other_tensors(trained, draft)
    trained.working()
    return Written(
        files=written.files, note=f"Checked: each tensor is that of the checkpoint{_outputs(trained, draft)}"
    )


def _outputs(trained: TrainedModel, draft: Path) -> str:
    """Compare the outputs; return the end of a sentence, with the reason if there was no comparison."""
    size = (draft / WEIGHTS).stat().st_size
    if _COPIES * size > available_bytes():
        return f"; no outputs were compared: {_COPIES} models of {num_bytes(size)} exceed the free memory."
    model = trained.model()
    try:
        samples = real_samples(trained.cfg, model)
    except (ConfigError, DataError) as error:
        return f"; no outputs were compared, as there are no samples: {named_first_line(error)}"
    trained.working()
    try:
        built = refuse_other_outputs(trained.cfg.model, model, samples, draft)
    except NotBuiltError as error:
        return f"; no outputs were compared, as a process without trainkit has no model: {error}"
    count = len(next(iter(samples.values())))
    return f", and in a process without trainkit {built} computes the bits of the run for {count} real samples."


def _refuse_other_tensors(trained: TrainedModel, draft: Path) -> None:
    """Compare names, dtypes, shapes and bits of the file with the checkpoint, one tensor at a time.

    Raises:
        NotExportableError: they differ; the text names the first layer in the order of the `state_dict`.
    """
    keys, tensors = _sources(trained)
    with safe_open(draft / WEIGHTS, framework="pt") as file:
        names, wrong = {*file.keys()}, ""
        for name, key in keys.items():
            trained.working()
            saved, other = tensors[key], file.get_tensor(name) if name in names else None
            if other is None:
                wrong = "is missing"
            elif (other.dtype, other.shape) != (saved.dtype, saved.shape) or bytes_of(other) != bytes_of(saved):
                wrong = f"is {other.dtype} {tuple(other.shape)} with other numbers or of another kind"
            if wrong:
                wrong += f"; the checkpoint has {saved.dtype} {tuple(saved.shape)}"
                break
        else:
            name = next(iter(names - keys.keys()), "")
            wrong = "is not in the checkpoint" if name else ""
    if wrong:
        layer = name.rpartition(".")[0] or name
        reason = f"{name} {wrong}. The first layer that differs is {layer}."
        raise NotExportableError(f"the safetensors export is refused: {reason}")


def refuse_other_outputs(node: Mapping[str, Any], model: nn.Module, samples: Inputs, draft: Path) -> str:
    """Compare the outputs of the file's weights with those of the run, bit for bit.

    The model of the process is built from its node if no class there is one of trainkit; otherwise it is a program of
    `torch.export` whose own weights are NaN.

    Args:
        node: builds the model.
        model: the model of the run, on the CPU, in evaluation mode.
        samples: real samples.
        draft: the folder with the file.

    Returns:
        The kind of model that got the weights, for a sentence.

    Raises:
        NotExportableError: the outputs differ.
        NotBuiltError: there is no model without trainkit that could compute them.
    """
    targets = [str(target) for _, target in targets_in(node, ("model",))]
    if not any(root_of(target) == "trainkit" for target in targets):
        request: dict[str, Any] = {"node": dict(node), "path": [str(Path(entry).absolute()) for entry in sys.path]}
        try:
            refuse_difference(Check(form="safetensors", exact=True, request=request), model, samples, draft)
        except NotBuiltError:
            pass
        else:
            return targets[0]
    if checkpoint_keys(model) is None:
        raise NotBuiltError("a hook of the model makes its state_dict.")
    hollow, example = copied(model), example_of(samples)
    for tensor in hollow.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_program(export_program(hollow, example), Path(folder) / _PROGRAM)
        except NotExportableError as error:
            raise NotBuiltError(str(error)) from error
        prefix = "" if _plain(model, example) is model else "model."
        request = {"format": "weights_in_program", "program": folder, "prefix": prefix}
        request["positional"] = _is_positional(model, samples)
        refuse_difference(Check(form="safetensors", exact=True, request=request), model, samples, draft)
    return "the program of the model that torch.export makes"


# torch_export: a program of `torch.export`, for PyTorch without the classes of the model

_PROGRAM: Final = "model.pt2"


def _write_program(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.pt2`, and check that it computes the same bits as the run."""
    model = trained.model()
    samples = real_samples(trained.cfg, model)
    trained.working()
    _refuse_lack_of_room(model, draft / _PROGRAM)
    request = {"positional": _is_positional(model, samples)}

    def attempt(free: tuple[str, ...]) -> ExportedProgram:
        program = export_program(model, example_of(samples), free=free)
        save_program(program, draft / _PROGRAM)
        trained.working()
        refuse_difference(Check(form="torch_export", exact=True, request=request, free=free), model, samples, draft)
        return program

    return Written(note=_try_free_lengths(samples, "torch_export", attempt))


def save_program(program: ExportedProgram, file: Path) -> None:
    """Write a program through a memory buffer, because torch aborts the process if the disk is full."""
    content = io.BytesIO()
    torch.export.save(program, content)
    file.unlink(missing_ok=True)
    write_bytes(file, content.getvalue())


def export_program(
    model: nn.Module, example: Inputs, *, form: str = "torch_export", free: Sequence[str] = ()
) -> ExportedProgram:
    """Export a model with a dynamic batch size, for a format.

    Args:
        model: in evaluation mode.
        example: inputs of two samples.
        form: the format, for error messages.
        free: inputs whose second dimension is dynamic too, as far as the operations of the model allow that.

    Raises:
        NotExportableError: torch.export does not take it; the message contains the first line of its error.
    """
    batch = Dim("batch", min=1)
    sizes: dict[str, Any] = {name: {0: batch, 1: Dim.AUTO} if name in free else {0: batch} for name in example}
    try:
        called = _plain(model, example)
        args = tuple(example.values()) if _is_positional(model, example) else ()
        shapes: Any = sizes
        if called is not model:  # it takes any arguments
            shapes = {"args": tuple(sizes.values())} if args else {"kwargs": sizes}
        with Untouched(seed=0), torch.no_grad():
            program = torch.export.export(called, args, {} if args else dict(example), dynamic_shapes=shapes)
    except Exception as error:
        raise _refused(form, error) from error
    if free:
        _longest(program)
    return program


def _refused(form: str, error: Exception) -> NotExportableError:
    """Return the error of a model that a format does not take."""
    rule = f"the model cannot be exported to {form} with a dynamic batch: {named_first_line(error)}."
    return NotExportableError(f"{rule} safetensors takes any model.")


def example_of(samples: Inputs) -> dict[str, Tensor]:
    """Return zeros in the shapes of two samples: an export stores its example input, which must not be a sample of the
    data.
    """
    return {name: torch.zeros(2, *value.shape[1:], dtype=value.dtype) for name, value in samples.items()}


def _is_positional(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether the inputs are the first arguments of a model, so that they need no names."""
    return [*inspect.signature(model.forward).parameters][: len(inputs)] == [*inputs]


def _plain(model: nn.Module, example: Inputs) -> nn.Module:
    """Return a model whose outputs are plain tensors: the model itself, or a wrapper that drops other objects."""
    with Untouched(seed=0), torch.no_grad():
        outputs = model(**example)
    values = outputs if isinstance(outputs, tuple | list) else [outputs]
    return model if all(isinstance(value, Tensor) for value in values) else _TensorsOf(model)


class _TensorsOf(nn.Module):
    """A model that returns the tensors among the outputs of another one; the prefix `model` is omitted from names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the model's outputs."""
        return tuple(tensors_of(self.model(*args, **kwargs)))


def token_inputs(samples: Inputs) -> tuple[str, ...]:
    """Return the inputs whose second dimension is a number of tokens: integer inputs, and inputs of the same length.

    Example:
        >>> ids, mask = torch.zeros(8, 16, dtype=torch.int64), torch.ones(8, 16)
        >>> token_inputs({"input_ids": ids, "mask": mask, "images": torch.zeros(8, 3, 4, 4)})
        ('input_ids', 'mask')
    """
    long = {name: value.shape[1] for name, value in samples.items() if value.dim() > 1}
    length = next((long[name] for name in long if not samples[name].is_floating_point()), 1)
    return tuple(name for name in long if long[name] == length) if length > 1 else ()


def _try_free_lengths(samples: Inputs, form: str, attempt: Callable[[tuple[str, ...]], ExportedProgram]) -> str | None:
    """Write an export with a dynamic number of tokens, or with that of the samples if the model allows no other.

    Args:
        samples: real samples.
        form: the format.
        attempt: writes the export and checks it; its argument is the inputs whose second dimension is dynamic.

    Returns:
        A sentence about the lengths that the export takes; None for a model without tokens.

    Raises:
        NotExportableError: the export is refused in both forms.
    """
    names = token_inputs(samples)
    if not names:
        attempt(())
        return None
    length, named = samples[names[0]].shape[1], " and ".join(names)
    try:
        most = _longest(attempt(names))
    except NotExportableError as error:
        attempt(())
        return (
            f"{named}: {length} tokens, and no other number. With a dynamic number, {form} refuses the model: {error}"
        )
    return f"{named}: any number of tokens{'' if most is None else f' up to {most}'}."


def _longest(program: ExportedProgram) -> int | None:
    """Return the largest length that a program accepts; None without a limit.

    Raises:
        NotExportableError: the length is fixed.
    """
    limits: list[int] = []
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in program.graph_signature.user_inputs:
            continue
        value: Any = node.meta["val"]
        if value.dim() < 2 or value.is_floating_point():
            continue
        if not isinstance(value.shape[1], torch.SymInt):
            raise NotExportableError("its operations fix the number of tokens.")
        allowed: Any = program.range_constraints.get(value.shape[1].node.expr)
        if allowed is not None and allowed.upper.is_Integer:
            limits.append(int(allowed.upper))
    return min(limits, default=None)


# onnx: a file for ONNX Runtime and other programs, in any language

_ONNX: Final = "model.onnx"
_LARGE: Final = 1 << 30
"""Weights of this many bytes or more are stored in a separate file: an ONNX file holds at most 2 GiB."""


def _write_onnx(trained: TrainedModel, draft: Path) -> Written:
    """Write `model.onnx`, and check that ONNX Runtime computes the same outputs as the run, up to rounding."""
    model = trained.model()
    samples = real_samples(trained.cfg, model)
    trained.working()
    _refuse_lack_of_room(model, draft / _ONNX)

    def attempt(free: tuple[str, ...]) -> ExportedProgram:
        program = export_onnx(model, example_of(samples), draft, free=free)
        trained.working()
        refuse_difference(Check(form="onnx", exact=False, free=free), model, samples, draft)
        return program

    return Written(note=_try_free_lengths(samples, "onnx", attempt))


def export_onnx(model: nn.Module, example: Inputs, draft: Path, *, free: Sequence[str] = ()) -> ExportedProgram:
    """Write a model with a dynamic batch size; a large one has its weights in `model.onnx.data`.

    Arguments as in `export_program`.

    Raises:
        NotExportableError: the exporter does not take it; the message contains the first line of its error.
    """
    program = export_program(model, example, form="onnx", free=free)
    try:
        with Untouched(seed=0), quiet(), torch.no_grad():
            torch.onnx.export(
                program,
                f=str(draft / _ONNX),
                input_names=[*example],
                dynamo=True,
                external_data=sum(param.nbytes for param in model.parameters()) > _LARGE,
                verbose=False,
            )
    except OSError:
        raise
    except Exception as error:
        raise _refused("onnx", error) from error
    return program


# huggingface: a folder that `from_pretrained` of transformers loads


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A model of transformers that computes the same as the model of the run."""

    model: Any
    """The model; it has `save_pretrained`."""
    exact: bool = True
    """Whether it performs the same operations."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Module of the run's model -> module that has the same output; empty: the same names."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Argument of the run's model -> argument; empty: the same names."""

    def save(self, folder: Path) -> Check:
        """Write the model, without a progress bar; return how it is checked."""
        from transformers.utils import logging  # noqa: PLC0415 - slow, and for this format alone

        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with quiet():
                self.model.save_pretrained(folder)
        finally:
            if shown:
                logging.enable_progress_bar()
        request = {"class": type(self.model).__name__, "names": dict(self.names), "inputs": dict(self.inputs)}
        return Check(form="huggingface", exact=self.exact, request=request)


def _write_transformer(trained: TrainedModel, draft: Path) -> Written:
    """Write `config.json` and `model.safetensors`, and check that transformers computes the same outputs as the run."""
    model = trained.model()
    transformer = transformer_of(model)
    samples = real_samples(trained.cfg, model)
    _refuse_lack_of_room(transformer.model, draft / WEIGHTS)
    check = transformer.save(draft)
    trained.working()
    refuse_difference(check, model, samples, draft)
    return Written()


def transformer_of(model: nn.Module) -> Transformer:
    """Return the model of transformers: the model itself, or a GPT-2 with the weights of a `Gpt`.

    Raises:
        NotExportableError: there is no such model.
    """
    kind = type(model)
    if isinstance(model, Gpt):
        with Untouched(seed=0), quiet():
            return _gpt2(model)
    if kind.__module__.startswith("transformers.") and hasattr(model, "save_pretrained"):
        return Transformer(model=model)
    raise NotExportableError(
        f"transformers has no class for {kind.__name__}: huggingface takes models of transformers and trainkit's Gpt. "
        "safetensors, torch_export and onnx take others."
    )


def _gpt2(model: Gpt) -> Transformer:
    """Return a GPT-2: the same layers, with zeros where the Gpt has no bias, and matrix products in another order."""
    import transformers  # noqa: PLC0415 - slow, and for this format alone

    embed, blocks = model.embed, list(model.blocks)
    attention: Any = blocks[0].attention
    width, heads = embed.tokens.embedding_dim, embed.tokens.embedding_dim // attention.head_size
    config = transformers.GPT2Config(
        vocab_size=embed.tokens.num_embeddings,
        n_positions=model.context,
        n_embd=width,
        n_layer=len(blocks),
        n_head=heads,
        activation_function="gelu",
        embd_pdrop=embed.dropout.p,
        attn_pdrop=attention.dropout,
        resid_pdrop=embed.dropout.p,
        bos_token_id=None,
        eos_token_id=None,
    )
    gpt2 = transformers.GPT2LMHeadModel(config).to(embed.tokens.weight.dtype).eval()
    weights, state = model.state_dict(), gpt2.state_dict()
    names = {"embed.tokens": "transformer.wte", "head.norm": "transformer.ln_f", "head.output": "lm_head"}
    for index in range(len(blocks)):
        names |= {f"blocks.{index}.{own_name}": f"transformer.h.{index}.{name}" for own_name, name in _LAYERS.items()}
    with torch.no_grad():
        state["transformer.wpe.weight"].copy_(weights["embed.positions.weight"])
        for own_name, name in names.items():
            for kind in ("weight", "bias"):
                if (target := state.get(f"{name}.{kind}")) is not None:
                    value = weights.get(f"{own_name}.{kind}")
                    target.copy_(torch.zeros_like(target) if value is None else _as_gpt2(own_name, value, heads))
    shown = {own_name: name for own_name, name in names.items() if not own_name.endswith("queries_keys_values")}
    return Transformer(model=gpt2, exact=False, names=shown, inputs={"tokens": "input_ids"})


_LAYERS: Final = {
    "attention_norm": "ln_1",
    "attention.queries_keys_values": "attn.c_attn",
    "attention.project": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.expand": "mlp.c_fc",
    "mlp.project": "mlp.c_proj",
}
"""Module of a block of Gpt -> module of a block of GPT-2."""


def _as_gpt2(name: str, value: Tensor, heads: int) -> Tensor:
    """Return a weight or bias of a Gpt in the layout of GPT-2.

    GPT-2 multiplies from the left, (inputs, outputs), and orders queries, keys and values first by kind, then by head.
    """
    if name.endswith("queries_keys_values"):
        value = value.reshape(heads, 3, -1, *value.shape[1:]).transpose(0, 1).flatten(0, 2)
    return value.T if value.dim() == 2 and name.startswith("blocks") else value


FORMATS: Final[Mapping[str, Format]] = {
    "safetensors": Format(
        write=write_weights,
        loading="""\
```python
from safetensors.torch import load_file

model = ...  # an instance of the class that config.yaml names, built with the arguments there
model.load_state_dict(load_file("model.safetensors"), strict=True)
model.eval()
```

Where trainkit is installed, `trainkit.load(FOLDER)` builds the model and loads the weights.
""",
    ),
    "torch_export": Format(
        write=_write_program,
        loading="""\
```python
import torch

model = torch.export.load("model.pt2").module()  # needs PyTorch alone; any batch size
outputs = model(inputs)
```

Load such a file only if you trust where it comes from: it is a program.
""",
    ),
    "onnx": Format(
        write=_write_onnx,
        packages=("onnx", "onnxscript", "onnxruntime"),
        loading="""\
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, {session.get_inputs()[0].name: inputs})  # NumPy arrays; any batch size
```
""",
    ),
    "huggingface": Format(
        write=_write_transformer,
        packages=("transformers",),
        loading="""\
```python
import json

import transformers

(name,) = json.load(open("config.json"))["architectures"]
model = getattr(transformers, name).from_pretrained(".")  # this folder
```
""",
    ),
}
"""Format, as given to `--to` -> how it is written."""
