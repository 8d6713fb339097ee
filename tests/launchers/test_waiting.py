"""A second group that writes into the folder of the first, and a wait without an end, are caught here alone."""

import socket
from pathlib import Path

import pytest

from tests.launchers.launches import launch_of
from trainkit.cluster.address import interface_of, own_address
from trainkit.cluster.launch import socket_environ
from trainkit.errors import ConfigError, HangError, TrainingError
from trainkit.run.folder.fencing_token import FencingToken
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.rendezvous.store_client import WaitReporter, store_of_launch


class Clock:
    """Time that passes during sleeps only."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait_for_ever(patience: WaitReporter) -> None:
    while True:
        patience.wait(0.5)


def test_the_wait_reports_the_missing_task_repeatedly_and_ends_at_its_limit() -> None:
    said: list[str] = []
    clock = Clock()
    who = "worker:1 (10.0.0.2:2222)"
    patience = WaitReporter(lambda: who, timeout_s=60.0, log=said.append, clock=clock, sleep=clock.sleep)
    with pytest.raises(HangError) as caught:
        wait_for_ever(patience)
    assert said == [
        f"waiting for {who}",
        f"waiting for {who}, 9 s",
        f"waiting for {who}, 21 s",
        f"waiting for {who}, 45 s",
    ]
    assert str(caught.value) == f"waited 60 s (supervisor.join_timeout_s) for {who}."


def test_a_folder_that_another_host_does_not_see_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        FencingToken.verify(folder, "token", timeout_s=0.0)
    assert str(caught.value).splitlines()[1] == (
        f"  run folder={folder.path}: rank 0 made it, and {socket.gethostname()} does not see it. All processes write "
        "into one run folder: start them in a folder of a file system that the hosts share, or name one with "
        "hydra.run.dir."
    )


def test_a_group_that_comes_back_late_finds_the_folder_taken(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = FencingToken.acquire(folder)
    assert FencingToken.verify(folder, first.token) == first
    second = FencingToken.acquire(folder)
    second.check()
    with pytest.raises(TrainingError, match=rf"^{tmp_path} was taken over by process \d+ on .+\. This group ends and"):
        first.check()


def test_no_checkpoint_gets_its_name_where_the_folder_is_another_groups(tmp_path: Path) -> None:
    import torch

    from tests.support.saving import save
    from trainkit.trainer.manifest import list_complete

    folder = RunFolder(tmp_path)
    fence = FencingToken.acquire(folder)
    tensors = {"param/a": torch.zeros(2)}
    save(folder.checkpoints, step=1, tensors=tensors, meta={}, confirm=fence.check)
    FencingToken.acquire(folder)
    with pytest.raises(TrainingError, match="was taken over by"):
        save(folder.checkpoints, step=2, tensors=tensors, meta={}, confirm=fence.check)
    assert [checkpoint.step for checkpoint in list_complete(folder.checkpoints)] == [1]


def test_on_one_host_gloo_stays_on_the_loopback_interface() -> None:
    assert socket_environ(launch_of(2, store=("localhost", 29400))) == {"GLOO_SOCKET_IFNAME": "lo"}


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            store_of_launch(launch_of(2, store=("127.0.0.1", port)))
    assert str(caught.value).splitlines()[1] == (
        f"  store=127.0.0.1:{port}: rank 0 cannot listen there: Address already in use."
    )


def test_a_sweep_in_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from trainkit.cli import main

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    assert main(["-m", "seed=1,2"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == (
        "  -m: this is one of 2 processes that RANK and WORLD_SIZE started, and each would run every point. Start the "
        "sweep without the launcher (TRAINKIT_LAUNCHER=none), or each point with it. (command line)"
    )
