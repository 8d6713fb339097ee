"""Run an exported model in a process without trainkit: `python -P fresh_process.py REQUEST.json`.

The file imports nothing of trainkit, and blocks every import of it. It reads the inputs of each batch, and writes the
outputs, or the outputs of every layer of the first batch.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

NOT_BUILT = 3
"""Exit code: the model of the node cannot be built without trainkit."""
Inputs = Mapping[str, Tensor]
Exported = tuple[Callable[[Inputs], list[Tensor]], Callable[[Inputs], dict[str, Tensor]]]
"""Two functions of the inputs: the outputs, and the output of each layer."""


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors among the outputs of a model, in their order; other objects are left out.

    Example:
        >>> [one.shape for one in tensors_of({"logits": torch.zeros(2, 3), "cache": None})]
        [torch.Size([2, 3])]
    """
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def layers_of(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Return module -> its output, from its last call, in the order in which modules return."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs.pop(name, None)
                outputs[name] = output.detach().clone()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _last_of_each_module(recorded: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return module -> the last value of its nodes, in the order in which modules return."""
    last: dict[str, tuple[int, int, Any]] = {}
    for index, (path, value) in enumerate(recorded):
        for depth, name in enumerate(path):
            last[name] = (index, -depth, value)
    ordered = sorted(last.items(), key=lambda item: item[1][:2])
    return {name.removeprefix("model."): value for name, (_, _, value) in ordered if name not in ("", "model")}


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node, with the modules that it belongs to."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.recorded: list[tuple[tuple[str, ...], Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            stack = (n.meta.get("nn_module_stack") or {}).values()
            self.recorded.append((tuple(str(path) for path, _ in stack), value.detach().clone()))
        return value


def _torch_export(folder: Path, request: Mapping[str, Any]) -> Exported:
    """Load the program of the export, or the one that `program` names, which gets the weights of the export."""
    graph = torch.export.load(Path(request.get("program", folder)) / "model.pt2").module()
    assert isinstance(graph, fx.GraphModule)
    if "program" in request:
        state = {f"{request['prefix']}{name}": value for name, value in load_file(folder / "model.safetensors").items()}
        names = graph.state_dict()
        if absent := [name for name in names if name not in state]:
            raise KeyError(f"the file lacks {absent[0]}")
        graph.load_state_dict({name: state[name] for name in names}, strict=True)

    def layers(inputs: Inputs) -> dict[str, Tensor]:
        recorder = _Recorder(graph)
        recorder.run(*inputs.values())
        return _last_of_each_module(recorder.recorded)

    return lambda inputs: tensors_of(graph(*inputs.values()) if request["positional"] else graph(**inputs)), layers


def _onnx(folder: Path, request: Mapping[str, Any]) -> Exported:
    """Load a file of ONNX for ONNX Runtime."""
    import onnx  # noqa: PLC0415 - where it is needed
    import onnxruntime  # noqa: PLC0415 - the same

    def run(content: str | bytes, inputs: Inputs) -> list[Tensor]:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = request["threads"]
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        feeds = {argument.name: inputs[argument.name].numpy() for argument in session.get_inputs()}
        return [torch.from_numpy(value) for value in session.run(None, feeds)]

    def scopes(node: Any) -> tuple[str, ...]:  # the modules of a node, as the exporter of torch has recorded them
        texts = [entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
        return tuple(texts[0].strip("[]").replace("'", "").split(", ")[:-1] if texts else ())  # the last: the operation

    def layers(inputs: Inputs) -> dict[str, Tensor]:
        model = onnx.load(folder / "model.onnx")
        names = _last_of_each_module([(scopes(node), node.output[0]) for node in model.graph.node if scopes(node)])
        del model.graph.output[:]
        output_names = list(dict.fromkeys(names.values()))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in output_names)
        values = dict(zip(output_names, run(model.SerializeToString(), inputs), strict=True))
        return {module: values[name] for module, name in names.items()}

    return lambda inputs: run(str(folder / "model.onnx"), inputs), layers


def _huggingface(folder: Path, request: Mapping[str, Any]) -> Exported:
    """Load a folder of `save_pretrained`."""
    import transformers  # noqa: PLC0415 - where it is needed

    model: nn.Module = getattr(transformers, request["class"]).from_pretrained(folder).eval()
    names: Mapping[str, str] = request["names"]

    def renamed(inputs: Inputs) -> dict[str, Tensor]:
        return {request["inputs"].get(name, name): value for name, value in inputs.items()}

    def outputs(inputs: Inputs) -> list[Tensor]:
        output = model(**renamed(inputs))
        return [output.logits] if names else tensors_of(output)

    def layers(inputs: Inputs) -> dict[str, Tensor]:
        theirs = layers_of(model, renamed(inputs))
        return {name: theirs[their] for name, their in names.items() if their in theirs} if names else theirs

    return outputs, layers


def _weights(folder: Path, request: Mapping[str, Any]) -> Exported:
    """Load a file of weights into the model that its node describes."""
    sys.path.extend(request["path"])
    try:
        model: nn.Module = _built(request["node"])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - read by the other process
        raise SystemExit(NOT_BUILT) from error
    state = load_file(folder / "model.safetensors")
    dtype = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    # `to` would drop the imaginary part of complex buffers.
    model._apply(  # type: ignore[no-untyped-call] # noqa: SLF001
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )
    model.load_state_dict(state, strict=True)
    model.eval()
    return lambda inputs: tensors_of(model(**inputs)), lambda inputs: layers_of(model, inputs)


def _built(node: Any) -> Any:
    """Return the object of a node with `_target_`, after the objects inside it, without any conversion of types."""
    if isinstance(node, list):
        return [_built(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    built = {name: _built(value) for name, value in node.items()}
    return pkgutil.resolve_name(built.pop("_target_"))(**built) if "_target_" in built else built


KINDS: Mapping[str, Callable[[Path, Mapping[str, Any]], Exported]] = {
    "torch_export": _torch_export,
    "weights_in_program": _torch_export,
    "onnx": _onnx,
    "huggingface": _huggingface,
    "safetensors": _weights,
}
"""Format, or a part of its check -> the function that loads it."""


def main(request_file: str) -> None:
    """Run a request: `format`, `folder`, `batches` (files of inputs), `order`, `layers`, `threads`, and others."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    outputs, layers = KINDS[request["format"]](Path(request["folder"]), request)
    for batch in request["batches"]:
        loaded = load_file(batch)
        # Copies begin at a boundary of 64 bytes, as those of the run do: MKL's bits may depend on the address.
        inputs = {name: loaded[name].clone() for name in request["order"]}
        with torch.no_grad():
            named: dict[Any, Tensor] = layers(inputs) if request["layers"] else dict(enumerate(outputs(inputs)))
        keyed = {f"{index:06}:{name}": value.contiguous().clone() for index, (name, value) in enumerate(named.items())}
        save_file(keyed, f"{batch}.out")


if __name__ == "__main__":
    sys.modules["trainkit"] = None  # type: ignore[assignment]  # an import of it fails
    main(sys.argv[1])
