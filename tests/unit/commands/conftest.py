"""Run one command in a process of its own, as a user does."""

import subprocess
import sys

import pytest

# The parser that `megavis.cli` builds, for one command alone.
MAIN = """
import argparse, importlib, sys
from megavis.config.errors import UserError
parser = argparse.ArgumentParser()
importlib.import_module(f"megavis.commands.{sys.argv[1]}").add_parser(parser.add_subparsers())
args = parser.parse_args(sys.argv[1:])
try:
    sys.exit(args.run(args))
except UserError as error:
    sys.exit(f"error: {error}")
"""


@pytest.fixture(scope="session")
def command():
    """Return a function that runs `megavis WORDS` and gives the finished process."""

    def run(*words, **options):
        line = [sys.executable, "-c", MAIN, *map(str, words)]
        return subprocess.run(line, text=True, capture_output=True, timeout=300, **options)

    return run
