"""The one exception that means: the user can fix this."""


class UserError(ValueError):
    """A user's mistake: the command line prints it as one message and exits with code 2."""
