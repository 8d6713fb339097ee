"""Notice parameters that code of the user freezes, unfreezes, adds, removes or replaces during a training."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Final

from torch import nn

from trainkit.errors import TrainingError

_REMEDY: Final = (
    "a run trains the parameters that required gradients when it started. Let an argument of the model's constructor "
    "decide it, and train in two runs, the second with init_from=RUN (docs/bring-your-own.md#freezing)."
)

_TRAINS: Final = attrgetter("requires_grad")


class ParamGuard:
    """The parameters of a model as a training started with them.

    An optimizer, an exchange of gradients and a checkpoint are made for these. Code of the user (a callback, a forward
    pass, a loop) that changes them later would train other ones than it seems to. Looking takes 2 us for a
    small model and 30 us for one of 200 modules, and nothing waits for the device.

    Args:
        model: the model on its devices, as it is trained.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).requires_grad_(False)
        >>> guard = ParamGuard(model)
        >>> model[1].bias.requires_grad_(True).requires_grad, guard.change()
        (True, 'requires_grad of 1.bias was changed to True')
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._all = [*self._params.values()]
        self._trains = [*map(_TRAINS, self._all)]
        self.frozen = frozenset(name for name, param in self._params.items() if not param.requires_grad)
        """Names of the parameters that are not trained."""
        self._watch()

    def _watch(self) -> None:
        """Store what the modules hold: while it stays, so do the names and the objects of all parameters."""
        modules = list(self._model.modules())
        self._tables = [table for module in modules for table in (module._modules, module._parameters)]  # noqa: SLF001
        self._sizes = [*map(len, self._tables)]
        held = [(table, name, one) for table in self._tables for name, one in table.items()]
        self._places, self._names, self._held = (
            ([*column] for column in zip(*held, strict=True)) if held else ([], [], [])
        )

    def change(self, *, flags: bool = True) -> str | None:
        """Return what was changed, as a part of a sentence; None if nothing was.

        Args:
            flags: whether a changed `requires_grad` counts.
        """
        is_same = all(map(is_, map(dict.get, self._places, self._names), self._held))
        if not is_same or [*map(len, self._tables)] != self._sizes:
            params = dict(self._model.named_parameters(remove_duplicate=False))
            kinds = {
                "added": [name for name in params if name not in self._params],
                "removed": [name for name in self._params if name not in params],
                "replaced": [name for name, param in self._params.items() if params.get(name, param) is not param],
            }
            if said := " and ".join(f"{_listed(names)} was {kind}" for kind, names in kinds.items() if names):
                return f"the parameter {said}"
            self._watch()  # only modules without parameters are new
        if not flags or [*map(_TRAINS, self._all)] == self._trains:
            return None
        changed = {
            name: one.requires_grad for name, one in self._params.items() if one.requires_grad is (name in self.frozen)
        }
        trains = next(iter(changed.values()))
        names = [name for name, value in changed.items() if value is trains]
        return f"requires_grad of {_listed(names)} was changed to {trains}"

    def refuse_change(self, step: int, *, flags: bool = True) -> None:
        """Raise if a parameter was changed.

        Raises:
            TrainingError: names the step, the parameters and the remedy.
        """
        if (change := self.change(flags=flags)) is not None:
            raise TrainingError(f"after step {step}, {self.refusal(change)}")

    @staticmethod
    def refusal(change: str) -> str:
        """Return the sentence about a change that ends the run."""
        return f"{change} by the model's or your own code, but {_REMEDY}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
