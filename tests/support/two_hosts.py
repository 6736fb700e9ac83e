"""Two hosts on one machine: network namespaces connected by a veth pair, with an sshd in each."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable"
SSHD_FOLDER = Path("/run/sshd")
# Daemons are in folders that only root's PATH includes.
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"

SSHD_CONFIG = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
"""
SSH_CONFIG = """\
Host *
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  StrictHostKeyChecking accept-new
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""


def unavailable_reason() -> str:
    """Return why this machine cannot have two hosts; empty if it can."""
    programs = ("ip", "sshd", "ssh", "ssh-keygen", "pdsh")
    missing = [name for name in programs if shutil.which(name, path=PATH) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2 openssh-server pdsh)"
    name = f"megavis-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], env={"PATH": PATH}, capture_output=True)
    if tried.returncode != 0:
        return f"no network namespace: {tried.stderr.decode().strip()}"
    subprocess.run(["ip", "netns", "del", name], env={"PATH": PATH}, check=True)
    return ""


class TwoHosts:
    """Two hosts, running while the context is open; they share the file system."""

    def __enter__(self) -> "TwoHosts":
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self.names = [f"megavis-{os.getpid()}-{number}" for number in range(2)]
        self._daemons: list[subprocess.Popen] = []
        self._made_sshd_folder = False
        try:
            self._connect()
            self._start_sshd()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(20)
        for name in self.names:
            # Kill processes that an ssh session has left.
            left = subprocess.run(
                ["ip", "netns", "pids", name], env={"PATH": PATH}, capture_output=True
            )
            for process in map(int, left.stdout.split()):
                os.kill(process, signal.SIGKILL)
            # Deleting a namespace deletes its end of the veth pair, and thereby the other end.
            subprocess.run(["ip", "netns", "del", name], env={"PATH": PATH}, capture_output=True)
        if self._made_sshd_folder:
            SSHD_FOLDER.rmdir()
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, host: int, *words: str) -> list[str]:
        """Return the command line that runs a command on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def _connect(self) -> None:
        for name in self.names:
            run("ip", "netns", "add", name)
        ends = [f"{INTERFACE} netns {name}" for name in self.names]
        run(*f"ip link add {ends[0]} type veth peer name {ends[1]}".split())
        for name, address in zip(self.names, ADDRESSES, strict=True):
            inside = f"ip -netns {name}"
            run(*f"{inside} address add {address}/30 dev {INTERFACE}".split())
            run(*f"{inside} link set {INTERFACE} up".split())
            run(*f"{inside} link set lo up".split())

    def _start_sshd(self) -> None:
        folder = self.folder
        for key in ("host_key", "user_key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        if not SSHD_FOLDER.exists():
            SSHD_FOLDER.mkdir(mode=0o755)
            self._made_sshd_folder = True
        sshd = shutil.which("sshd", path=PATH)
        assert sshd
        for host, address in enumerate(ADDRESSES):
            config = folder / f"sshd_config_{host}"
            config.write_text(SSHD_CONFIG.format(address=address, folder=folder))
            with (folder / f"sshd_{host}.log").open("w") as log:
                words = self.command(host, sshd, "-D", "-e", "-f", str(config))
                self._daemons.append(subprocess.Popen(words, env={"PATH": PATH}, stderr=log))
        # ssh ignores HOME, so its config must be given as an option.
        (folder / "ssh_config").write_text(SSH_CONFIG.format(folder=folder))
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        for address in ADDRESSES:
            self._wait_for_answer(address)

    def _wait_for_answer(self, address: str) -> None:
        end = time.monotonic() + 120
        words = self.command(0, str(self.folder / "bin" / "ssh"), address, "true")
        while (tried := subprocess.run(words, env={"PATH": PATH}, capture_output=True)).returncode:
            logs = "\n".join(log.read_text() for log in self.folder.glob("sshd_*.log"))
            if time.monotonic() > end:
                raise OSError(f"{address} does not answer: {tried.stderr.decode()}\n{logs}")
            time.sleep(0.1)


def run(*words: str) -> None:
    subprocess.run(words, env={"PATH": PATH}, check=True, capture_output=True)
