"""`python -m megavis`: the `megavis` command, where it is not on the PATH."""

import sys

from megavis.cli import main

if __name__ == "__main__":
    sys.exit(main())
