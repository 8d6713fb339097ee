"""A process of a launch that fails alone while the others wait for ever is caught here alone, by place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launchers.joining import free_port
from tests.support.pool import Pool
from trainkit.errors import DataError
from trainkit.run.folder.run_folder import RunFolder

ABSENT = DataError("/data/labels.txt is absent.")
PLACES = {
    "notes": "trainkit.run.rendezvous.join._notes_about",
    "cores": "trainkit.run.rendezvous.join.own_cores",
    "log": "trainkit.run.rendezvous.join.announce_log",
    "callbacks": "trainkit.run.task.build_callbacks",
    "the model": "trainkit.run.session.session.transformed_model",
    "the group": "trainkit.strategies.data_parallel.strategy.build_parts",
    "the loader": "trainkit.run.session.session.loader_of",
    "a step": "trainkit.strategies.core.synchronous.apply_update",
}


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Callable[..., list[Any]]:
    """Start two processes of a launch; per rank what came back, what was raised and what was said."""

    def go(function: str, *args: Any) -> list[Any]:
        return pool.run(f"tests.launchers.joining.{function}", str(tmp_path), free_port(), *args, num_ranks=2)

    return go


def test_a_number_of_threads_may_be_set_for_some_ranks_only(start: Callable[..., list[Any]]) -> None:
    told = start("train_apart", [{"OMP_NUM_THREADS": "1"}, {}])
    assert [result["status"] for result, _, _ in told] == ["finished", "finished"]


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_alone_ends_the_others_with_its_reason(
    start: Callable[..., list[Any]], place: str, tmp_path: Path
) -> None:
    (_, first, _), (_, other, _) = start("train_with_one_unlike", PLACES[place], ABSENT)
    assert first[:2] == ("DataError", 3)
    assert all("/data/labels.txt is absent." in error[2] for error in (first, other))
    assert other[1] == 3
    result = RunFolder(tmp_path / "run").read_result()
    assert "/data/labels.txt is absent." in result["reason"] if result else place in {"notes", "cores"}


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("packages", {"trainkit": "0.0.9"}, "version of trainkit=0.1.0: worker:1 has 0.0.9. Start all with the same"),
        ("size_of", 7, "data, samples of train=1437: worker:1 has 7. All need the same."),
    ],
)
def test_a_host_with_another_version_or_other_data_is_refused(
    start: Callable[..., list[Any]], name: str, found: Any, said: str, tmp_path: Path
) -> None:
    (_, first, _), (_, other, _) = start("train_with_one_unlike", f"trainkit.run.rendezvous.barrier.{name}", found)
    assert (first[:2], other[:2]) == (("ConfigError", 2), ("PeerError", 2))
    assert said in first[2]
    assert list(tmp_path.iterdir()) == []
