"""The recorded killers still kill."""

import builtins
import dis
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pytest

from tests.mutants.planting import FAILED, ROOT, Mutant, copy_sources, mutants, plant, run_tests
from tests.support.pool import PATIENCE

ALL = mutants()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_and_names_its_killers(mutant: Mutant) -> None:
    code = compile(mutant.planted((ROOT / mutant.file).read_text()), mutant.file, "exec")
    module = importlib.import_module(mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    assert [*undefined(code, module)] == []  # a variable that was renamed would kill it, and not the bug
    assert mutant.killers
    for killer in mutant.killers:
        assert (ROOT / killer.partition("::")[0]).is_file(), f"{killer} is gone"


def undefined(code: CodeType, module: ModuleType) -> Iterator[str]:
    """Yield the global names that a planted module reads and that its source does not define."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    yield from sorted(names - {*vars(module), *vars(builtins)})
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from undefined(constant, module)


@pytest.mark.long
def test_the_killers_pass_where_no_bug_is_planted(copy: Path) -> None:
    one_of_each = {killer.partition("::")[0]: killer for mutant in ALL for killer in mutant.killers}
    code, output = run_tests(copy, list(one_of_each.values()), timeout_s=240)  # all pass in this checkout
    assert code == 0, output


@pytest.mark.long
@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_recorded_killers_kill(mutant: Mutant, copy: Path) -> None:
    with plant(mutant, copy):
        code, output = run_tests(copy, mutant.killers, timeout_s=240, **{PATIENCE: "30"})
    assert code == FAILED, f"{mutant.name} survived: {mutant.bug}\n{output}"
