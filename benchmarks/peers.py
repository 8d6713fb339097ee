"""W1 in a hand-written loop and in other trainers: each function trains and returns the seconds per step.

A peer that is not installed is left out of the table. All peers run bare: no logger, no checkpoint, no progress bar, no
validation, and the clock starts after a first epoch as warmup.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional

from benchmarks import workload

Peer = Callable[[int], float]


def available() -> dict[str, Peer]:
    """Return the installed peers by their name in the table, the hand-written loop first."""
    peers: dict[str, tuple[str, Peer]] = {
        "hand-written loop, DataLoader": ("torch", by_hand),
        "Lightning": ("lightning", lightning),
        "Accelerate": ("accelerate", accelerate),
        "Keras, fit": ("tensorflow", keras_fit),
        "Keras, steps_per_execution=50": ("tensorflow", keras_fifty),
    }
    return {name: peer for name, (package, peer) in peers.items() if find_spec(package)}


def by_hand(epochs: int) -> float:
    """Run the usual hand-written loop."""
    model, loader = workload.model(), workload.loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.LR)

    def train(epochs: int) -> None:
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    return timed(train, epochs)


def lightning(epochs: int) -> float:
    """Run Lightning's Trainer, everything optional off."""
    import lightning as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Clock(pl.Callback):  # type: ignore[misc]
        start = 0.0

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.start = time.perf_counter()

    class Digits(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            inputs, targets = batch
            return functional.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=workload.LR)

    clock = Clock()
    trainer = pl.Trainer(
        max_epochs=epochs + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(Digits(), workload.loader())
    return (time.perf_counter() - clock.start) / workload.steps(epochs)


def accelerate(epochs: int) -> float:
    """Run the hand-written loop with everything prepared by Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    plain = workload.model()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), lr=workload.LR), workload.loader()
    )

    def train(epochs: int) -> None:
        for _ in range(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                accelerator.backward(functional.cross_entropy(model(inputs), targets))
                optimizer.step()

    return timed(train, epochs)


def keras_fit(epochs: int) -> float:
    """Run Keras on a cached, shuffled tf.data pipeline."""
    return _keras(epochs, steps_per_execution=1)


def keras_fifty(epochs: int) -> float:
    """Run Keras with fifty steps per execution, its fastest setting."""
    return _keras(epochs, steps_per_execution=50)


def _keras(epochs: int, *, steps_per_execution: int) -> float:
    """Run Keras in its best setup here: TensorFlow, arrays through tf.data, one long epoch (each costs ms)."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    if tf.config.threading.get_intra_op_parallelism_threads() != 1:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    import keras

    images, labels = (part.numpy() for part in workload.arrays())
    samples = tf.data.Dataset.from_tensor_slices((images, labels)).cache().shuffle(len(labels))
    batches = samples.batch(workload.BATCH).repeat()
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.AdamW(workload.LR),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
        jit_compile=False,
    )
    return timed(lambda n: model.fit(batches, epochs=1, steps_per_epoch=workload.steps(n), verbose=0), epochs)


def timed(train: Callable[[int], Any], epochs: int) -> float:
    """Return the seconds of a step over some epochs, after one that does not count."""
    train(1)
    start = time.perf_counter()
    train(epochs)
    return (time.perf_counter() - start) / workload.steps(epochs)
