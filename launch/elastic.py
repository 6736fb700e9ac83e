"""torchrun that ends with the code of the process that failed first, where torchrun says 1.

So whoever starts it can tell a mistake (2) from a run that was asked to stop (75) and is to go on.
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
