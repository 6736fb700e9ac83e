"""A full disk, or a limit of the size of files, ends no run: in processes of their own."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.once

BOARD = """
import os, resource, sys
from pathlib import Path
import numpy as np
from megavis.training.metrics import MetricsWriter
reader = __import__("tensorboard.backend.event_processing.event_accumulator", fromlist=["*"])

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

for size in map(int, sys.argv[1:]):
    os.mkdir(str(size))
    os.chdir(str(size))
    writer = MetricsWriter(Path("."), first_step=0, logging=("tensorboard",))
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    writer.write(1, {"loss": 1.0})
    limit(size)
    for step in range(2, 200):
        writer.write(step, {"loss": 1.0 * step, "rate": 0.5})
        if step % 50 == 0:
            writer.image(step, "samples", noise)
    limit(resource.RLIM_INFINITY)
    writer.write(200, {"loss": 200.0})
    writer.image(200, "samples", noise)
    writer.close()
    events = reader.EventAccumulator("tensorboard", size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    loss = [(each.step, each.value) for each in events.Scalars("loss")]
    assert loss == [(step, float(step)) for step in range(1, 201)], loss
    assert [each.step for each in events.Images("samples")] == [50, 100, 150, 200]
    assert events.Images("samples")[0].width == 64
    os.chdir("..")
"""


def test_tensorboard_goes_on_once_the_disk_has_space(tmp_path):
    """One process, which imports torch and TensorBoard once, for an early and a late limit."""
    pytest.importorskip("tensorboard")
    words = [sys.executable, "-c", BOARD, "300", "20000"]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING: metrics are not written") == 2
    assert "Traceback" not in done.stderr


HANDLERS = """
import ctypes, os, resource, signal, sys
from importlib.util import find_spec
from pathlib import Path
from megavis.training.callbacks.callback import StepState
from megavis.training.faults import interruption

class Alone:  # in place of a job
    settle = exchange = staticmethod(lambda raised: raised)

interruption.AsyncFlag = Alone
TAKEN = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGXFSZ)

def compile_with_triton():
    import triton
    from triton.backends.compiler import GPUTarget
    Path("kernel.py").write_text(
        "import triton, triton.language as tl\\n"
        "@triton.jit\\n"
        "def kernel(x, n: tl.constexpr):\\n"
        "    place = x + tl.arange(0, n)\\n"
        "    tl.store(place, tl.load(place) + 1)\\n"
    )
    sys.path.insert(0, ".")
    from kernel import kernel
    source = triton.compiler.ASTSource(kernel, {"x": "*fp32", "n": "constexpr"}, {"n": 64})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))

def take_handlers():
    for each in TAKEN:
        ctypes.CDLL(None).signal(int(each), None)  # SIG_DFL

def try_out(change, asked):
    with interruption.Signals() as signals:
        stop = interruption.StopOnSignal(signals)
        change()
        state = StepState(1, 10, None, None)
        stop.is_urgent() if asked == "validation" else stop(state)
        # SIGUSR1 first: LLVM puts all handlers back when it receives one of the others.
        for each in TAKEN[:3]:
            signals.received = False
            os.kill(os.getpid(), each)
            print(each.name, signals.received)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        try:
            Path("metrics").write_bytes(bytes(1000))
        except OSError as error:
            print(error.strerror)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        stop(state)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("stopped at once")

# In a process each: what a compiler or a test takes, no other has back.
for change, asked in ((compile_with_triton, "validation"), (take_handlers, "step")):
    if change is compile_with_triton and not find_spec("triton"):
        continue
    sys.stdout.flush()
    if not (child := os.fork()):
        try_out(change, asked)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_signals_are_received_after_a_compiler_has_taken_them(tmp_path):
    """Else SLURM's SIGUSR1 is lost, and a file-size limit ends the run."""
    # What is cached is not compiled.
    settings = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-c", HANDLERS]
    done = subprocess.run(words, cwd=tmp_path, env=settings, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    received = [
        "SIGUSR1 True",
        "SIGTERM True",
        "SIGINT True",
        "File too large",
        "stopped at once",
    ]
    assert done.stdout.splitlines() == received * (1 + bool(find_spec("triton")))
