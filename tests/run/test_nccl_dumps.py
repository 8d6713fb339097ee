"""NCCL's flight recorder writes into the run folder, and a verdict names what it has written."""

from __future__ import annotations

from pathlib import Path

from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.heartbeat import Heartbeat
from trainkit.run.process.nccl_dumps import nccl_dumps_to, recorder_variables
from trainkit.run.process.worker_group import ProcessExit
from trainkit.run.supervisor.failure import root_cause, unresponsive_rank


def begun(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.begin()
    folder.open_live()
    return folder


def test_a_verdict_names_the_dumps_and_how_to_compare_them(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    exits = [ProcessExit(attempt=0, rank=1, code=-6)]
    assert root_cause(folder, exits, [0]).dumps == ""
    (tmp_path / "live/nccl_rank_\x1b[2J").write_bytes(b"of another program")
    for rank in (0, 1):
        (tmp_path / f"live/nccl_rank_{rank}").write_bytes(b"\x80\x02")
    line = (
        f"NCCL's last collectives are in {tmp_path}/live: nccl_rank_0 to nccl_rank_1. "
        f"To compare them: torchfrtrace --prefix nccl_rank_ {tmp_path}/live"
    )
    assert str(root_cause(folder, exits, [0]).error()).splitlines()[-1] == line
    assert str(unresponsive_rank(folder, [0, 1]).error()).splitlines()[-1] == line


def test_a_rank_that_gave_up_waiting_does_not_hide_the_rank_it_waited_for(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    for rank in (0, 1, 2):
        Heartbeat(folder.heartbeat_of(rank)).beat(5, "data" if rank == 2 else "reduce")
    exits = [ProcessExit(attempt=0, rank=rank, code=-6) for rank in (0, 1)]
    assert root_cause(folder, exits, [2]).rank == 0  # nothing shows that NCCL has ended them
    for rank in (0, 1, 2):
        folder.nccl_dumps.with_name(f"nccl_rank_{rank}").write_bytes(b"\x80\x02")
    assert root_cause(folder, exits, [2]).headline == "rank 2 stopped answering in step 5 (data)."
    assert root_cause(folder, exits, []).headline.startswith("rank 0 was ended by SIGABRT in step 5 (reduce).")
    assert root_cause(folder, [*exits, ProcessExit(attempt=0, rank=2, code=-9)], []).rank == 2


def test_the_next_attempt_removes_the_dumps(tmp_path: Path) -> None:
    folder = begun(tmp_path)
    folder.nccl_dumps.with_name("nccl_rank_0").write_bytes(b"\x80\x02")
    folder.begin()
    assert not folder.live.exists()


def test_the_recorder_is_bounded_and_writes_into_the_run_folder(tmp_path: Path) -> None:
    environ = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    with nccl_dumps_to(RunFolder(tmp_path), environ):
        assert environ == {**recorder_variables(RunFolder(tmp_path)), "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert environ == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    old = recorder_variables(RunFolder(tmp_path), version="2.9.1+cu128")
    assert old == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{tmp_path}/live/nccl_rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
