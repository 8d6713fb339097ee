"""A script that the real torchrun, sbatch, mpirun or an engine's own schema refuses is caught here alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.joining import free_port
from tests.launchers.one_node_slurm import slurm
from tests.support import quick

pytestmark = pytest.mark.engine

SCHEMAS = "TRAINKIT_TEST_SCHEMAS"
"""Names a Python with skypilot and google-cloud-aiplatform: 700 MB, so in an environment of their own."""
VERTEX = """
import sys, yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec
from google.protobuf import json_format
json_format.ParseDict(yaml.safe_load(sys.stdin), CustomJobSpec.pb(CustomJobSpec()))  # refuses what it does not know
"""
SKYPILOT = """
import sys, jsonschema, yaml
from sky.utils import schemas
task = yaml.safe_load(sys.stdin)
jsonschema.validate(task, schemas.get_task_schema())
jsonschema.validate(task["resources"], schemas.get_resources_schema())
"""
PAIR = ("--processes-per-host", "2", "strategy=multi_worker_mirrored")
SAME = ("epochs=1", "numerics.reproducible=true", "callbacks=[]", "logger=[]")
FLAGS = ("--hosts", "2", "--gpus-per-host", "2", "--image", "ghcr.io/me/trainkit:1", "strategy=multi_worker_mirrored")


def trainkit(*arguments: str, cwd: Path) -> str:
    return subprocess.run(quick.command(*arguments), cwd=cwd, capture_output=True, text=True, check=True).stdout


def result_in(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("outputs/digits/*/result.json")
    result: dict[str, Any] = json.loads(file.read_text())
    return result


PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m trainkit" ]; then
  shift 2
  exec {quick} "$@"
fi
exec {python} "$@"
"""


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Run a script, whose `python -m trainkit` is a fork."""
    python = cwd / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(PYTHON.format(quick=quick.command()[0], python=sys.executable))
    python.chmod(0o755)
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | {"PATH": path, **variables}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bits of the same training on one host."""
    folder = tmp_path_factory.mktemp("mirrored")
    trainkit("strategy=mirrored", "strategy.replicas=2", *SAME, cwd=folder)
    return str(result_in(folder)["weights_sha256"])


def test_the_torchrun_script_trains_to_the_same_bits_as_mirrored(cwd: Path, mirrored: str) -> None:
    script = trainkit("emit", "torchrun", *PAIR, *SAME, cwd=cwd)
    assert "launch by torchrun: rank 0 of 2 on one host, rendezvous at " in run("bash", "-c", script, cwd=cwd)
    assert result_in(cwd)["weights_sha256"] == mirrored


def test_the_batch_script_trains_to_the_same_bits_as_mirrored(cwd: Path, mirrored: str) -> None:
    (cwd / "train.sbatch").write_text(trainkit("emit", "slurm", *PAIR, "--time", "00:05:00", *SAME, cwd=cwd))
    with slurm() as environ:
        run("sbatch", "--wait", "--output=out", "train.sbatch", cwd=cwd, **environ)
    assert "launch by SLURM: rank 0 of 2 on one host, rendezvous at " in (cwd / "out").read_text()
    assert result_in(cwd)["weights_sha256"] == mirrored


def test_the_batch_script_of_parameter_servers_trains_to_the_same_bits(cwd: Path, mirrored: str) -> None:
    servers = ("strategy=parameter_server", "strategy.workers=1", "strategy.servers=1")  # the node has two CPUs
    (cwd / "train.sbatch").write_text(trainkit("emit", "slurm", "--time", "00:05:00", *servers, *SAME, cwd=cwd))
    with slurm() as environ:
        assert run("sbatch", "--test-only", "train.sbatch", cwd=cwd, **environ).partition("sbatch: Job")[0] == ""
        run("sbatch", "--wait", "--output=out", "train.sbatch", cwd=cwd, **environ)
    assert "launch by SLURM: rank 0 (chief:0) of 2 on one host, rendezvous at " in (cwd / "out").read_text()
    assert result_in(cwd)["weights_sha256"] == mirrored


def test_the_lines_of_tf_config_train_to_the_same_bits(cwd: Path, mirrored: str) -> None:
    servers = ("strategy=parameter_server", "strategy.workers=2", "strategy.servers=1")
    lines = trainkit("emit", "tf_config", "--names", "127.0.0.1", "--port", str(free_port()), *servers, *SAME, cwd=cwd)
    run("bash", "-c", "\n".join(f"{line} &" for line in lines.splitlines() if line[:1] != "#") + "\nwait", cwd=cwd)
    assert result_in(cwd)["weights_sha256"] == mirrored


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_the_script_of_mpirun_trains_to_the_same_bits_as_mirrored(cwd: Path, mirrored: str) -> None:
    script = trainkit("emit", "mpirun", *PAIR, *SAME, cwd=cwd)
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert "launch by Open MPI: rank 0 of 2 on one host, rendezvous at " in run("bash", "-c", script, cwd=cwd, **root)
    assert result_in(cwd)["weights_sha256"] == mirrored


@pytest.mark.skipif(SCHEMAS not in os.environ, reason=f"{SCHEMAS} names no Python with the engines' packages")
@pytest.mark.parametrize(
    ("check", "engine", "shared", "flags"),
    [
        (
            VERTEX, "vertex", "10.0.0.2:/runs",
            ("--machine", "g2-standard-24", "--accelerator", "NVIDIA_L4", "--time", "01:00:00"),
        ),
        (SKYPILOT, "skypilot", "runs", ("--accelerator", "A100", "--setup", "pip install -e .")),
    ],
)  # fmt: skip
def test_the_schema_takes_the_manifest(check: str, engine: str, shared: str, flags: tuple[str, ...], cwd: Path) -> None:
    text = trainkit("emit", engine, *flags, "--shared", shared, *FLAGS, cwd=cwd)
    done = subprocess.run(
        [os.environ[SCHEMAS], "-c", check], input=text, capture_output=True, text=True, check=False, cwd=cwd,
        env=os.environ | {"HOME": str(cwd)},  # skypilot makes folders there
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
