"""Attempts to run code through the config: each node would leave a file `canary`, were it built.

`ATTEMPTS` maps a name to (group, node). In a node's texts `CANARY` stands for the file, and `HERE` for its folder,
which `set_up` fills with what the nodes read: a module, pickles, a model folder of transformers.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, Final

import torch

TOUCH: Final = "touch CANARY"
_MLP: Final = {"_target_": "trainkit.models.Mlp", "in_features": 64, "out_features": 10, "hidden": [8]}
_SYSTEM: Final = {"_target_": "torch.os.system", "command": TOUCH}
_POPEN: Final = {"_target_": "subprocess.Popen", "args": ["touch", "CANARY"]}
_STREAM: Final = {"_target_": "trainkit.data.Stream", "num_samples": 4}
_FILES: Final = {
    "_target_": "torch.utils.data.datapipes.iter.FileOpener",
    "datapipe": {"_target_": "torch.utils.data.datapipes.iter.IterableWrapper", "iterable": ["HERE/evil.pickle"]},
    "mode": "b",
}
_CODE: Final = "open('CANARY', 'w').close()"

ATTEMPTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    # modules that a module of the six packages imports
    "a module of torch's imports": ("model", _SYSTEM),
    "a module of trainkit's imports": (
        "model",
        {"_target_": "trainkit.run.begin.subprocess.getoutput", "cmd": TOUCH},
    ),
    "a class of subprocess through trainkit": (
        "data",
        {"_target_": "trainkit.callbacks.alert.subprocess.Popen", "args": ["touch", "CANARY"]},
    ),
    "the names of a function's module": (
        "model",
        {"_target_": "torch.nn.Linear.__init__.__globals__.os.system", "command": TOUCH},
    ),
    # functions of the six packages
    "torch.utils.collect_env.run": ("model", {"_target_": "torch.utils.collect_env.run", "command": TOUCH}),
    "torch.load": ("model", {"_target_": "torch.load", "f": "HERE/evil.pt", "weights_only": False}),
    "a function of torch.nn's": ("model", {"_target_": "torch.nn.utils.parameters_to_vector", "parameters": []}),
    "a class method of a module": ("model", {"_target_": "torch.nn.Embedding.from_pretrained", "embeddings": [[1.0]]}),
    "trainkit's own command line": ("model", {"_target_": "trainkit.cli.main", "argv": ["hydra.run.dir=CANARY"]}),
    # packages that are not allowed
    "os.system": ("model", {"_target_": "os.system", "command": TOUCH}),
    "os.system as data": ("data", {"_target_": "os.system", "command": TOUCH}),
    "a module that is imported": ("model", {"_target_": "evil_module.inner.Net"}),
    "a module that is imported for a nested node": ("model", {**_MLP, "activation": {"_target_": "evil_module.Act"}}),
    # nodes inside others
    "a list of nodes": (
        "model",
        {"_target_": "trainkit.models.Ensemble", "members": [_MLP, _SYSTEM]},
    ),
    "a list in a list": ("model", {**_MLP, "hidden": [[_POPEN]]}),
    "a stream that unpickles": (
        "data",
        {
            **_STREAM,
            "source": {"_target_": "torch.utils.data.datapipes.iter.RoutedDecoder", "datapipe": _FILES},
        },
    ),
    "a metric": (
        "objective",
        {"_target_": "trainkit.objectives.Classification", "extra_metrics": {"a": _SYSTEM}},
    ),
    "a parameter group": (
        "optimizer",
        {"_target_": "torch.optim.SGD", "lr": 0.1, "groups": {"a": {"match": ["*"], "lr": _POPEN}}},
    ),
    "a callback": ("callbacks", _SYSTEM),
    "a strategy": ("strategy", {"_target_": "trainkit.run.begin.subprocess.getoutput", "cmd": TOUCH}),
    "a precision": ("precision", _SYSTEM),
    # what downloads or unpickles, by its arguments
    "code of a model folder": (
        "model",
        {
            "_target_": "transformers.AutoModel.from_pretrained",
            "pretrained_model_name_or_path": "HERE/hf",
            "trust_remote_code": True,
        },
    ),
    "transformers.dynamic_module_utils": (
        "model",
        {
            "_target_": "transformers.dynamic_module_utils.get_class_from_dynamic_module",
            "class_reference": "evil_model.Net",
            "pretrained_model_name_or_path": "HERE/hf",
        },
    ),
    "a hub of timm's": ("model", {"_target_": "timm.create_model", "model_name": "hf_hub:evil/net"}),
    "a file that timm unpickles": (
        "model",
        {"_target_": "timm.create_model", "model_name": "resnet18", "checkpoint_path": "HERE/evil.pt"},
    ),
    # classes of another kind than the place takes
    "an optimizer as model": ("model", {"_target_": "torch.optim.SGD", "lr": 0.1}),
    "a strategy as callback": ("callbacks", {"_target_": "trainkit.strategies.OneDevice"}),
    "a plain class of trainkit's": ("data", {"_target_": "trainkit.trainer.metrics_accumulator.MetricsAccumulator"}),
}


class _Evil:
    """What unpickling it runs."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self._canary), "w")


def set_up(folder: Path) -> Path:
    """Write what the attempts read; returns the canary, which does not exist."""
    canary = folder / "canary"
    code = _CODE.replace("CANARY", str(canary))
    (folder / "evil_module").mkdir()
    (folder / "evil_module/__init__.py").write_text(f"{code}\n")
    (folder / "timm").mkdir()
    (folder / "timm/__init__.py").write_text(f"{code}\ndef create_model(**_): pass\n")
    (folder / "evil.pickle").write_bytes(pickle.dumps(_Evil(canary)))
    torch.save(_Evil(canary), folder / "evil.pt")
    (folder / "hf").mkdir()
    (folder / "hf/evil_model.py").write_text(f"{code}\nclass Net: pass\n")
    auto = {"AutoModel": "evil_model.Net"}
    (folder / "hf/config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    return canary


def filled(node: Any, folder: Path) -> Any:
    """Return a node with the folder and the canary in its texts."""
    text = json.dumps(node).replace("CANARY", str(folder / "canary")).replace("HERE", str(folder))
    return json.loads(text)
