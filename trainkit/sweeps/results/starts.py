"""Initial weights of a side whose shapes differ from those of the other: the parts that both have start equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from trainkit.config.schema import RunConfig
from trainkit.trained.build import build_model, meta_model
from trainkit.trainer.checkpoint.tensors import write_tensors


def shapes_differ(a: RunConfig, b: RunConfig) -> bool:
    """Return whether two models have unequal names or shapes of weights."""
    if a.model == b.model:
        return False
    shapes = [{name: tensor.shape for name, tensor in meta_model(cfg).state_dict().items()} for cfg in (a, b)]
    return shapes[0] != shapes[1]


def write_start(a: RunConfig, b: RunConfig, seed: int, path: Path) -> None:
    """Write the weights with which B starts at a seed: its own, and in the first units of each layer those of A.

    Args:
        a: the config of A, which starts as it does alone.
        b: the config of B.
        seed: the seed.
        path: the safetensors file; one that exists is kept.
    """
    if path.exists():
        return
    source, target = (build_model(replace(cfg, seed=seed)).state_dict() for cfg in (a, b))
    for name, tensor in target.items():
        other = source.get(name)
        if isinstance(other, torch.Tensor) and other.dim() == tensor.dim():
            part = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, other.shape, strict=True))
            tensor[part] = other[part]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, target)
