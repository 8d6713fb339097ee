"""The format `safetensors` of `trainkit export`: the file of weights, checked in a process without trainkit.

The process reads the file with safetensors alone: each tensor must be that of the checkpoint. Then the outputs on real
samples must have the bits of the run. The model of the process is built from its node if no class there is one of
trainkit; otherwise it is a program of `torch.export` whose own weights are NaN.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from trainkit.config.targets.allowed import root_of, targets_in
from trainkit.errors import ConfigError, DataError, named_first_line
from trainkit.exporting import torch_program, whole_file
from trainkit.exporting.checking import Check, NotBuiltError, example_of, refuse_difference, run_fresh
from trainkit.exporting.fresh_process import fingerprint
from trainkit.exporting.trained import Inputs, NotExportableError, TrainedModel, Written, checkpoint_keys
from trainkit.files import num_bytes, read_json
from trainkit.numerics.copies import copied
from trainkit.strategies.reducers.shared_memory import available_bytes

_ALONE: Final = "Checked in a process without trainkit: each tensor is that of the checkpoint"
_COPIES: Final = 4
"""Models in memory while outputs are compared: two in either process."""


@dataclass(frozen=True, kw_only=True)
class CheckedFile:
    """The format `safetensors`, with a check of the written file."""

    samples: Callable[[nn.Module], Inputs]
    """Function that returns the model inputs for real samples; raises ConfigError or DataError."""
    LOADING: str = whole_file.LOADING

    def write(self, trained: TrainedModel, draft: Path) -> Written:
        """Write `model.safetensors`, and check it.

        Raises:
            NotExportableError: a tensor or an output is not that of the run; the text names the first layer.
        """
        written = whole_file.write(trained, draft)
        refuse_other_tensors(trained, draft)
        trained.working()
        return replace(written, notes=(self._checked_outputs(trained, draft),))

    def _checked_outputs(self, trained: TrainedModel, draft: Path) -> str:
        """Compare the outputs; return a sentence about the comparison, or about the reason why there was none."""
        size = (draft / whole_file.WEIGHTS).stat().st_size
        if _COPIES * size > available_bytes():
            return f"{_ALONE}; no outputs were compared: {_COPIES} models of {num_bytes(size)} exceed the free memory."
        model = trained.model()
        try:
            samples = self.samples(model)
        except (ConfigError, DataError) as error:
            return f"{_ALONE}; no outputs were compared, as there are no samples: {named_first_line(error)}"
        trained.working()
        count, built_from = len(next(iter(samples.values()))), ""
        try:
            built_from = refuse_other_outputs(trained.cfg.model, model, samples, draft)
        except NotBuiltError as error:
            return f"{_ALONE}; no outputs were compared, as it has no model: {error}"
        return f"{_ALONE}, and {built_from} computes the bits of the run for {count} real samples."


def refuse_other_tensors(trained: TrainedModel, draft: Path) -> None:
    """Compare names, dtypes, shapes and bits of the file with the checkpoint, one tensor at a time.

    Raises:
        NotExportableError: they differ; the text names the first layer in the order of the `state_dict`.
    """
    keys, tensors = whole_file.sources(trained)
    with tempfile.TemporaryDirectory() as place:
        found_file = Path(place) / "found.json"
        run_fresh("safetensors", {"format": "tensors", "found": str(found_file)}, draft, Path(place))
        found = read_json(found_file)
    for name, key in keys.items():
        trained.working()
        own = fingerprint(tensors[key])
        if (other := found.pop(name, None)) != own:
            what = "is missing" if other is None else f"is {other[0]} {other[1]} with other numbers or of another kind"
            raise _refusal(name, f"{name} {what}; the checkpoint has {own[0]} {own[1]}")
    if found:
        name = next(iter(found))
        raise _refusal(name, f"{name} is not in the checkpoint")


def _refusal(name: str, what: str) -> NotExportableError:
    layer = name.rpartition(".")[0] or name
    return NotExportableError(f"the safetensors export is refused: {what}. The first layer that differs is {layer}.")


def refuse_other_outputs(node: Mapping[str, Any], model: nn.Module, samples: Inputs, draft: Path) -> str:
    """Compare the outputs of the file's weights with those of the run, bit for bit.

    Args:
        node: builds the model.
        model: the model of the run, on the CPU, in evaluation mode.
        samples: real samples.
        draft: the folder with the file.

    Returns:
        The kind of model that got the weights, for a sentence.

    Raises:
        NotExportableError: the outputs differ.
        NotBuiltError: there is no model without trainkit that could compute them.
    """
    targets = [str(target) for _, target in targets_in(node, ("model",))]
    if not any(root_of(target) == "trainkit" for target in targets):
        paths = [str(Path(one).absolute()) for one in sys.path]
        request = {"node": dict(node), "path": paths}
        try:
            refuse_difference(Check(form="safetensors", exact=True, request=request), model, samples, draft)
        except NotBuiltError:
            pass
        else:
            return targets[0]
    with tempfile.TemporaryDirectory() as place:
        request = {"format": "weights_in_program", "program": place, **_program(model, samples, Path(place))}
        refuse_difference(Check(form="safetensors", exact=True, request=request), model, samples, draft)
    return "the program of the model that torch.export makes"


def _program(model: nn.Module, samples: Inputs, place: Path) -> dict[str, Any]:
    """Write the program of a model whose weights are NaN; return the request for the fresh process.

    Raises:
        NotBuiltError: torch.export does not take the model.
    """
    if checkpoint_keys(model) is None:
        raise NotBuiltError("a hook of the model makes its state_dict.")
    hollow = copied(model)
    for tensor in hollow.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
    example = example_of(samples)
    try:
        program = torch_program.export(hollow, example)
    except NotExportableError as error:
        raise NotBuiltError(str(error)) from error
    torch_program.save(program, place / torch_program.FILE)
    prefix = "" if torch_program.plain(model, example) is model else "model."
    return {"positional": torch_program.is_positional(model, samples), "prefix": prefix}
