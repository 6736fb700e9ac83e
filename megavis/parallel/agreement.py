"""Exchange flags and means between processes asynchronously."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor


def _gloo_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every process is a member"
    return group


class AsyncFlag:
    """A flag that any process can raise after one step and that all see after the next.

    The all-reduce runs over gloo while the next step computes, so it never blocks a device. All
    processes get the same result from the same call and can act on it together.
    """

    def __init__(self) -> None:
        """Create the process group; collective over all processes of the job."""
        self._group = _gloo_group()
        self._flag = torch.zeros((), dtype=torch.uint8)
        self._work: dist.Work | None = None

    def exchange(self, raised: bool) -> bool | None:
        """Start an exchange of this process's flag; return whether any raised it in the last one.

        Returns None if there was no previous exchange.
        """
        # Wait for the last exchange first: its tensor is about to be replaced.
        before = self._answer()
        self._flag = torch.tensor(int(raised), dtype=torch.uint8)
        self._work = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return before

    def settle(self, raised: bool) -> bool:
        """Exchange and wait: return whether any process raises the flag now or did last time."""
        before = self.exchange(raised)
        return bool(self._answer() or before)

    def forget(self) -> None:
        """Discard the pending exchange."""
        self._answer()

    def _answer(self) -> bool | None:
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return bool(self._flag)


class DelayedMean:
    """Means of device tensors over all processes, available two calls later.

    The first call starts a copy to the host, the second an all-reduce over gloo, and the third
    returns the means, so that no step waits. All processes get the same means from the same call.
    """

    def __init__(self) -> None:
        """Create the process group; collective over all processes of the job."""
        self._group = _gloo_group()
        self._copied: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._sent: deque[tuple[int, Tensor, dist.Work]] = deque()

    def exchange(self, key: int, values: Tensor) -> list[tuple[int, list[float]]]:
        """Submit values `[n]` under a key; return the keys and means that are complete."""
        known = self._receive()
        self._send()
        # Read two calls later, after the event; before that the copy may not have arrived.
        copied = values.detach().double().to("cpu", non_blocking=True)
        event = None
        if values.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copied.append((key, copied, event))
        return known

    def settle(self) -> list[tuple[int, list[float]]]:
        """Complete and return all pending exchanges; collective over all processes."""
        known = self._receive()
        self._send()
        return known + self._receive()

    def _send(self) -> None:
        while self._copied:
            key, values, event = self._copied.popleft()
            if event is not None:
                # The copy was started a step ago, so this hardly waits.
                event.synchronize()
            work = dist.all_reduce(values, group=self._group, async_op=True)
            self._sent.append((key, values, work))

    def _receive(self) -> list[tuple[int, list[float]]]:
        known = []
        while self._sent:
            key, values, work = self._sent.popleft()
            work.wait()
            known.append((key, (values / self._group.size()).tolist()))
        return known
