"""Convolutions and linear layers with weights and activations in 8 bits, by PT2E quantization of torchao.

The model is exported to a graph, observers measure the range of each activation over the calibration samples, and the
graph is converted. The file holds the weights of the converted graph; the description has the scale and zero point of
each activation, by the name of its node. Loading creates the same graph from the model, and inserts both.

Source: https://docs.pytorch.org/ao/stable/pt2e_quantization/pt2e_quant_ptq.html
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

from trainkit.config.grammar import refusal
from trainkit.exporting.trained import Inputs, quiet
from trainkit.numerics.generators import Untouched
from trainkit.quantizing.formats import Quantized, Read
from trainkit.trainer.checkpoint.saving import untied

_MAX_BATCH: Final = 1 << 20
_ACTIVATION: Final = ("quantize_per_tensor.default", "dequantize_per_tensor.default")
"""Operations whose scale and zero point are numbers in the graph."""
_MAX_SAMPLE: Final = 1 << 25
"""Elements of an input of one sample that a description may request."""


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
        """Move the tensors, and let the graph make its own where they are: it was recorded with the device of then."""
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


def quantize(model: nn.Module, to: str, calibration: Sequence[Inputs]) -> Quantized:
    """Quantize the convolutions and linear layers of a model that `torch.export` takes."""
    graph = _converted(model, to, calibration)
    named = {name: tensor.detach().contiguous() for name, tensor in graph.state_dict().items()}
    tensors, tied = untied(named)
    layers = tuple(dict.fromkeys(_quantized_layers(graph)))
    if not layers:
        raise refusal(f"--to {to}", "quantizes convolutions and linear layers, and found none in the model's graph.")
    facts = {
        "tied": dict(tied),
        "inputs": {
            name: {"shape": list(value.shape[1:]), "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in calibration[0].items()
        },
        "activations": {node.name: [node.args[1], node.args[2]] for node in _activations(graph)},
    }
    model = StaticallyQuantized(graph, [*calibration[0]])
    return Quantized(model=model, tensors=tensors, layers=layers, facts=facts)


def restore(model: nn.Module, to: str, read: Read, facts: Mapping[str, Any]) -> nn.Module:
    """Convert the graph of a model, and load the weights and ranges of the file into it."""
    example = {
        str(name): torch.zeros(2, *_lengths(one["shape"]), dtype=_dtype(one["dtype"]))
        for name, one in facts["inputs"].items()
    }
    graph = _converted(model, to, [example])
    tied, ranges = facts["tied"], facts["activations"]
    for node in _activations(graph):
        scale, zero_point = ranges[node.name]
        if not (isinstance(scale, float) and isinstance(zero_point, int) and 0 < scale < math.inf):
            raise ValueError(f"{node.name} has no scale and zero point")
        node.args = (node.args[0], scale, zero_point, *node.args[3:])
    graph.recompile()
    for name, tensor in graph.state_dict().items():
        value = read(tied.get(name, name))
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise ValueError(f"{name} is {value.dtype} {tuple(value.shape)}, not {tensor.dtype} {tuple(tensor.shape)}")
        tensor.detach().copy_(value)
    return StaticallyQuantized(graph, [*example])


def _converted(model: nn.Module, to: str, calibration: Sequence[Inputs]) -> fx.GraphModule:
    """Export, observe and convert; weights that the graph no longer uses are left out."""
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH)
    with Untouched(seed=0), quiet(), torch.no_grad():
        try:
            example = {name: _two(value) for name, value in calibration[0].items()}
            exported = torch.export.export(model, (), example, dynamic_shapes={name: {0: batch} for name in example})
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            rule = f"needs a model that torch.export takes with a dynamic batch: {type(error).__name__}: {first}"
            raise refusal(f"--to {to}", f"{rule}. int8_weight and int8_dynamic need no graph.") from error
        quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported.module(), quantizer)
        for inputs in calibration:
            prepared(**inputs)
        _rename_batch_norms(prepared)
        graph: fx.GraphModule = convert_pt2e(prepared)
    for parameter in graph.parameters():
        parameter.requires_grad_(False)
    _delete_unused(graph)
    return graph


def _rename_batch_norms(graph: fx.GraphModule) -> None:
    """Call batch norms that follow no convolution by their function in torch.nn, with the same arithmetic.

    If the conversion finds the batch-norm operation itself, it traces a dozen patterns of quantization-aware training,
    which takes a minute and finds no match.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default:
            values, weight, bias, mean, variance, training, momentum, eps, _ = node.args
            node.target = functional.batch_norm
            node.args = (values, mean, variance, weight, bias, training, momentum, eps)
    graph.recompile()


def _two(value: Tensor) -> Tensor:
    """Return an input of at least two samples: a graph traced with one sample may only accept one."""
    return value if len(value) > 1 else value.expand(2, *value.shape[1:]).contiguous()


def _delete_unused(graph: fx.GraphModule) -> None:
    """Delete the parameters and buffers that no node reads: the weights that were replaced by quantized ones."""
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [*graph.state_dict()]:
        if name not in used:
            owner, _, last = name.rpartition(".")
            delattr(graph.get_submodule(owner), last)


def _activations(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target).endswith(_ACTIVATION):
            yield node


def _quantized_layers(graph: fx.GraphModule) -> Iterator[str]:
    """Yield the names of the modules whose weights are quantized, as their calls are recorded in the graph."""
    for node in graph.graph.nodes:
        if str(node.target).endswith("dequantize_per_channel.default"):
            for user in node.users:
                stack = [*(user.meta.get("nn_module_stack") or {}).values()]
                yield str(stack[-1][0] if stack else user.name)


def _lengths(shape: Any) -> list[int]:
    sound = isinstance(shape, list) and all(isinstance(one, int) and one > 0 for one in shape)
    if not sound or math.prod(shape) > _MAX_SAMPLE:
        raise ValueError("the shape of an input is not a list of lengths")
    return list(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is not a dtype")
    return found
