"""A long traceback that is cut at the user's line or at the message is caught here alone."""

import pytest

from trainkit.report.tracebacks import one_screen


def frame(path: str, line: str) -> list[str]:
    return [f'  File "{path}", line 7, in f', f"    {line}", "    ^^^^"]


LIBRARY = [line for number in range(20) for line in frame("/usr/lib/site-packages/torch/nn.py", f"call({number})")]
USER = frame("/home/u/model.py", "raise ValueError(shape)")
HEAD = ["rank 1 failed in step 3 (forward): ValueError: bad.", "Traceback (most recent call last):"]
LONG = [f"ValueError: {number}" for number in range(40)]


@pytest.mark.parametrize(
    ("frames", "message"),
    [([*LIBRARY, *USER], ["bad", "rank 1"]), ([*LIBRARY, *USER, *LIBRARY], ["bad"]), ([*LIBRARY, *USER], LONG)],
)
def test_the_users_line_and_both_ends_of_the_message_stay_in_one_screen(frames: list[str], message: list[str]) -> None:
    told = one_screen("\n".join([*HEAD, *frames, *message]), 31).splitlines()
    assert len(told) <= 31
    assert told[:2] == HEAD
    assert any(line.startswith("  ... ") for line in told)
    assert (USER[1] in told, message[0] in told, told[-1]) == (True, True, message[-1])


def test_a_short_text_stays_as_it_is() -> None:
    text = "\n".join([*HEAD, *USER, "ValueError: bad"])
    assert one_screen(text, 10) == text
