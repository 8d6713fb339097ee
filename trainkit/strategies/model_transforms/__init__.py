"""Transform a model before it is placed: its memory format, recomputation in backward, and compilation."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from trainkit.config.values import closest
from trainkit.errors import ConfigError, Problem
from trainkit.numerics.precision import Precision
from trainkit.numerics.randomness import draws_at_random, draws_nothing
from trainkit.objectives.linear_cross_entropy import offered_by, score_rows
from trainkit.strategies.model_transforms.compiling import Compiled, CompiledFunction
from trainkit.strategies.model_transforms.recomputing import Recomputed

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class RepeatedBlock:
    """A module with submodules, which a forward pass calls as a unit."""

    name: str
    """Canonical name of the block."""
    module: nn.Module
    repeated: bool
    """Whether it is an element of a container, like the repeated blocks of a deep model."""


def repeated_blocks_of(model: nn.Module) -> tuple[RepeatedBlock, ...]:
    """Return the blocks of a model, in its order: elements of its containers, and other top-level children.

    Containers of containers are searched recursively; a module without children is too small to be a block.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        >>> [(unit.name, unit.repeated) for unit in repeated_blocks_of(model)]
        [('1', True)]
    """
    return tuple(_units(model, "", repeated=isinstance(model, _CONTAINERS)))


def _units(parent: nn.Module, prefix: str, *, repeated: bool) -> Iterator[RepeatedBlock]:
    for name, child in parent.named_children():
        if _is_row(child):
            yield from _units(child, f"{prefix}{name}.", repeated=True)
        elif next(child.children(), None) is not None:
            yield RepeatedBlock(f"{prefix}{name}", child, repeated)


def _is_row(module: nn.Module) -> bool:
    """Return whether a module is a container of modules that have children themselves."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return isinstance(module, nn.Sequential) and any(next(child.children(), None) is not None for child in module)


MemoryFormat = Literal["auto", "contiguous", "channels_last"]
"""Value of `memory_format`. In a transform, `auto` is channels_last for models with 2-d convolutions."""

_CONVOLUTIONS: Final = (nn.Conv2d, nn.ConvTranspose2d)


def puts_channels_last(model: nn.Module, memory_format: MemoryFormat) -> bool:
    """Return whether a memory format changes a model: contiguous does not, and no format does without convolutions."""
    return memory_format != "contiguous" and any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def apply_format(model: nn.Module, memory_format: MemoryFormat) -> None:
    """Give the 4-d parameters and buffers of a convnet their memory format; other tensors keep theirs.

    A convolution with such a weight returns channels_last outputs, from inputs of any format: the first one converts
    the batch, and all features between it and the head stay channels_last.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        >>> apply_format(model, "channels_last")
        >>> model[0].weight.stride(), model(torch.ones(2, 3, 8, 8)).stride()
        ((27, 1, 9, 3), (144, 1, 24, 4))
    """
    if puts_channels_last(model, memory_format):
        # not `model.to`, which refuses models that also have 5-d tensors
        model._apply(lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor)  # type: ignore[no-untyped-call]  # noqa: SLF001


Compiles = Literal["model", "blocks", "nothing"]
"""Unit that a strategy can compile: the whole model, its blocks, or nothing."""

_INDUCTOR: Final = "inductor"
_MODES: Final = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Value of `compile.mode` -> mode of torch.compile. The next run of a CUDA graph overwrites its outputs: gradients of
earlier shards would be lost (pytorch issue 96693).
"""
_COMPILERS: Final = ("c++", "g++", "clang++")


Recomputation = Literal["none", "selective", "full"] | int | Sequence[str]
"""A value of `activation_checkpointing`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSettings:
    """Settings of the graph of loss and gradients of a shard, in addition to compiled modules."""

    covers: Literal["step", "shard"]
    """`step`: every step has such a graph; `shard`: only if a step draws no random numbers."""
    backend: str
    """The backend of torch.compile."""
    mode: str | None = None
    """A mode of the inductor backend; None for any other."""
    cuda_graphs: bool = False
    """Whether the kernels of the graph are captured, and replayed by one call."""

    @property
    def key(self) -> str:
        """The key that requested the graphs, for messages."""
        return "compile.mode=step" if self.covers == "step" else "compile.mode"


@dataclass(frozen=True, kw_only=True)
class ModelTransforms:
    """The requested transforms; `none` and `off` request nothing."""

    recompute: Recomputation = "none"
    """`full`: every block; `selective`: every block except its expensive operations; n: every n-th; names: every module
    of these classes.
    """
    compile_mode: Literal["off", "default", "max-autotune", "step"] = "off"
    """The optimisation mode of torch.compile; `step`: an executor compiles whole steps instead of modules."""
    backend: str = _INDUCTOR
    """The backend of torch.compile."""
    memory_format: MemoryFormat = "contiguous"
    """Memory format of a convnet's weights; `auto`: channels last, if it has convolutions."""
    cuda_graphs: bool = False
    """Whether compiled steps are replayed as CUDA graphs."""

    @property
    def recomputes(self) -> bool:
        """Whether some modules are recomputed in backward."""
        return self.recompute != "none"

    @property
    def recomputed(self) -> str | None:
        """Description of the recomputed parts, for the summary; None if nothing is recomputed."""
        recompute = self.recompute
        if isinstance(recompute, str):
            return {"full": "every block", "selective": "every block, but not its matrix products"}.get(recompute)
        return f"one block in {recompute}" if isinstance(recompute, int) else f"each {', '.join(recompute)}"

    @property
    def is_selective(self) -> bool:
        """Whether recomputed modules keep the results of expensive operations."""
        return self.recompute == "selective"

    @property
    def compiles(self) -> bool:
        """Whether something is compiled."""
        return self.compile_mode != "off"

    @property
    def compiles_modules(self) -> bool:
        """Whether some modules are compiled, each by itself."""
        return self.compiles and self.compile_mode != "step"

    @property
    def graph_settings(self) -> GraphSettings | None:
        """Settings of what an executor compiles as a whole: a step, or a shard unless parts are recomputed: a graph of
        all blocks would compute them all again before the backward pass of the last one.
        """
        if self.compile_mode == "step":
            return GraphSettings(covers="step", backend=self.backend, cuda_graphs=self.cuda_graphs)
        if not self.compiles or self.recomputes:
            return None
        return GraphSettings(covers="shard", backend=self.backend, mode=self.inductor_mode)

    @property
    def inductor_mode(self) -> str | None:
        """The mode of the inductor backend; None for any other backend."""
        return _MODES[self.compile_mode] if self.backend == _INDUCTOR else None


NO_TRANSFORMS: Final = ModelTransforms()


def format_for(memory_format: MemoryFormat, precision: Precision, device: str, *, is_kept: bool = True) -> MemoryFormat:
    """Return the memory format of a run on a device; auto: channels_last if tensor cores prefer it.

    Tensor cores take convolutions in 16 bits with the channels last; with the channels first, cuDNN transposes the
    inputs and outputs of each. On other devices the faster format depends on the model; contiguous keeps the bits of
    earlier versions.

    Args:
        memory_format: the value of the key.
        precision: the precision of the run.
        device: the device of the model, such as cuda:0.
        is_kept: whether the strategy keeps the strides of parameters.

    Raises:
        ConfigError: channels_last is requested, and the strategy does not keep it.

    Example:
        >>> mixed = Precision(value="bf16_mixed")
        >>> format_for("auto", mixed, "cuda:0"), format_for("auto", mixed, "cpu")
        ('auto', 'contiguous')
    """
    if memory_format == "channels_last" and not is_kept:
        rule = "has no effect on sharded parameters, which are contiguous. Use auto, or strategy=mirrored."
        raise ConfigError([Problem(key="memory_format", value=memory_format, rule=rule)])
    if memory_format != "auto":
        return memory_format
    in_16_bits = precision.compute_dtype in (torch.bfloat16, torch.float16)
    return "auto" if in_16_bits and is_kept and device.startswith("cuda") else "contiguous"


def apply_transforms(model: nn.Module, shaping: ModelTransforms, *, compiles: Compiles = "blocks") -> nn.Module:
    """Apply the requested format, recomputation and compilation to a model, once, before it is placed.

    No module is wrapped and no name changes: modules get another `forward`. Hooks (random keys, moves between devices,
    gathering of shards) stay outside of recomputed or compiled code, so a strategy can add hooks to any module of the
    result. Works on a model without data.

    Returns:
        The model itself.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
        >>> shaped = apply_transforms(model, ModelTransforms(recompute="full"))
        >>> type(shaped[0].forward).__name__, list(shaped.state_dict()) == list(model.state_dict())
        ('Recomputed', True)
    """
    apply_format(model, shaping.memory_format)
    recomputed = recomputed_modules(model, shaping)
    if shaping.compiles_modules:
        mode = shaping.inductor_mode
        if shaping.compile_mode == "max-autotune":
            quiet_autotuning()
        for module in _compiled(model, recomputed, compiles):
            module.forward = Compiled(module, backend=shaping.backend, mode=mode)
        if isinstance(layer := offered_by(model), nn.Module):  # the loop over chunks stays outside
            layer.compiled_score_rows = CompiledFunction(score_rows, backend=shaping.backend)  # type: ignore[assignment]
    for module in recomputed:  # outside of compiled code: a recomputation runs the same code
        module.forward = Recomputed(module, selective=shaping.is_selective)
    return model


def shaping_problems(model: nn.Module, shaping: ModelTransforms, *, compiles: Compiles, strategy: str) -> list[Problem]:
    """Return config problems of the keys behind the transforms for this model, strategy and machine."""
    problems = []
    if shaping.memory_format == "channels_last" and not puts_channels_last(model, "channels_last"):
        rule = "has no effect: the model has no nn.Conv2d. Leave it out."
        problems.append(Problem(key="memory_format", value="channels_last", rule=rule))
    return [
        *problems,
        *_recompute_problems(model, shaping.recompute),
        *_compile_problems(model, shaping, compiles, strategy),
    ]


def shaping_notes(model: nn.Module, shaping: ModelTransforms) -> tuple[str, ...]:
    """Return notes about the transforms for the plan and the startup summary."""
    drawing = shaping.compiles_modules and shaping.backend == _INDUCTOR and any(map(draws_at_random, model.modules()))
    note = "compile.mode: random numbers of the model differ from those of an eager run, with the same distribution."
    notes = [note] if drawing else []
    if puts_channels_last(model, shaping.memory_format):
        chosen = " (auto: convolutions in 16 bits on CUDA)" if shaping.memory_format == "auto" else ""
        notes.insert(0, f"memory_format: channels_last{chosen}. Results differ from contiguous ones by rounding.")
    return tuple(notes)


def recomputed_modules(model: nn.Module, shaping: ModelTransforms) -> list[nn.Module]:
    """Return the modules of a model that are recomputed in backward."""
    recompute = shaping.recompute
    if recompute == "none":
        return []
    if not isinstance(recompute, str | int):
        return list(_outermost(module for module in model.modules() if type(module).__name__ in recompute))
    every = 1 if isinstance(recompute, str) else recompute
    return _blocks(model)[::every]


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [unit.module for unit in repeated_blocks_of(model) if unit.repeated]


def _compiled(model: nn.Module, recomputed: Sequence[nn.Module], compiles: Compiles) -> list[nn.Module]:
    """Return the modules to compile, none of which is part of another."""
    if compiles == "nothing":
        return []
    if compiles == "model" and not recomputed and draws_nothing(model):
        return [model]
    blocks = (unit.module for unit in repeated_blocks_of(model))
    # maps split a model between the elements of a container: other blocks are on one device
    units = [block for block in blocks if compiles == "model" or not isinstance(block, nn.Sequential)]
    apart = set().union(*(set(module.modules()) for module in recomputed))
    others = [unit for unit in units if unit not in apart and apart.isdisjoint(unit.modules())]
    return [*recomputed, *others] or ([model] if compiles == "model" else [])


def _outermost(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    inside: set[nn.Module] = set()
    for module in modules:  # parents come before their children
        if module not in inside:
            inside.update(module.modules())
            yield module


def _recompute_problems(model: nn.Module, recompute: Recomputation) -> Iterator[Problem]:
    key, kinds = "activation_checkpointing", sorted({type(module).__name__ for module in model.modules()})
    if not isinstance(recompute, str | int):
        if not recompute:
            yield Problem(
                key=key, value="[]", rule="names no class. Use none, selective, full, a number, or names of classes."
            )
        for name in recompute:
            if name not in kinds:
                near = closest(name, kinds)
                hint = f" Did you mean {near}?" if near else f" There are: {', '.join(kinds)}."
                yield Problem(key=key, value=name, rule=f"the model has no module of this class.{hint}")
        return
    count = len(_blocks(model))
    if recompute != "none" and not count:
        rule = f"the model is not a sequence of blocks. Name classes to recompute; there are: {', '.join(kinds)}."
        yield Problem(key=key, value=recompute, rule=rule)
    elif isinstance(recompute, int) and recompute > count:
        rule = f"the model has {count} block{'' if count == 1 else 's'}. Use {count} or less."
        yield Problem(key=key, value=recompute, rule=rule)


def _compile_problems(
    model: nn.Module, shaping: ModelTransforms, compiles: Compiles, strategy: str
) -> Iterator[Problem]:
    if shaping.cuda_graphs and shaping.compile_mode != "step":
        rule = f"replays compiled steps, and compile.mode={shaping.compile_mode} compiles none. Use compile.mode=step."
        yield Problem(key="compile.cuda_graphs", value=True, rule=rule)
    if not shaping.compiles:
        return
    key, value = "compile.mode", shaping.compile_mode
    if shaping.compile_mode == "step":
        if shaping.recomputes:  # other problems are found in core.graphs.refusals
            rule = (
                "does not work with activation_checkpointing: a graph chooses the tensors that it keeps. Leave one out."
            )
            yield Problem(key=key, value=value, rule=rule)
    elif compiles == "nothing":
        yield Problem(key=key, value=value, rule=f"{strategy} cannot compile. Leave it out, or use strategy=mirrored.")
    elif not _compiled(model, recomputed_modules(model, shaping), compiles):
        rule = f"{strategy} compiles blocks, and the model has no block of several modules. Leave it out."
        yield Problem(key=key, value=value, rule=rule)
    if shaping.is_selective and shaping.compiles_modules:
        rule = (
            f"does not work with compile.mode={value}: the compiler chooses the tensors that a compiled block keeps. "
            "Use full."
        )
        yield Problem(key="activation_checkpointing", value="selective", rule=rule)
    if shaping.backend == _INDUCTOR:
        if not any(map(shutil.which, _COMPILERS)):
            rule = "needs a C++ compiler, and there is none here. Install one, such as g++, or leave it out."
            yield Problem(key=key, value=value, rule=rule)
        return
    from torch._dynamo import list_backends  # noqa: PLC0415 - slow to import, and most runs compile nothing

    backends = list_backends(exclude_tags=())
    if shaping.backend not in backends:
        near = closest(shaping.backend, backends)
        hint = f"Did you mean {near}? " if near else ""
        rule = f"not a backend of torch.compile. {hint}There are: {', '.join(backends)}."
        yield Problem(key="compile.backend", value=shaping.backend, rule=rule)
    if value == "max-autotune":
        rule = f"has no effect with compile.backend={shaping.backend}. Use default."
        yield Problem(key=key, value=value, rule=rule)


_REPORTS: Final = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
"""Settings of `torch._inductor.config` for a report of the kernels of each operation; not every torch has both."""
_UNFIT: Final = "Exception %s for benchmark choice %s"
"""The message about a kernel that cannot be compiled for the device; torch takes another one, or raises an error."""


def quiet_autotuning() -> None:
    """Switch off the tables of kernels, and the tracebacks of kernels that do not fit the device.

    A report that the environment requests stays on: `TORCHINDUCTOR_` and a name of `_REPORTS` for its table,
    `TORCH_LOGS` for the tracebacks.
    """
    from torch._inductor import config  # noqa: PLC0415 - slow to import, and most runs compile nothing

    for name, value in _REPORTS.items():
        if hasattr(config, name) and f"TORCHINDUCTOR_{name.upper()}" not in os.environ:
            setattr(config, name, value)
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger("torch._inductor.select_algorithm").addFilter(lambda record: record.msg != _UNFIT)
    # torch itself asks a tensor for its deprecated storage when it checks the arguments of a kernel
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", module=r"torch\._inductor\.select_algorithm")


def why_untrainable(model: object) -> str | None:
    """Return why no strategy trains an object that was built as a model, and the remedy; None for a model.

    Example:
        >>> why_untrainable(nn.LazyLinear(2)).partition(".")[0]
        'has a parameter, weight, without a shape: it gets one in the first forward pass'
        >>> why_untrainable(nn.Linear(2, 2)) is None
        True
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        return f"gives a {name}, not a torch.nn.Module."
    if isinstance(model, torch.jit.ScriptModule):
        return "gives a module of torch.jit, which takes no hooks. Give the class that it was made of."
    if "_parameters" not in vars(model):
        return f"{name}.__init__ does not call super().__init__(), as every torch.nn.Module must."
    for path, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            return (
                f"has a parameter, {path}, without a shape: it gets one in the first forward pass. Give its layer the "
                "sizes, or call the model once in its constructor."
            )
        if param.is_complex():
            return (
                f"has a complex parameter, {path}. Keep torch.view_as_real of it as the parameter, and use "
                "torch.view_as_complex in forward."
            )
    return None
