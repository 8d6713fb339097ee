import pytest

from trainkit.cluster.address import Address, derived_port, is_loopback


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("node-7.cluster.local:65535", ("node-7.cluster.local", 65535)),
        ("[::1]:1", ("::1", 1)),
        ("[fe80::1%eth0]:29400", ("fe80::1%eth0", 29400)),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: tuple[str, int]) -> None:
    assert Address.parse(text) == address
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("node7", "has no port. It must be HOST:PORT, as in 10.0.0.1:2222."),
        (":2222", "has no host. It must be HOST:PORT, as in 10.0.0.1:2222."),
        ("::1:2222", "must be HOST:PORT; an IPv6 address needs brackets, as in [::1]:2222."),
        ("node7:", "its port must be a number from 1 to 65535."),
        ("node7:0", "its port must be a number from 1 to 65535."),
        ("node7:65536", "its port must be a number from 1 to 65535."),
        ("node7:-1", "its port must be a number from 1 to 65535."),
        ("node 7:1", "its host must be a name, an IPv4 address, or an IPv6 address in brackets."),
        ("[node7]:1", "its host must be a name, an IPv4 address, or an IPv6 address in brackets."),
    ],
)
def test_what_is_no_address_names_the_rule(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        Address.parse(text)
    assert str(caught.value) == rule


def test_spellings_of_one_address_are_equal_once_canonical() -> None:
    assert Address.parse("LOCALHOST:1").canonical == Address.parse("127.0.0.1:1").canonical
    assert Address.parse("[0:0::1]:1").canonical == Address.parse("[::1]:1").canonical
    assert Address.parse("a:1").canonical != Address.parse("a:2").canonical


def test_a_machine_is_itself_only_at_loopback_addresses() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("localhost.example.org", "10.0.0.1", "n1")))


def test_derived_ports_lie_below_those_of_outgoing_connections() -> None:
    ports = [derived_port(f"slurm {job}.0") for job in range(1000)]
    assert min(ports) >= 20_000
    assert max(ports) < 32_000
    assert len(set(ports)) > 900
