"""Commands to which the modes of files apply, also where the superuser runs the tests."""

import os
import sys

# CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: a program that is started without them in its bounding
# set does not get them, although its user is the superuser.
_WITHOUT = """
import ctypes, os, sys
for capability in (1, 2):
    if ctypes.CDLL(None, use_errno=True).prctl(24, capability, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot drop a capability")
os.execv(sys.argv[1], sys.argv[1:])
"""


def unprivileged(command):
    """Return a command that runs another, given as a list, without the superuser's privileges."""
    if os.geteuid():
        return command
    return [sys.executable, "-c", _WITHOUT, *command]
