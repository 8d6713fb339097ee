"""A frame of Spark that is trained on with a row twice, or predicted with other numbers, is caught here alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engines.test_engines import needs
from trainkit.data.sets.spark_frame import SparkFrame

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_a_frame_is_written_once_trained_on_and_predicted_in_spark(cwd: Path) -> None:
    needs("pyspark", "pandas", "pyarrow", "java")
    # Executors of local-cluster are processes of their own, as on a cluster.
    job = [sys.executable, str(Path(__file__).with_name("spark_job.py")), "local-cluster[2,1,1024]"]
    done = subprocess.run(job, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(Path("predictions.json").read_text())
    (inputs, _) = SparkFrame(split="train", path=Path(document["path"]), target="digit", val_share=0.0).tensors()
    expected = {
        bytes(row): (scores, kind)
        for row, scores, kind in zip(inputs.numpy(), np.load("logits.npy"), np.load("classes.npy"), strict=True)
    }
    assert len(document["rows"]) == len(expected) == 200
    for pixels, scores, kind in document["rows"]:
        known_scores, known_kind = expected[bytes(np.array(pixels, dtype=np.float32))]
        # Batches are cut differently: 64 and then 128 products are added in another order, with some cancellation.
        np.testing.assert_allclose(scores, known_scores, rtol=0, atol=512 * 2**-24 * np.abs(known_scores).max())
        assert kind == known_kind
