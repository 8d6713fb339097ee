"""Run one process of a peer on W2 or W3: `benchmarks/pair_peers.py PEER WORKLOAD STEPS` prints its seconds per step.

RANK and WORLD_SIZE identify the process, MASTER_ADDR and MASTER_PORT the rendezvous, as torchrun sets them. The clock
starts after a third of the steps. Every peer uses the fused AdamW and, if its loop allows it, data gathered by one
index operation.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.pair import LR, WORKLOADS, Windows, Workload

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    """Train and print."""
    peer, workload, steps = PEERS[sys.argv[1]], WORKLOADS[sys.argv[2]], int(sys.argv[3])
    torch.set_num_threads(1)
    print(f"seconds a step: {peer(workload, steps)}")


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def timed(step: Callable[[], None], workload: Workload, steps: int) -> float:
    """Run steps; return seconds per step."""
    clock = Windows(workload, steps)
    for _ in range(steps):
        step()
        clock.tick()
    return clock.seconds_a_step


def by_hand(workload: Workload, steps: int) -> float:
    """Run a plain loop; two processes run independently, each with half of every batch."""
    return _loop(workload, steps, workload.make_model())


def ddp(workload: Workload, steps: int) -> float:
    """Run the plain loop with DistributedDataParallel."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    plain = workload.make_model()
    seconds = _loop(workload, steps, nn.parallel.DistributedDataParallel(plain) if WORLD > 1 else plain)
    if WORLD > 1:
        dist.destroy_process_group()
    return seconds


def _loop(workload: Workload, steps: int, model: nn.Module) -> float:
    optimizer, batches = optimizer_of(model), workload.batches(rank=RANK, world=WORLD)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return timed(step, workload, steps)


def accelerate(workload: Workload, steps: int) -> float:
    """Run the plain loop with everything prepared by Accelerate."""
    from accelerate import Accelerator

    accelerator, plain = Accelerator(cpu=True), workload.make_model()
    loader = DataLoader(TensorDataset(*workload.make_data()), batch_size=workload.batch // WORLD, shuffle=True)
    model, optimizer, prepared = accelerator.prepare(plain, optimizer_of(plain), loader)
    batches = _endless(prepared)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        accelerator.backward(workload.loss(model, inputs, targets))
        optimizer.step()

    seconds = timed(step, workload, steps)
    accelerator.end_training()
    return seconds


def lightning(workload: Workload, steps: int) -> float:
    """Run Lightning's Trainer, everything optional off."""
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Clock(pl.Callback):  # type: ignore[misc]
        windows = Windows(workload, steps)

        def on_train_batch_end(self, *_: Any) -> None:
            self.windows.tick()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.make_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return workload.loss(self.net, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    clock = Clock()
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    loader = DataLoader(TensorDataset(*workload.make_data()), batch_size=workload.batch // WORLD, shuffle=True)
    trainer.fit(Module(), loader)
    return clock.windows.seconds_a_step


def _endless(loader: Any) -> Any:
    while True:
        yield from loader


def mirrored_strategy(workload: Workload, steps: int) -> float:
    """Run Keras under TensorFlow's MirroredStrategy: one process, a logical CPU per replica (LOGICAL_CPUS)."""
    from benchmarks.pair_keras import train

    return train(workload, steps, replicas=int(os.environ["LOGICAL_CPUS"]))


PEERS = {
    "by_hand": by_hand,
    "ddp": ddp,
    "lightning": lightning,
    "accelerate": accelerate,
    "mirrored_strategy": mirrored_strategy,
}

if __name__ == "__main__":
    main()
