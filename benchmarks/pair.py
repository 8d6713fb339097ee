"""W2 and W3, the workloads of two processes: a small convnet on images and a GPT on bytes, the same for all peers.

The data is synthetic and in memory, because steps are measured. A step takes the same number of samples on one process
and on two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

LR = 1e-3
SAMPLES = 2048


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and its batch."""

    key: str
    """Its name on a command line."""
    title: str
    batch: int
    """Samples of a step, over all processes."""
    steps: int
    """Steps of a measurement; a third of them before the clock starts."""
    window: int
    """Steps that are timed together."""
    overrides: tuple[str, ...]
    """The overrides for trainkit's command."""
    make_model: Callable[[], nn.Module]
    make_data: Callable[[], tuple[Tensor, Tensor]]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all targets."""
        return functional.cross_entropy(model(inputs).flatten(0, targets.dim() - 1), targets.flatten())

    def batches(self, *, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a rank's part of one batch after the other, without end; each is one gather."""
        inputs, targets = self.make_data()
        generator = torch.Generator().manual_seed(0)
        while True:
            for indices in torch.randperm(len(targets), generator=generator).split(self.batch):  # type: ignore[no-untyped-call]
                shard = indices[rank::world]
                yield inputs[shard], targets[shard]


def _convnet() -> nn.Module:
    from trainkit.models.convnet import ConvNet

    return ConvNet(in_channels=1, image_size=28, widths=[32, 64, 128], num_classes=10)


def _gpt() -> nn.Module:
    from trainkit.models.gpt import Gpt

    return Gpt(vocab_size=256, context=128, num_layers=4, num_heads=4, width=128)


def _images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 1, 28, 28, generator=generator), torch.arange(SAMPLES) % 10


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(256, (SAMPLES, 129), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Windows:
    """The clock of a measurement: call `tick` after every step.

    Example:
        >>> clock = Windows(WORKLOADS["gpt"], steps=60)
        >>> for _ in range(60):
        ...     clock.tick()
        >>> clock.seconds_a_step < 1
        True
    """

    def __init__(self, workload: Workload, steps: int) -> None:
        self._size, self._first, self._count = workload.window, steps // 3, 0
        self._stamps: list[float] = []

    def tick(self) -> None:
        """Record the end of a step."""
        self._count += 1
        if self._count >= self._first and (self._count - self._first) % self._size == 0:
            self._stamps.append(time.perf_counter())

    @property
    def seconds_a_step(self) -> float:
        """The median of the windows after the first third of the steps."""
        return statistics.median(later - stamp for stamp, later in pairwise(self._stamps)) / self._size


_ALL = (
    Workload(
        key="convnet",
        title="convnet 32-64-128 on 28 x 28 images, batch 128",
        batch=128,
        steps=180,
        window=10,
        overrides=(
            "model=convnet", "data=synthetic", "data.shape=[1,28,28]", f"data.num_samples={SAMPLES}",
            "loader.cache=true", "batch.global_size=128",
        ),
        make_model=_convnet,
        make_data=_images,
    ),
    Workload(
        key="gpt",
        title="GPT, 4 layers of width 128, context 128, batch 16",
        batch=16,
        steps=60,
        window=4,
        overrides=(
            "model=gpt", "model.context=128", "data=synthetic_tokens", "data.vocab_size=256", "data.context=128",
            f"data.num_samples={SAMPLES}", "objective=language_modelling", "objective.padding=false",
            "batch.global_size=16",
        ),
        make_model=_gpt,
        make_data=_tokens,
    ),
)  # fmt: skip
WORKLOADS: Mapping[str, Workload] = {workload.key: workload for workload in _ALL}
