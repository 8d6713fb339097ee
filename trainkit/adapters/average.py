"""Averages of the weights over the steps, kept as slots of the optimizer.

A slot of the optimizer is where its parameter is: on a rank of a sharded model, on a stage, on a server. So every
strategy shards, moves, saves and restores an average like the slots of Adam.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from trainkit.fields import at_least, below, cosmetic, maths, unit

AVERAGE: Final = "average"
"""Name of the slot that holds the average, in the shape of the parameter."""
UPDATES: Final = "average_updates"
"""Name of the slot that holds the number of averaged updates of the parameter."""
SLOTS: Final = frozenset({AVERAGE, UPDATES})
"""Slots of averages: a parameter that other optimizers alone have updated has no others yet."""


Mix = Callable[[list[Tensor], list[Tensor], int], None]
"""Function that adds parameters to their averages in place: (averages, parameters, number of values in each average).
"""


@dataclass(frozen=True, kw_only=True)
class Average(ABC):
    """An average of the weights after some of the updates."""

    name: ClassVar[str]
    """Suffix of the splits in names of metrics: `val_ema/loss`."""
    counts_statistics: ClassVar[bool] = False
    """Whether the batch statistics are computed again for the average at the end of the training."""

    start_step: Annotated[int, maths, at_least(0), unit("steps")] = 0
    """Number of updates before averaging starts; the average of a parameter starts as the parameter itself."""
    every_steps: Annotated[int, maths, at_least(1), unit("steps")] = 1
    """Updates between two values of the average."""
    export: Annotated[bool, cosmetic] = True
    """Write the averaged weights in addition to the trained ones at the end: RUN/model/average."""

    @abstractmethod
    def mix(self) -> Mix:
        """Return the function that adds parameters to their averages."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the parameters of an optimizer after its updates from now on."""
        hook = AfterStep(self)
        optimizer.register_step_pre_hook(hook.set_aside)
        optimizer.register_step_post_hook(hook)


def count_update(optimizers: Sequence[torch.optim.Optimizer], params: Iterable[Tensor]) -> None:
    """Bring the averages of parameters up to date, after an update that other optimizers have made."""
    updated = set(map(id, params))
    for optimizer in optimizers:
        members = [param for group in optimizer.param_groups for param in group["params"] if id(param) in updated]
        for hook in list(optimizer._optimizer_step_post_hooks.values()):  # noqa: SLF001 - has no public name
            if isinstance(hook, AfterStep):
                hook.update(optimizer, members)


def put_back(optimizer: torch.optim.Optimizer) -> None:
    """Give the slots that were set aside for a step back, also if the step has failed."""
    for hook in optimizer._optimizer_step_post_hooks.values():  # noqa: SLF001
        if isinstance(hook, AfterStep):
            hook.put_back()


def detach(optimizer: torch.optim.Optimizer) -> None:
    """Keep no averages by the updates of an optimizer: another one of the same parameters counts them."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):  # noqa: SLF001
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), AfterStep)]:
            del hooks[key]


class AfterStep:
    """A hook of `Optimizer.step`, which brings the averages of the updated parameters up to date."""

    def __init__(self, average: Average) -> None:
        self._first, self._every = max(average.start_step, 1), average.every_steps
        self._mix = average.mix()
        self._aside: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def set_aside(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Empty slots that hold an average alone, until the step is over: torch's optimizers create theirs, in the
        first step of a parameter, only where there are none.
        """
        for slots in optimizer.state.values():
            if slots and slots.keys() <= SLOTS:
                self._aside.append((slots, dict(slots)))
                slots.clear()

    def put_back(self) -> None:
        """Fill the emptied slots again."""
        for slots, averages in self._aside:
            slots.update(averages)
        self._aside.clear()

    def __call__(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Average the parameters that `Optimizer.step` has updated: those with a gradient."""
        self.put_back()
        members = (param for group in optimizer.param_groups for param in group["params"])
        self.update(optimizer, (param for param in members if param.grad is not None))

    def update(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        """Bring the averages of parameters that were updated up to date."""
        due: dict[tuple[int, torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for param in params:
            slots = optimizer.state[param]
            updates = slots[UPDATES] = int(slots.get(UPDATES, 0)) + 1  # a tensor after a restore
            count, rest = divmod(updates - self._first, self._every)
            if count < 0 or rest:
                continue
            if not count or AVERAGE not in slots:
                slots[AVERAGE] = param.detach().clone()
            else:
                due.setdefault((count, param.device, param.dtype), []).append((slots[AVERAGE], param.detach()))
        with torch.no_grad():
            for (count, _device, _dtype), pairs in due.items():
                averages, current = (list(tensors) for tensors in zip(*pairs, strict=True))
                self._mix(averages, current, count)


@dataclass(frozen=True, kw_only=True)
class Ema(Average):
    """Exponential moving average: average = decay * average + (1 - decay) * weights, after each update.

    Example:
        >>> average = [torch.tensor([1.0])]
        >>> Ema(decay=0.75).mix()(average, [torch.tensor([2.0])], 1)
        >>> average[0].item()
        1.25

    Source: torch.optim.swa_utils.get_ema_multi_avg_fn; Polyak and Juditsky 1992.
    """

    name: ClassVar[str] = "ema"

    decay: Annotated[float, maths, below(0, 1), unit("a share, 0 to 1")] = 0.999
    """Share of the average that stays."""

    def mix(self) -> Mix:
        """Return torch's function: it moves the averages towards the parameters by 1 - decay."""
        function: Mix = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        return function


@dataclass(frozen=True, kw_only=True)
class Swa(Average):
    """Stochastic weight averaging: the mean of the weights after the chosen updates.

    Source: torch.optim.swa_utils.get_swa_multi_avg_fn; Izmailov et al. 2018, arXiv:1803.05407.
    """

    name: ClassVar[str] = "swa"
    counts_statistics: ClassVar[bool] = True

    def mix(self) -> Mix:
        """Return torch's function: it makes the averages means of one more value."""
        function: Mix = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        return function


def swap(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Exchange parameters and averages in place; a second exchange restores the same bits. Return whether there are
    averages.
    """
    states = [item for optimizer in optimizers for item in optimizer.state.items()]
    pairs = [(param, slots[AVERAGE]) for param, slots in states if isinstance(slots, dict) and AVERAGE in slots]
    with torch.no_grad():
        for param, average in pairs:
            saved = param.detach().clone()
            param.copy_(average)
            average.copy_(saved)
    return bool(pairs)
