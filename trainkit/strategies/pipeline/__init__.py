"""Pipelines: stages of one replica over ranks, by `torch.distributed.pipelining`."""

from trainkit.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
