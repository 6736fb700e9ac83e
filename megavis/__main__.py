"""`python -m megavis`: the `megavis` command, where it is not on the PATH."""

from megavis.cli import run_process

if __name__ == "__main__":
    run_process()
