"""A function of 151 lines, an import cycle, or a check that knows one strategy by its name is caught here alone."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

from tests.packaging.conftest import ROOT


@cache
def trees() -> Mapping[str, ast.Module]:
    """Return the syntax tree of each module of trainkit, by its path."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in ROOT.glob("trainkit/**/*.py")}


def dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_config_checks_and_memory_remedies_contain_no_name_of_a_choice() -> None:
    choices = {file.stem for group in ("strategy", "precision") for file in ROOT.glob(f"conf/{group}/*.yaml")}
    choices |= {"basic", "slots", "ray", "submitit_local", "submitit_slurm"}  # hydra/launcher
    choices |= {"grid", "random", "optuna"}  # hydra/sweeper
    core = ("trainkit/config/", "trainkit/run/planning/", "trainkit/run/estimates/remedies")
    assert [
        f"{path}:{node.lineno} {node.value}"
        for path, tree in trees().items()
        if path.startswith(core) and not path.endswith("key_facts.py")  # `slots` is also a key, with a unit
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in choices
    ] == []


def test_no_function_is_longer_than_150_lines_and_no_line_than_120_characters() -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 150, f"{path} {node.name}"
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            words = line.partition("  # ")[0].split()  # one long word and notes for tools may be longer
            assert len(line) <= 120 or len(words) == 1 or "# noqa" in line or "# type: " in line, f"{path}:{number}"


def test_variables_have_the_names_of_what_they_are() -> None:
    for path, tree in trees().items():
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        assert names.isdisjoint({"found", "one", "own", "held"}), path


def test_two_modules_import_internals_of_hydra() -> None:
    """They may change in any release."""
    importing = re.compile(r"^\s*(from|import) hydra\._internal", re.MULTILINE)
    files = [*ROOT.glob("trainkit/**/*.py"), *ROOT.glob("hydra_plugins/**/*.py")]
    assert sorted(path.name for path in files if importing.search(path.read_text())) == ["__init__.py", "jobs.py"]


def test_no_module_imports_itself_in_the_end() -> None:
    """Imports within functions and those for type checkers count too."""
    modules = {dotted(path): tree for path, tree in trees().items()}
    graph = {name: {*imported(tree, modules)} - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def imported(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module in modules:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            package = node.module
            yield from (name if name in modules else package for name in names)


ONCE = {
    r"def first_failure\(": {"agent/failure.py"},
    r"monitor\.look\(": {"agent/agent.py", "agent/self_watch.py"},  # of other processes, and of the own one
    r"(events|exits)\.get\(": {"agent/agent.py"},
    r"status=status_of_error\(error\)": {"folder/run_result.py"},
    r"def begun\(": {"begin.py"},
    r"= find_start\(|return find_start\(": {"begin.py", "rendezvous/join.py"},  # also of a launch that is restarted
    r"worker\.main\(|exit_without_teardown\(main": {"worker_main.py", "fork_server_main.py"},
}
"""What a run has one of -> the files of `trainkit/run` that contain it."""


def test_a_run_is_begun_watched_judged_and_recorded_in_one_place_each() -> None:
    texts = {
        str(path.relative_to(ROOT / "trainkit/run")): path.read_text() for path in ROOT.glob("trainkit/run/**/*.py")
    }
    assert {rule: {name for name, text in texts.items() if re.search(rule, text)} for rule in ONCE} == ONCE
