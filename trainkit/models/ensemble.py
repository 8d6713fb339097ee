"""Several trained models as one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Ensemble(nn.Module):
    """Predicts the average of its members; members may be on different devices.

    `probabilities`: members return scores, whose softmax over `class_dim` gives probabilities; the ensemble returns
    the logarithm of their mean. This is again a score: its softmax is the mixture, its cross entropy the mixture's. A
    mean of scores would be a geometric mean of probabilities, in which one overconfident member outvotes the others.
    `outputs`: the mean of the members' outputs, for regression.

    Args:
        members: the models.
        combine: the quantity that is averaged.
        class_dim: the dim of the scores with the classes.

    Example:
        >>> sure, unsure = nn.Identity(), nn.Linear(2, 2)
        >>> _ = nn.init.zeros_(unsure.weight), nn.init.zeros_(unsure.bias)
        >>> scores = Ensemble(members=[sure, unsure])(torch.tensor([[0.0, math.log(9)]]))
        >>> [round(p, 2) for p in scores.exp()[0].tolist()]
        [0.3, 0.7]

    Source: Lakshminarayanan et al. 2017, arXiv:1612.01474, section 2.4.
    """

    draws_nothing: ClassVar[bool] = True

    def __init__(
        self,
        *,
        members: Sequence[nn.Module],
        combine: Literal["probabilities", "outputs"] = "probabilities",
        class_dim: int = -1,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.combine, self.class_dim = combine, class_dim

    def spread(self, devices: Sequence[torch.device]) -> Self:
        """Put each member on a device, in turn, repeating devices if there are fewer; return the ensemble itself."""
        for index, member in enumerate(self.members):
            member.to(devices[index % len(devices)])
        return self

    def forward(self, inputs: Any) -> Tensor:
        """Combine the members' outputs, on the device of the first; GPUs compute in parallel."""
        outputs = [member(_moved(inputs, next(member.parameters(), None))) for member in self.members]
        stacked = torch.stack([output.to(outputs[0].device) for output in outputs])
        if self.combine == "outputs":
            return stacked.mean(dim=0)
        # a mean in 16 bits would lose the contribution of the last members
        scores = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        class_dim = self.class_dim + (self.class_dim >= 0)  # the members are the first dim
        return scores.log_softmax(class_dim).logsumexp(dim=0) - math.log(len(self.members))


def _moved(inputs: Any, param: Tensor | None) -> Any:
    """Return inputs on the device of a parameter, if there is one."""
    if param is None:
        return inputs
    device = param.device
    async_ = device.type != "cpu"  # torch returns from an asynchronous copy to the host before its numbers have arrived
    return tree_map(lambda value: value.to(device, non_blocking=async_) if isinstance(value, Tensor) else value, inputs)
