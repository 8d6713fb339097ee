"""The names of dtypes in safetensors, and a tensor's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from trainkit.errors import CheckpointError

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Name in the file -> dtype."""

NAMES: Final[Mapping[torch.dtype, str]] = {dtype: name for name, dtype in DTYPES.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, whatever its layout in memory (channels_last, a transposed
    view).

    Needs no copy for a contiguous tensor on the host; copies, and waits for the device, otherwise.
    """
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Raise for a tensor that cannot be saved.

    Raises:
        CheckpointError: it is sparse or quantised, or of a dtype without a name in safetensors.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise CheckpointError(f"{name} cannot be saved: it is no dense tensor with data.")
    if tensor.dtype not in NAMES:
        raise CheckpointError(f"{name} cannot be saved: safetensors has no name for {tensor.dtype}.")
