"""Fixtures of every test: one thread, and nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

# before torch is imported, here and in every process a test starts: two cores, and several processes to share them
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# proofs are kept in the user's cache: tests have one of their own, here and in every process a test starts
os.environ["MPLCONFIGDIR"] = os.environ.get("MPLCONFIGDIR") or str(Path.home() / ".cache" / "matplotlib")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="trainkit-tests-")
# a run waits for the disk two dozen times, for minutes beside an installation, and in memory for nothing; tests start
# programs that they write, which containers allow on disk only
if sys.platform == "linux" and Path("/dev/shm").is_dir():
    _takes_programs = not os.statvfs("/dev/shm").f_flag & os.ST_NOEXEC
    if _takes_programs and shutil.disk_usage("/dev/shm").free >= 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

from tests.support import quick
from tests.support.browsing import browser
from tests.support.graphs import fresh_graphs
from tests.support.installing import clean_environ, installed, wheel
from tests.support.leaks import look, settled_leaks
from tests.support.named_ends import NamedEnds
from tests.support.older_torch import compiled_gradients, without_pipelines
from tests.support.pool import Pool
from tests.support.processes import FastLane
from tests.support.refusing import refuse
from tests.support.thinning import thin
from trainkit.config.targets.allowed import allow_packages
from trainkit.redaction import forgetting_secrets

__all__ = ["browser", "clean_environ", "compiled_gradients", "fresh_graphs", "installed", "refuse", "wheel"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """One thread, also where an earlier import of torch read another setting."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_leaks(_one_thread: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a variable, process, thread, process group, folder or setting behind."""
    before = look()
    yield
    fast = request.config.pluginmanager.get_plugin(FastLane.NAME)
    waits = fast is None or not fast.skips(request.node)  # a skipped test may leave threads that wait for a process
    leaks = settled_leaks(before, patience_s=60 if waits else 0)
    assert not leaks, "the test left behind " + "; ".join(leaks)


@pytest.fixture(autouse=True, scope="session")
def _own_classes() -> Iterator[None]:
    """Let tests build the classes of `tests` in this process without composing a run."""
    with allow_packages(["tests"]):
        yield


@pytest.fixture(autouse=True)
def _no_secrets() -> Iterator[None]:
    """Forget the secrets of a test, which would be masked in what the next ones print."""
    with forgetting_secrets():
        yield


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, made the current one for this test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says what the fake workers of this test do (`tests/run/fake_worker.py`)."""

    def set_up(settings: str, fail: str = "", raising: str = "-1::") -> None:
        monkeypatch.setenv("FAKE", settings)
        monkeypatch.setenv("TRAINKIT_FAIL", fail)
        monkeypatch.setenv("FAKE_RAISE", raising)

    return set_up


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes shared by the whole session; a task names a function and gets one rank in each."""
    with Pool() as shared:
        yield shared


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of the fast lane."""
    parser.addoption("--fast", action="store_true", help="skip what starts a process")


def _asks_for_gpus(config: pytest.Config) -> bool:
    """Return whether `-m` names the mark `gpu`, and not to leave its tests out."""
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def pytest_configure(config: pytest.Config) -> None:
    """Set up the session; let signals reach the tests also where pytest runs in the background or under nohup."""
    # without bytecode, each process compiles all that it imports again: half of the time to collect
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    quick.quicken_launches()
    pytest.register_assert_rewrite("tests.contract.checks")
    config.pluginmanager.register(NamedEnds(stderr=2))
    if _asks_for_gpus(config):
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that outlive a test
    else:  # the other tests share out CPUs: with one GPU, two replicas would be too many
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("fast"):
        config.pluginmanager.register(FastLane(config), FastLane.NAME)
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_sessionfinish() -> None:
    """End what lived for the session."""
    quick.end()
    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage, and freeze them: they are much, and little of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one more than there are cores: tests of processes wait for a quarter of their time, the fast lane not."""
    return (os.cpu_count() or 1) + (not config.getoption("fast"))


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Thin the matrices; skip what needs a GPU where there is none, with the reason.

    A test with a time limit of its own is among the longest: it comes first, so that none is left alone at the end.
    """
    thin(items)
    without_pipelines(items)
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    on_gpus = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpus:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: pytest -m gpu where torch sees one"))
