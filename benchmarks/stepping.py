"""Steps of one device: a hand-written loop, trainkit's executor, and the least that an eager step can take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import count

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import workload
from benchmarks.pair import LR, WORKLOADS, Workload
from trainkit.cluster.tasks import Identity
from trainkit.config.sections import LoaderConfig
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import Loader
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


def floor_loop(of: Workload, samples: workload.MapStyle | None = None) -> Step:
    """Return a step without any trainer: forward, backward, and the fused kernel of AdamW. A lower bound, not a peer.

    Args:
        of: the workload.
        samples: read each sample from it, and stack them; None: one gather a batch.
    """
    model, (inputs, targets) = of.make_model(), of.make_data()
    params: list[Tensor] = list(model.parameters())
    means, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    counts = [torch.zeros(()) for _ in params]

    def step() -> None:
        order = torch.randint(len(targets), (of.batch,))
        if samples is None:
            batch = [inputs.index_select(0, order), targets.index_select(0, order)]
        else:
            batch = list(map(torch.stack, zip(*map(samples.__getitem__, order.tolist()), strict=True)))
        of.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
        torch._foreach_add_(counts, 1)
        grads = [param.grad for param in params if param.grad is not None]
        torch._fused_adamw_(
            params, grads, means, squares, [], counts,
            lr=LR, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False,
        )  # fmt: skip
        for param in params:
            param.grad = None

    return step


def trainkit_loop(
    of: Workload,
    transforms: ModelTransforms,
    precision: Precision | None = None,
    *,
    samples: workload.MapStyle | None = None,
) -> Step:
    """Return a step of `strategy=one_device`, with data in memory and the fused AdamW of the shipped config.

    It is the step of a run whose every target counts, without its loader, rows and callbacks: of the digits, those took
    a quarter of a run's time a step (2026-11-28). With `samples` it is the step of a run that counts its targets, and
    the loader reads them.
    """
    inputs, targets = of.make_data()
    objective: Objective = LanguageModelling(padding=False) if targets.dim() > 1 else Classification()
    per_sample = float(targets[0].numel())
    training = StepContext(
        plan=BatchPlan(num_samples=len(inputs), global_size=of.batch, micro_size=of.batch),
        objective=objective,
        weighing=LossWeighting(per_sample=per_sample if samples is None else None, planned=per_sample, exact=True),
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
    loader = None
    if samples is not None:
        reading = Reading(device=torch.device("cpu"), settings=LoaderConfig(cache=False))
        loader = Loader(samples, plan=training.plan, shards_at=lambda _: (0,), num_steps=10**6, reading=reading)

    def step() -> None:
        number = next(numbers)
        if loader is not None:
            executor.step(Ticket(number, (0,)), loader.fetch(Ticket(number, (0,))))
            return
        order = torch.randint(len(targets), (training.plan.batch_size(number),))
        executor.expect_unchanged()
        executor.step(Ticket(number, (0,)), [(inputs.index_select(0, order), targets.index_select(0, order))])

    return step
