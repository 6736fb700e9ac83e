"""Run torchrun, restart the whole job if it fails, and exit with the code of what failed first.

torchrun exits with 1; the process's own code lets a launcher distinguish a user's mistake (2) and a
run that must not go on (72) from one to be resumed (75).

With fixed nodes, each node counts torchrun's own --max-restarts separately: if one fails twice
before another has noticed, their processes look for each other under different numbers and never
meet. `--restarts N` restarts torchrun itself instead, at the next port. No node can get ahead,
since an attempt begins only when all nodes have joined at its port.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

MISTAKE, GIVEN_UP, STOPPED = 2, 72, 75
PATIENCE = 1800
"""Seconds that a node waits for the others before a restart; they may only notice a failure after
`training.hang_timeout`."""


def run(words: Sequence[str]) -> int:
    """Run torchrun with these arguments, after an optional `--restarts N`; return the exit code."""
    restarts, words = (int(words[1]), words[2:]) if words[0] == "--restarts" else (0, words)
    code = 0
    try:
        for attempt in range(restarts + 1):
            # Makes `training.max_restarts` count restarts, and a held lock be waited for.
            os.environ["MEGAVIS_RESTART_COUNT"] = str(attempt)
            code = _run_once(arguments(words, attempt))
            if code in (0, MISTAKE, GIVEN_UP, STOPPED):
                break
            if attempt < restarts:
                text = f"exit code {code}; starting the job again ({attempt + 1} of {restarts})"
                sys.stderr.write(f"elastic.py: {text}\n")
    except SignalException:
        # torchrun has forwarded the signal, and the processes have saved if there was time.
        return STOPPED
    return code


def arguments(words: Sequence[str], attempt: int) -> list[str]:
    """Return torchrun's arguments for an attempt, counted from 0, at a port of its own."""
    words = [*words]
    if attempt and "--master-port" in words:
        port = words.index("--master-port") + 1
        words[port] = str(int(words[port]) + attempt)
        words = ["--rdzv-conf", f"timeout={PATIENCE}", *words]
    return words


def _run_once(words: list[str]) -> int:
    try:
        main(words)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        # Signals are negative numbers in Python, and 128 + number in a shell.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
