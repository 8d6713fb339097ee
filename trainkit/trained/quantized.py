"""A model in fewer bits, by torchao: weights in 8 or 4 bits, or weights and activations in 8.

A quantized model is written without any pickled object: its tensors are a safetensors file, and the rest is YAML.
Loading builds the model from its node, quantizes it in the same way, and then copies the numbers of the file into it.

Linear layers: a quantized weight is a tensor subclass of torchao. The file holds its dense tensors, `NAME.qdata`,
`NAME.scale` and others; two weights of 4 bits share a byte.

`int8_static`: the model is exported to a graph, observers measure the range of each activation over the calibration
samples, and the graph is converted. The file holds the weights of the converted graph; the description has the scale
and zero point of each activation, by the name of its node.

Source: https://docs.pytorch.org/ao/stable/pt2e_quantization/pt2e_quant_ptq.html
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from trainkit.config.grammar import refusal
from trainkit.config.values import nearest
from trainkit.errors import CheckpointError, MissingExtraError
from trainkit.numerics.generators import Untouched
from trainkit.trained.checking import Inputs, quiet
from trainkit.trainer.checkpoint.saving import untied
from trainkit.trainer.checkpoint.tensors import TensorFile

QUANTIZED: Final = "quantized"
"""The key of the description that only a quantized model has."""
STATIC: Final = "int8_static"
"""The format that observes activations."""
FORMATS: Final = ("int8_weight", "int8_dynamic", "int4_weight", STATIC)
"""Formats, as given to `--to`."""
_GROUP: Final = 32
"""Weights of 4 bits that share a scale, along the inputs of a layer."""
_MAX_BATCH: Final = 1 << 20
_ACTIVATION: Final = ("quantize_per_tensor.default", "dequantize_per_tensor.default")
"""Operations whose scale and zero point are numbers in the graph."""
_MAX_SAMPLE: Final = 1 << 25
"""Elements of an input of one sample that a description may request."""
Read = Callable[[str], Tensor]
"""Function that reads a tensor of a file by its name; KeyError if there is none."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized model, in memory and for the file."""

    model: nn.Module
    """The model, in evaluation mode, on the CPU."""
    tensors: Mapping[str, Tensor]
    """Content of the file of weights: dense tensors, no two of which share memory."""
    layers: tuple[str, ...]
    """Names of the modules whose weights were quantized."""
    facts: Mapping[str, Any]
    """Further facts that loading needs; values of YAML."""


def refuse_format(to: str) -> None:
    """Refuse a format that does not exist, and each where torchao is not installed, or not for this torch.

    Raises:
        ConfigError: it is one of these.
    """
    if to not in FORMATS:
        raise refusal(f"--to {to}", f"is not a format. {nearest(to, FORMATS)}")
    with quiet():
        try:
            import torchao.quantization  # noqa: F401, PLC0415 - slow, and an extra
        except ImportError as error:  # absent, or made for another torch
            raise MissingExtraError(key=f"--to {to}", package="torchao", extra="quantize") from error


def quantize(model: nn.Module, to: str, calibration: Sequence[Inputs]) -> Quantized:
    """Quantize a model.

    Args:
        model: in float32 and evaluation mode, on the CPU; it is changed.
        to: the format.
        calibration: the inputs of each forward pass for `int8_static`; others observe none.

    Raises:
        ConfigError: the format does not suit the model; the message contains the reason.
    """
    refuse_format(to)
    replaced = as_linear(model)
    done = _quantized_graph(model, calibration) if to == STATIC else _quantized_layers(model, to)
    return replace(done, facts={**done.facts, **({"transposed": replaced} if replaced else {})})


def description_of(quantized: Quantized, to: str) -> dict[str, Any]:
    """Return the facts that loading needs, as values of YAML."""
    return {"to": to, **_versions(), "layers": list(quantized.layers), **quantized.facts}


def restored_model(config: Path, description: Mapping[str, Any], model: nn.Module, weights: TensorFile) -> nn.Module:
    """Return the quantized model of a folder.

    Args:
        config: the file of the description, for error messages.
        description: the result of `description_of`; the file may have been changed by others.
        model: built from the node of the folder.
        weights: the verified file.

    Raises:
        ConfigError: torchao is not installed, or torch.export no longer takes the model.
        CheckpointError: the description and the weights are not those of this model.
    """
    to = str(description.get("to"))
    if to not in FORMATS:
        raise CheckpointError(f"{config} has the format {to}, which is none of {', '.join(FORMATS)}.")
    try:
        return restore(model.float().eval(), to, weights.read, description).eval()
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        used = _versions()
        old = [f"{name} {description.get(name)}" for name, version in used.items() if description.get(name) != version]
        text = f"{config.parent} holds no quantized form of this model: {error}."
        if old:
            installed = " and ".join(f"{name} {version}" for name, version in used.items())
            text += f" It was written with {' and '.join(old)}, and {installed} are installed: quantize it again."
        raise CheckpointError(text) from error


def restore(model: nn.Module, to: str, read: Read, facts: Mapping[str, Any]) -> nn.Module:
    """Return the quantized model of a file.

    Args:
        model: built from its node, in float32 and evaluation mode; its numbers do not matter.
        to: the format.
        read: reads a tensor of the file by its name.
        facts: `facts` and `layers` of the description; the file may have been changed by others.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: they are not those of this model.
    """
    refuse_format(to)
    as_linear(model, map(str, facts.get("transposed", ())))
    return _restored_graph(model, read, facts) if to == STATIC else _restored_layers(model, to, read, facts)


def _versions() -> dict[str, str]:
    """Return the versions of the packages that determine the result of a quantization."""
    return {name: importlib.metadata.version(name) for name in ("torch", "torchao")}


def _like(name: str, value: Tensor, expected: Tensor) -> Tensor:
    if value.shape != expected.shape or value.dtype != expected.dtype:
        actual = f"{value.dtype} {tuple(value.shape)}"
        raise ValueError(f"{name} is {actual}, not {expected.dtype} {tuple(expected.shape)}")
    return value


# Linear layers of transformers that hold their weight transposed: `Conv1D`, used by GPT-2


def _is_transposed(module: nn.Module) -> bool:
    kind = type(module)  # compared by name: transformers need not be installed
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes the same as `nn.Linear`.

    Example:
        >>> is_linear(nn.Linear(2, 3)), is_linear(nn.Conv1d(2, 3, 1))
        (True, False)
    """
    return isinstance(module, nn.Linear) or _is_transposed(module)


def as_linear(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Replace each `Conv1D` of a model by an `nn.Linear` with the same numbers, in place.

    Args:
        model: the model, which is changed.
        names: the modules to replace; None: all of them.

    Returns:
        The names of the replaced modules.

    Raises:
        AttributeError, TypeError: a name is not a `Conv1D` of the model.
    """
    transposed = (name for name, module in model.named_modules() if _is_transposed(module))
    replaced = list(transposed if names is None else names)
    for name in replaced:
        module: Any = model.get_submodule(name)
        if not _is_transposed(module):
            raise TypeError(f"{name} is not a Conv1D")
        linear = nn.Linear(module.nx, module.nf, device="meta")
        linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), module.weight.requires_grad)
        linear.bias = module.bias
        model.set_submodule(name, linear.train(module.training))
    return replaced


# Linear layers with weights in 8 or 4 bits


def _quantize_layers(model: nn.Module, to: str, layers: Sequence[str]) -> None:
    """Quantize linear layers of a model, in place."""
    from torchao import quantization as ao  # noqa: PLC0415 - slow, and an extra
    from torchao.quantization.granularity import PerGroup  # noqa: PLC0415 - the same

    for name in layers:
        if not isinstance(model.get_submodule(name), nn.Linear):
            raise TypeError(f"{name} is not a linear layer")
    four: torch.dtype = torch.int4  # type: ignore[attr-defined]  # the stubs of torch lack it
    config: Any = {
        "int8_weight": ao.Int8WeightOnlyConfig,
        "int8_dynamic": ao.Int8DynamicActivationInt8WeightConfig,
        "int4_weight": lambda: ao.IntxWeightOnlyConfig(weight_dtype=four, granularity=PerGroup(_GROUP)),
    }[to]()
    with quiet():
        ao.quantize_(model, config, filter_fn=lambda _module, name: name in layers)


def _parts_of(tensor: Any) -> dict[str, Tensor] | None:
    """Return the dense tensors of a quantized one, by name; None for a dense tensor."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    return {name: getattr(tensor, name).detach().contiguous() for name in tensor.__tensor_flatten__()[0]}


def _quantized_layers(model: nn.Module, to: str) -> Quantized:
    """Quantize the weights of linear layers; those of int4_weight need a multiple of 32 inputs."""
    linear = {name: module.in_features for name, module in model.named_modules() if type(module) is nn.Linear}
    layers = tuple(name for name, size in linear.items() if to != "int4_weight" or size % _GROUP == 0)
    if not layers:
        others = f"none. {STATIC} quantizes convolutions too."
        why = f"none whose inputs are a multiple of {_GROUP}." if linear else others
        raise refusal(f"--to {to}", f"quantizes linear layers, and the model has {why}")
    _quantize_layers(model, to, layers)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if (parts := _parts_of(tensor)) is None:
            tensors[name] = tensor.detach().contiguous()
            continue
        for part, value in parts.items():
            tensors[f"{name}.{part}"] = packed(value) if to == "int4_weight" and part == "qdata" else value
    unique, tied = untied(tensors)
    return Quantized(model=model, tensors=unique, layers=layers, facts={"tied": dict(tied)})


def _restored_layers(model: nn.Module, to: str, read: Read, facts: Mapping[str, Any]) -> nn.Module:
    """Quantize the same layers of a model, and copy the numbers of the file into them."""
    _quantize_layers(model, to, [str(name) for name in facts["layers"]])
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (parts := _parts_of(tensor)) is None:
            with torch.no_grad():
                tensor.copy_(_like(name, read(facts["tied"].get(name, name)), tensor))
            continue
        for part, template in parts.items():
            value = read(f"{name}.{part}")
            parts[part] = _like(part, unpacked(value) if to == "int4_weight" and part == "qdata" else value, template)
        kind, (_, context) = type(tensor), tensor.__tensor_flatten__()
        restored = kind.__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(restored, requires_grad=False))
    return model


def packed(values: Tensor) -> Tensor:
    """Put two whole numbers of [-8, 7] into a byte, int8 (..., 2 n) to uint8 (..., n).

    Example:
        >>> packed(torch.tensor([-8, 7], dtype=torch.int8)).tolist()
        [240]
    """
    raised = (values + 8).to(torch.uint8)
    return raised[..., ::2] | raised[..., 1::2] << 4


def unpacked(values: Tensor) -> Tensor:
    """Undo `packed`.

    Example:
        >>> unpacked(torch.tensor([240], dtype=torch.uint8)).tolist()
        [-8, 7]
    """
    pairs = torch.stack((values & 15, values >> 4), -1)
    return pairs.flatten(-2).to(torch.int8) - 8


# Convolutions and linear layers with weights and activations in 8 bits


class StaticallyQuantized(nn.Module):
    """A converted graph that is called like the model; it has no training mode, and ignores autocast."""

    def __init__(self, graph: fx.GraphModule, names: Sequence[str]) -> None:
        """Hold a graph and the names of its inputs, in the order in which a caller passes them by position."""
        super().__init__()
        self.graph, self.names = graph, tuple(names)
        self.training = False

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: the graph is that of an evaluation."""
        del mode
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move the tensors, and let the graph create its own on their device instead of the recorded one."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(iter(self.graph.state_dict().values())).device
        for node in self.graph.graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda value: device if isinstance(value, torch.device) else value
            )
        self.graph.recompile()
        return self

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Run the graph on the inputs of the model, the first dimension of each being the batch."""
        inputs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        with torch.autocast(inputs[self.names[0]].device.type, enabled=False):
            return self.graph(**inputs)


def _quantized_graph(model: nn.Module, calibration: Sequence[Inputs]) -> Quantized:
    """Quantize the convolutions and linear layers of a model that `torch.export` takes."""
    graph = _converted(model, calibration)
    tensors, tied = untied({name: tensor.detach().contiguous() for name, tensor in graph.state_dict().items()})
    layers: dict[str, None] = {}  # in the order of their calls
    for node in graph.graph.nodes:
        if str(node.target).endswith("dequantize_per_channel.default"):
            for user in node.users:
                stack = [*(user.meta.get("nn_module_stack") or {}).values()]
                layers[str(stack[-1][0] if stack else user.name)] = None
    if not layers:
        rule = "quantizes convolutions and linear layers, and found none in the model's graph."
        raise refusal(f"--to {STATIC}", rule)
    facts = {
        "tied": dict(tied),
        "inputs": {
            name: {"shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in calibration[0].items()
        },
        "activations": {node.name: [node.args[1], node.args[2]] for node in _activations(graph)},
    }
    model = StaticallyQuantized(graph, [*calibration[0]])
    return Quantized(model=model, tensors=tensors, layers=tuple(layers), facts=facts)


def _restored_graph(model: nn.Module, read: Read, facts: Mapping[str, Any]) -> nn.Module:
    """Convert the graph of a model, and load the weights and ranges of the file into it."""
    example = {str(name): _zeros(spec["shape"], spec["dtype"]) for name, spec in facts["inputs"].items()}
    graph = _converted(model, [example])
    tied, ranges = facts["tied"], facts["activations"]
    for node in _activations(graph):
        scale, zero_point = ranges[node.name]
        if not (isinstance(scale, float) and isinstance(zero_point, int) and 0 < scale < math.inf):
            raise ValueError(f"{node.name} has no scale and zero point")
        node.args = (node.args[0], scale, zero_point, *node.args[3:])
    graph.recompile()
    for name, tensor in graph.state_dict().items():
        tensor.detach().copy_(_like(name, read(tied.get(name, name)), tensor))
    return StaticallyQuantized(graph, [*example])


def _converted(model: nn.Module, calibration: Sequence[Inputs]) -> fx.GraphModule:
    """Export, observe and convert; weights that the graph no longer uses are left out."""
    from torchao.quantization.pt2e import quantize_pt2e  # noqa: PLC0415 - slow, and an extra
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: PLC0415 - the same

    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH)
    # A graph traced with one sample may only accept one.
    example = {
        name: value if len(value) > 1 else value.expand(2, *value.shape[1:]).contiguous()
        for name, value in calibration[0].items()
    }
    with Untouched(seed=0), quiet(), torch.no_grad():
        try:
            exported = torch.export.export(model, (), example, dynamic_shapes={name: {0: batch} for name in example})
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            rule = f"needs a model that torch.export takes with a dynamic batch: {type(error).__name__}: {first}"
            raise refusal(f"--to {STATIC}", f"{rule}. int8_weight and int8_dynamic need no graph.") from error
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = quantize_pt2e.prepare_pt2e(exported.module(), quantizer)
        for inputs in calibration:
            prepared(**inputs)
        # Batch norms that follow no convolution are called by their function in torch.nn, with the same arithmetic: if
        # the conversion finds the operation itself, it traces a dozen patterns of quantization-aware training, which
        # takes a minute and finds no match.
        for node in prepared.graph.nodes:
            if node.target is torch.ops.aten.batch_norm.default:
                values, weight, bias, mean, variance, training, momentum, eps, _ = node.args
                node.target = functional.batch_norm
                node.args = (values, mean, variance, weight, bias, training, momentum, eps)
        prepared.recompile()
        graph: fx.GraphModule = quantize_pt2e.convert_pt2e(prepared)
    graph.requires_grad_(requires_grad=False)
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [*graph.state_dict()]:
        if name not in used:  # a weight that was replaced by a quantized one
            owner, _, last = name.rpartition(".")
            delattr(graph.get_submodule(owner), last)
    return graph


def _activations(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function" and str(node.target).endswith(_ACTIVATION)]


def _zeros(shape: Any, dtype: Any) -> Tensor:
    """Return an input of two samples; the description may have been changed by others."""
    is_valid = isinstance(shape, list) and all(isinstance(length, int) and length > 0 for length in shape)
    if not is_valid or math.prod(shape) > _MAX_SAMPLE:
        raise ValueError("the shape of an input is not a list of lengths")
    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"{dtype} is not a dtype")
    return torch.zeros(2, *shape, dtype=kind)
