import socket
from datetime import timedelta
from pathlib import Path

from trainkit.strategies.rendezvous_store import HostedStore


def listeners(port: int) -> list[str]:
    """The addresses that something listens on at this port, as /proc writes them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [words[1].partition(":")[0] for words in lines if words[3] == "0A" and words[1].endswith(f":{port:04X}")]


def test_the_store_listens_on_loopback_only_and_every_attempt_has_its_own_keys() -> None:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    with HostedStore() as hosted:
        hosted.open()
        hosted.open()  # the second attempt's
        assert listeners(hosted.address[1]) == ["0100007F"]
        store = TCPStore(*hosted.address, is_master=False, timeout=timedelta(seconds=5))
        PrefixStore("attempt/0", store).set("address", "dead")
        assert not PrefixStore("attempt/1", store).check(["address"])
        del store


def test_who_comes_before_the_store_is_open_waits() -> None:
    with HostedStore() as hosted, socket.create_connection(hosted.address, timeout=60):
        assert hosted.address[0] == "127.0.0.1"


def test_a_store_that_was_never_opened_frees_its_port() -> None:
    with HostedStore() as hosted:
        pass
    assert listeners(hosted.address[1]) == []
