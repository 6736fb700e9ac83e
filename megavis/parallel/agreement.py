"""Share flags and means between processes without making one of them wait."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor


class AsyncFlag:
    """A flag that any process raises after one step and that all see after the next.

    It travels over the hosts' network in parallel with the step, so no device is waited for. All
    processes get the same answer from the same call, so they can act on it together.
    """

    def __init__(self) -> None:
        """Join the other processes of the job; every process calls this."""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every process is a member"
        self._group = group
        self._flag = torch.zeros((), dtype=torch.uint8)
        self._work: dist.Work | None = None

    def exchange(self, raised: bool) -> bool | None:
        """Say whether this process raises the flag; return whether any did the last time.

        None where there was no last time.
        """
        before = self._answer()
        self._flag = torch.tensor(int(raised), dtype=torch.uint8)
        self._work = dist.all_reduce(
            self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return before

    def settle(self, raised: bool) -> bool:
        """Say likewise and wait: return whether any process raises the flag now or did before."""
        before = self.exchange(raised)
        return bool(self._answer() or before)

    def forget(self) -> None:
        """Drop the last answer: the next exchange begins anew."""
        self._answer()

    def _answer(self) -> bool | None:
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return bool(self._flag)


class DelayedMean:
    """Means over all processes of what each has on its device, known two calls later.

    The first call copies the numbers to the host while the device works, the second sends them
    over the hosts' network, the third has their means: no step waits, and all processes have equal
    means at the same call.
    """

    def __init__(self) -> None:
        """Join the other processes of the job; every process calls this."""
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every process is a member"
        self._group = group
        self._copied: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._sent: deque[tuple[int, Tensor, dist.Work]] = deque()

    def exchange(self, key: int, values: Tensor) -> list[tuple[int, list[float]]]:
        """Give numbers `[n]` under a key; return the keys and means that are known by now."""
        known = self._receive()
        self._send()
        copied = values.detach().double().to("cpu", non_blocking=True)
        event = None
        if values.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copied.append((key, copied, event))
        return known

    def settle(self) -> list[tuple[int, list[float]]]:
        """Wait for all that is on its way and return it; every process calls this."""
        known = self._receive()
        self._send()
        return known + self._receive()

    def _send(self) -> None:
        while self._copied:
            key, values, event = self._copied.popleft()
            if event is not None:
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
