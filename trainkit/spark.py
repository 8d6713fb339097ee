"""Spark frames beside trainings: write one for a training, and predict the rows of one with a trained model.

    from trainkit.spark import predict_udf, save_frame

`cluster=spark` trains on a Spark cluster, and `hydra/launcher=spark` runs the jobs of a sweep there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from trainkit.errors import DataError, require_packages
from trainkit.files import naming
from trainkit.trained.build import Which
from trainkit.trained.predict import predictor

__all__ = ["predict_udf", "save_frame"]

_PACKAGES: Final = ("pyspark", "pandas", "pyarrow")


def save_frame(frame: Any, folder: str | Path) -> Path:
    """Write a Spark frame to Parquet for `data=spark_frame`, once: an equal frame is not written again.

    The rows are counted and hashed by Spark, whatever their order, and written below a name made of this hash. A folder
    with this name is complete: it is renamed when Spark has written all. Vectors of pyspark.ml become arrays.

    Args:
        frame: the frame, `spark.table(NAME)` for a table of the catalog.
        folder: a folder that this process and all executors see.

    Returns:
        The folder with the files, for `data.path`.

    Raises:
        DataError: this process does not see what the executors wrote.
        StorageError: the folder cannot be written.
    """
    require_packages(_PACKAGES, key="save_frame", extra="spark")
    from pyarrow import dataset  # noqa: PLC0415 - of the extra spark
    from pyspark.ml.functions import vector_to_array  # noqa: PLC0415 - the same
    from pyspark.sql import functions  # noqa: PLC0415 - the same

    for field in frame.schema.fields:
        if field.dataType.typeName() == "vectorudt":
            frame = frame.withColumn(field.name, vector_to_array(field.name))
    row = functions.to_json(functions.struct("*"), {"ignoreNullFields": "false"})
    hashed = frame.select(functions.xxhash64(row).alias("row"))
    total = functions.sum(functions.col("row").cast("decimal(38,0)"))
    facts = hashed.agg(functions.count("*"), total, functions.bit_xor("row")).first()
    name = hashlib.sha256(f"{frame.schema.json()} {tuple(facts)}".encode()).hexdigest()[:16]
    target = Path(folder).expanduser().absolute() / f"{name}.parquet"
    if target.is_dir():
        return target
    temporary = target.with_name(f".{name}.{os.getpid()}")
    with naming(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    try:
        frame.write.parquet(temporary.as_uri(), mode="overwrite")
        num_rows = dataset.dataset(str(temporary), format="parquet").count_rows()
        if num_rows != facts[0]:
            raise DataError(f"{target.parent}: {num_rows:,} of {facts[0]:,} rows are here. Do all executors share it?")
        with naming(target):
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def predict_udf(
    run: str | Path,
    *,
    input_shape: Sequence[int],
    outputs: str = "logits",
    batch_size: int = 64,
    checkpoint: Which = "last",
    packages: Sequence[str] = (),
) -> Any:
    """Return a function of Spark that predicts a column of arrays with a trained model, by `predict_batch_udf`.

    The numbers are those of `trainkit predict`, up to the rounding of batches that are cut differently. Each Python
    process of an executor loads the model once, and computes with one thread, as Spark runs a task per core.

    Args:
        run: what `trainkit.load` takes, where all executors see it.
        input_shape: shape of the input of a sample; the arrays of the column are its numbers in their order. Several
            columns become one by `pyspark.sql.functions.array`.
        outputs: logits, probabilities, classes, embedding:LAYER, or output:NAME.
        batch_size: samples per forward pass.
        checkpoint: the checkpoint of a run folder to load.
        packages: your own packages that the classes of the run may come from.

    Returns:
        A function from a column to array<double>, the outputs of a row one after the other, or to bigint for classes.
    """
    require_packages(_PACKAGES, key="predict_udf", extra="spark")
    from pyspark.ml.functions import predict_batch_udf  # noqa: PLC0415 - of the extra spark
    from pyspark.sql.types import ArrayType, DoubleType, LongType  # noqa: PLC0415 - the same

    path = Path(run).expanduser().absolute()
    load = partial(
        _loaded, path, outputs=outputs, batch_size=batch_size, checkpoint=checkpoint, packages=tuple(packages)
    )
    returns = LongType() if outputs == "classes" else ArrayType(DoubleType())
    return predict_batch_udf(load, return_type=returns, batch_size=batch_size, input_tensor_shapes=[[*input_shape]])


def _loaded(path: Path, **settings: Any) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Load the model in a process of an executor; return the function that predicts a batch of inputs."""
    torch.set_num_threads(1)
    predicted = predictor(path, **settings)

    def predict(inputs: NDArray[Any]) -> NDArray[Any]:
        dtype = np.float32 if np.issubdtype(inputs.dtype, np.floating) else np.int64
        outputs = predicted(torch.from_numpy(inputs.astype(dtype)))
        return outputs.numpy() if settings["outputs"] == "classes" else outputs.double().flatten(1).numpy()

    return predict
