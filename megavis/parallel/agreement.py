"""What any process may have to tell all others, without making one of them wait."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Agreement:
    """A flag that any process raises after one step and that all know of after the next.

    It travels over the hosts' network beside the step, so that no device is waited for; and all
    processes hear the same answer at the same call, so that they may act on it together.
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
