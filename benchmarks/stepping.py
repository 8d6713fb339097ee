"""Steps of one device: a hand-written loop, and trainkit's executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import workload
from benchmarks.pair import LR, WORKLOADS, Workload
from trainkit.cluster.tasks import Identity
from trainkit.numerics.batch import BatchPlan, Ticket
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Objective
from trainkit.objectives.classification import Classification
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import LossWeighting, Numerics, SetupRequest, StepContext, UpdateParams
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms
from trainkit.strategies.one_device import OneDevice

DIGITS = Workload(
    key="digits",
    title="digits, MLP 64-128-10, batch 64",
    batch=workload.BATCH,
    steps=0,
    window=0,
    overrides=(),
    make_model=workload.model,
    make_data=workload.arrays,
)
RECIPES: Mapping[str, Workload] = {"digits": DIGITS, **WORKLOADS}

Step = Callable[[], None]
"""Takes one step."""


def plain_loop(of: Workload) -> Step:
    """Return a step of a loop as most people write it: a shuffling DataLoader, AdamW with torch's defaults."""
    model = of.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    data = TensorDataset(*of.make_data())

    def batches() -> Iterator[list[Tensor]]:
        while True:
            yield from DataLoader(data, batch_size=of.batch, shuffle=True)

    endless = batches()

    def step() -> None:
        inputs, targets = next(endless)
        optimizer.zero_grad()
        of.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def trainkit_loop(of: Workload, transforms: ModelTransforms, precision: Precision | None = None) -> Step:
    """Return a step of `strategy=one_device`, with data in memory and the fused AdamW of the shipped config.

    It is the step of a run whose every target counts, without its loader, rows and callbacks: of the digits, those took
    a quarter of a run's time a step (2026-11-28).
    """
    inputs, targets = of.make_data()
    objective: Objective = LanguageModelling(padding=False) if targets.dim() > 1 else Classification()
    per_sample = float(targets[0].numel())
    training = StepContext(
        plan=BatchPlan(num_samples=len(inputs), global_size=of.batch, micro_size=of.batch),
        objective=objective,
        weighing=LossWeighting(per_sample=per_sample, planned=per_sample),
        rule=lambda _version: UpdateParams(lr_factor=1.0, max_norm=None),
    )
    executor = OneDevice(device="cpu").setup(
        SetupRequest(
            model=apply_transforms(of.make_model(), transforms, compiles=OneDevice.facts.compiles),
            identity=Identity.solo("cpu"),
            precision=precision or Precision(),
            numerics=Numerics(),
            make_optimizer=lambda params: torch.optim.AdamW(list(params.values()), lr=LR, fused=True),
            training=training,
            open_data=lambda _device: None,  # type: ignore[arg-type, return-value] # one_device opens none
            graphs=transforms.graph_settings,
        )
    )
    numbers = count()

    def step() -> None:
        number = next(numbers)
        order = torch.randint(len(targets), (training.plan.batch_size(number),))
        executor.expect_unchanged()
        executor.step(Ticket(number, (0,)), [(inputs.index_select(0, order), targets.index_select(0, order))])

    return step
