"""The limits of time: what a phase decides, and what `supervisor.hang_timeout_s=auto` learns on a fake clock."""

import pytest

from tests.support.present import present
from trainkit.run.hang_detection import TimeLimits
from trainkit.run.process.heartbeat import HeartbeatReading, Pauses
from trainkit.trainer.failpoints import Phase


class Steps:
    """A rank on a clock of its own, and the limit of what it is doing."""

    def __init__(self) -> None:
        self.pauses, self.moment, self.step = Pauses(), 0.0, 0

    def beat(self, phase: Phase, lasts_s: float = 0.0) -> None:
        self.pauses.note(phase, self.step, moment=self.moment)
        self.moment += lasts_s

    def do(self, *seconds: float, shards: int = 1) -> "Steps":
        for lasts_s in seconds:
            self.beat("data")
            for _ in range(shards):
                self.beat("forward", lasts_s / shards / 2)
                self.beat("backward", lasts_s / shards / 2)
            self.beat("reduce")
            self.beat("update")
            self.step += 1
        return self

    @property
    def limit_s(self) -> float:
        self.beat("data")
        return present(TimeLimits().limit_of(self.pulse("data"))).seconds

    def pulse(self, phase: Phase) -> HeartbeatReading:
        pauses = self.pauses
        return HeartbeatReading(
            moment=0.0, step=self.step, phase=phase, longest_s=pauses.longest_s, is_first=pauses.is_first
        )


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.001, 30), (1, 30), (5.9, 30), (60, 300), (600, 3000)])
def test_the_limit_of_a_step_follows_the_steps_from_30_s_on(step_s: float, limit_s: float) -> None:
    assert Steps().do(*[step_s] * 300).limit_s == pytest.approx(limit_s)


def test_a_first_step_is_no_measure_for_itself() -> None:
    steps = Steps()
    assert steps.limit_s == 1800
    assert steps.do(400).limit_s == 2000  # with nothing but the first step to go by, the second may take long as well


def test_a_slow_first_step_has_no_effect_on_the_limit_after_two_minutes_of_steps_of_a_second() -> None:
    steps = Steps().do(40, *[1] * 20)
    assert steps.limit_s == 200
    assert steps.do(*[1] * 100).limit_s == 30


def test_steps_that_grow_are_allowed_ten_times_the_last_ones() -> None:
    steps = Steps().do(*[1] * 200)
    for lasts_s in (4, 12, 40, 120, 300):
        assert lasts_s / 2 < steps.limit_s
        steps.do(*[lasts_s] * 3)
    assert steps.limit_s == 1500


def test_steps_that_shrink_bring_the_limit_down() -> None:
    assert Steps().do(*[20] * 60, *[0.5] * 300).limit_s == 30


def test_accumulation_counts_by_shard() -> None:
    assert Steps().do(*[640] * 5, shards=64).limit_s == 50


def test_one_slow_step_among_fast_ones_raises_the_limit_for_a_while() -> None:
    assert Steps().do(*[1] * 200, 25, *[1] * 30).limit_s == 125  # the machine may be loaded: again as slow is healthy


def test_the_first_step_after_an_evaluation_is_a_first_step_once() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("evaluate", 50)
    assert steps.limit_s == 1800
    assert steps.do(45, 0.1).limit_s == 30  # no word about the steps that follow
    steps.do(*[0.1] * 2000).beat("evaluate", 50)
    assert steps.limit_s == pytest.approx(225)  # such a step took 45 s before


def test_a_save_between_evaluation_and_step_changes_nothing() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("evaluate", 50)
    steps.beat("save", 50)
    assert steps.limit_s == 1800


def test_a_save_alone_allows_the_next_step_nothing() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("save", 50)
    assert steps.limit_s == 30


def test_compiling_in_the_middle_has_its_own_limit_and_teaches_nothing() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("forward")
    steps.beat("compile", 500)
    assert present(TimeLimits().limit_of(steps.pulse("compile"))).key == "supervisor.first_step_timeout_s"
    steps.beat("forward")
    assert steps.limit_s == 30


def test_after_a_rollback_the_first_step_opens_data_again() -> None:
    steps = Steps().do(*[0.1] * 700)
    steps.beat("load", 5)
    assert steps.limit_s == 1800


def test_orders_with_idle_times_between_them_are_steps_too() -> None:
    steps = Steps()
    for _ in range(130):
        steps.do(4).beat("idle", 100)
    assert steps.limit_s == 30  # 10 x 2 s; the idle times do not count


KEYS: dict[Phase | None, str] = {
    None: "start_timeout_s=600",
    "start": "start_timeout_s=600",
    "join": "start_timeout_s=600",
    "load": "load_timeout_s=1800",
    "callback": "eval_timeout_s=600",
    "evaluate": "eval_timeout_s=600",
    "save": "checkpoint_timeout_s=1800",
    "end": "checkpoint_timeout_s=1800",
    "compile": "first_step_timeout_s=1800",
}


@pytest.mark.parametrize(("phase", "key"), KEYS.items())
def test_each_phase_names_its_key_and_the_remedy(phase: Phase | None, key: str) -> None:
    limit = present(TimeLimits().limit_of(None if phase is None else HeartbeatReading(moment=1.0, step=3, phase=phase)))
    assert limit.remedy(limit.seconds + 1) == f"The limit is supervisor.{key}: raise it if the rank was healthy."


def test_a_number_is_taken_as_given() -> None:
    pulse = HeartbeatReading(moment=1.0, step=3, phase="forward", longest_s=500.0)
    assert present(TimeLimits(hang_timeout_s=2).limit_of(pulse)).remedy(3) == (
        "The limit is supervisor.hang_timeout_s=2: raise it if the rank was healthy."
    )


def test_the_remedy_names_the_automatic_limit_and_the_pauses_that_it_comes_from() -> None:
    pulse = HeartbeatReading(moment=1.0, step=3, phase="forward", longest_s=6.25)
    assert present(TimeLimits().limit_of(pulse)).remedy(63) == (
        "The limit is 62 s by supervisor.hang_timeout_s=auto, where recent steps paused for 6.2 s at most: "
        "set supervisor.hang_timeout_s to more than 63 if the rank was healthy."
    )


def test_a_rank_that_is_idle_may_wait() -> None:
    assert TimeLimits().limit_of(HeartbeatReading(moment=1.0, step=3, phase="idle")) is None
