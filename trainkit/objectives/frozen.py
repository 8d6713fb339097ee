"""Models that an objective runs but does not train, such as the teacher of a distillation."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trainkit.errors import TrainingError
from trainkit.numerics.copies import copied
from trainkit.numerics.precision import cast_inputs, converted_floats

LoadRun = Callable[[str, Literal["best", "last"]], nn.Module]
"""(run folder, which checkpoint) -> its trained model, on the CPU."""


class FrozenModel:
    """A model in evaluation mode, without gradients, on the device of its inputs.

    It is an attribute of an objective, so it is not part of the trained model, the optimizer or a checkpoint. Each
    process that computes a loss has one copy per device, in the dtype of the run's parameters.

    Args:
        source: the model, or the folder of a run that trained it.
        checkpoint: the checkpoint of a run folder to load.

    Example:
        >>> teacher = FrozenModel(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)))
        >>> scores = teacher(torch.ones(4, 2))
        >>> tuple(scores.shape), scores.requires_grad
        ((4, 3), False)
    """

    def __init__(self, source: nn.Module | str, checkpoint: Literal["best", "last"] = "best") -> None:
        self.source, self.checkpoint = source, checkpoint
        self._dtype: torch.dtype | None = None
        self._load: LoadRun | None = None
        self._copies: dict[torch.device, nn.Module] = {}
        self._lock = Lock()  # replicas of one process share the objective

    def bind(self, *, dtype: torch.dtype, load: LoadRun) -> None:
        """Set the dtype of its parameters and the function that loads a run folder; the model is loaded when it is
        first called.
        """
        self._dtype, self._load = dtype, load

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating inputs are converted to its dtype."""
        leaves = tree_leaves((args, kwargs))
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        model = self._copies.get(device)
        if model is None:
            with self._lock:
                model = self._copies.get(device) or self._copy_on(device)
        with torch.no_grad():
            return model(*args, **kwargs)

    def _copy_on(self, device: torch.device) -> nn.Module:
        if self._copies:
            model = copied(next(iter(self._copies.values()))).to(device)
        else:
            model = self._loaded().eval().requires_grad_(requires_grad=False).to(device)
            if self._dtype is not None:
                converted_floats(model, self._dtype)
                if self._dtype is not torch.float32:
                    cast_inputs(model, self._dtype)
        self._copies[device] = model
        return model

    def _loaded(self) -> nn.Module:
        if isinstance(self.source, nn.Module):
            return self.source
        if self._load is None:
            raise TrainingError(f"no function was set to load {self.source}: call bind before the first batch.")
        return self._load(self.source, self.checkpoint)
