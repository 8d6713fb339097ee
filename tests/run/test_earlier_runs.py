"""A run folder that another version of the code cannot continue to the same weights is caught here alone.

The archives hold runs of digits, stopped after 4 of 8 steps by the code of 2026-11-27, before strategies were
arranged on one mesh. `weights.json` has the SHA-256 with which that code ended each; null where a key is gone, and the
run is refused.
"""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

from tests.support import quick

FOLDER = Path(__file__).parent / "earlier_runs"
WEIGHTS: dict[str, str | None] = json.loads((FOLDER / "weights.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_run_of_earlier_code_ends_in_the_weights_of_that_code_or_names_the_key_that_is_gone(
    name: str, tmp_path: Path
) -> None:
    with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    command = quick.command("resume", str(tmp_path / name), "stop_at_step=null")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    if WEIGHTS[name] is None:
        assert done.returncode == 2
        assert "strategy.shard: no such key in TensorParallel. It belongs to local_sgd, mesh" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the hashes are those of a processor with AVX-512; with other instructions sums round otherwise")
    assert json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"] == WEIGHTS[name]
