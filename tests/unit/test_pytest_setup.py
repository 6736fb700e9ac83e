"""tests/conftest.py: a process that dies ends the run; a file that changes its process fails."""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

TESTS = Path(__file__).parents[1]
# Of the Makefile: processes that take files in turn.
SHARED = re.search(r"^SHARED := (.*)$", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)


def run_pytest(folder, words, **files):
    """Run pytest with the conftest of these tests on the text of test files."""
    (folder / "conftest.py").symlink_to(TESTS / "conftest.py")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {TESTS.parent} {TESTS / 'support'}\n"
    )
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=900,
    )


def test_death_of_a_process_ends_the_run(tmp_path):
    """The other one waits in its test, and has further files."""
    waits = "import subprocess\ndef test_waits(): subprocess.run(['sleep', '1500'])\n"
    dies = """import os, signal, time
from pathlib import Path
def test_lives(): time.sleep(1)
def test_dies():
    Path("died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = run_pytest(tmp_path, SHARED[1].split(), a=dies, b=waits, c=waits, d=waits)
    # From its death: on a busy machine pytest alone takes a minute to start.
    assert time.monotonic() - float((tmp_path / "died").read_text()) < 60
    assert run.returncode == 1
    assert "a test process died while it ran test_a.py::test_dies" in run.stdout + run.stderr


CHANGES = {
    "a limit": (
        "import resource as r; soft, hard = r.getrlimit(r.RLIMIT_NOFILE);"
        " r.setrlimit(r.RLIMIT_NOFILE, (soft - 1, hard))",
        "RLIMIT_NOFILE: ",
    ),
    "the mask of modes": ("import os; os.umask(0o137)", "umask: 0.* before, 0137 after"),
    "the folder": ("import os; os.chdir('/')", "folder: "),
    "a handler": ("import signal; signal.signal(signal.SIGUSR1, print)", "handler of signal 10"),
    "a handler that Python does not see": (
        "import ctypes; ctypes.CDLL(None).signal(25, None)",
        r"SigIgn: .*25.* before",
    ),
    "a variable": ("import os; os.environ['LEFT'] = '1'", "variable LEFT: absent before, 1 after"),
    "a thread": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True,"
        " name='waits').start()",
        "thread 'waits' runs",
    ),
    "torch's threads": ("import torch; torch.set_num_threads(3)", "torch.get_num_threads: "),
    "gradients": ("import torch; torch.set_grad_enabled(False)", "torch.is_grad_enabled: True"),
}


def test_changes_of_the_process_fail_their_file(tmp_path):
    files = {
        f"{number}": f"import torch\ndef test_passes():\n    {change}\n"
        for number, (change, _) in enumerate(CHANGES.values())
    }
    run = run_pytest(tmp_path, [], z="def test_passes(): pass\n", **files)
    assert f"{len(CHANGES) + 1} passed, {len(CHANGES)} errors" in run.stdout
    errors = re.findall(r"^E +Failed: left by the tests of this file: (.*)$", run.stdout, re.M)
    for (what, (_, expected)), error in zip(CHANGES.items(), errors, strict=True):
        assert re.search(expected, error), f"{what}: {error}"
        assert ";" not in error or "handler" in what, f"{what}: {error}"


# By any object: `os`, `monkeypatch`, `resource`, `signal`.
FOR_CHILDREN = {"chdir", "fchdir", "umask", "setrlimit", "setitimer", "signal"}


def test_tests_and_fixtures_leave_their_process_alone():
    """What is restored at a test's end still holds for threads, and if the process is killed."""
    found = []
    for path in TESTS.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and (
                function.name.startswith("test_")
                or any("fixture" in ast.unparse(each) for each in function.decorator_list)
            ):
                calls = (each for each in ast.walk(function) if isinstance(each, ast.Call))
                names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
                if used := names & FOR_CHILDREN:
                    found.append(f"{path.name}: {function.name} calls {used}")
    assert not found, "use in_child of tests/support/children.py"
