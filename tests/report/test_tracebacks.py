import pytest

from trainkit.report.tracebacks import one_screen


def frame(path: str, line: str) -> list[str]:
    return [f'  File "{path}", line 7, in f', f"    {line}", "    ^^^^"]


LIBRARY = [line for number in range(20) for line in frame("/usr/lib/site-packages/torch/nn.py", f"call({number})")]
USER = frame("/home/u/model.py", "raise ValueError(shape)")
HEAD = ["rank 1 failed in step 3 (forward): ValueError: bad.", "Traceback (most recent call last):"]


def test_the_users_line_and_the_message_stay_where_they_come_last() -> None:
    told = one_screen("\n".join([*HEAD, *LIBRARY, *USER, "ValueError: bad", "rank 1, step 3"]), 31).splitlines()
    assert len(told) <= 31
    assert told[:2] == HEAD
    assert told[2].startswith("  ... ")
    assert told[-5:] == [*USER, "ValueError: bad", "rank 1, step 3"]


def test_the_users_line_stays_where_libraries_stand_below_it() -> None:
    told = one_screen("\n".join([*HEAD, *LIBRARY, *USER, *LIBRARY, "ValueError: bad"]), 31).splitlines()
    assert len(told) <= 31
    assert [line for line in told if line in USER[:2]] == USER[:2]
    assert told[-1] == "ValueError: bad"


def test_a_long_message_is_cut_in_its_middle() -> None:
    message = [f"ValueError: {number}" for number in range(40)]
    told = one_screen("\n".join([*HEAD, *LIBRARY, *USER, *message]), 31).splitlines()
    assert len(told) <= 31
    assert (told[-1], message[0] in told, USER[1] in told) == (message[-1], True, True)


@pytest.mark.parametrize("text", ["one\ntwo", "\n".join([*HEAD, *USER, "ValueError: bad"])])
def test_a_short_text_stays_as_it_is(text: str) -> None:
    assert one_screen(text, 10) == text
