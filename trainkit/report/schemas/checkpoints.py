"""JSON files of the folder `checkpoints` of a run. The `format` in a manifest is the version of a whole checkpoint."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class WrittenFile(TypedDict):
    """A file of a checkpoint."""

    bytes: int
    """Size of the file."""
    sha256: str
    """SHA-256 of the content of the file, in hexadecimal digits."""


class Manifest(TypedDict):
    """`checkpoints/STEP/manifest.json`: written last, so that a folder with a manifest is a complete checkpoint."""

    format: Literal[1]
    """Version of the checkpoint, of its `index.json` and `meta.json` too; a reader refuses a larger one."""
    step: int
    """Updates completed."""
    position: dict[str, Any] | None
    """The `step` and the `tickets` at which the training continues."""
    fingerprint: str | None
    """Hash of the keys that decide the result, of the run that wrote the checkpoint."""
    metric: float | None
    """The metric `eval.metric`, if it was known."""
    files: dict[str, WrittenFile]
    """Name -> size and hash, of every file except the manifest."""
    owner: NotRequired[str]
    """The token of the run that wrote the checkpoint."""
    sha256: str
    """SHA-256 of the other keys as JSON with sorted keys."""


class Piece(TypedDict):
    """A block of a tensor, as one rank has written it."""

    file: str
    """The file with the block."""
    key: NotRequired[str]
    """Key of the block in the file; absent: the name of the tensor."""
    offset: list[int]
    """Index of the first element of the block, for each dimension."""
    size: list[int]
    """Length of the block, for each dimension."""


class StoredTensor(TypedDict):
    """A tensor of a checkpoint."""

    dtype: str
    """Dtype of the tensor, as in safetensors: `F32`, `BF16`, `I64` ..."""
    shape: list[int]
    """Shape of the tensor."""
    pieces: list[Piece]
    """The blocks that make it up; they do not overlap."""


class TensorIndex(TypedDict):
    """`checkpoints/STEP/index.json`: the location of each tensor in the files of the ranks."""

    tensors: dict[str, StoredTensor]
    """`param/NAME`, `buffer/NAME`, `optimizer/SLOT/NAME` or `callback/...` -> the tensor."""
    aliases: dict[str, str]
    """Name of a tied tensor -> the name under which it is written."""


class LeftOut(TypedDict):
    """The steps that were skipped because a loss or gradient was not finite."""

    count: int
    """Number of skipped steps."""
    first: int
    """First of the latest consecutive skipped steps; -1 if there is none."""
    last: int
    """Last of the latest consecutive skipped steps; -1 if there is none."""
    steps: list[dict[str, Any]]
    """`step`, `samples` and `num_samples` of each, at most 1,000."""


class Progress(TypedDict):
    """The counters of a training."""

    step: int
    """Updates completed."""
    seconds: float
    """Seconds of training, without evaluations and checkpoints."""
    best: float | None
    """The best value of `eval.metric`; null before the first evaluation."""
    retries: int
    """Steps that were repeated because their gradients overflowed."""
    own_loss: NotRequired[bool]
    """Present and true if a user's own loop gave the loss of a step."""
    left_out: LeftOut
    """Skipped steps."""


class LossScale(TypedDict):
    """The scale of the loss under `precision=fp16_mixed`; constant under others."""

    scale: float
    """The factor of the loss."""
    good_steps: int
    """Steps since the scale has changed."""
    overflows: int
    """Steps in a row whose gradients overflowed."""


class CutOfStep(TypedDict):
    """Division of a step into shards."""

    global_size: int
    """Samples of a step."""
    micro_size: int
    """Samples of a shard, at most."""


class Meta(TypedDict):
    """`checkpoints/STEP/meta.json`: the state of a training without its tensors. Later versions add keys."""

    state: Progress
    """The counters."""
    loss_scale: LossScale
    """The loss scale."""
    callbacks: dict[str, Any]
    """Name of a callback -> its state; tensors are in the files of the ranks."""
    data: dict[str, Any] | None
    """The position in a stream; null for a dataset with an index, whose position follows from the step."""
    strategy: dict[str, Any]
    """State of the strategy: its reducer, or the steps that were assigned but not applied."""
    batch: CutOfStep
    """The cut of the steps."""
    evaluation_due: NotRequired[bool]
    """Present and true if the run ended with an error before the evaluation of this step."""


class Names(TypedDict):
    """`checkpoints/index.json`: the newest and the best checkpoint. Derived from the manifests."""

    last: str | None
    """Folder of the newest checkpoint."""
    best: str | None
    """Folder of the best checkpoint by `eval.metric`; null if none was evaluated."""
