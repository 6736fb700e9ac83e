"""A stream that takes itself for a terminal."""

import io


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self):
        return True
