"""The format `huggingface`: a folder that `from_pretrained` of transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainkit.errors import MissingExtraError
from trainkit.exporting.checking import Check, real_samples, refuse_difference
from trainkit.exporting.trained import NotExportableError, TrainedModel, Written, quiet, refuse_lack_of_room
from trainkit.models.gpt import Gpt
from trainkit.numerics.generators import Untouched

LOADING: Final = """\
```python
import json

import transformers

(name,) = json.load(open("config.json"))["architectures"]
model = getattr(transformers, name).from_pretrained(".")  # this folder
```
"""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A model of transformers that computes the same as the model of the run."""

    model: Any
    """The model; it has `save_pretrained`."""
    exact: bool = True
    """Whether it performs the same operations."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Module of the run's model -> module that has the same output; empty: the same names."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Argument of the run's model -> argument; empty: the same names."""


def write(trained: TrainedModel, draft: Path) -> Written:
    """Write `config.json` and `model.safetensors`, and check that transformers computes the same outputs as the run.

    Raises:
        MissingExtraError: transformers is not installed.
        NotExportableError: transformers has no class for the model, or its outputs differ.
    """
    model = trained.model()
    if find_spec("transformers") is None:
        raise MissingExtraError(key="--to huggingface", package="transformers", extra="huggingface")
    found = convert(model)
    samples = real_samples(trained.cfg, model)
    refuse_lack_of_room(found.model, draft / "model.safetensors")
    save(found, draft)
    trained.working()
    request = {"class": type(found.model).__name__, "names": dict(found.names), "inputs": dict(found.inputs)}
    refuse_difference(Check(form="huggingface", exact=found.exact, request=request), model, samples, draft)
    return Written()


def save(found: Transformer, folder: Path) -> None:
    """Write a model of transformers, without a progress bar."""
    from transformers.utils import logging  # noqa: PLC0415 - slow, and for this format alone

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet():
            found.model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def convert(model: nn.Module) -> Transformer:
    """Return the model of transformers: the model itself, or a GPT-2 with the weights of a `Gpt`.

    Raises:
        NotExportableError: there is no such model.
    """
    kind = type(model)
    if isinstance(model, Gpt):
        with Untouched(seed=0), quiet():
            return _gpt2(model)
    if kind.__module__.startswith("transformers.") and hasattr(model, "save_pretrained"):
        return Transformer(model=model)
    raise NotExportableError(
        f"transformers has no class for {kind.__name__}: huggingface takes models of transformers and trainkit's Gpt. "
        "safetensors, torch_export and onnx take others."
    )


def _gpt2(model: Gpt) -> Transformer:
    """Return a GPT-2: the same layers, with zeros where the Gpt has no bias, and matrix products in another order."""
    import transformers  # noqa: PLC0415 - slow, and for this format alone

    embed, blocks = model.embed, list(model.blocks)
    attention: Any = blocks[0].attention
    width, heads = embed.tokens.embedding_dim, embed.tokens.embedding_dim // attention.head_size
    config = transformers.GPT2Config(
        vocab_size=embed.tokens.num_embeddings,
        n_positions=model.context,
        n_embd=width,
        n_layer=len(blocks),
        n_head=heads,
        activation_function="gelu",
        embd_pdrop=embed.dropout.p,
        attn_pdrop=attention.dropout,
        resid_pdrop=embed.dropout.p,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = transformers.GPT2LMHeadModel(config).to(embed.tokens.weight.dtype).eval()
    own, state = model.state_dict(), made.state_dict()
    names = {"embed.tokens": "transformer.wte", "head.norm": "transformer.ln_f", "head.output": "lm_head"}
    for place in range(len(blocks)):
        names |= {f"blocks.{place}.{own_name}": f"transformer.h.{place}.{name}" for own_name, name in _LAYERS.items()}
    with torch.no_grad():
        state["transformer.wpe.weight"].copy_(own["embed.positions.weight"])
        for own_name, name in names.items():
            for kind in ("weight", "bias"):
                if f"{name}.{kind}" in state:
                    value = own.get(f"{own_name}.{kind}")
                    target = state[f"{name}.{kind}"]
                    target.copy_(torch.zeros_like(target) if value is None else _as_gpt2(own_name, value, heads))
    shown = {own_name: name for own_name, name in names.items() if not own_name.endswith("queries_keys_values")}
    return Transformer(model=made, exact=False, names=shown, inputs={"tokens": "input_ids"})


_LAYERS: Final = {
    "attention_norm": "ln_1",
    "attention.queries_keys_values": "attn.c_attn",
    "attention.project": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.expand": "mlp.c_fc",
    "mlp.project": "mlp.c_proj",
}
"""Module of a block of Gpt -> module of a block of GPT-2."""


def _as_gpt2(name: str, value: Tensor, heads: int) -> Tensor:
    """Return a weight or bias of a Gpt in the layout of GPT-2.

    GPT-2 multiplies from the left, (inputs, outputs), and orders queries, keys and values first by kind, then by head.
    """
    if name.endswith("queries_keys_values"):
        value = value.reshape(heads, 3, -1, *value.shape[1:]).transpose(0, 1).flatten(0, 2)
    return value.T if value.dim() == 2 and name.startswith("blocks") else value
