"""A tracker whose own store has two runs, a lost step or a secret after a kill and a resume is caught here alone.

They run where the packages are installed, as in the environment that .ci/run makes for them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.tracking.sending import read_state

pytestmark = pytest.mark.long
CANARY = "canary-7f3a9b2c5d"
SECRET = "+logger.w.api_key=${oc.env:W_API_KEY}"
READERS = {
    "wandb": """
import json, struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2 as pb

def records(content):  # blocks of 32 KiB as in a LevelDB log, after 7 bytes; a killed writer tears the last
    place, part = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        data, place = content[place + 7 : place + 7 + size], place + 7 + size
        if kind == 0 or len(data) < size:
            return
        part = data if kind in (1, 2) else part + data
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            yield record

ids, tags, files, steps, values, code = set(), set(), set(), [], {}, None
for path in sorted(Path(sys.argv[1]).rglob("*.wandb")):
    for record in records(path.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            ids.add(record.run.run_id)
            tags |= {*record.run.tags}
        items = {"run": record.run.config.update, "config": record.config.update, "summary": record.summary.update}
        values |= {one.key or one.nested_key[0]: one.value_json for one in items.get(kind, ())}
        files |= {one.path for one in record.files.files}
        code = record.exit.exit_code if kind == "exit" else code
        if kind == "history":
            row = {one.key or one.nested_key[0]: one.value_json for one in record.history.item}
            steps += [int(row["_step"])] if "train/loss" in row else []
files = {name for name in files if not name.startswith("wandb-") and name not in ("config.yaml", "output.log")}
print(json.dumps({"runs": sorted(ids), "steps": steps, "lr": json.loads(values["optimizer.lr"]), "files": sorted(files),
    "ended": {0: "finished", 1: "killed"}[code], "status": json.loads(values["trainkit/status"]),
    "fingerprint": [tag.removeprefix("fingerprint:") for tag in tags]}))
""",
    "mlflow": """
import json
from mlflow.tracking import MlflowClient
client = MlflowClient()
runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
data, points = runs[0].data, client.get_metric_history(runs[0].info.run_id, "train/loss")
print(json.dumps({"runs": [one.data.tags["trainkit.id"] for one in runs], "steps": [one.step for one in points],
    "fingerprint": [data.tags["trainkit.fingerprint"][:16]], "lr": float(data.params["optimizer.lr"]),
    "files": [one.path for one in client.list_artifacts(runs[0].info.run_id)], "ended": runs[0].info.status.lower(),
    "status": data.tags["trainkit.status"]}))
""",
    "trackio": """
import json
from trackio.sqlite_storage import SQLiteStorage as store
runs = store.get_runs("digits")
logs, config = store.get_logs("digits", runs[0]), store.get_run_config("digits", runs[0])
status = [one["trainkit/status"] for one in logs if "trainkit/status" in one][-1]
names = [one["name"].removeprefix(f"{runs[0]}-".replace("/", "-")) for one in store.list_artifacts("digits")]
print(json.dumps({"runs": runs, "steps": [one["step"] for one in logs if "train/loss" in one],
    "fingerprint": [config["_Group"].removeprefix("fingerprint ")], "lr": config["optimizer.lr"], "files": names,
    "ended": "killed", "status": status}))
""",
}
"""What each tracker has kept: a run's id, steps, fingerprint, a parameter, files, and how it ended."""


def environment(folder: Path) -> dict[str, str]:
    stores = {"TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    homes = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    return {**os.environ, **stores, **homes, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": CANARY * 3, "W_API_KEY": CANARY}


def command(tracker: str, run: Path) -> list[str]:
    sizes = ["steps=10000000", "log_every_steps=5", "checkpoint.every_steps=20", "callbacks=[]"]
    more = [f"logger.{tracker}.wait_s=120"] + (["logger.wandb.mode=offline"] if tracker == "wandb" else [])
    more += ["epochs=null", "eval.every_epochs=null", "eval.every_steps=40"]
    more += [f"logger.{tracker}.artifacts=[resolved.yaml]", "+logger.w._target_=tests.tracking.folders.Keyed", SECRET]
    first = [sys.executable, "-m", "trainkit", "--allow-package", "tests"]
    return [*first, f"hydra.run.dir={run}", f"logger=[{tracker}]", *sizes, *more]


def wait_for(run: Path, tracker: str) -> Iterator[None]:
    """Yield until the tracker was sent something."""
    limit = time.monotonic() + 240
    while time.monotonic() < limit:
        state = read_state(run, tracker) if (run / "tracking" / f"{tracker}.json").exists() else None
        if state is not None and state.last_step >= 5:
            return
        yield


def holders(folder: Path, text: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if text.encode() in path.read_bytes()]


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_killed_and_resumed_run_is_one_tracked_run_without_secrets(tmp_path: Path, tracker: str) -> None:
    pytest.importorskip(tracker, reason=f'needs the package: pip install "{tracker}"', exc_type=ImportError)
    run, environ = tmp_path / "run", environment(tmp_path)
    slow = environ | {"TRAINKIT_FAIL": "phase=data,action=slow"}  # the tracker starts for seconds of a core
    with subprocess.Popen(
        command(tracker, run), env=slow, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        for _ in wait_for(run, tracker):
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    stop = int((run / "metrics.jsonl").read_text().splitlines()[-1].split(":")[1].split(",")[0]) // 5 * 5 + 10
    resumed = [sys.executable, "-m", "trainkit", "resume", str(run), "--allow-package", "tests"]
    resumed += [f"stop_at_step={stop}"]
    done = subprocess.run(resumed, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "not sent" not in done.stderr + done.stdout, done.stderr + done.stdout
    answer = subprocess.run(
        [sys.executable, "-c", READERS[tracker], str(run)], env=environ, capture_output=True, text=True, check=True
    )
    report, state = json.loads(answer.stdout.strip().splitlines()[-1]), read_state(run, tracker)
    result = json.loads((run / "result.json").read_text())
    fingerprint = json.loads((run / "environment.json").read_text())["fingerprint"]
    assert state is not None
    (tracked,) = report.pop("runs")
    assert state.id[:8] in tracked
    assert report == {
        "steps": list(range(5, stop + 1, 5)),
        "fingerprint": [fingerprint[:16]],
        "lr": 0.01,
        "files": ["resolved.yaml"],
        "ended": "killed",
        "status": result["status"],
    }
    assert [file for file in holders(tmp_path, fingerprint[:16]) if tracker in file]
    assert holders(tmp_path, CANARY) == []
    assert CANARY not in done.stdout + done.stderr
