"""A loop of one's own, `python -m stories._own_loop`: a variational autoencoder whose divergence is switched on late.

On one device, and on two ranks of two strategies under torchrun: each must end, in fp64, in the weights of one_device.
"""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import trainkit
from stories.vae import Bars, Vae  # type: ignore[import-not-found]  # beside this file, where it runs

KEYS: dict[str, Any] = {
    "steps": 6, "batch": {"global_size": 12, "micro_size": 5}, "precision": "fp64", "quiet": True, "optimizer": "sgd",
    "eval": {"every_steps": 4},
}  # fmt: skip


def negative_elbo(model: torch.nn.Module, pixels: Tensor, *, beta: float = 1.0) -> dict[str, Tensor]:
    scores, mean, log_variance = model(pixels)
    likelihood = functional.binary_cross_entropy_with_logits(scores, pixels.to(scores.dtype), reduction="sum")
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
    return {"likelihood": likelihood / len(pixels), "divergence": beta * divergence / len(pixels)}


def train(folder: str, *overrides: str) -> None:
    parts: dict[str, Any] = {"model": partial(Vae, codes=2), "data": Bars, "loss": negative_elbo}
    with trainkit.session(overrides, run_dir=folder, terms=["likelihood", "divergence"], **parts, **KEYS) as session:
        for _ in session.batches():
            if session.steps < 3:
                session.step(lambda model, batch: negative_elbo(model, batch, beta=0.0))
            else:
                session.step()
        assert session.evaluate()["val/divergence"] > 0


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        train(f"{scratch}/one_device")
        expected = weights(f"{scratch}/one_device")
        for strategy in ("mirrored", "fsdp"):
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stories._own_loop"]
            subprocess.run([*launch, f"{scratch}/{strategy}", f"strategy={strategy}"], check=True)
            for name, tensor in weights(f"{scratch}/{strategy}").items():
                torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
            sys.stdout.write(f"{strategy}: as one_device\n")


def weights(folder: str) -> dict[str, Tensor]:
    return trainkit.load(Path(folder), packages=["stories"]).state_dict()


if __name__ == "__main__":
    if sys.argv[1:]:
        train(*sys.argv[1:])
    else:
        main()
