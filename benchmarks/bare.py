"""The baseline of startup and memory measurements: a bare script with the same training.

`python benchmarks/bare.py EPOCHS` trains; with EPOCHS 0 it ends after the first step.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

DIGITS = Path(__file__).resolve().parents[1] / "trainkit" / "data" / "digits.npz"


def main(epochs: int) -> None:
    """Read the digits, train, evaluate once per epoch."""
    torch.manual_seed(0)
    with np.load(DIGITS) as stored:
        pixels, labels, val = stored["pixels"], stored["labels"], stored["val"]
    images = torch.from_numpy((pixels / 16).astype(np.float32)).flatten(1)
    classes = torch.from_numpy(labels.astype(np.int64))
    held_out = torch.zeros(len(classes), dtype=torch.bool)
    held_out[torch.from_numpy(val.astype(np.int64))] = True
    loader = DataLoader(TensorDataset(images[~held_out], classes[~held_out]), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(max(1, epochs)):
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if epochs == 0:
                return
        with torch.no_grad():
            (model(images[held_out]).argmax(1) == classes[held_out]).float().mean().item()


if __name__ == "__main__":
    main(int(sys.argv[1]))
