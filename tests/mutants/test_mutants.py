"""The recorded killers still kill."""

from pathlib import Path

import pytest

from tests.mutants.planting import FAILED, ROOT, Mutant, copy_sources, mutants, plant, run_tests
from tests.support.pool import PATIENCE

ALL = mutants()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_and_names_its_killers(mutant: Mutant) -> None:
    assert mutant.undefined() == []
    assert mutant.killers
    for killer in mutant.killers:
        assert (ROOT / killer.partition("::")[0]).is_file(), f"{killer} is gone"


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
