"""The exceptions that the command line turns into one message and an exit code of its own."""


class UserError(ValueError):
    """A user's mistake: the command line prints it as one message and exits with code 2."""


CORRUPTION_EXIT_CODE = 71
"""`sysexits.h` calls it EX_OSERR, an error of the system below."""


class CorruptionError(RuntimeError):
    """Processes that must agree do not: exit code 71."""


class UnfinishedError(RuntimeError):
    """A run that was asked to stop, is saved, and is to be started again: exit code 75.

    `sysexits.h` calls the code EX_TEMPFAIL: "the user is invited to retry".
    """
