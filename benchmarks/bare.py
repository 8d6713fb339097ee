"""The baseline of startup and memory measurements: a bare script with the same training.

`python benchmarks/bare.py EPOCHS` trains; with EPOCHS 0 it ends after the first step. `python benchmarks/bare.py 1
STEPS` ends after these steps. Under torchrun, the model is in DistributedDataParallel on gloo and each rank takes its
part of a batch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DIGITS = Path(__file__).resolve().parents[1] / "trainkit" / "data" / "digits.npz"


def main(epochs: int, steps: int | None = None) -> None:
    """Read the digits, train, evaluate once per epoch."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    with np.load(DIGITS) as stored:
        pixels, labels, val = stored["pixels"], stored["labels"], stored["val"]
    images = torch.from_numpy((pixels / 16).astype(np.float32)).flatten(1)
    classes = torch.from_numpy(labels.astype(np.int64))
    held_out = torch.zeros(len(classes), dtype=torch.bool)
    held_out[torch.from_numpy(val.astype(np.int64))] = True
    train = TensorDataset(images[~held_out], classes[~held_out])
    sampler: DistributedSampler[object] | None = DistributedSampler(train) if world > 1 else None
    loader = DataLoader(train, batch_size=64 // world, shuffle=sampler is None, sampler=sampler)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(max(1, epochs)):
        for step, (inputs, targets) in enumerate(loader, start=1):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if epochs == 0:
                return
            if step == steps:
                break
        with torch.no_grad():
            (model(images[held_out]).argmax(1) == classes[held_out]).float().mean().item()
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
