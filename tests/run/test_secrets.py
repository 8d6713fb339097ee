import json

import pytest

from trainkit.config.schema import RunConfig, load_resolved
from trainkit.errors import ConfigError
from trainkit.run.environment import git_state, packages, write_environment, write_resolved
from trainkit.run.folder import RunFolder
from trainkit.run.secrets import redacted, restored


@pytest.mark.parametrize(
    "key",
    ["api_key", "apikey", "wandb_api_key", "password", "db_passwd", "token", "hub_token", "client_secret", "API_KEY"],
)
def test_a_secret_is_known_by_its_key(key):
    assert redacted({key: "s3"}) == ({key: "(redacted)"}, {key: "s3"})


@pytest.mark.parametrize("key", ["bos_token", "num_tokens", "tokens", "key", "author", "secretary", "pass_through"])
def test_what_only_sounds_like_a_secret_stays(key):
    assert redacted({key: "s3"}) == ({key: "s3"}, {})


def test_a_password_in_a_url_is_a_secret():
    assert redacted({"logger": [{"uri": "http://me:pw@host/x"}]})[1] == {"logger.0.uri": "http://me:pw@host/x"}


def test_numbers_switches_and_absence_are_no_secrets():
    values = {"token": None, "password": 5, "api_key": True, "secret": ""}
    assert redacted(values) == (values, {})


def test_secrets_come_back_to_their_place():
    values = {"logger": {"w": {"api_key": "k", "tags": ["a"]}}, "hooks": [{"token": "t"}]}
    assert restored(*redacted(values)) == values


def test_a_secret_that_was_not_given_is_asked_for():
    with pytest.raises(ConfigError) as caught:
        restored({"logger": {"w": {"api_key": "(redacted)"}}}, {})
    assert str(caught.value) == (
        "1 problem in the config\n"
        "  logger.w.api_key=(redacted): a secret is not kept in the run folder. "
        "Give it again: logger.w.api_key=... on the command line."
    )


def test_resolved_yaml_is_read_back_by_plain_yaml_without_the_secret(tmp_path):
    folder, cfg = RunFolder(tmp_path), RunConfig(logger={"w": {"_target_": "x.Y", "api_key": "k7"}}, seed=3)
    assert write_resolved(folder, cfg) == {"logger.w.api_key": "k7"}
    assert "k7" not in folder.resolved.read_text()
    assert load_resolved(folder.resolved).seed == 3
    assert write_resolved(folder, RunConfig(seed=4)) == {}
    assert load_resolved(folder.resolved) == RunConfig(seed=4)


def test_environment_json_tells_where_a_run_came_from(tmp_path):
    folder = RunFolder(tmp_path)
    argv = ["trainkit", "logger.w.api_key=k7", "--hub-token=t", "seed=3"]
    write_environment(folder, cfg=RunConfig(seed=3), fingerprint="f00", notes=["a note"], argv=argv)
    content = json.loads(folder.environment.read_text())
    assert content["argv"] == ["trainkit", "logger.w.api_key=(redacted)", "--hub-token=(redacted)", "seed=3"]
    assert (content["seed"], content["fingerprint"], content["notes"]) == (3, "f00", ["a note"])
    assert content["packages"]["torch"]
    assert content["devices"]["cores"] >= 1


def test_the_packages_of_targets_are_told():
    values = {
        "model": {"_target_": "safetensors.X"},
        "callbacks": {"a": {"_target_": "yaml.Y"}, "b": [{"_target_": "pytest.Z"}]},
    }
    assert {"torch", "safetensors", "pytest"} <= packages(values).keys()


def test_outside_a_repository_there_is_no_commit(cwd):
    assert git_state() is None


def test_a_repository_tells_commit_and_changes(cwd):
    import subprocess

    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True
        )

    git("init", "-b", "main")
    (cwd / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "one")
    state = git_state()
    assert (len(state["commit"]), state["branch"], state["dirty"]) == (40, "main", False)
    (cwd / "file").write_text("two")
    assert git_state()["dirty"]
