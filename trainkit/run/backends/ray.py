"""Ray: Ray Train starts one worker per replica, and restarts all of them after a failure."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from trainkit.fields import above, placement, unit
from trainkit.run.backends.engine import WorkerInfo, begin_attempt, run_rank
from trainkit.run.process.setup import variables
from trainkit.run.process_backend import BackendJob, ProcessBackend

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # disable usage reports
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


@dataclass(frozen=True, kw_only=True)
class Ray(ProcessBackend):
    """Train on a Ray cluster, or on a Ray instance that is started on this machine for the run.

    Source: https://docs.ray.io/en/latest/train/train.html
    """

    name: ClassVar[str] = "Ray"
    packages: ClassVar[tuple[str, ...]] = ("ray", "pyarrow")
    extra: ClassVar[str] = "ray"
    elastic: ClassVar[bool] = True

    address: Annotated[str | None, placement] = None
    """The cluster: HOST:PORT, or auto for the one that this host is part of; null starts Ray here, for this run."""
    cpus_per_replica: Annotated[float, placement, above(0), unit("cores")] = 1.0
    """Cores that Ray reserves for each replica."""

    @contextmanager
    def connect(self, *, num_ranks: int, uses_gpus: bool) -> Iterator[_Connection]:  # noqa: ARG002 - Ray finds GPUs
        """Start Ray here, or join the cluster."""
        with ray_session(self.address, num_cpus=max(1, int(num_ranks * self.cpus_per_replica + 0.999))) as ray:
            host = "127.0.0.1" if self.address is None else ray.util.get_node_ip_address()
            yield _Connection(host=host, cpus=self.cpus_per_replica)


@contextmanager
def ray_session(address: str | None, *, num_cpus: int) -> Iterator[Any]:
    """Yield Ray's module, connected to a cluster, or to a Ray started here with a temporary folder that is removed."""
    with ExitStack() as stack:
        stack.enter_context(variables(_QUIET, unless_set=True))
        import ray  # noqa: PLC0415 - takes 1 s

        settings: dict[str, Any] = {"ignore_reinit_error": True}
        if address is None:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True))
            settings = {"num_cpus": num_cpus, "include_dashboard": False, "_temp_dir": temporary}
        stack.callback(ray.shutdown)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
        yield ray


@dataclass(frozen=True)
class _Connection:
    host: str
    cpus: float

    def run(self, job: BackendJob) -> None:
        """Run one worker per rank; a failure of one ends and restarts all, which counts as one restart of the run."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: PLC0415
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # noqa: PLC0415

        elastic = job.min_ranks is not None and job.min_ranks < job.num_ranks
        trainer = DataParallelTrainer(
            _on_worker,
            train_loop_config=dict(job.payload),
            scaling_config=ScalingConfig(
                num_workers=(job.min_ranks, job.num_ranks) if elastic else job.num_ranks,
                elastic_resize_monitor_interval_s=job.retry_s,
                use_gpu=job.uses_gpus,
                resources_per_worker={"CPU": self.cpus, **({"GPU": 1} if job.uses_gpus else {})},
            ),
            run_config=RunConfig(
                name="run", storage_path=job.folder, failure_config=FailureConfig(max_failures=job.max_restarts)
            ),
        )
        trainer.fit()


def _on_worker(payload: Mapping[str, Any]) -> None:
    """Run a rank in a Ray worker: a module function, so that only its name and the payload are pickled."""
    from ray.train import get_context  # noqa: PLC0415
    from ray.train.collective import broadcast_from_rank_zero  # noqa: PLC0415

    context = get_context()
    info = WorkerInfo(
        rank=context.get_world_rank(),
        num_ranks=context.get_world_size(),
        local_rank=context.get_local_rank(),
        num_local=context.get_local_world_size(),
    )
    attempt = broadcast_from_rank_zero(begin_attempt(payload) if info.rank == 0 else None)
    run_rank(payload, info, attempt)
