"""A max pool of a compiled graph whose bits, ties or layout are not torch's is caught here alone.

Compiled graphs: max pools on a CPU by torch's kernels inside of an operator, and what autotuning prints.
"""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from trainkit.strategies.core.graphs import whole
from trainkit.strategies.core.graphs.whole import keep_pool_kernels, settings_of
from trainkit.strategies.model_transforms import ModelTransforms, apply_transforms

LAST = torch.channels_last
SETTINGS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((2,), {}), (((3, 2),), {"stride": 2, "padding": (1, 0)}), ((2, 1), {"dilation": 2}), ((3,), {"ceil_mode": True}),
]  # fmt: skip


def gradients(pool: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    leaf = inputs.clone(memory_format=torch.preserve_format).requires_grad_()
    outputs = pool(leaf)
    outputs.square().sum().backward()
    assert leaf.grad is not None
    return outputs.detach(), leaf.grad


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [1, 16])
@pytest.mark.parametrize(("args", "kwargs"), SETTINGS)
def test_the_operator_has_the_bits_of_torch(args: Any, kwargs: Any, channels: int, memory_format: Any) -> None:
    inputs = torch.randn(3, channels, 9, 7).round(decimals=1).contiguous(memory_format=memory_format)  # with ties
    settings = settings_of(*args, **kwargs)
    ours = gradients(lambda leaf: torch.ops.trainkit.pool_maxima(leaf, *settings)[0], inputs)
    plain = gradients(lambda leaf: nn.functional.max_pool2d(leaf, *args, **kwargs), inputs)
    for actual, expected in zip(ours, plain, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("channels", "memory_format"), [(3, torch.contiguous_format), (16, LAST)])
@pytest.mark.slow
def test_the_layouts_that_the_operators_declare_are_those_of_their_results(channels: int, memory_format: Any) -> None:
    inputs = torch.randn(3, channels, 9, 7).contiguous(memory_format=memory_format).requires_grad_()
    settings = settings_of(3, 2)
    torch.library.opcheck(torch.ops.trainkit.pool_maxima.default, (inputs, *settings))
    outputs, indices = torch.ops.trainkit.pool_maxima(inputs.detach(), *settings)
    arguments = (torch.ones_like(outputs), indices, list(inputs.shape), *settings)
    torch.library.opcheck(torch.ops.trainkit.grads_of_maxima.default, arguments)


class Pools(nn.Module):
    """A module and two functions that pool, and one that also returns places."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2)

    def forward(self, inputs: Tensor) -> Tensor:
        pooled = torch.max_pool2d(nn.functional.max_pool2d(self.pool(inputs), 2, stride=1), 2)
        pooled = pooled + nn.functional.max_pool2d(pooled, 1, return_indices=True)[0]
        return pooled.view(len(pooled), -1) if pooled.is_contiguous() else pooled


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize(
    ("memory_format", "is_joint", "replaced"), [(LAST, False, 3), (None, True, 3), (None, False, 0)]
)
def test_pools_whose_compiled_code_is_slow_are_replaced(
    memory_format: Any, is_joint: bool, replaced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_LEAST_ELEMENTS", 1)
    counts = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        keep_pool_kernels(graph, is_joint=is_joint)
        counts.append(sum("trainkit" in str(node.target) for node in graph.graph.nodes))
        return graph

    inputs = torch.randn(2, 8, 17, 16).contiguous(memory_format=memory_format or torch.contiguous_format)
    outputs = torch.compile(Pools(), backend=backend, fullgraph=True)(inputs)
    assert counts == [replaced]
    assert torch.equal(outputs, Pools()(inputs))
    assert outputs.shape == ((2, 8 * 3 * 3) if memory_format is None else (2, 8, 3, 3))


def test_max_autotune_reports_what_the_environment_asks_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("torch._inductor.select_algorithm")
    monkeypatch.setattr(log, "filters", [])
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS", "1")
    with config.patch(autotune_num_choices_displayed=10, max_autotune_report_choices_stats=True):
        apply_transforms(nn.Linear(2, 2), ModelTransforms(compile_mode="max-autotune"), compiles="model")
        assert (config.autotune_num_choices_displayed, config.max_autotune_report_choices_stats) == (0, True)
    texts = ["Exception %s for benchmark choice %s", "Runtime error during autotuning"]
    records = [log.makeRecord(log.name, logging.ERROR, "", 0, text, (), None) for text in texts]
    assert [bool(log.filter(record)) for record in records] == [False, True]
