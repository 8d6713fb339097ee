"""Pipeline parallelism: the stages of a replica on several ranks, by `torch.distributed.pipelining`."""

from trainkit.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
