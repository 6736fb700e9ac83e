"""torchrun that ends with the code of the process that failed first, where torchrun says 1.

So a launcher can distinguish a user's mistake (2) from a run to be resumed (75).
"""

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

STOPPED = 75


def run() -> int:
    """Run torchrun with this program's words; return its exit code."""
    try:
        main()
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        # A signal's number comes negative; a shell adds 128.
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException:
        # It has passed the signal on, and the processes have saved if there was time.
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(run())
