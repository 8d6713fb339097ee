import json

import pytest

from trainkit.errors import CheckpointError, ConfigError, HangError, Problem, TrainingError
from trainkit.run.failure import culprit
from trainkit.run.folder import RunFolder
from trainkit.run.group import Exited
from trainkit.run.heartbeat import Heartbeat
from trainkit.run.last_words import read_last_words, write_last_words


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def say(folder, rank, error, moment):
    path = folder.error_of(rank)
    write_last_words(path, rank, error)
    path.write_text(json.dumps({**json.loads(path.read_text()), "moment": moment}))


def exited(rank, code, moment):
    return Exited(attempt=0, rank=rank, code=code, moment=moment)


def test_the_first_of_several_errors_is_told(folder):
    say(folder, 0, ValueError("later"), moment=20.0)
    say(folder, 1, ValueError("first"), moment=10.0)
    found = culprit(folder, [exited(0, 1, 30.0), exited(1, 1, 31.0)], [])
    assert (found.rank, found.headline) == (1, "rank 1 failed while starting: ValueError: first.")


@pytest.mark.parametrize(
    ("message", "told"),
    [("one\ntwo", "ValueError: one."), ("", "ValueError."), ("It ends.", "ValueError: It ends.")],
)
def test_a_headline_is_one_sentence(folder, message, told):
    say(folder, 0, ValueError(message), moment=10.0)
    assert culprit(folder, [exited(0, 1, 11.0)], []).headline == f"rank 0 failed while starting: {told}"


@pytest.mark.parametrize(
    "message",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [127.0.0.1]:1234: Connection reset by peer",
        "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:34567",
        "Broken pipe",
    ],
)
def test_who_only_lost_another_counts_last(folder, message):
    say(folder, 0, RuntimeError(message), moment=10.0)
    found = culprit(folder, [exited(0, 1, 11.0), exited(1, -9, 12.0)], [])
    assert found.headline.startswith("rank 1 was ended by SIGKILL")


def test_an_error_of_ours_that_a_lost_peer_caused_may_be_tried_again(folder):
    try:
        raise TrainingError("rank 0, step 3: the sum of gradients failed") from ConnectionResetError("gone")
    except TrainingError as error:
        say(folder, 0, error, moment=10.0)
    assert not culprit(folder, [exited(0, 1, 11.0)], []).final


def test_where_all_only_lost_another_the_one_that_is_mute_is_named(folder):
    say(folder, 0, ConnectionError("lost"), moment=10.0)
    for rank, step in ((0, 4), (1, 3), (2, 4)):
        heart = Heartbeat(folder.heartbeat_of(rank))
        heart.beat(step, "forward")
        heart.close()
    found = culprit(folder, [exited(0, 1, 11.0)], [1, 2])
    assert found.headline == "rank 1 stopped answering in step 3 (forward)."
    assert isinstance(found.error(), HangError)


def test_a_silent_death_shows_the_end_of_the_log(folder):
    folder.logs.mkdir()
    folder.log_of(1).write_text("".join(f"line {number}\n" for number in range(30)))
    text = str(culprit(folder, [exited(1, -11, 10.0)], []).error("So be it."))
    assert text.splitlines()[:3] == [
        "rank 1 was ended by SIGSEGV while starting. So be it.",
        f"The end of {folder.log_of(1)}:",
        "  line 10",
    ]


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("damaged"),
        ConfigError([Problem(key="a.b", value=3, rule="too large.", origin="x.yaml:2"), Problem(key="c", rule="odd.")]),
    ],
)
def test_an_error_of_ours_arrives_as_it_was_raised(folder, error):
    say(folder, 1, error, moment=10.0)
    found = culprit(folder, [exited(1, error.exit_code, 11.0)], [])
    assert found.final
    assert (type(found.error()), str(found.error())) == (type(error), str(error))


def test_an_error_class_of_a_user_arrives_as_the_one_of_ours_it_is_made_from(folder):
    class BadBatchError(TrainingError):
        pass

    say(folder, 0, BadBatchError("batch 7"), moment=10.0)
    found = culprit(folder, [exited(0, 1, 11.0)], []).error()
    assert (type(found), str(found)) == (TrainingError, "batch 7")


def test_damaged_last_words_are_none(folder):
    folder.live.mkdir()
    folder.error_of(0).write_text('{"rank": 0}')
    assert read_last_words(folder.error_of(0)) is None
