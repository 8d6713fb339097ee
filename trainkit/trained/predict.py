"""Predict each sample once: scores, probabilities, classes, the outputs of a layer, or a named output of the model.

A prediction into a file is written in parts, from which an interrupted one continues. A part has its final name only
once it is complete. Chunk i holds the same rows on any number of ranks. The complete file is written in one pass, with
the ids of its rows: .npy, .jsonl or .parquet.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor, nn

from trainkit.cluster.host import use_device
from trainkit.config.identity import run_config
from trainkit.config.interface import called_from
from trainkit.config.sections import LoaderConfig
from trainkit.config.targets.allowed import allow_packages
from trainkit.config.targets.build import build
from trainkit.data.hooks import Reading
from trainkit.data.reading.loader import EvalBatches
from trainkit.data.splits import size_of
from trainkit.errors import ConfigError, DataError, Problem, refuse, require_packages
from trainkit.files import json_value, naming, replacing
from trainkit.numerics.generators import Untouched
from trainkit.numerics.precision import Precision
from trainkit.objectives.base import Loss, Model, Objective, Supervised
from trainkit.objectives.fields import named_fields
from trainkit.strategies.base import LocalModel
from trainkit.strategies.collectives import LocalCollective
from trainkit.trained.build import Which, build_objective, refuse_unknown_checkpoint
from trainkit.trained.model import load_model
from trainkit.trainer.evaluate import evaluation_mode

NO_SPACE: Final = "Free space there, or name a file on another file system: --out."
_BATCHES: Final = 16
"""Number of batches in a chunk."""
_NAME: Final = re.compile(r"part_(\d{8})\.npy")
Ids = Callable[[], Iterator[int | str]]
"""Function that iterates the names of the rows, from the first on: indices, or the ids that the dataset gives."""


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """The rows of a dataset in chunks of whole batches.

    Example:
        >>> chunks = Chunks(num_rows=100, batch_size=3)
        >>> chunks.count, chunks.rows_of(2), chunks.batches_of(2)
        (3, 4, [96, 99])
    """

    num_rows: int
    batch_size: int

    @property
    def count(self) -> int:
        """Number of chunks; an empty dataset has none."""
        return -(-self.num_rows // (_BATCHES * self.batch_size))

    def batches_of(self, chunk: int) -> list[int]:
        """Return the first row of each batch of a chunk."""
        start = chunk * _BATCHES * self.batch_size
        return list(range(start, start + self.rows_of(chunk), self.batch_size))

    def rows_of(self, chunk: int) -> int:
        """Return the number of rows of a chunk."""
        size = _BATCHES * self.batch_size
        return min(size, self.num_rows - chunk * size)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The folder of the parts."""

    folder: Path
    chunks: Chunks

    def file(self, chunk: int) -> Path:
        """Return the file of a chunk."""
        return self.folder / f"part_{chunk:08d}.npy"

    def _written(self) -> list[int]:
        """Return the chunks whose parts have their final name."""
        numbers = (int(match[1]) for name in os.listdir(self.folder) if (match := _NAME.fullmatch(name)))  # noqa: PTH208 - a million names
        return sorted(number for number in numbers if number < self.chunks.count)

    def done(self) -> list[int]:
        """Return the chunks that are complete; a damaged part counts as absent and is written again."""
        complete = []
        for chunk in self._written():
            with suppress(OSError, ValueError, EOFError):
                if len(self._read(chunk)) == self.chunks.rows_of(chunk):
                    complete.append(chunk)
        return complete

    def num_rows_done(self) -> int:
        """Return the number of rows of all parts that have their final name."""
        return sum(map(self.chunks.rows_of, self._written()))

    def _read(self, chunk: int) -> NDArray[Any]:
        """Map a part into memory; its rows are read on access."""
        rows: NDArray[Any] = npy.open_memmap(self.file(chunk), mode="r")
        return rows

    def layout(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape of a row and the dtype, which all parts share.

        Raises:
            DataError: parts differ in the shape of their rows.
        """
        first: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        for chunk in range(self.chunks.count):
            part = self._read(chunk)
            first = first or (part.shape[1:], part.dtype)
            if (part.shape[1:], part.dtype) != first:
                raise uneven_rows(first[0], part.shape[1:], self.chunks.batches_of(chunk)[0])
        return first or ((), np.dtype(np.float32))

    def write(self, chunk: int, batches: Iterable[NDArray[Any]]) -> None:
        """Write a part batch by batch; it gets its final name when it is complete."""
        with _complete(self.file(chunk)) as file:
            rows = iter(batches)
            first = next(rows)
            _write_header(file, (self.chunks.rows_of(chunk), *first.shape[1:]), first.dtype)
            for block in chain([first], rows):
                file.write(np.ascontiguousarray(block).data)

    def contents(self) -> Iterator[NDArray[Any]]:
        """Yield the rows of one batch after another, in the order of the dataset; memory holds one batch."""
        for chunk in range(self.chunks.count):
            part, size = self._read(chunk), self.chunks.batch_size
            yield from (np.array(part[start : start + size]) for start in range(0, len(part), size))

    def remove(self) -> None:
        """Delete the parts, complete and incomplete ones."""
        for name in os.listdir(self.folder):  # noqa: PTH208 - as above
            if _NAME.fullmatch(name) or re.fullmatch(r"\.part_\d{8}\.npy\.\d+", name):
                (self.folder / name).unlink(missing_ok=True)


@contextmanager
def _complete(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that gets its name only at the end of the block, flushed to the disk."""
    with naming(path, remedy=NO_SPACE), replacing(path) as file:
        yield file


def _write_header(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, described)


def uneven_rows(first: Sequence[int], other: Sequence[int], row: int) -> DataError:
    """Return the error of samples whose outputs differ in shape, from the sample `row` on."""
    shapes = f"the shape {tuple(first)} at the beginning, and {tuple(other)} from sample {row} on"
    remedy = "Pad the samples to one length, or ask for predict.outputs=classes of a model with one class per sample."
    return DataError(f"the outputs of a sample have {shapes}. {remedy}")


def check_format(path: Path) -> None:
    """Refuse a file whose ending is that of no format, or of one whose package is not installed.

    Raises:
        ConfigError: it is such a file.
    """
    ending = path.suffix.removeprefix(".")
    if ending not in _WRITERS:
        rule = "must end in .parquet, .npy or .jsonl."
        raise ConfigError([Problem(key="--out", value=str(path), rule=rule, origin="command line")])
    if ending == "parquet":
        require_packages(["pyarrow"], key="--out", extra="parquet")


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the files that a prediction writes: for .npy, also the file with the ids.

    Example:
        >>> [file.name for file in files_of(Path("scores.npy"))]
        ['scores.npy', 'scores.ids.npy']
    """
    return (path, path.with_suffix(".ids.npy")) if path.suffix == ".npy" else (path,)


def ids_of(dataset: Any) -> Iterator[int | str]:
    """Yield the id of every row in order: `ids` of the dataset, or else the indices 0, 1, ...

    Example:
        >>> list(ids_of(["a", "b"]))
        [0, 1]
    """
    ids = getattr(dataset, "ids", None)
    if ids is None:
        yield from range(len(dataset))
        return
    for value in islice(ids, len(dataset)):
        yield value if isinstance(value, str) else int(value)


def write_rows(path: Path, parts: Parts, ids: Ids, *, name: str) -> None:
    """Merge all parts into the files of a prediction, which appear under their names only when complete.

    Args:
        path: the file; its ending gives the format.
        parts: the complete parts.
        ids: iterates the ids of the rows from the first on; it may be called twice.
        name: the column of the outputs.

    Raises:
        DataError: parts differ in the shape of their rows.
        StorageError: a file cannot be written.
    """
    _WRITERS[path.suffix.removeprefix(".")](path, parts, ids, name)


def _write_npy(path: Path, parts: Parts, ids: Ids, name: str) -> None:
    del name
    shape, dtype = parts.layout()
    rows = parts.chunks.num_rows
    # Two passes over the ids: the first finds the longest.
    longest = max((len(value) for value in ids() if isinstance(value, str)), default=0)
    kind = np.dtype(f"<U{longest}") if longest else np.dtype(np.int64)
    main, ids_file = files_of(path)
    with _complete(ids_file) as file:
        _write_header(file, (rows,), kind)
        row_ids = ids()
        while block := list(islice(row_ids, 1 << 16)):
            file.write(np.array(block, dtype=kind).tobytes())
    with _complete(main) as file:
        _write_header(file, (rows, *shape), dtype)
        for content in parts.contents():
            file.write(content.data)


def _write_jsonl(path: Path, parts: Parts, ids: Ids, name: str) -> None:
    row_ids = ids()
    parts.layout()
    with _complete(path) as file:
        for content in parts.contents():
            rows = zip(islice(row_ids, len(content)), content.tolist(), strict=True)
            lines = (json.dumps({"id": row_id, name: json_value(row)}, ensure_ascii=False) for row_id, row in rows)
            file.write("".join(f"{line}\n" for line in lines).encode())


def _write_parquet(path: Path, parts: Parts, ids: Ids, name: str) -> None:
    import pyarrow as pa  # noqa: PLC0415 - an extra
    from pyarrow import parquet  # noqa: PLC0415 - the same

    shape, dtype = parts.layout()
    size = int(np.prod(shape, dtype=np.int64))
    scalar = pa.from_numpy_dtype(dtype)
    fields = [
        ("id", pa.string() if isinstance(next(ids(), 0), str) else pa.int64()),
        (name, pa.list_(scalar, size) if shape else scalar),
    ]
    schema = pa.schema(fields, metadata={"shape": json.dumps(list(shape))})
    row_ids, contents = ids(), parts.contents()
    with _complete(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while blocks := list(islice(contents, _BATCHES)):  # a row group a chunk
            block = np.concatenate(blocks)
            values = pa.array(block.reshape(-1))
            column = pa.FixedSizeListArray.from_arrays(values, size) if shape else values
            keys = pa.array(list(islice(row_ids, len(block))), type=schema.field("id").type)
            writer.write_table(pa.table([keys, column], schema=schema))


_WRITERS: Final = {"npy": _write_npy, "jsonl": _write_jsonl, "parquet": _write_parquet}


_KINDS: Final = ("logits", "probabilities", "classes")
_NAMED: Final = ("embedding", "output")
"""The words before a colon in `predict.outputs`."""
_RULE: Final = (
    "must be logits, probabilities, classes, embedding:LAYER with the name of a module of the model, or output:NAME "
    "with the name or index of one of its outputs."
)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The content of each row of a prediction.

    Example:
        >>> Outputs.parse("embedding:blocks.2")
        Outputs(kind='embedding', name='blocks.2')
    """

    kind: str
    name: str = ""
    """The module whose outputs an embedding holds, by its name in the model; or the output of the model."""

    @classmethod
    def parse(cls, text: str) -> Outputs:
        """Read the key `predict.outputs`.

        Raises:
            ConfigError: it is none of the kinds, or an embedding without a layer.
        """
        kind, _, name = text.partition(":")
        if kind not in (_NAMED if name else _KINDS):
            raise ConfigError([Problem(key="predict.outputs", value=text, rule=_RULE)])
        return cls(kind=kind, name=name)

    @property
    def text(self) -> str:
        """The value of the key."""
        return f"{self.kind}:{self.name}" if self.name else self.kind

    def problems(self, objective: Objective, model: nn.Module) -> list[Problem]:
        """Return the problems of this choice for an objective and a model, which may be on the meta device."""
        modules = dict(model.named_modules())
        if self.kind in ("probabilities", "classes") and not objective.log_scores:
            rule = f"the outputs of {type(objective).__name__} are not scores of classes. Use logits."
        elif self.kind == "embedding" and self.name not in modules:
            names = ", ".join(name for name in list(modules)[:12] if name)
            rule = f"the model has no module of this name. It has {names}{' ...' if len(modules) > 13 else ''}."
        else:
            return []
        return [Problem(key="predict.outputs", value=self.text, rule=rule)]

    @contextmanager
    def of(self, model: nn.Module, objective: Objective) -> Iterator[OutputFunction]:
        """Yield a function that runs the model on a batch, for the duration of the block."""
        function = OutputFunction(self, model, objective)
        watched = model.get_submodule(self.name if self.kind == "embedding" else "") if self.name else None
        handle = None if watched is None else watched.register_forward_hook(function.keep)
        try:
            yield function
        finally:
            if handle is not None:
                handle.remove()


class OutputFunction:
    """Runs a model on a batch and returns the rows of a prediction."""

    def __init__(self, outputs: Outputs, model: nn.Module, objective: Objective) -> None:
        self._outputs, self._model, self._objective = outputs, model, objective
        self._recorded: Any = None

    def keep(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Keep the outputs of a layer, or of the model; a forward hook."""
        del module, inputs
        self._recorded = outputs

    def __call__(self, batch: Any, *, num_rows: int) -> Tensor:
        """Return (num_rows, ...) on the device: float32 or float64, int64 for classes.

        Raises:
            ConfigError: neither the objective nor the model has an output of the name.
            DataError: the model gives no tensor with one row per sample.
        """
        self._recorded = None
        try:
            scores = self._objective.predict(self._model, batch)
        except Exception:
            if self._outputs.kind != "output" or self._recorded is None:
                raise
            scores = None  # the model has run, and its own outputs suffice
        if self._outputs.kind == "embedding":
            scores = self._recorded[0] if isinstance(self._recorded, tuple) and self._recorded else self._recorded
        elif self._outputs.kind == "output":
            scores = self._named(scores)
        if not isinstance(scores, Tensor) or not scores.dim() or scores.shape[0] != num_rows:
            actual = f"a tensor of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            rule = "a prediction needs one row per sample. predict.outputs=output:NAME takes one of several outputs."
            raise DataError(f"the model gives {actual} for {num_rows} samples: {rule}")
        self._recorded, scores, dim = None, scores.detach(), self._objective.class_dim
        if self._outputs.kind == "classes":
            return scores.argmax(dim)
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return scores.softmax(dim) if self._outputs.kind == "probabilities" else scores

    def _named(self, predicted: Any) -> Any:
        """Return an output by its name or index: of what the objective predicts, or else of the model."""
        name = self._outputs.name
        key = int(name) if name.isdecimal() else name
        names: list[str] = []
        for outputs in (predicted, self._recorded):
            named = named_fields(outputs)
            if key in named:
                return named[key]
            names += map(str, named)
        hint = f"They are {', '.join(dict.fromkeys(names))}" if names else "The model gives one tensor: use logits"
        rule = f"neither the objective nor the model gives an output of this name. {hint}."
        raise ConfigError([Problem(key="predict.outputs", value=self._outputs.text, rule=rule)])


def predicted(
    local: LocalModel,
    objective: Objective,
    outputs: Outputs,
    dataset: Any,
    reading: Reading,
    *,
    chunks: Chunks,
    starts: Sequence[int],
) -> Generator[Tensor]:
    """Yield the rows of one batch after another, on the device.

    Args:
        local: the model; its training mode is restored afterwards.
        objective: knows which fields of a batch are the model's inputs.
        outputs: the content of a row.
        dataset: the samples.
        reading: how they are read.
        chunks: the size of the dataset and of a batch.
        starts: the first sample of each batch.

    Raises:
        DataError: samples have outputs of several shapes.
    """
    size, shape = chunks.batch_size, None
    batches = EvalBatches(dataset, reading, batch_size=size, rank=local.rank, num_ranks=local.num_ranks, starts=starts)
    with outputs.of(local.model, objective) as run:
        for start, batch in zip(starts, batches, strict=True):
            with evaluation_mode(local, objective) as enter, Untouched(seed=0, devices=[local.device]):
                enter(start // size)
                with torch.no_grad():
                    rows = run(batch, num_rows=min(size, chunks.num_rows - start))
            shape = rows.shape[1:] if shape is None else shape
            if rows.shape[1:] != shape:
                raise uneven_rows(shape, rows.shape[1:], start)
            yield rows


class _StoppedError(Exception):
    """Raised to leave an incomplete part."""


def compute_parts(
    local: LocalModel,
    parts: Parts,
    todo: Sequence[int],
    rows: Callable[[Sequence[int]], Generator[Tensor]],
    *,
    together: bool,
    is_asked_to_stop: Callable[[], bool],
) -> bool:
    """Compute one rank's share of a prediction, and write each chunk as a part; collective.

    If several ranks compute a replica together, the first of them writes.

    Args:
        local: the ranks.
        parts: the folder to which the parts are written.
        todo: the chunks that are not complete, the same on every rank: the i-th belongs to data rank i modulo the
            data ranks.
        rows: computes the rows of the batches with the given first samples.
        together: whether ranks communicate in a forward pass, so that all compute equally many batches.
        is_asked_to_stop: returns whether this process was asked to stop; it then stops after the current batch.

    Returns:
        Whether everything is done; False: it was asked to stop.
    """
    assigned, ranks = list(todo[local.rank :: local.num_ranks]), local.all_ranks
    starts = [start for chunk in assigned for start in parts.chunks.batches_of(chunk)]
    if together:
        counts = ranks.gather(torch.tensor([len(starts)]))
        starts += [0] * (max(int(count.item()) for count in counts) - len(starts))
    data_ranks = [int(rank.item()) for rank in ranks.gather(torch.tensor([local.rank]))]
    writes = data_ranks.index(local.rank) == ranks.rank

    def until_stopped() -> Iterator[NDArray[Any]]:
        with closing(rows(starts)) as computed:
            for _ in starts:
                stops = is_asked_to_stop()
                if together and ranks.num_ranks > 1:  # those of one replica stop together
                    stops = bool(ranks.sum(torch.tensor([float(stops)])).item())
                if stops:
                    raise _StoppedError
                yield next(computed).cpu().numpy()

    batches = until_stopped()
    try:
        for chunk in assigned:
            arrays = islice(batches, len(parts.chunks.batches_of(chunk)))
            if writes:
                parts.write(chunk, arrays)
            else:
                deque(arrays, maxlen=0)
        deque(batches, maxlen=0)  # repeated batches, computed because other ranks need this one
    except _StoppedError:
        return False
    return True


@called_from("python")
def predict(
    model: nn.Module | str | Path,
    dataset: Any,
    *,
    outputs: str = "logits",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Tensor:
    """Predict every sample of a dataset, in its order, in this process.

    Args:
        model: a model, or what `trainkit.load` takes.
        dataset: samples with a length, by index or by iteration; targets are not needed.
        outputs: logits, probabilities, classes, embedding:LAYER, or output:NAME.
        batch_size: samples per forward pass.
        device: where to compute; None: where the model is, and the first GPU for a path.
        checkpoint: the checkpoint of a run folder to load.
        packages: your own packages that the classes of a path may come from.

    Returns:
        (samples, ...) on the CPU.

    Raises:
        ConfigError: there is no such model, or `outputs` does not suit it.
        DataError: a sample cannot be read, or samples have outputs of several shapes.

    Example:
        >>> predict(nn.Linear(2, 3), torch.zeros(5, 2)).shape
        torch.Size([5, 3])
    """
    return predictor(
        model, outputs=outputs, batch_size=batch_size, device=device, checkpoint=checkpoint, packages=packages
    )(dataset)


def predictor(
    model: nn.Module | str | Path,
    *,
    outputs: str = "logits",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Callable[[Any], Tensor]:
    """Load a model once, and return the function that `predict` calls with a dataset; arguments as in `predict`."""
    refuse_unknown_checkpoint(checkpoint)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError([Problem(key="batch_size", value=batch_size, rule="must be a whole number, 1 or more.")])
    chosen, precision = Outputs.parse(outputs), Precision()
    objective: Objective = _AnyInputs(chosen)
    if isinstance(model, nn.Module):
        module = model
    else:
        path = Path(model).expanduser()
        module = load_model(path, checkpoint=checkpoint, packages=packages)
        if (path / "resolved.yaml").is_file():
            with allow_packages(packages):
                cfg = run_config(path)
                precision, objective = build(cfg.precision, "precision"), build_objective(cfg)
            module = precision.adapt(module)
        device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    if device is not None:
        module = module.to(device)
    refuse(chosen.problems(objective, module))
    model_device = next((param.device for param in module.parameters()), torch.device("cpu"))
    use_device(model_device)
    if module is not model:  # by default torch rounds the products of a convolution to ten bits
        precision.apply_globally(model_device.type)
    local = LocalModel(model=module, device=model_device, data_ranks=LocalCollective(), precision=precision)

    def run(dataset: Any) -> Tensor:
        chunks = Chunks(num_rows=size_of(dataset), batch_size=batch_size)
        starts, reading = range(0, chunks.num_rows, batch_size), Reading(device=model_device, settings=LoaderConfig())
        rows = predicted(local, objective, chosen, dataset, reading, chunks=chunks, starts=starts)
        return torch.cat([batch.cpu() for batch in rows])

    return run


class _AnyInputs(Supervised):
    """Takes the input of a sample by its common names."""

    log_scores = True

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def predict(self, model: Model, batch: Any) -> Any:
        """Run the model.

        Raises:
            ConfigError: the dim of the classes is needed, and not known.
        """
        outputs = super().predict(model, batch)
        if self._outputs.kind in ("probabilities", "classes") and outputs.dim() > 2:
            rule = (
                f"needs to know which dim has the classes, and the model alone, without its objective, gives "
                f"{tuple(outputs.shape)}. Predict from the folder of its run, or take logits."
            )
            raise ConfigError([Problem(key="outputs", value=self._outputs.kind, rule=rule)])
        return outputs

    def score(self, outputs: Any, targets: Any) -> Loss:
        """Raise an error: nothing is scored."""
        raise NotImplementedError
