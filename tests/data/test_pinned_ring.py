"""A page-locked buffer that is filled again before its copy has ended is caught here alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data.samples import CPU, InMemorySquares, Numbered, Squares, make_loader
from trainkit.data.reading import collate
from trainkit.data.reading.collate import CopyStream, PinnedRing
from trainkit.data.reading.iterable import Stream
from trainkit.numerics.batch import Ticket


class Device(CopyStream):
    """A device whose copies end when the host waits for them, and not before."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: set[int] = set()
        self._copies = 0

    def buffer(self, size: int) -> Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def is_pinned(self, tensor: Tensor) -> bool:
        return id(tensor) in self.pinned

    def copy(self, host: Tensor) -> tuple[Tensor, Any]:
        moved, number, log = torch.empty_like(host), self._copies, self.log
        self._copies += 1
        log.append(f"copy {number}")

        class Ended:
            done = False

            def synchronize(self) -> None:
                if not self.done:
                    moved.copy_(host)  # as late as possible: a buffer that was filled again would show
                    log.append(f"host waits for {number}")
                self.done = True

        return moved, Ended()

    def join(self, moved: Sequence[Tensor], event: Any) -> None:
        del moved
        self.log.append("kernels wait")
        self.last = event


def test_copies_begin_at_once_and_a_buffer_is_filled_again_when_its_copy_has_ended() -> None:
    device = Device()
    ring = PinnedRing(device, CPU, depth=2)
    batches = [ring.move(torch.full((3,), float(step))) for step in range(4)]
    assert device.log == [
        "copy 0", "kernels wait", "copy 1", "kernels wait",
        "host waits for 0", "copy 2", "kernels wait", "host waits for 1", "copy 3", "kernels wait",
    ]  # fmt: skip
    assert [batch.tolist() for batch in batches[:2]] == [[0.0] * 3, [1.0] * 3]


def test_a_batch_of_any_structure_is_one_copy_with_equal_bits() -> None:
    device = Device()
    batch = {
        "image": torch.arange(10, dtype=torch.uint8).reshape(5, 2).t(),
        "rest": [torch.arange(3), (torch.tensor(True), torch.zeros(0), "text", torch.ones(2, requires_grad=True))],
    }
    moved = PinnedRing(device, CPU).move(batch)
    device.last.synchronize()
    assert device.log[0] == "copy 0"
    assert device.log.count("kernels wait") == 1
    assert torch.equal(moved["image"], batch["image"])  # type: ignore[arg-type]
    assert torch.equal(moved["rest"][0], torch.arange(3))
    flag, empty, text, leaf = moved["rest"][1]
    assert (bool(flag), empty.shape, text, leaf.is_leaf) == (True, (0,), "text", True)


def test_what_workers_have_pinned_is_copied_from_where_it_is() -> None:
    device, batch = Device(), torch.ones(4)
    device.pinned.add(id(batch))
    moved = PinnedRing(device, CPU).move((batch, torch.zeros(2)))
    assert device.log == ["copy 0", "kernels wait", "copy 1", "kernels wait"]
    assert moved[0] is not batch


class Gathering(Squares):
    """Samples that are gathered many at a time."""

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return indices.float().unsqueeze(1), indices * indices


SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "memory": (InMemorySquares(9), {}),
    "cached": (Squares(9), {"cache": True}),
    "gathered": (Gathering(9), {}),
    "direct": (Squares(9), {}),
    "workers": (Squares(9), {"num_workers": 1, "rank": 1, "num_ranks": 2}),  # of other ranks: no process is started
    "stream": (Stream(source=[(number, 0.0) for number in range(9)], num_samples=9), {}),
    "files": (Stream(source=Numbered(4, 5), num_samples=9, distribute="files"), {}),
}


@pytest.mark.parametrize(("dataset", "settings"), SOURCES.values(), ids=SOURCES)
def test_batches_of_every_source_go_through_the_ring_of_a_cuda_device(
    dataset: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(collate, "CopyStream", lambda _: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))  # the dataset does not fit there
    batches = make_loader(dataset, device=torch.device("cuda"), **settings)
    for step in range(2):
        assert len(batches.fetch(Ticket(step, (0, 1)))) == 2
    batches.close()
    assert device.log == ["copy 0", "kernels wait", "copy 1", "kernels wait"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("dataset", "settings"), [*SOURCES.values(), (Squares(9), {"num_workers": 1})])
def test_on_a_gpu_no_batch_waits_and_all_are_those_of_the_host(dataset: Any, settings: dict[str, Any]) -> None:
    host, there = (make_loader(dataset, device=one, **settings) for one in (CPU, torch.device("cuda", 0)))
    for step in (0, 1, 3, 4, 6):  # step 3 begins an epoch
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            found = there.fetch(Ticket(step, (0, 1)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for batch, wanted in zip(found, host.fetch(Ticket(step, (0, 1))), strict=True):
            assert all(torch.equal(one.cpu(), other) for one, other in zip(batch, wanted, strict=True))
    host.close()
    there.close()
