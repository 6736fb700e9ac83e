"""Run torchrun, but exit with the code of the process that failed first instead of 1.

This lets a launcher distinguish a user's mistake (2) from a run to be resumed (75).
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

STOPPED = 75


def run() -> int:
    """Run torchrun with this program's arguments; return the exit code."""
    try:
        main()
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        # Signals are negative numbers here, and 128 + number in a shell.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException:
        # torchrun has forwarded the signal, and the processes have saved if there was time.
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(run())
