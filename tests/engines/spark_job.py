"""A Spark job of a user, in a process of its own: its frame is written, trained on and predicted in Spark."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import quick
from trainkit.data.sets.images import Digits
from trainkit.run.backends.spark import spark_session
from trainkit.spark import predict_udf, save_frame

RUN = (
    "recipe=digits", "data=spark_frame", "data.target=digit", "data.target_kind=class", "steps=12", "callbacks=[]",
    "logger=[]", "quiet=true",
)  # fmt: skip
PREDICT = ("predict", "run", "--split", "train", "data.val_share=0", "--out")


def frame_of(session: Any) -> Any:
    digits = Digits(split="train")
    rows = [(digits[index][0].flatten().tolist(), int(digits[index][1])) for index in range(200)]
    return session.createDataFrame(rows, "pixels array<float>, digit int").repartition(3)


if __name__ == "__main__":
    with spark_session(sys.argv[1], num_cores=2) as session:
        frame = frame_of(session)
        path = save_frame(frame, "frames")
        written = path.stat().st_mtime_ns
        assert save_frame(frame_of(session), "frames") == path
        assert path.stat().st_mtime_ns == written
        assert save_frame(frame.limit(199), "frames") != path
        subprocess.run(quick.command(*RUN, f"data.path={path}", "hydra.run.dir=run"), check=True)
        subprocess.run(quick.command(*PREDICT, "logits.npy"), check=True)
        subprocess.run(quick.command(*PREDICT, "classes.npy", "predict.outputs=classes"), check=True)
        columns = [predict_udf("run", input_shape=(64,), outputs=name)("pixels") for name in ("logits", "classes")]
        predictions = [[*map(list, row[:2]), row[2]] for row in frame.select("pixels", *columns).collect()]
        Path("predictions.json").write_text(json.dumps({"path": str(path), "rows": predictions}))
