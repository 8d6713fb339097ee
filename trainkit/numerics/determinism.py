"""The process-wide settings of a reproducible run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["reproducible_process"]


@contextmanager
def reproducible_process(*, enabled: bool) -> Iterator[None]:
    """Use one thread, deterministic algorithms and no autotuning; restore all settings afterwards.

    The number of threads changes how torch splits its own sums, which changes bits: 3 of 3 models differed between one
    and two threads.

    Args:
        enabled: with False, do nothing, so that the caller needs no branch.
    """
    if not enabled:
        yield
        return
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    benchmark = torch.backends.cudnn.benchmark
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # required by cuBLAS, which reads it at its first use
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
