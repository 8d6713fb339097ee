"""A debugger that does not get the terminal, and what a debugged rank changes of a training, are caught here alone."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import quick
from tests.support.descendants import descendants
from tests.support.results import result_of, sha256

TRAIN = ("recipe=null", "steps=3", "callbacks=[]", "logger=[]", "quiet=true", "seed=4")
TWO = (*TRAIN, "strategy=mirrored", "strategy.replicas=2")
DEBUG = ("cluster=debug", "hydra.run.dir=run")
PLACES = {
    "one_device": (1, ""), "multi_worker_mirrored": (1, ""), "pipeline": (2, "stages=2 replicas=1"),
    "parameter_server": (2, "workers=1 servers=1"),
}  # fmt: skip
"""Strategies that are launched otherwise -> the ranks of the smallest case, and its keys."""
ALIKE = {
    "mirrored": (2, "replicas=2"), "fsdp": (2, "replicas=2"), "local_sgd": (2, "replicas=2"),
    "central_storage": (1, ""), "device_map": (1, "devices=[cpu]"),
    "tensor_parallel": (2, "degree=2 replicas=1 plan={0:colwise,2:rowwise}"),
    "mesh": (4, "shard=2 tensor=2 plan={0:colwise,2:rowwise}"),
}  # fmt: skip
"""Strategies that are launched like one of these."""
MODEL = """
import os
from torch import nn
from torch.distributed import get_rank

class Stopping(nn.Linear):
    calls = 0
    def forward(self, inputs):
        self.calls += 1
        if self.calls == 2:
            {act}
        return super().forward(inputs.flatten(1))
"""


def stopping(folder: Path, act: str, *where: str) -> list[str]:
    (folder / "stopping.py").write_text(MODEL.format(act=act))
    model = ("~model", "+model._target_=stopping.Stopping", "+model.in_features=64", "+model.out_features=10")
    return ["--allow-package=stopping", *TWO, *model, *(where or DEBUG)]


def typed(arguments: list[str], *lines: str) -> tuple[int, str]:
    """Type words at the prompts of a debugger; return the exit code and what the terminal showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "trainkit", *arguments])
    shown, remaining = "", list(lines)
    while True:
        try:
            shown += os.read(terminal, 4096).decode()
        except OSError:  # the process has ended
            break
        if remaining and shown.count("(Pdb) ") > len(lines) - len(remaining):
            os.write(terminal, remaining.pop(0).encode())
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_a_rank_is_debugged_in_the_terminal_and_quit_without_a_checkpoint(cwd: Path) -> None:
    before = descendants(os.getpid())  # those of a pool of other tests
    code, shown = typed([*stopping(cwd, "breakpoint()"), "cluster.rank=1"], "p 7 * self.calls, os.getppid()\n", "q\n")
    assert re.search(rf"\(14, {os.getpid()}\)", shown), shown
    assert code == 130
    assert "stopped in the debugger; nothing was saved." in shown
    assert result_of("run")["status"] == "stopped"
    assert not list(Path("run").glob("checkpoints/*"))
    assert descendants(os.getpid()) == before


def test_after_continue_the_weights_are_those_without_a_debugger(cwd: Path) -> None:
    assert typed([*stopping(cwd, "breakpoint()"), "cluster.rank=1"], "p self.weight.add_(0)\n", "c\n")[0] == 0
    subprocess.run(quick.command(*stopping(cwd, "pass", "hydra.run.dir=plain")), check=True)
    assert sha256("run") == sha256("plain")


def test_the_failure_of_another_rank_is_named(cwd: Path) -> None:
    command = quick.command(*stopping(cwd, "assert get_rank() == 0, 'of rank 1'"))
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "AssertionError: of rank 1" in process.stderr
    assert "rank 1" in process.stderr.splitlines()[1]


def test_a_rank_that_the_run_has_not_is_refused(cwd: Path) -> None:
    process = subprocess.run(quick.command(*TWO, *DEBUG, "cluster.rank=2"), capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "cluster.rank=2: there is no such rank. There are: 0 (worker:0), 1 (worker:1)." in process.stderr
    assert not Path("run").exists()


@pytest.mark.long
@pytest.mark.parametrize("strategy", [*PLACES, *(pytest.param(name, marks=pytest.mark.matrix) for name in ALIKE)])
def test_the_last_rank_trains_in_this_process_as_anywhere(cwd: Path, strategy: str) -> None:
    ranks, keys = (PLACES | ALIKE)[strategy]
    strategy_keys = [f"strategy={strategy}", *(f"strategy.{key}" for key in keys.split())]
    for name, more in {"plain": (), "debug": ("cluster=debug", f"cluster.rank={ranks - 1}")}.items():
        command = quick.command(*TRAIN, *strategy_keys, *more, f"hydra.run.dir={name}")
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert process.returncode == 0, process.stderr
    assert sha256("plain") == sha256("debug")
