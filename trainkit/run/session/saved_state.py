"""Validate the meta.json of a checkpoint before the training state is restored from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from trainkit.bounded_json import Kind, expect_map, expect_maps
from trainkit.trainer.checkpoint import Loaded
from trainkit.trainer.manifest import damaged

_META: Final[Mapping[str, Kind]] = {"state": dict, "loss_scale": dict, "callbacks": dict}
_LATER: Final[Mapping[str, Kind]] = {"data": (dict, type(None)), "strategy": dict, "evaluation_due": bool}
"""Keys that earlier versions did not write."""
_STATE: Final[Mapping[str, Kind]] = {"step": int, "seconds": float, "best": (float, type(None)), "retries": int}
_LOSS_SCALE: Final[Mapping[str, Kind]] = {"scale": float, "good_steps": int, "overflows": int}
_LEFT_OUT: Final[Mapping[str, Kind]] = {"count": int, "steps": list, "first": int, "last": int}
_STREAM: Final[Mapping[str, Kind]] = {"epoch": int, "position": int}


def refuse_malformed(loaded: Loaded) -> None:
    """Refuse a checkpoint with a malformed meta.json; the previous checkpoint is then used.

    Raises:
        CheckpointError: a key is missing, of another type, or contradicts the manifest.
    """
    try:
        _check(loaded.meta, loaded.checkpoint.step)
    except ValueError as error:
        raise damaged(loaded.checkpoint.folder, f"meta.json is not what was written ({error})") from None


def _check(meta: Any, step: int) -> None:
    expect_map(meta, _META, optional=_LATER)
    state = expect_map(meta["state"], _STATE, optional={"left_out": dict, "skipped": int})
    expect_map(meta["loss_scale"], _LOSS_SCALE)
    left_out = expect_map(state.get("left_out", {}), {}, optional=_LEFT_OUT)
    expect_maps(left_out.get("steps", []), {"step": int})
    if meta.get("data") is not None:
        expect_map(meta["data"], {}, optional=_STREAM)
    if state["step"] != step:
        raise ValueError(f"its step is {state['step']}, and that of the manifest {step}")
