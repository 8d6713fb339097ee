"""A planted failure that hits another rank, step or attempt, so that kill tests test nothing, is caught here alone."""

from collections.abc import Iterator

import pytest

from trainkit.errors import ConfigError
from trainkit.trainer import failpoints
from trainkit.trainer.failpoints import hit, parse, reload


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
    reload({"TRAINKIT_FAIL": "action=full"})  # without step or phase every moment is meant
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


@pytest.mark.parametrize(
    "text", ["step=x,action=kill", "action=burn", "phase=lunch,action=kill", "kill", "when=2,action=kill"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"TRAINKIT_FAIL=.*: write rank=N,index=N,step=N"):
        parse(text)
