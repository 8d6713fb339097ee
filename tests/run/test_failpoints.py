from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.errors import ConfigError
from trainkit.trainer import failpoints
from trainkit.trainer.failpoints import Failpoint, hit, parse, reload


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    reload({})


def test_a_failpoint_fails_at_its_moment_only() -> None:
    reload({"TRAINKIT_FAIL": "step=3,phase=backward,action=raise"})
    hit("backward", 2)
    hit("forward", 3)
    with pytest.raises(RuntimeError, match=r"^failpoint in backward of step 3$"):
        hit("backward", 3)


def test_without_step_or_phase_every_moment_is_meant() -> None:
    reload({"TRAINKIT_FAIL": "action=full"})
    with pytest.raises(OSError, match="No space left on device"):
        hit("save", 12)


@pytest.mark.parametrize(
    "environ",
    [
        {"TRAINKIT_RANK": "0", "TRAINKIT_FAIL": "rank=1,action=raise"},
        {"TRAINKIT_RANK": "1", "TRAINKIT_FAIL": "action=raise"},
        {"TRAINKIT_ATTEMPT": "1", "TRAINKIT_FAIL": "attempt=0,action=raise"},
        {},
    ],
)
def test_others_are_spared(environ: dict[str, str]) -> None:
    reload(environ)
    hit("forward", 0)
    assert not failpoints.ARMED


def test_several_are_parted_by_semicolons() -> None:
    assert parse("rank=1,action=kill; step=2,action=hang") == (
        Failpoint(action="kill", rank=1),
        Failpoint(action="hang", step=2),
    )


def test_a_task_is_named_by_its_index_whatever_its_rank() -> None:
    reload({"TRAINKIT_RANK": "1", "TRAINKIT_INDEX": "3", "TRAINKIT_FAIL": "index=3,action=raise"})
    assert failpoints.ARMED
    reload({"TRAINKIT_RANK": "3", "TRAINKIT_INDEX": "0", "TRAINKIT_FAIL": "index=3,action=raise"})
    assert not failpoints.ARMED


def test_a_failure_lasts_as_long_as_its_file(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    reload({"TRAINKIT_FAIL": f"while={gone},action=raise"})
    hit("start", 0)
    gone.touch()
    with pytest.raises(RuntimeError, match=r"^failpoint in start of step 0$"):
        hit("start", 0)


@pytest.mark.parametrize(
    "text", ["step=x,action=kill", "action=burn", "phase=lunch,action=kill", "kill", "when=2,action=kill"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value).splitlines()[1] == (
        f"  TRAINKIT_FAIL={text}: write rank=N,index=N,step=N,attempt=N,life=N,phase=PHASE,while=FILE,action=ACTION "
        "with one of the phases start, join, load, callback, evaluate, save, data, compile, forward, backward, reduce, "
        "update, end, idle and one of the actions kill, stop, hang, raise, full, exit, slow. (environment)"
    )
