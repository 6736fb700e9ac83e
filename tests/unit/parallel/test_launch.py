"""Rank, world size and rendezvous from each launcher's environment variables."""

import pytest

from megavis.config.errors import UserError
from megavis.parallel.launch import Launch, first_host, read_launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "70123",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login",
}


def test_without_launcher_there_is_one_process():
    launch = read_launch({"PATH": "/bin"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (0, 1, 0)
    assert launch.master_address == "127.0.0.1"
    assert 1024 < launch.master_port < 65536


def test_torchrun_variables():
    assert read_launch(TORCHRUN) == Launch(5, 8, 1, "node0", 29500)


def test_environment_round_trips():
    assert read_launch(TORCHRUN).environment() == TORCHRUN


def test_torchrun_takes_precedence_over_slurm():
    assert read_launch({**SLURM, **TORCHRUN}) == Launch(5, 8, 1, "node0", 29500)


def test_srun_variables():
    assert read_launch(SLURM) == Launch(5, 8, 1, "gpu03", 20000 + 70123 % 12768)


def test_two_steps_of_a_job_meet_at_different_ports():
    ports = {read_launch({**SLURM, "SLURM_STEP_ID": step}).master_port for step in "0123"}
    assert len(ports) == 4
    assert all(20000 <= port < 32768 for port in ports)
    # Nor at those of the jobs that follow.
    assert ports.isdisjoint(
        read_launch({**SLURM, "SLURM_JOB_ID": job}).master_port for job in ("70124", "70125")
    )


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({**TORCHRUN, "RANK": ""}, "RANK is '', not a whole number of 0 to 7; start with torchrun"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is '8', not a whole number of 0 to 7"),
        ({**TORCHRUN, "WORLD_SIZE": "eight"}, "WORLD_SIZE is 'eight', not a whole number of 1 or"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', not a whole number of 0 or more"),
        (
            {**TORCHRUN, "MASTER_PORT": "70000"},
            "MASTER_PORT is '70000', not a whole number of 1 to",
        ),
        ({**SLURM, "SLURM_PROCID": ""}, "SLURM_PROCID is '', not a whole number of 0 to 7"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "2(x3)"}, "SLURM_STEP_NUM_TASKS is '2(x3)', not a"),
        (
            {**SLURM, "MASTER_PORT": "http"},
            "MASTER_PORT is 'http', not a whole number of 1 to 65535",
        ),
    ],
)
def test_a_variable_that_is_no_number_is_one_sentence(variables, sentence):
    with pytest.raises(UserError) as raised:
        read_launch(variables)
    assert str(raised.value).startswith(sentence)


def test_master_variables_override_srun():
    launch = read_launch({**SLURM, "MASTER_ADDR": "ib-gpu03", "MASTER_PORT": "4000"})
    assert (launch.master_address, launch.master_port) == ("ib-gpu03", 4000)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "a[1-2]"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a1"},
    ],
    ids=["sbatch without srun", "srun of one task"],
)
def test_single_task_slurm_allocation_is_one_process(environment):
    assert read_launch(environment).world_size == 1


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_torchrun_variable_raises(missing):
    environment = {k: v for k, v in TORCHRUN.items() if k != missing}
    with pytest.raises(UserError, match=f"RANK is set but not {missing}; start with torchrun"):
        read_launch(environment)


def test_srun_without_node_list_raises():
    environment = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        read_launch(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("rack-2-gpu[0010-0020]", "rack-2-gpu0010"),
        ("a.cluster.example,b.cluster.example", "a.cluster.example"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("rack[2,1]node[08-10,12],login", "rack2node08"),
        ("gpu[1-2]-ib", "gpu1-ib"),
        ("n[01-03,07]", "n01"),
        ("n[007,001-003].cluster.example", "n007.cluster.example"),
        ("login,gpu[1-2]", "login"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",a", "gpu[1-2", "gpu[]", "gpu[a-b]", "gpu]1"])
def test_invalid_node_list_raises(nodes):
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        first_host(nodes)
