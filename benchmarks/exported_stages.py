"""Cut models into two stages by torch's exporting front end, and compare three passes with those of the model.

    python benchmarks/exported_stages.py

The models are those of the tests of Python objects in a pipeline (`tests/support/object_models.py`), which
`strategy=pipeline` trains as one device does, or refuses by name. One line a model: what trainkit does, and in which
of three passes the exported stages compute the model's outputs. Random numbers begin each pass alike.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from tests.support.object_models import EQUAL, REFUSED
from trainkit.strategies.mesh.pipe.forward import CannotCut, trace
from trainkit.strategies.mesh.pipe.stages import blocks_to_cut


def main() -> None:
    """Print a line for each model."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    for name, kind in (EQUAL | REFUSED).items():
        inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
        print(f"{name:20} trainkit {by_trainkit(kind(), inputs):8} exported {by_export(kind(), inputs)}", flush=True)


def by_trainkit(model: nn.Module, inputs: Tensor) -> str:
    """Return whether trainkit cuts a model."""
    try:
        trace(model, blocks_to_cut(model), inputs, device=torch.device("cpu"), autocast=nullcontext())
    except CannotCut:
        return "refuses"
    return "cuts"


def by_export(model: nn.Module, inputs: Tensor) -> str:
    """Return in which passes exported stages compute what the model does."""
    units = blocks_to_cut(model)
    split = {units[len(units) // 2].name: SplitPoint.BEGINNING}
    try:
        stages = pipeline(copy.deepcopy(model), mb_args=(inputs,), split_spec=split)
        same = [torch.allclose(outputs(model, inputs, step), outputs(stages, inputs, step)) for step in range(3)]
    except Exception as error:  # noqa: BLE001 - whatever torch raises is the answer
        return f"fails: {type(error).__name__}"
    others = ", ".join(str(step + 1) for step in range(3) if not same[step])
    return f"other numbers in pass {others}" if others else "the same"


def outputs(model: nn.Module, inputs: Tensor, step: int) -> Tensor:
    """Return the outputs of a pass; its inputs are a copy of their own."""
    random.seed(step)
    torch.manual_seed(step)
    result = model(inputs + step)
    tensor: Tensor = result[0] if isinstance(result, tuple | list) else result
    return tensor


if __name__ == "__main__":
    main()
