"""Two trainings with one fingerprint, and one training with two, are caught here alone.

A run-level key that is ignored without a word is caught here alone: each is changed.
A secret in a file or in what a worker prints, and a special token that is hidden, are caught here alone.
"""

from __future__ import annotations

import json
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import yaml

from tests.end_to_end.vault import Vault
from trainkit.config.annotations import misfit
from trainkit.config.check import check_names, check_values
from trainkit.config.compose import compose
from trainkit.config.identity import difference, fingerprint, maths_keys, other_training, tag_of
from trainkit.config.schema import GROUPS, RunConfig, hints_of, load_resolved
from trainkit.config.secrets import literal_secrets, redacted
from trainkit.config.targets.build import build
from trainkit.config.values import plain
from trainkit.config.yaml_files import read_document, shown_text
from trainkit.errors import ConfigError, Problem
from trainkit.fields import maths, placement
from trainkit.redaction import is_secret_name, mask, masked_output, remember
from trainkit.run.begin import write_environment
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import error_report
from trainkit.sweeps.launching import identity


class Averaging:
    """A strategy of the test that changes the result."""

    changes_maths: ClassVar[bool] = True

    def __init__(self, every: int = 4, compression: Annotated[str, maths(neutral="none")] = "none") -> None: ...


class Elsewhere:
    def __init__(
        self, port: Annotated[int, placement] = 1, compression: Annotated[str, maths(neutral="none")] = "none"
    ) -> None: ...


def cfg(*arguments: str, **changes: Any) -> RunConfig:
    return RunConfig.from_dict({**compose(["recipe=null", *arguments]).values, **changes})


def strategy(name: str, **values: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **values}


def test_a_key_has_its_tag() -> None:
    keys = {
        "maths": "seed model.hidden model._target_ optimizer.lr optimizer.groups.no_decay.weight_decay nonsense.key",
        "placement": "stop_at_step strategy._target_ strategy.device",
        "speed": "loader.num_workers",
        "cosmetic": "name callbacks.plots._target_ logger.tensorboard.images",
    }
    run = cfg()
    for tag, names in keys.items():
        assert {name: tag_of(run, tuple(name.split("."))).tag.value for name in names.split()} == dict.fromkeys(
            names.split(), tag
        )
    assert maths_keys(run)["optimizer.lr"] == 0.001
    assert "strategy.device" not in maths_keys(run)


def test_strategies_share_a_fingerprint() -> None:
    assert fingerprint(cfg("strategy=one_device")) == fingerprint(cfg("strategy=mirrored", "strategy.replicas=3"))


def test_a_strategy_that_changes_the_result_has_its_own_fingerprint_unless_its_value_is_neutral() -> None:
    plain = fingerprint(cfg())
    assert fingerprint(cfg(strategy=strategy("Averaging"))) != plain
    assert fingerprint(cfg(strategy=strategy("Elsewhere", compression="none", port=9))) == plain
    assert fingerprint(cfg(strategy=strategy("Elsewhere", compression="bf16"))) != plain


KEEPING = (
    "name=x log_every_steps=3 checkpoint.keep_last=5 eval.every_epochs=2 stop_at_step=3 resume=auto callbacks=[] "
    "logger=[] loader.num_workers=2 loader.cache=false numerics.lanes=4 lr_scaling.rule=sqrt warmup.start=base "
    "precision.initial_scale=2.0 sweep.name=x"
)
CHANGING = (
    "seed=1 epochs=2 batch.global_size=32 batch.micro_size=8 batch.drop_last=true loader.shuffle=false "
    "loader.cache=true clip.max_norm=1 numerics.reproducible=true model.dropout=0.1 optimizer.lr=0.1 optimizer=sgd "
    "schedule=linear precision=fp64 objective.label_smoothing=0.1 warmup.steps=3 optimizer.groups={} init_from=x "
    "optimizers.a.match=[a]"
)


@pytest.mark.slow
def test_what_can_change_the_result_alone_changes_the_fingerprint() -> None:
    plain = fingerprint(cfg())
    assert [argument for argument in KEEPING.split() if fingerprint(cfg(argument)) != plain] == []
    assert [argument for argument in CHANGING.split() if fingerprint(cfg(argument)) == plain] == []
    assert fingerprint(cfg("epochs=2")) == fingerprint(cfg("epochs=2.0")), "numbers count by value"
    assert fingerprint(RunConfig(stop_after="5min")) != fingerprint(RunConfig()), "though it takes the place of epochs"


def test_a_difference_says_what_can_matter_first() -> None:
    differences = difference(cfg(), cfg("strategy=mirrored", "optimizer.lr=0.1", "name=b"))
    assert next((item.key, item.tag.value) for item in differences) == ("optimizer.lr", "maths")
    tags = {item.key: item.tag.value for item in differences}
    assert {key for key, tag in tags.items() if tag == "maths"} == {"optimizer.lr"}
    assert (tags["name"], tags["strategy.replicas"], tags["strategy.bucket_mb"]) == ("cosmetic", "placement", "speed")
    assert difference(cfg(), cfg()) == []


@pytest.mark.parametrize("swapped", [False, True])
def test_a_key_that_only_one_run_has_matters_unless_it_is_neutral(swapped: bool) -> None:
    target = f"{__name__}.Elsewhere"
    runs = [cfg(), cfg(strategy={"_target_": target, "port": 1, "compression": "none"})]
    squeezed = [cfg(), cfg(strategy={"_target_": target, "port": 1, "compression": "bf16"})]
    if swapped:
        runs, squeezed = runs[::-1], squeezed[::-1]
    assert [item.key for item in difference(*runs) if item.matters] == []
    assert [item.key for item in difference(*squeezed) if item.matters] == ["strategy.compression"]


def test_a_run_survives_the_way_through_yaml(tmp_path: Path) -> None:
    run = cfg("optimizer.lr=1e-5", "epochs=0.5")
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(run.to_dict()))
    assert load_resolved(tmp_path / "resolved.yaml") == run


WORDS = "sqrt base skip max val/accuracy auto default other stop none contiguous"
CANDIDATES = (False, True, 3, 16, 0.5, *WORDS.split(), ["new_schedule"])


def run_level_keys(kind: Any = RunConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in fields(kind):
        hint = plain(hints_of(kind)[field.name])
        if is_dataclass(hint):
            yield from run_level_keys(hint, (*path, field.name))
        elif field.name not in (*GROUPS, "recipe", "optimizers") or path:
            yield (*path, field.name)


KEYS = list(run_level_keys())


def another_value(path: tuple[str, ...]) -> object:
    kind: typing.Any = RunConfig
    for name in path[:-1]:
        kind = plain(hints_of(kind)[name])
    hint = plain(hints_of(kind)[path[-1]])
    default = getattr(kind(), path[-1])
    return next(value for value in CANDIDATES if misfit(value, hint) is None and value != default)


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_a_changed_key_is_reported_as_a_problem_or_a_difference(path: tuple[str, ...]) -> None:
    value = another_value(path)
    text = str(value).lower() if isinstance(value, bool) else value
    composed = compose(["recipe=null", f"{'.'.join(path)}={text}"])
    reports = check_names(composed) or check_values(composed)
    if reports:
        assert all(problem.key.startswith(path[0]) for problem in reports)
        return
    before, after = compose(["recipe=null"]).cfg, composed.cfg
    (changed,) = [item for item in difference(before, after) if item.key == ".".join(path)]
    assert changed.tag is tag_of(after, path).tag or not changed.matters
    assert (fingerprint(before) != fingerprint(after)) == changed.matters


ANYWHERE = """
api_key apikey apiKey API_KEY wandb_api_key password db_passwd pwd secret client_secret secret_key token
hub_token wandb_token github_token auth basic_auth authorization webhook_url pat credentials"""
NOWHERE = """
image_key special_tokens tokens headers bos_token num_tokens key author secretary pass_through path pattern
authored"""


def keys(values: dict[str, Any]) -> list[str]:
    return [problem.key for problem in literal_secrets(values)]


def test_a_secret_is_known_by_its_name() -> None:
    assert [name for name in ANYWHERE.split() if not is_secret_name(name)] == []
    assert [name for name in NOWHERE.split() if is_secret_name(name)] == []


def test_a_container_under_a_secret_key_is_a_secret_as_a_whole() -> None:
    values = {"data": {"auth": {"user": "me", "pin": 5}}, "logger": {"w": {"tokens": [7]}}}
    assert redacted(values) == {"data": {"auth": "(redacted)"}, "logger": {"w": {"tokens": "(redacted)"}}}
    assert keys(values) == ["data.auth", "logger.w.tokens"]


def test_what_a_class_marks_is_a_secret_also_in_its_parts() -> None:
    node = {"_target_": f"{Vault.__module__}.Vault", "mark": "m1", "door": {"code": "c5"}, "project": "p"}
    assert keys({"callbacks": {"v": node}}) == ["callbacks.v.mark", "callbacks.v.door.code"]


def test_a_secret_is_no_part_of_a_fingerprint_or_of_what_makes_another_training() -> None:
    left, right = (RunConfig(data={"token": secret}) for secret in ("${oc.env:K}", "${oc.env:OTHER}"))
    assert (fingerprint(left), identity(left)) == (fingerprint(right), identity(right))
    assert other_training(difference(left, right), run=Path("a")) == []


def test_a_variable_of_a_secret_is_looked_up_where_the_object_is_built_and_masked_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_KEY", "canary-words")
    monkeypatch.setenv("ALL", "{A: k8}")
    node = {"_target_": f"{Vault.__module__}.Vault", "api_key": "${oc.env:A_KEY}", "project": "${oc.env:A_KEY}"}
    vault = build({**node, "headers": "${oc.decode:${oc.env:ALL}}", "mark": "Bearer ${oc.env:A_KEY}"})
    assert (vault.api_key, vault.project, vault.headers) == ("canary-words", "${oc.env:A_KEY}", {"A": "k8"})
    assert vault.mark == "Bearer canary-words"
    assert mask("as canary-words says") == "as (redacted) says"


def test_a_file_of_the_users_is_listed_without_its_secrets(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("# Mine\nname: x\napi_key: k7\nheaders:\n  A: k8\n\n# more\nurl: http://a:b@c\n")
    assert shown_text(read_document(file), "logger") == (
        "# Mine\nname: x\napi_key: (redacted)\nheaders: (redacted)\n\n# more\nurl: http://a:(redacted)@c\n"
    )


def test_a_secret_that_is_a_common_word_or_a_number_is_not_masked_in_other_texts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = "12345678 classification Training README OPTIMIZER digits k7-x9"
    with masked_output():
        remember(common.split())
        remember(["long-secret", "sk4digits", "aQwErTyUi", "abcdefghijklmnopq"])
        sys.stdout.write(f"outputs/digits/2026 {common}\n")
        sys.stdout.write("xlong-secretx sk4digits aQwErTyUi abcdefghijklmnopq http://a:b@c\n")
    sys.stdout.write("long-secret")
    line, hidden, after = capsys.readouterr().out.split("\n")
    assert (line, after) == (f"outputs/digits/2026 {common}", "long-secret")
    assert hidden == "x(redacted)x (redacted) (redacted) (redacted) http://a:(redacted)@c"


def test_a_traceback_and_its_record_hold_no_secret() -> None:
    with masked_output():
        remember("canary-words")
        report = error_report(1, ConfigError([Problem(key="data.token", value="k7", rule="canary-words is wrong.")]))
    assert report.problems == (
        {"key": "data.token", "rule": "(redacted) is wrong.", "origin": "", "value": "(redacted)"},
    )
    assert "canary-words" not in report.message + report.traceback


def test_environment_json_contains_arguments_seed_packages_and_devices(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    argv = ["trainkit", "logger.w.api_key=k7", "--hub-token=t", "seed=3"]
    write_environment(folder, cfg=RunConfig(seed=3), fingerprint="f00", notes=["a note"], argv=argv)
    content = json.loads(folder.environment.read_text())
    assert content["argv"] == ["trainkit", "logger.w.api_key=(redacted)", "--hub-token=(redacted)", "seed=3"]
    assert (content["seed"], content["fingerprint"], content["notes"]) == (3, "f00", ["a note"])
    assert content["packages"]["torch"]
    assert content["devices"]["cores"] >= 1
