"""One rank of data parallelism at work: its replica, the choice of a reducer, the check of the replicas."""

from __future__ import annotations

from trainkit.strategies.base import StepContext
from trainkit.strategies.capabilities import JsonMap
from trainkit.strategies.core.graphs.steps import StepGraphs
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.core.replica_check import drifted_parameter
from trainkit.strategies.core.synchronous import MakeStep, SynchronousExecutor
from trainkit.strategies.groups.process_group import RankGroup
from trainkit.strategies.reducers import AutoReducer, BackendReducer
from trainkit.strategies.tensors.layouts import FlatBuffer


class DataParallelExecutor(SynchronousExecutor[Replica]):
    """A rank with a copy of the model, whose gradients a reducer sums over the ranks.

    Args:
        recovers: whether an interrupted exchange leaves no state behind.
        graphs: the graphs of a step; None: steps are eager.
    """

    def __init__(
        self,
        replica: Replica,
        training: StepContext,
        *,
        ranks: RankGroup,
        make_step: MakeStep[Replica],
        recovers: bool,
        graphs: StepGraphs | None = None,
    ) -> None:
        super().__init__(replica, training, ranks=ranks, make_step=make_step, graphs=graphs)
        self._recovers = recovers

    def tune(self) -> tuple[str, ...]:
        """With auto, time the reducers on this model's gradients, or keep the choice of the resumed run."""
        replica, reducer = self._replica, self._replica.reducer
        if not isinstance(reducer, AutoReducer):
            return ()
        masters = list(replica.masters.values())
        places = replica.places_of(list(replica.masters))
        packing = FlatBuffer.like(masters, replica.precision.master_dtype, replica.device, places)
        return (reducer.choose(packing),)

    def state_dict_extra(self) -> JsonMap:
        """Return the reducer that auto chose, or the steps of PowerSGD."""
        reducer = self._replica.reducer
        if isinstance(reducer, AutoReducer) and reducer.chosen is not None:
            return {"reduce": reducer.chosen}
        if isinstance(reducer, BackendReducer) and reducer.compressor is not None:
            return {"compressed_steps": reducer.compressor.steps}
        return {}

    def load_state_extra(self, extra: JsonMap) -> None:
        """Restore the choice; PowerSGD's error feedback begins at zero."""
        reducer = self._replica.reducer
        if isinstance(reducer, AutoReducer):
            reducer.recall(extra.get("reduce"))
        if isinstance(reducer, BackendReducer) and reducer.compressor is not None:
            reducer.compressor.set_steps(int(str(extra.get("compressed_steps", 0))))

    def check_replicas(self) -> str | None:
        """Return the first parameter whose bits are not the same on all ranks; collective."""
        return drifted_parameter(self._replica)

    def recover(self, step: int) -> bool:
        """Undo an interrupted step, unless the exchange leaves state behind (PowerSGD's error feedback)."""
        return self._recovers and super().recover(step)
