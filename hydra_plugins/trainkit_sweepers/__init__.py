"""Define the sweepers `grid`, `random` and `optuna`, in the package that Hydra searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

__all__ = ["TrainkitSweeper"]


_READERS: Mapping[str, tuple[str, ...]] = {
    "trials": ("random", "optuna"),
    "seed": ("random", "optuna"),
    "pruner": ("optuna",),
    "min_steps": ("optuna",),
    "reduction": ("optuna",),
}
"""Key of `sweep` -> the choices of hydra/sweeper that read it."""


class TrainkitSweeper(Sweeper):
    """Passes the points of a sweep to the launcher; `trainkit.sweeps.spaces` computes the points."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._context: HydraContext | None = None
        self._launcher: Any = None

    @staticmethod
    def unused_keys(sweeper: str, sweep: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys of `sweep` that a sweeper does not read, and those that another key makes ineffective."""
        for name, readers in _READERS.items():
            if sweeper not in readers:
                yield name, f"has no effect with hydra/sweeper={sweeper}: it is for {', '.join(readers)}."
        pruner = sweep.get("pruner")
        if sweeper == "optuna" and pruner not in ("halving", "hyperband"):
            yield "reduction", "has no effect without sweep.pruner=halving or hyperband."
        if sweeper == "optuna" and pruner == "none":
            yield "min_steps", "has no effect with sweep.pruner=none: every job takes all its steps."

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Create the launcher."""
        from hydra.core.plugins import Plugins  # noqa: PLC0415 - Hydra loads every plugin on every start

        self._context, self.config = hydra_context, config
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep of the given arguments."""
        from trainkit.sweeps.spaces.request import sweep  # noqa: PLC0415 - the same

        assert self._context is not None
        assert self.config is not None
        composer: Any = self._context.config_loader
        return sweep(
            self._kind, launcher=self._launcher, composer=composer.composer, config=self.config, arguments=arguments
        )


for _kind in ("grid", "random", "optuna"):
    ConfigStore.instance().store(
        group="hydra/sweeper",
        name=_kind,
        node={"_target_": "hydra_plugins.trainkit_sweepers.TrainkitSweeper", "kind": _kind},
        provider="trainkit",
    )
