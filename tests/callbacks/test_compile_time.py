"""The warning about steps that compile the same code again, with the reason of torch."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from trainkit.callbacks.compile_time import CompileTime


class Counting(nn.Module):
    """Counts its calls in Python up to a number, beyond which its code is the same."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.calls, self.most = 0, most

    def forward(self, x: Tensor) -> Tensor:
        self.calls = min(self.calls + 1, self.most)
        return x * self.calls


@pytest.mark.slow
@pytest.mark.parametrize(("most", "warnings"), [(9, 1), (3, 0)])
def test_a_count_in_python_that_compiles_each_step_again_is_said_once_with_its_reason(
    most: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    step = 10
    torch._dynamo.reset()
    times, model = CompileTime(lambda: step), torch.compile(Counting(most), backend="eager")
    try:
        with caplog.at_level(logging.WARNING, logger=CompileTime.__module__):
            for step in range(10, 18):  # noqa: B007 - the object reads it
                model(torch.ones(2))
    finally:
        times.close()
        torch._dynamo.reset()
    found = [record.getMessage() for record in caplog.records if record.name == CompileTime.__module__]
    assert len(found) == warnings
    assert all("again in steps 13, 14, 15, " in text and "Its reason: self.calls == " in text for text in found)
    assert times.seconds > 0
