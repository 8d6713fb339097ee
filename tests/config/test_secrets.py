"""A secret in a file or in what a worker prints, and a special token that is hidden, are caught here alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.vault import Vault
from tests.support.present import present
from trainkit.config.identity import difference, fingerprint, other_training
from trainkit.config.schema import RunConfig
from trainkit.config.secrets import literal_secrets, redacted
from trainkit.config.targets.build import build
from trainkit.config.yaml_files import read_document, shown_text
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import mask, masked_output, remember
from trainkit.run.begin import git_state, packages, write_environment
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import error_report
from trainkit.sweeps.launching import identity

ANYWHERE = """
api_key apikey apiKey API_KEY wandb_api_key password db_passwd pwd secret client_secret secret_key token
hub_token wandb_token github_token auth basic_auth authorization webhook_url pat credentials"""
NOWHERE = """
image_key special_tokens tokens headers bos_token num_tokens key author secretary pass_through path pattern
authored"""


def keys(values: dict[str, Any]) -> list[str]:
    return [problem.key for problem in literal_secrets(values)]


def test_a_secret_is_known_by_its_key() -> None:
    for key in ANYWHERE.split():
        assert (redacted({"data": {key: "s3"}}), keys({"data": {key: "s3"}})) == (
            {"data": {key: "(redacted)"}}, [f"data.{key}"]
        )  # fmt: skip
    for key in ("signing_key", "bos_token", "tokens", "headers", "x_headers", "X-Api-Key"):
        assert keys({"logger": {"w": {key: "s3"}}}) == [f"logger.w.{key}"]
    assert keys({"callbacks": {"w": {"pad_token": "x", "tokens": [5], "headers": {"A": "s3"}}}}) == [
        "callbacks.w.headers"
    ]
    for key in NOWHERE.split():
        values = {"data": {key: "s3"}, "logger": {"auth": {"image_key": "x", "special_tokens": ["y"]}}}
        assert (redacted(values), keys(values)) == (values, [])


def test_a_container_under_a_secret_key_is_a_secret_as_a_whole() -> None:
    values = {"data": {"auth": {"user": "me", "pin": 5}}, "logger": {"w": {"tokens": [7]}}}
    assert redacted(values) == {"data": {"auth": "(redacted)"}, "logger": {"w": {"tokens": "(redacted)"}}}
    assert keys(values) == ["data.auth", "logger.w.tokens"]


def test_only_the_password_of_a_url_is_hidden() -> None:
    values = {"logger": [{"uri": "http://me:pw@host/x"}], "data": {"url": "redis://:p@host"}}
    shown = {"logger": [{"uri": "http://me:(redacted)@host/x"}], "data": {"url": "redis://:(redacted)@host"}}
    assert redacted(values) == shown
    assert keys(values) == ["logger.0.uri", "data.url"]


def test_another_key_that_quotes_a_secret_hides_it() -> None:
    shown = redacted({"data": {"token": "canary-alias", "call": "get ?k=canary-alias"}})
    assert shown["data"]["call"] == "get ?k=(redacted)"


def test_switches_references_and_absence_are_no_literal_secrets() -> None:
    given: dict[str, Any] = {"token": None, "api_key": True, "secret": "", "auth": {}, "pat": "Bearer ${oc.env:X}"}
    assert keys({"data": given}) == []
    assert keys({"data": {"pat": "${oc.env:X,abc}"}}) == ["data.pat"]


def test_what_a_class_marks_is_a_secret_also_in_its_parts() -> None:
    node = {"_target_": f"{Vault.__module__}.Vault", "mark": "m1", "door": {"code": "c5"}, "project": "p"}
    assert keys({"callbacks": {"v": node}}) == ["callbacks.v.mark", "callbacks.v.door.code"]


def test_a_secret_is_no_part_of_a_fingerprint_or_of_what_makes_another_training() -> None:
    one, other = (RunConfig(data={"token": secret}) for secret in ("${oc.env:K}", "${oc.env:OTHER}"))
    assert (fingerprint(one), identity(one)) == (fingerprint(other), identity(other))
    assert other_training(difference(one, other), run=Path("a")) == []


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


def test_a_problem_shows_no_secret_in_its_value_or_in_a_node() -> None:
    node = {"api_key": "k7", "project": "p"}
    assert str(Problem(key="+a.token", value=5, rule="is bad.")) == "+a.token=(redacted): is bad."
    shown = str(Problem(key="logger.w", value=node, rule="is bad."))
    assert shown == "logger.w={'api_key': '(redacted)', 'project': 'p'}: is bad."


def test_only_distinct_secrets_are_masked_in_other_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with masked_output():
        remember(["12345678", "tiny", "sesame", "long-secret"])
        sys.stdout.write("12345678 tiny sesame sesames xlong-secretx http://a:b@c\n")
    sys.stdout.write("long-secret")
    assert capsys.readouterr().out == "12345678 tiny (redacted) sesames x(redacted)x http://a:(redacted)@c\nlong-secret"


def test_a_traceback_and_its_record_hold_no_secret() -> None:
    with masked_output():
        remember("canary-words")
        words = error_report(1, ConfigError([Problem(key="data.token", value="k7", rule="canary-words is wrong.")]))
    assert words.problems == (
        {"key": "data.token", "rule": "(redacted) is wrong.", "origin": "", "value": "(redacted)"},
    )
    assert "canary-words" not in words.message + words.traceback


def test_environment_json_contains_arguments_seed_packages_and_devices(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    argv = ["trainkit", "logger.w.api_key=k7", "--hub-token=t", "seed=3"]
    write_environment(folder, cfg=RunConfig(seed=3), fingerprint="f00", notes=["a note"], argv=argv)
    content = json.loads(folder.environment.read_text())
    assert content["argv"] == ["trainkit", "logger.w.api_key=(redacted)", "--hub-token=(redacted)", "seed=3"]
    assert (content["seed"], content["fingerprint"], content["notes"]) == (3, "f00", ["a note"])
    assert content["packages"]["torch"]
    assert content["devices"]["cores"] >= 1


def test_the_packages_of_targets_are_recorded() -> None:
    values = {
        "model": {"_target_": "safetensors.X"},
        "callbacks": {"a": {"_target_": "yaml.Y"}, "b": [{"_target_": "pytest.Z"}]},
    }
    assert {"torch", "safetensors", "pytest"} <= packages(values).keys()


def test_a_repository_tells_commit_and_changes(cwd: Path) -> None:
    assert git_state() is None
    (cwd / "file").write_text("one")
    for line in ("init -b main", "add file", "-c user.name=a -c user.email=a@b commit -m one"):
        subprocess.run(["git", *line.split()], check=True, capture_output=True)
    state = present(git_state())
    assert (len(state["commit"]), state["branch"], state["dirty"]) == (40, "main", False)
    (cwd / "file").write_text("two")
    assert present(git_state())["dirty"]
