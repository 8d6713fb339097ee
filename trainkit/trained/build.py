"""Build the model and the objective of a config, without data, with initial weights, or with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainkit.config.identity import run_config
from trainkit.config.schema import RunConfig
from trainkit.config.targets.build import build
from trainkit.errors import (
    CheckpointError,
    ConfigError,
    Problem,
    TrainkitError,
    UnreadableError,
    first_line,
    named_first_line,
    with_frames,
)
from trainkit.files import read_map
from trainkit.numerics.generators import Untouched, seed_host
from trainkit.numerics.precision import Precision, converted_floats
from trainkit.objectives.base import Objective
from trainkit.objectives.distillation import FrozenModel
from trainkit.strategies.core.replica import refuse_mismatch
from trainkit.strategies.model_transforms import why_untrainable
from trainkit.trainer.checkpoint.tensors import Loaded, load_below, newest_valid
from trainkit.trainer.manifest import Checkpoint, is_checkpoint, manifest_below, named_checkpoints

Which = Literal["best", "last"]
"""Name of a checkpoint of a run."""


def build_model(cfg: RunConfig) -> nn.Module:
    """Build the model on the CPU, in training mode; its initial weights depend on the run's seed alone.

    Raises:
        ConfigError: the target is not a model that can be trained.
    """
    with Untouched(seed=cfg.seed):
        seed_host(cfg.seed)
        model: nn.Module = build(cfg.model, "model")
    if (rule := why_untrainable(model)) is not None:
        raise ConfigError([Problem(key="model._target_", value=cfg.model.get("_target_"), rule=rule)])
    model.train()  # `from_pretrained` of transformers gives evaluation mode; a model may override `train`
    return model


def build_without_data(cfg: RunConfig) -> nn.Module | None:
    """Build the model on torch's `meta` device; None if its constructor needs data.

    Raises:
        ConfigError: the size of a parameter in bytes overflows 64 bits.
    """
    mode = _WithoutDraws()
    try:
        with torch.device("meta"), mode:
            model = build_model(cfg)
    except TrainkitError:
        raise
    except Exception as error:  # noqa: BLE001 - a constructor that reads data may fail in any way
        if "Storage size calculation overflowed" in str(error):
            rule = f"has a parameter that is larger than any memory: {first_line(error)}. Use smaller sizes."
            raise ConfigError([Problem(key="model", rule=rule)]) from None
        return None
    return None if mode.has_failed else model


class _WithoutDraws(TorchFunctionMode):
    """Leave out the random numbers of tensors without data, for which torch imports its compiler: 2 s."""

    has_failed = False
    """Whether an operation needs data; a constructor may catch the error and build another model."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function, or return the tensor that it would fill."""
        tensor = args[0] if args else (kwargs or {}).get("tensor")
        if getattr(func, "__name__", "") in _DRAWS and isinstance(tensor, Tensor) and tensor.is_meta:
            return tensor
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError:
            self.has_failed = True
            raise


_DRAWS: Final = frozenset({"normal_", "uniform_", "trunc_normal_", "bernoulli_", "exponential_", "random_"})
"""Functions that fill a tensor with random numbers and return it, of `torch.nn.init` and of tensors."""


def meta_model(cfg: RunConfig) -> nn.Module:
    """Return the model of a config without data (on torch's `meta` device); with data if it cannot be built without.

    Raises:
        ConfigError: the size of a parameter in bytes overflows 64 bits; or its constructor raised an error of its own,
            also with data.
    """
    if (model := build_without_data(cfg)) is not None:
        return model
    try:
        return build_model(cfg)
    except TrainkitError:
        raise
    except Exception as error:
        rule = f"cannot be made: {named_first_line(error)}."
        target = cfg.model["_target_"]
        raise ConfigError([Problem(key="model._target_", value=target, rule=with_frames(rule, error))]) from error


def build_objective(cfg: RunConfig) -> Objective:
    """Build the objective of a run; random numbers in its constructor depend only on the run's seed.

    Raises:
        ConfigError: the target gives no objective, or a frozen model of it does not name a run folder.
    """
    with Untouched(seed=cfg.seed):
        seed_host(cfg.seed)
        objective: object = build(cfg.objective, "objective")
    if not isinstance(objective, Objective):
        rule = f"gives a {type(objective).__name__}, not a trainkit Objective."
        raise ConfigError([Problem(key="objective._target_", value=cfg.objective["_target_"], rule=rule)])
    precision: Precision = build(cfg.precision, "precision")
    for name, frozen in frozen_models(objective):
        if isinstance(frozen.source, str) and not (Path(frozen.source).expanduser() / "resolved.yaml").is_file():
            rule = "is not a run folder: it has no resolved.yaml. Name the folder that the teacher's run printed."
            raise ConfigError([Problem(key=f"objective.{name.lstrip('_')}", value=frozen.source, rule=rule)])
        frozen.bind(dtype=precision.model_dtype, load=_teacher)
    return objective


def frozen_models(objective: Objective) -> Iterator[tuple[str, FrozenModel]]:
    """Yield the frozen models of an objective, with the names of the attributes that hold them."""
    for name, value in vars(objective).items():
        if isinstance(value, FrozenModel):
            yield name, value


def _teacher(folder: str, which: Which) -> nn.Module:
    """Return the model of a run for a frozen model; the last one if there is no best."""
    run = Path(folder).expanduser()
    chosen = which if checkpoint_name(run, which) else "last"
    return model_with(run_config(run), checkpoint_of(run, chosen).tensors)


def model_with(cfg: RunConfig, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return the model of a run with the weights of a checkpoint, on the CPU, in the dtype that its optimizer updated.

    Raises:
        CheckpointError: the weights are those of another model.
    """
    precision: Precision = build(cfg.precision, "precision")
    model = converted_floats(build_model(cfg), precision.master_dtype)
    saved = model.state_dict()
    targets = {f"param/{name}": param.detach() for name, param in model.named_parameters()}
    targets |= {f"buffer/{name}": buffer.detach() for name, buffer in model.named_buffers() if name in saved}
    refuse_mismatch({key: tuple(tensor.shape) for key, tensor in targets.items()}, tensors)
    for key, tensor in targets.items():
        tensor.copy_(tensors[key])
    return model


def refuse_unknown_checkpoint(which: str) -> None:
    """Refuse a name of a checkpoint that no run has.

    Raises:
        ConfigError: it is neither best nor last.
    """
    if which not in ("best", "last"):
        raise ConfigError([Problem(key="checkpoint", value=which, rule="must be best or last.")])


def checkpoint_name(run: Path, which: Which) -> str | None:
    """Return the name of the best or the last checkpoint of a run; None if there is none."""
    refuse_unknown_checkpoint(which)
    recorded = None
    with suppress(UnreadableError):
        recorded = read_map(run / "result.json", {}, optional={which: (str, type(None))}).get(which)
    if not recorded:
        with suppress(UnreadableError):
            recorded = named_checkpoints(run / "checkpoints")[which]
    name = Path(recorded or "").name  # the run may have been moved since
    return name if is_checkpoint(name) else None


def checkpoint_of(run: Path, which: Which) -> Loaded:
    """Load the best or the last checkpoint of a run; without a record of it, the newest complete one is the last.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    name = checkpoint_name(run, which)
    if name is not None:
        return load_below(run / "checkpoints", name)
    loaded = newest_valid(run / "checkpoints", report=lambda _: None) if which == "last" else None
    if loaded is None:
        raise CheckpointError(f"{run} has no checkpoint named {which}.")
    return loaded


def find_checkpoint(run: Path, which: Which) -> Checkpoint:
    """Find the best or the last checkpoint of a run, without reading its tensors if its name is recorded.

    Raises:
        CheckpointError: as `checkpoint_of`; damaged tensors are found when they are loaded.
    """
    name = checkpoint_name(run, which)
    return checkpoint_of(run, which).checkpoint if name is None else manifest_below(run / "checkpoints", name)
