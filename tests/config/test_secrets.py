"""A secret in a file or in what a worker prints, and a special token that is hidden, are caught here alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.vault import Vault
from tests.support.present import present
from trainkit.config.compose import compose
from trainkit.config.identity import difference, fingerprint, other_training
from trainkit.config.schema import RunConfig, load_resolved
from trainkit.config.secrets import (
    given_arguments,
    hidden_arguments,
    redacted,
    refuse_to_carry,
    restored,
    with_own_secrets,
)
from trainkit.config.targets.build import build
from trainkit.config.yaml_files import read_document, shown_text
from trainkit.errors import ConfigError, Problem
from trainkit.redaction import mask, masked_output, remember
from trainkit.run.begin import git_state, packages, write_environment, write_resolved
from trainkit.run.folder.run_folder import RunFolder
from trainkit.run.process.error_report import error_report
from trainkit.run.rendezvous.barrier import config_digest
from trainkit.sweeps.launching import identity

ANYWHERE = """
api_key apikey apiKey API_KEY wandb_api_key password db_passwd pwd secret client_secret secret_key token
hub_token wandb_token github_token auth basic_auth authorization webhook_url pat credentials"""
NOWHERE = """
image_key special_tokens tokens headers bos_token num_tokens key author secretary pass_through path pattern
authored"""


def test_a_secret_is_known_by_its_key() -> None:
    for key in ANYWHERE.split():
        assert redacted({"data": {key: "s3"}}) == ({"data": {key: "(redacted)"}}, {f"data.{key}": "s3"})
    for key in ("signing_key", "bos_token", "tokens", "headers", "x_headers", "X-Api-Key"):
        for group in ("logger", "callbacks"):
            assert redacted({group: {"w": {key: "s3"}}})[1] == {f"{group}.w.{key}": "s3"}
    for key in NOWHERE.split():
        values = {"data": {key: "s3"}, "logger": {"auth": {"image_key": "x", "special_tokens": ["y"]}}}
        assert redacted(values) == (values, {})


@pytest.mark.parametrize(
    ("values", "shown", "secrets"),
    [
        (  # a container as a whole
            {"data": {"auth": {"user": "me", "pin": 5}}, "logger": {"w": {"tokens": [7]}}},
            {"data": {"auth": "(redacted)"}, "logger": {"w": {"tokens": "(redacted)"}}},
            {"data.auth": {"user": "me", "pin": 5}, "logger.w.tokens": [7]},
        ),
        (  # of a URL its password alone
            {"logger": [{"uri": "http://me:pw@host/x"}]},
            {"logger": [{"uri": "http://me:(redacted)@host/x"}]},
            {"logger.0.uri": "http://me:pw@host/x"},
        ),
        (  # another key that quotes it
            {"data": {"token": "canary-alias", "call": "get ?k=canary-alias"}},
            {"data": {"token": "(redacted)", "call": "get ?k=(redacted)"}},
            {"data.token": "canary-alias", "data.call": "get ?k=canary-alias"},
        ),
        (  # switches and absence are none
            {"data": {"token": None, "api_key": True, "secret": "", "auth": {}}},
            {"data": {"token": None, "api_key": True, "secret": "", "auth": {}}},
            {},
        ),
    ],
)
def test_a_secret_is_hidden_where_it_stands_and_comes_back(
    values: dict[str, Any], shown: dict[str, Any], secrets: dict[str, Any]
) -> None:
    assert redacted(values) == (shown, secrets)
    assert restored(shown, secrets) == values


def test_what_a_class_marks_is_a_secret_also_in_its_parts() -> None:
    node = {"_target_": f"{Vault.__module__}.Vault", "mark": "m1", "door": {"code": 5}, "project": "p"}
    assert redacted({"callbacks": {"v": node}})[1] == {"callbacks.v.mark": "m1", "callbacks.v.door.code": 5}


def test_a_worker_that_restores_secrets_masks_them_in_all_that_it_prints() -> None:
    stored = {"logger": {"w": {"api_key": "(redacted)", "uri": "http://me:(redacted)@host"}}}
    restored(stored, {"logger.w.api_key": "canary-words", "logger.w.uri": "http://me:canary-part@host"})
    assert mask("canary-words http://host canary-part") == "(redacted) http://host (redacted)"


def test_a_secret_that_was_not_given_is_asked_for_in_the_way_that_the_command_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"logger\.w\.api_key=\(redacted\): .*\$\{oc\.env:W_API_KEY\}"):
        restored({"logger": {"w": {"api_key": "(redacted)"}}}, {})
    cfg = RunConfig(data={"token": "(redacted)"}, logger={"w": {"api_key": "(redacted)"}})
    with pytest.raises(ConfigError, match=r"data\.token=\(redacted\): .*TRAINKIT_SECRETS='\{\"data\.token\": "):
        with_own_secrets(cfg, ("data",))
    monkeypatch.setenv("TRAINKIT_SECRETS", '{"data.token": "t"}')
    assert with_own_secrets(cfg, ("data",)).data == {"token": "t"}
    monkeypatch.setenv("TRAINKIT_SECRETS", "canary")
    with pytest.raises(ConfigError, match="TRAINKIT_SECRETS: must be a JSON object") as caught:
        with_own_secrets(cfg, ("data",))
    assert "canary" not in str(caught.value)


def test_what_would_write_a_secret_to_a_disk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"logger\.w\.api_key=\(redacted\): a job of submitit would write it"):
        refuse_to_carry(["logger.w.api_key=(redacted)"], "a job of submitit", key="hydra/launcher=submitit_slurm")


def test_a_job_gets_its_secret_arguments_in_its_environment() -> None:
    given = ["seed=1", "logger.w={api_key: k7}", "data.url=http://a:b@c", "data.image_key=x"]
    shown, environ = hidden_arguments(given)
    assert shown == ("seed=1", "logger.w=(redacted)", "data.url=http://a:(redacted)@c", "data.image_key=x")
    assert given_arguments([*shown, "resume=auto"], environ) == [*given, "resume=auto"]
    assert environ == {}


def test_a_secret_is_no_part_of_a_fingerprint_or_of_what_makes_another_training() -> None:
    other = RunConfig(data={"token": "another"})
    for secret in ("k7", "${oc.env:K}", "(redacted)"):
        one = RunConfig(data={"token": secret})
        assert (fingerprint(one), identity(one)) == (fingerprint(other), identity(other))
        assert other_training(difference(one, other), run=Path("a")) == []
    assert config_digest(RunConfig(data={"token": "k7"})) == config_digest(other)


def test_a_reference_with_a_default_is_a_secret_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given = compose(["recipe=null", "+data.token=${oc.env:NOT_SET_HERE,k7}"])
    assert redacted(given.values)[1]["data.token"] == "k7"
    monkeypatch.setenv("SET_HERE", "/pictures")
    assert compose(["recipe=null", "+data.path=${oc.env:SET_HERE}"]).values["data"]["path"] == "/pictures"


def test_a_variable_of_a_secret_is_looked_up_where_the_object_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "k7")
    monkeypatch.setenv("ALL", "{A: k8}")
    node = {"_target_": f"{Vault.__module__}.Vault", "api_key": "${oc.env:A_KEY}", "project": "${oc.env:A_KEY}"}
    vault = build({**node, "headers": "${oc.decode:${oc.env:ALL}}", "mark": "Bearer ${oc.env:A_KEY}"})
    assert (vault.api_key, vault.project, vault.headers) == ("k7", "${oc.env:A_KEY}", {"A": "k8"})
    assert vault.mark == "Bearer k7"


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


def test_resolved_yaml_is_read_back_by_plain_yaml_without_the_secret(tmp_path: Path) -> None:
    folder, cfg = RunFolder(tmp_path), RunConfig(logger={"w": {"_target_": "x.Y", "api_key": "k7"}}, seed=3)
    assert write_resolved(folder, cfg) == {"logger.w.api_key": "k7"}
    assert "k7" not in folder.resolved.read_text()
    assert load_resolved(folder.resolved).seed == 3
    plain = RunConfig(data={"image_key": "x", "tokens": 5, "special_tokens": ["a"]})
    assert write_resolved(folder, plain) == {}
    assert load_resolved(folder.resolved) == plain


def test_environment_json_contains_arguments_without_secrets_seed_and_packages(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    argv = ["trainkit", "logger.w.api_key=k7", "--hub-token=t", "seed=3"]
    write_environment(folder, cfg=RunConfig(seed=3), fingerprint="f00", notes=["a note"], argv=argv)
    content = json.loads(folder.environment.read_text())
    assert content["argv"] == ["trainkit", "logger.w.api_key=(redacted)", "--hub-token=(redacted)", "seed=3"]
    assert (content["seed"], content["fingerprint"], content["notes"]) == (3, "f00", ["a note"])
    values = {"model": {"_target_": "safetensors.X"}, "callbacks": {"b": [{"_target_": "pytest.Z"}]}}
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
