"""What a command imports says nothing, and what held before holds after it."""

import gc
import warnings

import pytest

from megavis.commands.quiet import quietly


def fail_aloud():
    with quietly():
        print("what a library says")
        warnings.warn("what it warns of", stacklevel=1)
        assert not gc.isenabled()
        raise ImportError("passes")


@pytest.mark.once
def test_nothing_is_said_and_no_garbage_collected_inside(capsys):
    with pytest.raises(ImportError, match="passes"):
        fail_aloud()
    assert gc.isenabled()
    assert capsys.readouterr().out == ""
