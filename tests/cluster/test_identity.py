import pytest

from trainkit.cluster.tasks import VARIABLES, Identity, Task
from trainkit.errors import ConfigError


def test_an_identity_survives_the_environment() -> None:
    task = Task(role="ps", index=1, rank=3, device="cuda:1")
    identity = Identity(
        task=task, num_ranks=4, store=("127.0.0.1", 29400), prefix="attempt/2", attempt=2, life=1, token="t0"
    )
    assert Identity.from_environ(identity.to_environ()) == identity
    assert set(identity.to_environ()) == set(VARIABLES)


def test_without_variables_a_process_is_alone() -> None:
    assert Identity.from_environ({"PATH": "/bin"}) == Identity.solo("cpu")


def test_an_ipv6_store_keeps_its_colons() -> None:
    environ = {"TRAINKIT_RANK": "0", "TRAINKIT_STORE": "::1:29400"}
    assert Identity.from_environ(environ).store == ("::1", 29400)


def test_every_bad_variable_is_named_at_once() -> None:
    environ = {"TRAINKIT_RANK": "one", "TRAINKIT_RANKS": "-2", "TRAINKIT_STORE": "localhost"}
    with pytest.raises(ConfigError) as caught:
        Identity.from_environ(environ)
    assert str(caught.value) == (
        "3 problems in the config\n"
        "  TRAINKIT_RANK=one: must be a whole number, 0 or more. (environment)\n"
        "  TRAINKIT_RANKS=-2: must be a whole number, 0 or more. (environment)\n"
        "  TRAINKIT_STORE=localhost: must be HOST:PORT, as in 127.0.0.1:29400. (environment)"
    )


def test_a_rank_outside_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TRAINKIT_RANK=2: ranks go from 0 to TRAINKIT_RANKS - 1 = 1\."):
        Identity.from_environ({"TRAINKIT_RANK": "2", "TRAINKIT_RANKS": "2"})
