"""A run in surroundings in which other projects failed has the numbers of a run in plain ones."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
from unprivileged import unprivileged

from data_tools.__main__ import main as data_tools

pytestmark = pytest.mark.once

TRAIN = """
import sys
from megavis.cli import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
# A container's user, of whom its /etc/passwd knows nothing, and fewer descriptors than shards.
ODD = """
import pwd, resource
def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = getpwuid
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
"""
# Of a batch script that calls no srun.
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "0",
}
CONFIG = """\
name: run
objective: {name: igpt, vocabulary_size: 64}
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {train: SHARDS, image_size: 8}
optimizer: {learning_rate: 1e-2}
training: {steps: 3, batch_size: 256, micro_batch_size: 64, log_every: 1}
checkpoint: {every: 3}
"""


def outcome(folder):
    """Return losses and gradient norms of a run, and a hash of its weights."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    weights = folder / "checkpoints/step-00000003/rank-00000.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return [(record["loss"], record["grad_norm"]) for record in records], digest


def test_numbers_are_those_of_plain_surroundings(shards, tmp_path):
    """Spaces in paths, `python -O`, no home, no user, nowhere for temporary files, umask 077,
    SLURM's variables, 200 shards with 160 descriptors, and a batch larger than the data."""
    words = ["train", "run.yaml", "--device", "cpu"]
    plain, odd = tmp_path / "plain", tmp_path / "an odd folder"
    (plain / "shards").parent.mkdir()
    shutil.copytree(shards / "train", plain / "shards")
    (plain / "run.yaml").write_text(CONFIG.replace("SHARDS", "shards"))
    (odd / "tmp").mkdir(parents=True, mode=0o555)
    reshard = ["reshard", str(shards / "train"), "--out", str(odd / "the shards")]
    assert data_tools([*reshard, "--samples-per-shard", "1"]) == 0
    (odd / "run.yaml").write_text(CONFIG.replace("SHARDS", "the shards"))

    command = [sys.executable, "-c", TRAIN, *words]
    done = subprocess.run(command, cwd=plain, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    who = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
    environment = {name: value for name, value in os.environ.items() if name not in who}
    environment |= {**SLURM, "TMPDIR": str(odd / "tmp")}
    command = unprivileged([sys.executable, "-O", "-c", ODD + TRAIN, *words])
    done = subprocess.run(
        command, cwd=odd, env=environment, umask=0o077, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert outcome(odd / "runs/run") == outcome(plain / "runs/run")
    for path in (odd / "runs/run").rglob("*"):
        assert not path.stat().st_mode & 0o077, path
