"""A full, read-only or vanished file system that spoils the last checkpoint, or ends with 1, is caught here alone.
A strategy that holds the whole model in each process, however small its shard, is caught here alone.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.end_to_end.disk_faults import mounted
from tests.support import quick
from trainkit.run.folder.run_folder import RunFolder
from trainkit.trainer.checkpoint.tensors import newest_valid

ROOT = Path(__file__).parents[2]
Mount = Callable[[str], Path]
STRATEGIES = {"one_device": [], "mirrored": ["strategy=mirrored", "strategy.replicas=2"]}
FAULTS = {
    "full": "could not be written below|cannot be written: No space left on device",
    "nearly full": "could not be written below",
    "no inodes": "it can hold no more files (inodes)",
    "read-only": "Read-only file system",
    "removed": "gone|No such file",
    "renamed": "gone|No such file",
    "unmounted": "gone|No such file",
}
TRAINING = ["steps=60", "checkpoint.every_steps=3", "log_every_steps=2", "--allow-package=tests"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts small file systems; a test is skipped where that is not permitted."""
    with ExitStack() as stack:

        def make(options: str) -> Path:
            try:
                return stack.enter_context(mounted(tmp_path / "disk", options))
            except (PermissionError, FileNotFoundError) as error:
                pytest.skip(f"file systems cannot be mounted here: {error}")

        yield make


def train(disk: Path, conf: Path, *more: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Train in a folder of the disk, which is spoilt after step 8."""
    (conf / "callbacks").mkdir(parents=True, exist_ok=True)
    node = f"_target_: tests.end_to_end.disk_faults.DiskFault\nkind: {fault}\n"
    (conf / "callbacks/fault.yaml").write_text(node)
    callbacks = "callbacks=[fault]" if fault else "callbacks=[]"
    command = quick.command(*TRAINING, "--config-dir", str(conf), callbacks, f"hydra.run.dir={disk}/run", *more)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=200)


def spoilt(mount: Mount, conf: Path, fault: str, arguments: list[str]) -> None:
    """Run into one fault: the exit code, the screen, the result, and the checkpoint that is left."""
    disk = mount("size=3m,nr_inodes=120")
    ended = train(disk, conf, *arguments, fault=fault)
    assert ended.returncode == 4, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert any(part in line for part in FAULTS[fault].split("|")), line
    folder = disk / ("moved" if fault == "renamed" else "run")
    if fault in ("removed", "unmounted"):
        assert not folder.exists()
        return
    loaded = newest_valid(folder / "checkpoints", pytest.fail)
    assert loaded is not None
    assert loaded.checkpoint.step in (3, 6)  # that of step 6 may be under way when the disk is spoilt
    assert all(loaded.tensors[name].isfinite().all() for name in loaded.tensors)
    if fault in ("full", "nearly full"):
        result = RunFolder(folder).read_result()
        assert result is not None
        assert (result["status"], result["reason"]) == ("failed", line)


# one of both strategies that a fault differs for, and two cases by default
@pytest.mark.parametrize(("fault", "strategy"), [
    ("full", "one_device"), ("removed", "mirrored"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("nearly full", "one_device"), ("no inodes", "mirrored"), ("read-only", "one_device"),
        ("renamed", "mirrored"), ("unmounted", "one_device"),
    )),
])  # fmt: skip
def test_a_disk_that_is_spoilt_during_the_run_ends_it_with_4(
    mount: Mount, tmp_path: Path, fault: str, strategy: str
) -> None:
    spoilt(mount, tmp_path / "conf", fault, STRATEGIES[strategy])


@pytest.mark.parametrize(("options", "message"), [
    ("size=300k", "has too little room for the checkpoints of this run: 718 KiB are needed"),
    pytest.param("size=3m,ro", "run cannot be written: Read-only file system.", marks=pytest.mark.long),
])  # fmt: skip
def test_a_disk_that_is_spoilt_from_the_start_starts_nothing(
    mount: Mount, tmp_path: Path, options: str, message: str
) -> None:
    disk = mount(options)
    ended = train(disk, tmp_path / "conf", *STRATEGIES["mirrored"])
    assert ended.returncode == 4
    (line,) = ended.stderr.splitlines()
    assert message in line
    assert list(disk.iterdir()) == []


@pytest.mark.long
def test_a_run_that_met_a_full_disk_is_resumed_once_there_is_room(mount: Mount, tmp_path: Path) -> None:
    disk = mount("size=3m,nr_inodes=120")
    (tmp_path / "filler").touch()  # spoils nothing
    whole = train(tmp_path, tmp_path / "conf", fault="full")
    assert train(disk, tmp_path / "conf", fault="full").returncode == 4
    (disk / "filler").write_bytes(b"")
    resumed = train(disk, tmp_path / "conf", "resume=auto", fault="full")
    assert (whole.returncode, resumed.returncode) == (0, 0), resumed.stderr
    results = [RunFolder(folder / "run").read_result() or {} for folder in (disk, tmp_path)]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert not (disk / "run" / ".reserve").exists()
    shutil.rmtree(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.skipif(subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0, reason="needs root")
def test_batches_that_do_not_fit_into_shared_memory_end_the_run() -> None:
    small = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    settings = ["data=synthetic", "data.shape=[3,64,64]", "model=convnet", "model.in_channels=3", "model.image_size=64"]
    read = ["recipe=null", "loader.cache=false", "loader.num_workers=2", "steps=6"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # the folders of tests may be in /dev/shm
        command = ["unshare", "-m", "sh", "-c", small, "sh", sys.executable, "-m", "trainkit", *settings, *read]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert ended.returncode == 1
    assert "the shared memory of the host (/dev/shm), through which its processes exchange tensors, is" in ended.stderr


LIMIT = 1000 * 2**20
"""Bytes that a process may have; it has about 300 MiB before there is a model."""

GPT = (
    "recipe=null", "model=gpt", "model.vocab_size=64", "model.context=16", "model.num_layers=8", "model.num_heads=4",
    "model.width=888", "data=synthetic_tokens", "data.vocab_size=64", "data.context=16",
    "objective=language_modelling", "batch.global_size=4", "batch.micro_size=1", "steps=2", "eval.every_epochs=null",
    "checkpoint.background=false", "callbacks=[]", "logger=[]", "hydra.run.dir=run",
)  # fmt: skip
"""76 million parameters: 1.13 GiB with their gradients and the state of AdamW."""


def train_limited(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    """Train under the limit, which the processes of the run inherit."""
    return subprocess.run(
        [sys.executable, "-m", "trainkit", *GPT, *settings],
        cwd=folder, capture_output=True, text=True, timeout=580, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_device_says_what_it_needs_and_what_needs_less(cwd: Path) -> None:
    done = train_limited(cwd, "strategy=one_device")
    assert done.returncode == 1
    (head,) = [line for line in done.stderr.splitlines() if "cpu is out of memory. The run needs 1.13 GiB" in line][-1:]
    assert head.endswith("optimizer 578 MiB. To need less, try one of:")
    for way in (
        "strategy=fsdp strategy.replicas=4",
        "activation_checkpointing=full",
        "strategy=pipeline strategy.stages=4",
    ):
        assert f"\n  {way}  " in done.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("settings", [("fsdp", "replicas"), ("pipeline", "stages")], ids=lambda pair: pair[0])
def test_strategies_that_cut_it_train_it(cwd: Path, settings: tuple[str, str]) -> None:
    strategy, count = settings
    done = train_limited(cwd, f"strategy={strategy}", f"strategy.{count}=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 2 steps" in done.stdout
