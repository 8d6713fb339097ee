"""Run an exported model in a process without trainkit: `python -I fresh_process.py REQUEST.json`.

The file imports nothing of trainkit, and blocks every import of it. It reads the inputs of each batch, and writes the
outputs, or the outputs of every layer of the first batch.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn

NOT_BUILT = 3
"""Exit code: the model of the node cannot be built without trainkit."""


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors among the outputs of a model, in their order; other objects are left out.

    Example:
        >>> [one.shape for one in tensors_of({"logits": torch.zeros(2, 3), "cache": None})]
        [torch.Size([2, 3])]
    """
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors_of(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors_of(value)]
    return []


def layers_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return module -> its output, from its last call, in the order in which modules return."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                found.pop(name, None)
                found[name] = output.detach().clone()

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _TorchExport:
    """A file of `torch.export.save`."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self._graph = torch.export.load(folder / "model.pt2").module()
        self._positional = bool(request["positional"])

    def outputs(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return tensors_of(self._graph(*inputs.values()) if self._positional else self._graph(**inputs))

    def layers(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert isinstance(self._graph, fx.GraphModule)
        interpreter = _Recorder(self._graph)
        with torch.no_grad():
            interpreter.run(*inputs.values())
        return _last_of_each_module(interpreter.recorded)


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


def _last_of_each_module(recorded: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return module -> the last value of its nodes, in the order in which modules return."""
    last: dict[str, tuple[int, int, Any]] = {}
    for place, (path, value) in enumerate(recorded):
        for depth, name in enumerate(path):
            last[name] = (place, -depth, value)
    ordered = sorted(last.items(), key=lambda item: item[1][:2])
    return {name.removeprefix("model."): value for name, (_, _, value) in ordered if name not in ("", "model")}


class _Onnx:
    """A file of ONNX, run by ONNX Runtime."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self._path, self._threads = folder / "model.onnx", int(request["threads"])

    def outputs(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        return self._run(str(self._path), inputs)

    def layers(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import onnx  # noqa: PLC0415 - where it is needed

        model = onnx.load(self._path)
        recorded = [(_scopes(node), node.output[0]) for node in model.graph.node if _scopes(node)]
        names = _last_of_each_module(recorded)
        del model.graph.output[:]
        wanted = list(dict.fromkeys(names.values()))
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        values = dict(zip(wanted, self._run(model.SerializeToString(), inputs), strict=True))
        return {module: values[name] for module, name in names.items()}

    def _run(self, model: str | bytes, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        import onnxruntime  # noqa: PLC0415 - where it is needed

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        given = {one.name: inputs[one.name].numpy() for one in session.get_inputs()}
        return [torch.from_numpy(value) for value in session.run(None, given)]


def _scopes(node: Any) -> tuple[str, ...]:
    """Return the modules that a node of ONNX belongs to, as the exporter of torch has recorded them."""
    texts = [entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
    scopes = texts[0].strip("[]").replace("'", "").split(", ")[:-1] if texts else []  # the last one is the operation
    return tuple(scopes)


class _HuggingFace:
    """A folder of `save_pretrained`."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        import transformers  # noqa: PLC0415 - where it is needed

        self._model: nn.Module = getattr(transformers, request["class"]).from_pretrained(folder).eval()
        self._names: dict[str, str] = request["names"]
        self._inputs: dict[str, str] = request["inputs"]

    def outputs(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            found = self._model(**self._renamed(inputs))
        return [found.logits] if self._names else tensors_of(found)

    def layers(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        theirs = layers_of(self._model, self._renamed(inputs))
        if not self._names:
            return theirs
        return {name: theirs[their] for name, their in self._names.items() if their in theirs}

    def _renamed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._inputs.get(name, name): value for name, value in inputs.items()}


class _Weights:
    """A file of weights, in the model that its node describes."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        sys.path.extend(request["path"])
        try:
            self._model: nn.Module = _built(request["node"])
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - read by the other process
            raise SystemExit(NOT_BUILT) from error
        state = load_file(folder / "model.safetensors")
        dtype = next((one.dtype for one in state.values() if one.is_floating_point()), torch.float32)
        # `to` would drop the imaginary part of complex buffers.
        self._model._apply(lambda one: one.to(dtype) if one.is_floating_point() else one)  # noqa: SLF001
        self._model.load_state_dict(state, strict=True)
        self._model.eval()

    def outputs(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return tensors_of(self._model(**inputs))

    def layers(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return layers_of(self._model, inputs)


def _built(node: Any) -> Any:
    """Return the object of a node with `_target_`, after the objects inside it, without any conversion of types."""
    if isinstance(node, list):
        return [_built(one) for one in node]
    if not isinstance(node, Mapping):
        return node
    made = {name: _built(value) for name, value in node.items()}
    return pkgutil.resolve_name(made.pop("_target_"))(**made) if "_target_" in made else made


class _WeightsInProgram(_TorchExport):
    """A file of weights, in an exported program of the model without weights."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        super().__init__(Path(request["program"]), request)
        state = {f"{request['prefix']}{name}": one for name, one in load_file(folder / "model.safetensors").items()}
        names = self._graph.state_dict()
        if absent := [name for name in names if name not in state]:
            raise KeyError(f"the file lacks {absent[0]}")
        self._graph.load_state_dict({name: state[name] for name in names}, strict=True)


class _Tensors:
    """A file of weights, tensor by tensor: no model is needed, and no two tensors are in memory at once."""

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            found = {name: fingerprint(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - no mapping
        Path(request["found"]).write_text(json.dumps(found), encoding="utf-8")


def fingerprint(tensor: Tensor) -> list[str]:
    """Return dtype, shape and SHA-256 of the numbers of a tensor.

    Example:
        >>> fingerprint(torch.zeros(2, 3))[:2]
        ['torch.float32', '(2, 3)']
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha256(content.data).hexdigest()]


KINDS: Mapping[str, Any] = {
    "torch_export": _TorchExport,
    "onnx": _Onnx,
    "huggingface": _HuggingFace,
    "safetensors": _Weights,
    "weights_in_program": _WeightsInProgram,
    "tensors": _Tensors,
}
"""Format, or a part of its check -> the class that runs it."""


def _numbered(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for place, (name, tensor) in enumerate(tensors.items()):
        yield f"{place:06}:{name}", tensor.contiguous().clone()


def main(request_file: str) -> None:
    """Run a request: `format`, `folder`, `batches` (files of inputs), `order`, `layers`, `threads`, and others."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    exported = KINDS[request["format"]](Path(request["folder"]), request)
    for batch in request.get("batches", ()):
        loaded = load_file(batch)
        # Copies begin at a boundary of 64 bytes, as those of the run do: MKL's bits may depend on the address.
        inputs = {name: loaded[name].clone() for name in request["order"]}
        if request["layers"]:
            found = exported.layers(inputs)
        else:
            found = {str(place): tensor for place, tensor in enumerate(exported.outputs(inputs))}
        save_file(dict(_numbered(found)), f"{batch}.out")


if __name__ == "__main__":
    sys.modules["trainkit"] = None  # type: ignore[assignment]  # an import of it fails
    main(sys.argv[1])
