"""Every mesh of 2, 4 and 8 ranks of three language models, and how far its training is from that of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from tests.contract.crossing import cross
from tests.contract.stepping import Case, _Rank, oracle
from tests.support import zoo
from tests.support.pool import Member, Pool
from trainkit.models.gpt import Gpt
from trainkit.objectives.language_modelling import LanguageModelling
from trainkit.strategies.base import PlanContext
from trainkit.trainer.checkpoint.tensors import load

LLAMA_PLAN: Final = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
    "lm_head": "colwise_gathered",
}
SIZES: Final = (2, 4, 8)
STEPS: Final = 10
TOLERANCES: Final = {
    "fp64": 1e-12,
    "fp32": 8 * torch.finfo(torch.float32).eps * STEPS**0.5,
    "bf16_mixed": 8 * torch.finfo(torch.bfloat16).eps * STEPS**0.5,
}
"""Precision -> the largest relative error of a parameter: each step adds rounding of a random sign."""


class Mesh(NamedTuple):
    """The ranks along each axis."""

    replicate: int
    shard: int
    tensor: int
    pipe: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        """Their number."""
        return prod(self)

    def __str__(self) -> str:
        stages = f", {self.pipe} stages" if self.pipe > 1 else ""
        return " x ".join(map(str, self[:3])) + stages + (f", context {self.context}" if self.context > 1 else "")


@dataclass(frozen=True, kw_only=True)
class MeshCase(Case):
    """A language model of two blocks; the last step of an epoch has fewer samples, and idle ranks."""

    strategy: str = "mesh"
    task: str = "tokens"
    family: str
    micro_size: int = 2
    num_steps: int = STEPS
    max_norm: float | None = 0.1

    def make_model(self) -> nn.Module:
        """The model with weights by formula: as its constructor makes it, or as transformers makes it from a config."""
        if self.family == "Gpt":
            sizes = {"vocab_size": 16, "context": zoo.LENGTH, "num_layers": 2, "num_heads": 8, "width": 16}
            return zoo.fill(Gpt(**sizes, bias=False))
        from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig  # slow: only few tests pay for it

        none: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        config = (
            LlamaConfig(
                vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, intermediate_size=32, **none
            )
            if self.family == "Llama"
            else GPT2Config(
                vocab_size=zoo.TOKENS, n_positions=zoo.LENGTH, n_embd=16, n_layer=2, n_head=2,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **none,
            )
        )  # fmt: skip
        model: nn.Module = AutoModelForCausalLM.from_config(config)
        for module in list(model.modules()):
            for name, norm in module.named_children():
                if type(norm).__name__ == "LlamaRMSNorm":  # which computes in float32, whatever the precision
                    setattr(module, name, nn.RMSNorm(norm.weight.shape, eps=1e-6))
        return zoo.fill(model)


def case_of(family: str, mesh: Mesh, precision: str = "fp64") -> MeshCase:
    """Return the training of a model on a mesh; its plan names the layers if the model has none of its own.

    AdamW makes steps of the rounding of a gradient near zero: precisions below fp64 take SGD, and so does GPT-2, whose
    bias of keys has no gradient.
    """
    settings: dict[str, Any] = mesh._asdict()
    if family == "Llama" and mesh.tensor > 1:
        settings["plan"] = LLAMA_PLAN
    if mesh.pipe > 1:
        model, sentence = MeshCase(family=family).make_model().to("meta"), torch.zeros(zoo.LENGTH, dtype=torch.long)
        strategy = replace(MeshCase(family=family), settings=settings).make_strategy()
        facts = PlanContext(sample=(sentence, sentence), objective=LanguageModelling())
        settings["map"] = strategy.resolve(lambda: model, facts).map  # type: ignore[attr-defined]
    optimizer = "adamw" if precision == "fp64" and family != "GPT-2" else "sgd"
    return MeshCase(family=family, settings=settings, optimizer=optimizer, precision=precision)


def meshes(family: str, sizes: tuple[int, ...] = SIZES) -> Iterator[Mesh]:
    """Yield every mesh of these numbers of ranks that a model can have: the fused layers of GPT-2 are not cut.

    There are one, two or four stages, as many as all models have parts.
    """
    powers = (1, 2, 4, 8)
    for size in sizes:
        for context, pipe, tensor, shard in product(powers, powers[:3], powers, powers):
            inner = shard * tensor * pipe * context
            if size % inner == 0 and (tensor == 1 or family != "GPT-2"):
                yield Mesh(size // inner, shard, tensor, pipe, context)


FAMILIES: Final = ("Gpt", "Llama", "GPT-2")
LAYOUTS: Final = [(family, mesh) for family in FAMILIES for mesh in meshes(family)]
OF_16_RANKS: Final = [(family, Mesh(1, 2, 2, 2, 2)) for family in FAMILIES[:2]]
"""Shard x tensor x pipe x context."""


class Ended(NamedTuple):
    """The weights of a rank before the first step and after the last, and the mean loss of each step."""

    first: dict[str, Tensor]
    last: dict[str, Tensor]
    losses: list[float]


def begin_and_train(member: Member | None, case: MeshCase) -> Ended:
    """Train all steps on one rank."""
    rank = _Rank(member, case)
    executor = rank.setup(0)

    def weights() -> dict[str, Tensor]:
        state = executor.state_dict().items()
        return {key.partition("/")[2]: tensor.detach().clone() for key, tensor in state if key.startswith("param/")}

    first = weights()
    executor.tune()
    rank.steps(executor, case.num_steps)
    ended = Ended(first, weights(), rank.losses(executor))
    executor.close()
    return ended


@cache
def on_one_device(family: str, precision: str) -> Ended:
    """Return the training on one device; in fp64 its end is that of the plain loop."""
    case = replace(case_of(family, Mesh(1, 1, 1), precision), strategy="one_device", settings={})
    ended = begin_and_train(None, case)
    if precision != "fp64":
        return ended
    plain = oracle(case)
    return Ended(ended.first, {name: p.detach() for name, p in plain.model.named_parameters()}, plain.losses)


class Verdict(NamedTuple):
    """How far a mesh is from one device in one precision."""

    begins_alike: bool
    """Whether the initial weights have the same bits, on every rank."""
    error: float
    """The largest relative error of a parameter after the last step, or of a loss, on any rank."""


def error_of(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of a tensor."""
    assert actual.keys() == expected.keys()
    pairs = ((actual[name].double(), expected[name].double()) for name in expected)
    return max(float((value - exact).norm() / exact.norm()) for value, exact in pairs)


def compare(pool: Pool, family: str, mesh: Mesh, precision: str) -> Verdict:
    """Train on a mesh, and compare: in fp64 with the plain loop, else with one device in the same precision."""
    expected, case = on_one_device(family, precision), case_of(family, mesh, precision)
    ranks: list[Ended] = pool.run(f"{__name__}.begin_and_train", case, num_ranks=mesh.ranks)
    alike = all(torch.equal(rank.first[name], tensor) for rank in ranks for name, tensor in expected.first.items())
    losses = [abs(loss / exact - 1) for rank in ranks for loss, exact in zip(rank.losses, expected.losses, strict=True)]
    return Verdict(alike, max(*losses, *(error_of(rank.last, expected.last) for rank in ranks)))


class Resumed(NamedTuple):
    """A training that goes from one mesh to another in the middle of an epoch, by the files of a checkpoint."""

    family: str
    before: Mesh
    after: Mesh
    step: int


def draw_pairs(count: int, seed: int, sizes: tuple[int, ...] = SIZES) -> list[Resumed]:
    """Draw pairs of meshes of these numbers of ranks; an epoch has four steps."""
    numbers, pairs = Random(seed), list[Resumed]()
    middles = [step for step in range(1, STEPS) if step % 4]
    for _ in range(count):
        family = numbers.choice(FAMILIES)
        before, after = numbers.sample(list(meshes(family, sizes)), 2)
        pairs.append(Resumed(family, before, after, numbers.choice(middles)))
    return pairs


def resume_error(pool: Pool, pair: Resumed, folder: Path) -> float:
    """Return the largest relative error, against the plain loop that nobody stopped, of a weight or of a loss."""
    expected, end = on_one_device(pair.family, "fp64"), STEPS
    before = replace(case_of(pair.family, pair.before), num_steps=pair.step)
    cross(pool, before, source=None, target=folder / "before", saves_at=pair.step)
    source = folder / "before" / f"step_{pair.step:08d}"
    ranks = cross(pool, case_of(pair.family, pair.after), source=source, target=folder / "after", saves_at=end)
    tensors = load(folder / "after" / f"step_{end:08d}").tensors
    weights = {name: tensors[f"param/{name}"] for name in expected.last}
    losses = [
        abs(loss / exact - 1)
        for rank in ranks
        for loss, exact in zip(rank.losses, expected.losses[pair.step :], strict=True)
    ]
    return max(*losses, error_of(weights, expected.last))
