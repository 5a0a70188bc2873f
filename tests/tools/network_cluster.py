"""Make machines from Linux namespaces, with links between them that can be disturbed.

    uv run python tests/tools/network_cluster.py --machines 3 --cpus 2 --link 2:rate=2,delay=100

This command starts a Ray cluster of the machines 0 (the head), 1 and 2, and a machine 3 without
Ray. Machine n has the name machine-n, the address 10.99.0.(n + 1), and its own network devices,
processes, /tmp, /dev/shm and home folder. All machines write to $SHARED. The link of machine 2
passes 2 Mbit/s, and delays each packet by 100 ms. Commands at the prompt (";" separates commands in
a line):

    3 raysim submit --address http://10.99.0.1:8265 run out=/tmp/first     a command on machine 3
    0 raysim run runtime=cluster out=$SHARED/first &                       in the background
    cut 2       let no packet pass on the link of machine 2
    join 2      repair the link
    freeze 2    suspend all processes of machine 2
    thaw 2      let the suspended processes continue
    kill 2      end all processes of machine 2, as a loss of power does
    start 2     switch machine 2 on, and start Ray on it
    bytes       print the bytes on each link
    quit        end the program

The program needs root on Linux, `ip`, `tc`, `unshare` and `nsenter`. It does not change this
computer's network. A relay in this file delays or drops packets, because many kernels have no
netem.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import secrets
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NETWORK = "10.99.0"
PORT = 6379  # of Ray's head
PROGRAMS = ("ip", "tc", "unshare", "nsenter")
START_TIMEOUT_S = 400.0
COMMANDS = "N WORDS, cut N, join N, freeze N, thaw N, kill N, start N, bytes, quit"
# Ray starts late on a busy machine, where a worker of lower priority hardly runs.
RAY_VARIABLES = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "10",  # in addition to that of Ray's own processes
}
# A raylet ends if its agents take more than 15 s to start, as they do on a busy machine.
RAY_NICENESS, MAX_STARTS = -10, 4
CLONE_NEWNET = 0x40000000
# A tun device that passes on whole Ethernet frames, without a header of its own.
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MAX_FRAME_BYTES = 65536
SEGMENT_BYTES = 1448  # of data in a full TCP segment
# The first process of a machine: it mounts the machine's folders, and collects ended processes.
FIRST_PROCESS = """\
import signal, socket, subprocess, sys
folder, name = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_IGN)
socket.sethostname(name)
subprocess.run(["mount", "--bind", folder + "/hosts", "/etc/hosts"], check=True)
subprocess.run(["mount", "--bind", folder + "/tmp", "/tmp"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "shm", "/dev/shm"], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""


def find_obstacle() -> str:
    """Return why this machine cannot make network namespaces; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian's packages iproute2 and util-linux)"
    name = f"rs{secrets.token_hex(3)}"
    for words in (
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "true"],
    ):
        result = subprocess.run(words, capture_output=True, text=True)
        if result.returncode:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            return f"`{shlex.join(words)}` fails: {result.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


def call(*words: object) -> str:
    """Run a program and return its output. Raise RuntimeError with its message if it fails."""
    result = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(map(str, words))}: {result.stderr.strip()}")
    return result.stdout


@dataclass(frozen=True)
class Link:
    """The properties of a machine's link to the switch, the same in each direction.

    rate: in Mbit/s; None is unlimited.
    delay: in milliseconds, for each direction.
    loss: the fraction of packets that are lost in each direction.
    """

    rate: float | None = None
    delay: float = 0.0
    loss: float = 0.0

    @property
    def needs_relay(self) -> bool:
        """Return True if packets are delayed or lost."""
        return self.delay > 0 or self.loss > 0


@dataclass(frozen=True)
class Traffic:
    """The bytes that went over a machine's link since the machine was made.

    received, sent: the bytes with the headers of packets.
    resent: an upper estimate, without headers: the repeated TCP segments times `SEGMENT_BYTES`.
    """

    received: int  # by the machine
    sent: int
    resent: int


class Machine:
    """A machine of a `NetworkCluster`, which `kill` switches off and `start` switches on again.

    number: the index of the machine in the cluster, from 0.
    link: the properties of the machine's link to the switch.
    """

    def __init__(self, cluster: NetworkCluster, number: int, link: Link):
        self.number, self._cluster = number, cluster
        self.name, self.address = f"machine-{number}", f"{NETWORK}.{number + 1}"
        self.folder = cluster.folder / self.name
        self._namespace = f"{cluster.id}-{number}"
        self._port, self._side = f"port{number}", f"side{number}"
        self._relay: subprocess.Popen[str] | None = None
        self._unshare: subprocess.Popen[str] | None = None
        self._first_process = 0
        for name in ("tmp", "home"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "hosts").write_text(cluster.hosts)
        self._make_link()
        self.set_link(link)
        self.start()

    # --- the link ---------------------------------------------------------------------------------
    def _make_link(self) -> None:
        switch, own = self._cluster.switch, self._namespace
        call("ip", "netns", "add", own)
        veth = ("type", "veth", "peer", "name", "eth0", "netns", own)
        call("ip", "-n", switch, "link", "add", self._port, *veth)
        call("ip", "-n", switch, "link", "add", self._side, "type", "bridge")
        for device in (self._port, self._side):
            call("ip", "-n", switch, "link", "set", device, "up")
        call("ip", "-n", own, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            call("ip", "-n", own, "link", "set", device, "up")

    def set_link(self, link: Link) -> None:
        """Change rate, delay and loss of the machine's link; connections stay open."""
        switch, port = self._cluster.switch, self._port
        self._stop_relay()
        if link.needs_relay:
            self._start_relay(link)
        bridge = self._side if link.needs_relay else "bridge"
        call("ip", "-n", switch, "link", "set", port, "master", bridge)
        for namespace, device in ((switch, port), (self._namespace, "eth0")):
            root = ("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root")
            if link.rate is None:
                call(*root, "pfifo")
            else:
                bucket = ("rate", f"{link.rate}mbit", "burst", "64kb", "latency", "50ms")
                call(*root, "tbf", *bucket)

    def _start_relay(self, link: Link) -> None:
        """Start a process that passes packets between this machine's link and the switch.

        The process delays and drops packets as `link` says.
        """
        switch, taps = self._cluster.switch, (f"near{self.number}", f"far{self.number}")
        words = [sys.executable, __file__, "--relay", switch, *taps]
        words += [str(link.delay), str(link.loss), str(self.number)]
        self._relay = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise RuntimeError("the relay did not start; is there a /dev/net/tun?")
        for tap, bridge in zip(taps, (self._side, "bridge"), strict=True):
            call("ip", "-n", switch, "link", "set", tap, "master", bridge, "up")

    def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.terminate()
            self._relay.wait()
            self._relay = None

    def cut(self) -> None:
        """Cut the machine's link to the switch: no packet passes in either direction."""
        call("ip", "-n", self._cluster.switch, "link", "set", self._port, "down")

    def join(self) -> None:
        """Repair the machine's link to the switch after `cut`."""
        call("ip", "-n", self._cluster.switch, "link", "set", self._port, "up")

    @property
    def traffic(self) -> Traffic:
        """Return the bytes on the link."""
        text = call("ip", "-n", self._cluster.switch, "-s", "-j", "link", "show", self._port)
        (counters,) = (device["stats64"] for device in json.loads(text) if device)
        words = ("nsenter", f"--net=/run/netns/{self._namespace}", "cat", "/proc/net/snmp")
        protocols = call(*words).splitlines()
        names, values = (line.split() for line in protocols if line.startswith("Tcp:"))
        resent = SEGMENT_BYTES * int(values[names.index("RetransSegs")])
        return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"], resent)

    # --- processes --------------------------------------------------------------------------------
    def start(self) -> None:
        """Switch the machine on."""
        words = ["nsenter", f"--net=/run/netns/{self._namespace}", "unshare", "--mount", "--pid"]
        words += ["--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        words += [sys.executable, "-c", FIRST_PROCESS, str(self.folder), self.name]
        self._unshare = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare reports that its child was killed
            text=True,
            start_new_session=True,
        )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.name} did not start")
        pid = self._unshare.pid
        self._first_process = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def kill(self) -> None:
        """End all processes of the machine at once, as a loss of power does."""
        if self._unshare is not None:
            os.kill(self._first_process, signal.SIGKILL)  # the kernel ends its whole namespace
            self._unshare.wait()
            self._unshare = None

    def processes(self) -> list[int]:
        """Return the ids of the machine's processes, except its first one.

        The machine exists as long as its first process.
        """
        namespace = os.readlink(f"/proc/{self._first_process}/ns/pid")
        processes = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self._first_process:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                        processes.append(int(entry))
        return processes

    def freeze(self) -> None:
        """Suspend all processes of the machine, while its link still works."""
        stopped: set[int] = set()
        while not stopped.issuperset(running := self.processes()):  # a process may have started
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            stopped.update(running)

    def thaw(self) -> None:
        """Let the suspended processes of the machine continue."""
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program on the machine.

        options: arguments of `subprocess.Popen`; `env` has further environment variables.
        """
        environment = self._cluster.environment | options.pop("env", {})
        environment |= {"HOME": str(self.folder / "home"), "SHARED": str(self._cluster.shared)}
        enter = ["nsenter", "-t", str(self._first_process), "-m", "-p", "-n", "-u", "-i"]
        home = f"--wdns={self.folder / 'home'}"
        return subprocess.Popen([*enter, home, "--", *words], text=True, env=environment, **options)

    def run(self, *words: str, timeout: float = 300.0, **options: Any) -> str:
        """Run a program to its end; return its output. Raise RuntimeError if it fails.

        timeout: in seconds.
        options: arguments of `popen`.
        """
        process = self.popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(f"{self.name}: {shlex.join(words)} failed:\n{output}")
        return output

    # --- Ray --------------------------------------------------------------------------------------
    def start_ray(self, cpus: int, *, is_head: bool = False, **environment: str) -> None:
        """Start Ray on this machine.

        cpus: the number of CPUs that the machine declares to Ray.
        is_head: True: start the cluster; False: join it.
        environment: further environment variables of Ray's processes.
        """
        head = f"{NETWORK}.1:{PORT}"
        place = [f"--address={head}"]
        if is_head:  # its job server also answers the machine without Ray
            place = ["--head", f"--port={PORT}", "--dashboard-host=0.0.0.0"]
            place.append(f"--include-dashboard={self._cluster.has_job_server}")
        words = ["nice", "-n", str(RAY_NICENESS), "ray", "start", *place]
        words.append(f"--node-ip-address={self.address}")
        words += [f"--num-cpus={cpus}", "--object-store-memory=200000000", "--disable-usage-stats"]
        for attempt in range(MAX_STARTS):
            try:
                self.run(*words, env=environment, timeout=START_TIMEOUT_S)
                return
            except RuntimeError:
                if attempt == MAX_STARTS - 1:
                    raise
                self.run("ray", "stop", "--force")

    def close(self) -> None:
        """Remove the machine and its link."""
        self.kill()
        self._stop_relay()
        call("ip", "netns", "delete", self._namespace)


class NetworkCluster:
    """Machines that are joined by a switch, for use in a `with` statement.

    links: rate, delay and loss of links, by machine number. All other links have no limit, delay or
    loss.
    environment: further environment variables of all processes.
    has_job_server: False: Ray runs without its dashboard, so `raysim submit` finds no job server.
    """

    def __init__(
        self,
        machines: int,
        links: Mapping[int, Link] | None = None,
        environment: Mapping[str, str] | None = None,
        has_job_server: bool = True,
    ):
        self.id = f"rs{secrets.token_hex(3)}"
        self.switch = f"{self.id}-switch"
        self.machines: list[Machine] = []
        self.has_job_server = has_job_server
        self._count, self._links = machines, links or {}
        # Each machine has a /tmp of its own, so that their folders cannot be there.
        self.folder = Path(tempfile.mkdtemp(prefix="raysim-net-", dir="/var/tmp"))
        self.shared = self.folder / "shared"
        names = [f"{NETWORK}.{number + 1} machine-{number}" for number in range(machines)]
        self.hosts = "\n".join(["127.0.0.1 localhost", *names, ""])
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "RAYSIM_CACHE", "PYTEST"))
        }
        folder = Path(sys.executable).parent
        self.environment: dict[str, str] = {
            **inherited,
            "PATH": f"{folder}:{inherited['PATH']}",
            **RAY_VARIABLES,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "TMPDIR": "/tmp",
            **(environment or {}),
        }

    def __enter__(self) -> NetworkCluster:
        self.shared.mkdir()
        try:
            call("ip", "netns", "add", self.switch)
            call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
            call("ip", "-n", self.switch, "link", "set", "bridge", "up")
            for number in range(self._count):
                self.machines.append(Machine(self, number, self._links.get(number, Link())))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_ray(self, cpus: Sequence[int], **environment: str) -> None:
        """Start Ray on the first len(cpus) machines, one after another; machine 0 is the head.

        cpus: for each machine that starts Ray, the number of CPUs that it declares.
        environment: further environment variables of Ray's processes.
        """
        for machine, count in zip(self.machines, cpus, strict=False):
            machine.start_ray(count, is_head=machine.number == 0, **environment)

    def close(self) -> None:
        """End all processes, and remove the machines."""
        for machine in self.machines:
            machine.close()
        self.machines = []
        subprocess.run(["ip", "netns", "delete", self.switch], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


# --- the relay --------------------------------------------------------------------------------
def open_tap(namespace: str, name: str) -> int:
    """Make a tap device in a network namespace; return its file descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        for target in (there, here):
            if libc.setns(target.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
            if target is there:
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI)
                fcntl.ioctl(tap, TUNSETIFF, request)
    return tap


def relay(switch: str, near: str, far: str, delay_s: float, loss: float, seed: int) -> None:
    """Pass frames between two new network devices of the switch, with delays and losses.

    This function never returns.

    switch: the switch's network namespace.
    near, far: the devices' names.
    delay_s: the delay in each direction.
    loss: the fraction of lost frames.
    """
    taps = [open_tap(switch, near), open_tap(switch, far)]
    other = dict(zip(taps, reversed(taps), strict=True))
    print("ready", flush=True)
    draws = random.Random(seed)
    waiting: list[tuple[float, int, int, bytes]] = []  # due time, order, device, frame
    order = 0
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(taps, [], [], wait_s)
        for tap in readable:
            with contextlib.suppress(OSError):  # a device is down
                frame = os.read(tap, MAX_FRAME_BYTES)
                if draws.random() >= loss:
                    due = time.monotonic() + delay_s
                    heapq.heappush(waiting, (due, order, other[tap], frame))
                    order += 1
        while waiting and waiting[0][0] <= time.monotonic():
            *_, tap, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                os.write(tap, frame)


# --- the prompt -------------------------------------------------------------------------------
def parse_link(text: str) -> tuple[int, Link]:
    """Return the machine's number and its link for a text such as "2:rate=2,delay=100,loss=0.01".

    The number is before the colon. The rate is in Mbit/s, the delay in ms, and the loss a fraction.
    """
    number, _, parts = text.partition(":")
    values = {
        key: float(value) for key, _, value in (part.partition("=") for part in parts.split(","))
    }
    return int(number), Link(**values)


def prompt(cluster: NetworkCluster, cpus: int) -> None:
    """Execute commands from the standard input, until `quit` or the end of the input.

    The text at the beginning of this file explains the commands.
    cpus: the number of CPUs that a newly started machine declares to Ray.
    """
    for line in read_lines():
        for words in map(str.split, line.split(";")):
            if words == ["quit"]:
                return
            try:
                carry_out(cluster, words, cpus)
            except (IndexError, ValueError):
                print(f"commands: {COMMANDS}")
            except (RuntimeError, KeyboardInterrupt) as error:
                print(error)


def read_lines() -> Iterator[str]:
    """Yield the lines of the standard input."""
    while True:
        print("network> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def carry_out(cluster: NetworkCluster, words: Sequence[str], cpus: int) -> None:
    """Execute one command that the user typed at the prompt.

    words: the words of the command.
    cpus: used only by the command `start`: the number of CPUs that the started machine declares to
    Ray.
    """
    if not words:
        return
    if words[0].isdigit():
        is_background = words[-1] == "&"
        command = " ".join(words[1:-1] if is_background else words[1:])
        process = cluster.machines[int(words[0])].popen(["bash", "-c", command])
        if not is_background:
            process.wait()
        return
    if words[0] == "bytes":
        for machine in cluster.machines:
            traffic = machine.traffic
            print(f"{machine.name} received {traffic.received} sent {traffic.sent}", end=", ")
            print(f"{traffic.resent} again")
        return
    machine = cluster.machines[int(words[1])]
    if words[0] == "start":
        machine.start()
        machine.start_ray(cpus, is_head=machine.number == 0)
        return
    actions = {
        "cut": machine.cut,
        "join": machine.join,
        "freeze": machine.freeze,
        "thaw": machine.thaw,
        "kill": machine.kill,
    }
    if words[0] not in actions:
        raise ValueError(f"{words[0]} is no command")
    actions[words[0]]()


def main() -> None:
    """Start a Ray cluster on simulated machines; execute the commands that the user types.

    A command runs a program on a machine, or disturbs a machine or its link.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", type=int, default=3, help="that run Ray (default 3)")
    parser.add_argument("--cpus", type=int, default=2, help="that each of them declares")
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        type=parse_link,
        help="N:rate=MBIT,delay=MS,loss=SHARE",
    )
    arguments = parser.parse_args()
    obstacle = find_obstacle()
    if obstacle:
        sys.exit(f"network_cluster: {obstacle}")
    with NetworkCluster(arguments.machines + 1, dict(arguments.link)) as cluster:
        cluster.start_ray([arguments.cpus] * arguments.machines)
        prompt(cluster, arguments.cpus)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--relay"]:
        switch, near, far, delay, loss, seed = sys.argv[2:]
        relay(switch, near, far, float(delay) / 1000, float(loss), int(seed))
    else:
        main()
