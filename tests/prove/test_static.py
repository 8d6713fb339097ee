"""A sum that is missing or doubled on a mesh that nobody can start, and is said to be proven, is caught here alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.prove.static import SetProof, Trace, axes_of, findings, prove_static, trace, verdicts
from trainkit.run.estimates.fake_run import Watch
from trainkit.strategies.core.replica import Replica
from trainkit.strategies.mesh.pipe.executor import ChunkStage
from trainkit.strategies.mesh.sharding import Axes
from trainkit.strategies.mesh.step import ShardedWork
from trainkit.strategies.reducers.vector import BackendReducer, Bucket
from trainkit.verbs.running.prove import _config_on
from trainkit.verbs.support.call import parse

pytestmark = pytest.mark.slow

GPT = [
    "recipe=null", "objective=language_modelling", "data=synthetic_tokens", "data.context=8", "data.num_samples=64",
    "model=gpt", "model.vocab_size=64", "model.context=8", "model.num_layers=2", "model.num_heads=4", "model.width=8",
]  # fmt: skip
STREAM = (
    "strategy.plan={embed:sequence_split,attention_norm:sequence,mlp_norm:sequence,queries_keys_values:colwise_sequence,"
    "expand:colwise_sequence,project:rowwise_sequence,head:sequence_join}"
)


def traced(*words: str, **axes: int) -> Trace:
    call, _ = parse(["prove", "--static", *GPT, *words])
    return trace(_config_on(call, vars(Axes(**axes))), Axes(**axes))


@cache
def one_device() -> Trace:
    return traced()


def faults(*words: str, **axes: int) -> list[str]:
    return list(findings(traced(*words, **axes), one_device()))


@pytest.mark.parametrize(
    "axes",
    [
        {"replicate": 2, "shard": 2},
        {"shard": 2, "context": 2},
        {"pipe": 2, "context": 2},
        {"shard": 2, "pipe": 2, "tensor": 2},
        {"replicate": 4, "context": 2, "tensor": 2},
    ],
    ids=str,
)
def test_nothing_is_found_on_a_clean_mesh(axes: dict[str, int]) -> None:
    assert faults(**axes) == []


def test_parameters_that_meet_parts_of_a_sequence_are_summed_over_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert faults(STREAM, tensor=2, shard=2) == []
    from trainkit.prove import static

    monkeypatch.setattr(static, "_meeting_parts", lambda _: ())
    assert "the gradient of blocks.0.mlp_norm.weight is summed 1 times over tensor, not 0" in faults(STREAM, tensor=2)


def test_a_missing_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackendReducer, "launch", lambda self, _: self.waits.append(lambda: None))
    assert "the gradient of head.norm.weight is summed 0 times over replicate, not 1" in faults(replicate=2)
    assert "the gradient of head.norm.weight is summed 0 times over replicate, not 1" in faults(replicate=2, shard=2)


def test_a_doubled_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = BackendReducer.launch

    def twice(self: BackendReducer, bucket: Bucket) -> None:
        dist.all_reduce(self.flat)
        once(self, bucket)

    monkeypatch.setattr(BackendReducer, "launch", twice)
    assert "the gradient of head.norm.weight is summed 2 times over replicate, not 1" in faults(replicate=2)


def test_a_sum_that_is_divided_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Replica.take_grads

    def averaged(self: Replica) -> list[Tensor | None]:
        grads = take(self)
        torch._foreach_div_([grad for grad in grads if grad is not None], 2.0)
        return grads

    monkeypatch.setattr(Replica, "take_grads", averaged)
    assert "the gradient of head.norm.weight is multiplied by 0.5" in faults(shard=2)


def test_a_loss_that_is_divided_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    one_device()
    seed = ShardedWork._seed
    monkeypatch.setattr(ShardedWork, "_seed", lambda self, total: seed(self, total) / 2)
    (line,) = faults(shard=2)
    assert line.startswith("the loss times 0.5 begins backward, and on one device times 1")


def test_a_stage_without_its_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = ChunkStage.get_bwd_send_ops

    def without(self: ChunkStage, number: int) -> Any:
        return [] if self.stage_index == 1 else usual(self, number)

    monkeypatch.setattr(ChunkStage, "get_bwd_send_ops", without)
    (line,) = faults(pipe=2)
    assert line.startswith("gradients between stages 0 and 1: 0 elements are sent, and ")


def test_a_count_that_is_not_summed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedWork, "_sum_whole", lambda self, _: self._take_whole(self.weight))
    assert "the gradient of head.norm.weight is divided 0 times by a count of targets, not 1" in faults(shard=2)
    assert "the count of targets is summed 0 times over shard, not once" in faults(shard=2, replicate=2)


def test_a_collective_that_is_not_known_is_said_and_never_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: Watch, func: Any, *_: object) -> None:
        if "reduce" in func.name():
            raise NotImplementedError("the collective all_reduce_later is not known")

    monkeypatch.setattr(Watch, "_record", record)
    call, _ = parse(["prove", "--static", *GPT])

    def config(mesh: Mapping[str, int]) -> Any:
        return _config_on(call, mesh)

    proofs, refused = prove_static(config, world=8)
    by_axes = {proof.axes: proof for proof in proofs}
    replicate = by_axes["replicate",]
    assert replicate.unknown == "NotImplementedError: the collective all_reduce_later is not known"
    assert {"pipe=8", "tensor=8"} <= refused.keys()
    assert verdicts(proofs, refused, 8)["unknown"] > 0


def test_every_mesh_is_judged_by_its_set_of_axes_and_its_sizes() -> None:
    proofs = [SetProof(axes=("replicate",)), SetProof(axes=("tensor",), findings=["twice"])]
    assert verdicts(proofs, {"tensor=4": "3 heads"}, 4) == {"proven": 3, "refused": 1, "wrong": 1, "unknown": 0}
    clean = [SetProof(axes=axes) for axes in [("replicate",), ("shard",), ("replicate", "shard")]]
    assert verdicts(clean, {}, 1024)["proven"] == 66


def test_a_group_is_all_ranks_along_its_axes() -> None:
    axes = Axes(replicate=2, shard=2, pipe=4)
    assert axes_of([0, 4], axes) == ("shard",)
    assert axes_of([0, 3, 8, 11], axes, {0, 3}) == ("replicate", "pipe")
    assert axes_of([0, 3, 8, 11], axes) is None
