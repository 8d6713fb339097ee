"""A worker without torch: the real shell of a worker around a loop that counts, saves and looks at failpoints.

FAKE="steps=6 save=1 pause=0.01 child=1"     steps; save every so many; seconds a step; start a child process
FAKE_RAISE="1:DataError:gone"                a rank raises this error at step 2 of every attempt
FAKE_ROLES="worker ps evaluator"              the tasks after rank 0, which then trains alone while they assist
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainkit import errors
from trainkit.cluster.tasks import Identity
from trainkit.run import worker_main as worker
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import Reporter
from trainkit.run.process.heartbeat import Heartbeat, read_heartbeat
from trainkit.run.signals import StopFlag
from trainkit.trainer import failpoints
from trainkit.trainer.manifest import Checkpoint, folder_name, list_complete, manifest_bytes
from trainkit.trainer.ownership import OwnershipToken

SETTINGS = dict(pair.split("=") for pair in os.environ.get("FAKE", "").split())


def save(folder: RunFolder, step: int) -> None:
    final = folder.checkpoints / folder_name(step)
    final.mkdir(parents=True, exist_ok=True)
    owner = OwnershipToken.find(folder.path)
    checkpoint = Checkpoint(folder=final, step=step, owner=None if owner is None else owner.token, files={})
    (final / "manifest.json").write_bytes(manifest_bytes(checkpoint))


def raise_planted(rank: int) -> None:
    planted_rank, _, rest = os.environ.get("FAKE_RAISE", "-1::").partition(":")
    kind, _, message = rest.partition(":")
    if int(planted_rank) == rank:
        if kind == "ConfigError":
            raise errors.ConfigError([errors.Problem(key="data.path", value=message, rule="does not exist.")])
        raise getattr(errors, kind, RuntimeError)(message)


def wait_for_the_others(folder: RunFolder, identity: Identity, step: int, stop: StopFlag) -> None:
    """Wait until every rank has come to this step, as in a collective."""
    num_training = 1 if os.environ.get("FAKE_ROLES") else identity.num_ranks
    paths = [folder.heartbeat_of(rank) for rank in range(num_training)]
    done = (step, failpoints.PHASES.index("end"))
    while (
        any((pulse := read_heartbeat(path)) is None or pulse.progress < done for path in paths) and not stop.requested
    ):
        time.sleep(0.002)


def assist(folder: RunFolder, identity: Identity, heart: Heartbeat) -> None:
    """Assist until the training is over, or for ever where FAKE says that this role stays."""
    role, step = identity.task.role, 0
    while SETTINGS.get("stays") == role or not (folder.live / "over").exists():
        for phase in ("forward", "idle"):
            heart.beat(step, phase)
            failpoints.hit(phase, step)
        if step == 2 and identity.life == 0:
            raise_planted(identity.task.rank)
        step += 1
        time.sleep(0.01)


def run(
    resolved: Path, identity: Identity, folder: RunFolder, stop: StopFlag, report: Reporter
) -> dict[str, Any] | None:
    rank, every = identity.task.rank, int(SETTINGS.get("save", 0))
    pids = [os.getpid()]
    if "child" in SETTINGS:
        pids.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    (folder.live / f"pids_{rank}").write_text(" ".join(map(str, pids)))
    shown = {
        "attempt": identity.attempt,
        "life": identity.life,
        "prefix": identity.prefix,
        "omp": os.environ["OMP_NUM_THREADS"],
    }
    with (folder.path / f"index_{identity.task.index}").open("a") as file:  # what became of a task, by attempt
        file.write(f"attempt {identity.attempt}: rank {rank} of {identity.num_ranks}\n")
    sys.stdout.write(f"rank {rank} says {json.dumps(shown)}\n")
    sys.stdout.flush()
    heart = Heartbeat(folder.heartbeat_of(rank))
    if rank > 0 and os.environ.get("FAKE_ROLES"):
        assist(folder, identity, heart)
        return None
    checkpoints = list_complete(folder.checkpoints)
    for step in range(checkpoints[0].step if checkpoints else 0, int(SETTINGS.get("steps", 4))):
        if stop.requested:
            if stop.requested == "resized" and rank == 0:
                save(folder, step)
            break
        for phase in ("data", "forward", "update"):
            heart.beat(step, phase)
            failpoints.hit(phase, step)
        if step == 2:
            raise_planted(rank)
        heart.beat(step, "end")
        wait_for_the_others(folder, identity, step, stop)
        time.sleep(float(SETTINGS.get("pause", 0)))
        if rank == 0 and every and (step + 1) % every == 0:
            save(folder, step + 1)
    if rank > 0:
        return None
    (folder.live / "over").touch()
    result = {"status": stop.requested or "finished", "attempt": identity.attempt}
    folder.write_result(result)
    return result


if __name__ == "__main__":
    worker._run = run
    sys.exit(worker.main(sys.argv[1:]))
