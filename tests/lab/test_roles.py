"""Test the roles on lab hosts: check the driver and the container toolkit, install them from a mirror, and run and remove the
exporter's service.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lab import packages, processes
from tests.lab.lab import CONTROL_ADDRESS, Lab
from tests.lab.systemd_host import BASE, PACKAGES, SystemdHost

ROOT = Path(__file__).parents[2]
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"
MIRROR = f"http://{CONTROL_ADDRESS}:8000"
RELEASES = {
    "node1": "ID=debian\nVERSION_ID='12'\n",
    "node2": "ID=ubuntu\nVERSION_ID='24.04'\n",
    "node3": "ID='rocky'\nID_LIKE='rhel centos fedora'\nVERSION_ID='9.6'\nPLATFORM_ID='platform:el9'\n",
}
"""Host -> content of /etc/os-release. All other system files are those of this machine, with real apt and dnf."""
# Make a lab host look freshly installed: remove container runtimes, NVIDIA's programs and package sources. Create missing
# directories. Install fakes of update-initramfs and dracut that log their calls.
BARE = """
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d /etc/docker /etc/cdi
for program in docker podman containerd nerdctl nvidia-smi nvidia-ctk; do rm -f /usr/local/bin/$program /usr/bin/$program; done
mkdir -p /etc/modprobe.d /etc/yum.repos.d /etc/apt/sources.list.d
for program in update-initramfs dracut; do
  printf '#!/bin/sh\\necho "${0##*/} $*" >>/var/log/initramfs\\n' >/usr/local/sbin/$program
  chmod 755 /usr/local/sbin/$program
done
"""


@dataclass(frozen=True)
class Site:
    """A control node with three hosts, and a mirror of NVIDIA's repositories."""

    lab: Lab
    directory: Path

    def play(self, playbook: Path, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        """Run a playbook on all hosts; `variables` are inventory variables of all hosts."""
        group = {
            "rackproof_profile": "smoke",
            "rackproof_gpu_count": 1,
            "rackproof_python": "/usr/bin/python3",
            "rackproof_runs_directory": str(self.directory),
            **variables,
        }
        mirrors = {"node1": ("debian12", "deb"), "node2": ("ubuntu2404", "deb"), "node3": ("rhel9", "rpm")}
        hosts = {
            host: {
                "nvidia_driver_repository": f"{MIRROR}/{driver}/",
                "nvidia_driver_repository_key": f"{MIRROR}/{driver}/key.asc",
                "container_toolkit_repository": f"{MIRROR}/{toolkit}",
            }
            for host, (driver, toolkit) in mirrors.items()
        }
        inventory = self.lab.inventory(hostvars=hosts, groupvars=group)
        command: list[str | Path] = [ANSIBLE, "-i", inventory, playbook, *options]
        playbook_run = self.lab.run(command, cwd=ROOT, check=False, timeout=120)
        print(playbook_run.stdout[-9000:], playbook_run.stderr[-2000:])
        return playbook_run

    def install(self, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        """Run playbooks/drivers.yml to install driver 580 and toolkit 1.18.1; `variables` replaces inventory variables."""
        wanted = {
            "nvidia_driver_state": "installed",
            "nvidia_driver_version": "580",
            "nvidia_driver_serial": "100%",
            "container_toolkit_state": "installed",
            "container_toolkit_version": "1.18.1",
            "container_toolkit_runtime": "podman",
            "container_toolkit_repository_key": f"{MIRROR}/deb/amd64/key.asc",
        }
        return self.play(ROOT / "playbooks" / "drivers.yml", *options, **{**wanted, **variables})

    def versions(self, host: str) -> dict[str, str]:
        """Return the NVIDIA packages on a host with their versions."""
        query = "dpkg-query -W -f '${Package} ${Version}\\n'; rpm -qa --qf '%{NAME} %{VERSION}-%{RELEASE}\\n'"
        lines = self.lab.on(host, "sh", "-c", query).stdout.splitlines()
        return dict(line.split() for line in lines if re.search("nvidia|cuda", line))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("roles")
    mirror(directory / "mirror", packages.Key(directory / "gnupg"))
    with Lab(directory / "lab") as lab:
        server_options = ("--bind", CONTROL_ADDRESS, "--directory", str(directory / "mirror"))
        serve = [sys.executable, "-m", "http.server", "8000", *server_options]
        lab.popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for host, release in RELEASES.items():
            lab.on(host, "sh", "-c", BARE)
            lab.on(host, "rm", "/etc/os-release")  # a link into /usr, which `put` would follow
            lab.put(host, "/etc/os-release", release)
        yield Site(lab=lab, directory=directory / "runs")


def mirror(directory: Path, key: packages.Key) -> None:
    """Create repositories of fake packages in the layout of NVIDIA's repositories."""
    for name in ("debian12", "ubuntu2404"):
        drivers = [*packages.recorded(name), packages.headers("linux-headers-")]
        packages.apt_repository(directory / name, drivers, key)
    drivers = [*packages.recorded("rhel9"), packages.headers("kernel-devel-")]
    streams = {"580-open": "580.", "580-dkms": "580.", "open-dkms": "5"}
    packages.dnf_repository(directory / "rhel9", drivers, key, streams)
    packages.apt_repository(directory / "deb" / "amd64", packages.recorded("container_toolkit"), key)
    packages.dnf_repository(directory / "rpm" / "x86_64", packages.recorded("container_toolkit"), key, {})
    key.close()


# --- the checks of the roles: one fault at a time


UUIDS = ("GPU-0", "GPU-1")
DOCKER = '{"nvidia":{},"runc":{}}'


def smi(version: str = "580.126.20", persistence: tuple[str, str] = ("Enabled", "Enabled")) -> str:
    """Return a fake nvidia-smi of a host with two GPUs."""
    rows = "".join(f"{version}, {index}, {mode}\\n" for index, mode in enumerate(persistence))
    return f"""#!/bin/sh
case $1 in
*driver_version,index,persistence_mode) printf '{rows}' ;;
*driver_version) printf '{version}\\n{version}\\n' ;;
*uuid) printf '{UUIDS[0]}\\n{UUIDS[1]}\\n' ;;
esac
"""


def docker(runtimes: str = DOCKER, uuids: tuple[str, ...] = UUIDS) -> str:
    """Return a fake docker that reports these runtimes. A container that it runs prints these GPU UUIDs."""
    return f"""#!/bin/sh
case $1 in
info) echo '{runtimes}' ;;
run) printf '%s\\n' {" ".join(uuids)} ;;
esac
"""


FABRIC_MANAGER = "#!/bin/sh\necho Fabric Manager version is : {}\n"
TOOLKIT_CLI = "#!/bin/sh\necho NVIDIA Container Toolkit CLI version {}\necho commit: 0123\n"
CDI = "kind: nvidia.com/gpu\npath: /dev/nvidia0\npath: /dev/nvidia1\nhostPath: /usr/lib/libcuda.so.{}\n"
LOADED = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22-I3-AF03)\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04.2)\n"
)
BIN = "/usr/local/bin"
HEALTHY_FILES = {
    f"{BIN}/nvidia-smi": smi(),
    f"{BIN}/nv-fabricmanager": FABRIC_MANAGER.format("580.126.20"),
    f"{BIN}/nvidia-ctk": TOOLKIT_CLI.format("1.18.1"),
    f"{BIN}/docker": docker(),
    "/tmp/pci/0000:07:00.0/vendor": "0x10de\n",
    "/tmp/pci/0000:07:00.0/class": "0x068000\n",
    "/tmp/module/nvidia/refcnt": "0\n",
    "/tmp/driver/nvidia/version": LOADED.format("580.126.20"),
}
"""Files of a healthy host with two GPUs and one NVSwitch."""
Files = Mapping[str, str | None]


@dataclass(frozen=True)
class Probe:
    """The output of files/probe.py of a role: facts, and problems. A problem states what is wanted and what was found."""

    facts: dict[str, Any]
    problems: list[str]


class ProbeHost:
    """The host node1, on which probes run with fake files. The files are removed after each probe."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def probe(self, role: str, files: Files, *options: str, running: tuple[str, ...] = ("nv-fabricmanager",)) -> Probe:
        """Run files/probe.py of a role on node1 with HEALTHY_FILES.

        `files` adds files or replaces healthy ones; None removes a file. `running` are the names of processes that run meanwhile.
        """
        wanted = {path: text for path, text in {**HEALTHY_FILES, **files}.items() if text is not None}
        script = ["trap 'kill $(jobs -p); cd /; rm -rf $made /tmp/pci /tmp/module /tmp/driver' EXIT"]
        directories = sorted({str(Path(path).parent) for path in wanted} | {"/tmp/pci", "/tmp/module", "/tmp/driver"})
        script += [f"made='{' '.join(wanted)}'", f"mkdir -p {' '.join(directories)}"]
        script += [f"printf %s {shlex.quote(text)} >{path}" for path, text in wanted.items()]
        script += ["chmod 755 $made"]
        script += [f"(exec -a {name} sleep 60 >/dev/null) &" for name in running]
        script += ["mount --bind /tmp/pci /sys/bus/pci/devices", "mount --bind /tmp/module /sys/module"]
        script += ["mount --bind /tmp/driver /proc/driver"]
        script += [f"python3 - {' '.join(options)} <{ROOT}/roles/{role}/files/probe.py"]
        done = self._lab.on("node1", "unshare", "--mount", "bash", "-c", "\n".join(script), check=False)
        print(done.stdout, done.stderr)
        problems = done.stderr.strip().split("; wanted: ") if done.stderr.strip() else []
        assert done.returncode == (1 if problems else 0)
        return Probe(json.loads(done.stdout), problems)


@pytest.fixture
def probe_host(site: Site) -> ProbeHost:
    return ProbeHost(site.lab)


def test_driver_of_the_wanted_version_has_no_problem(probe_host: ProbeHost) -> None:
    for version in ("", "580", "580.", "580.126", "580.126.20"):
        probe = probe_host.probe("nvidia_driver", {}, f"--version={version}")
        assert probe.problems == []
    assert probe.facts["version"] == "580.126.20"
    assert (probe.facts["nvswitches"], probe.facts["in_use"], probe.facts["systemd"]) == (1, [], False)


SWITCHLESS: Files = {"/tmp/pci/0000:07:00.0/vendor": None, "/tmp/pci/0000:07:00.0/class": None}
FAILING = "#!/bin/sh\necho 'Failed to initialize NVML: {}'\nexit 18\n"
DRIVER_FAULTS: dict[str, tuple[Files, tuple[str, ...], str]] = {
    "no driver": (
        {f"{BIN}/nvidia-smi": None},
        (),
        r"a driver that responds; found: nvidia-smi is not installed; set nvidia",
    ),
    "another branch": ({}, ("--version=570",), r"driver 570; found: 580.126.20; correct nvidia_driver_version"),
    "longer version with the same beginning": (
        {f"{BIN}/nvidia-smi": smi("5801.10.02"), **SWITCHLESS},
        ("--version=580",),
        r"found: 5801.10.02;",
    ),
    "another release": ({}, ("--version=580.126.2",), r"driver 580.126.2; found: 580.126.20;"),
    "libraries upgraded": (
        {f"{BIN}/nvidia-smi": FAILING.format("Driver/library version mismatch"), **SWITCHLESS},
        (),
        r"nvidia-smi exits with 18: .* mismatch; the loaded kernel module is older or newer .*: reboot the host",
    ),
    "module not loaded": (
        {f"{BIN}/nvidia-smi": FAILING.format("Unknown Error"), "/tmp/module/nvidia/refcnt": None, **SWITCHLESS},
        (),
        r"the kernel module nvidia is not loaded: reboot, then check `modprobe nvidia`",
    ),
    "no GPU in the output": ({f"{BIN}/nvidia-smi": "#!/bin/sh\n", **SWITCHLESS}, (), r"nvidia-smi prints ''"),
    "nouveau loaded": (
        {"/tmp/module/nouveau/refcnt": "1\n"},
        (),
        r"nouveau not loaded; found: it is loaded; blacklist it",
    ),
    "persistence off": (
        {f"{BIN}/nvidia-smi": smi(persistence=("Enabled", "Disabled"))},
        (),
        r"persistence mode Enabled; found: Disabled on GPU 1; start it with",
    ),
    "no fabric manager": (
        {f"{BIN}/nv-fabricmanager": None},
        (),
        r"manager 580.126.20 running, because NVSwitches are on .* \(1\); found: nv-fabricmanager is not installed",
    ),
    "fabric manager of another release": (
        {f"{BIN}/nv-fabricmanager": FABRIC_MANAGER.format("580.105.08")},
        (),
        r"found: fabric manager 580.105.08, whose version must be the driver's; set nvidia_driver_state: installed",
    ),
    "fabric manager required but not installed": (
        {**SWITCHLESS, f"{BIN}/nv-fabricmanager": None},
        ("--fabric-manager=required",),
        r"because nvidia_driver_fabric_manager requires it; found: nv-fabricmanager is not installed",
    ),
}


@pytest.mark.parametrize("fault", DRIVER_FAULTS)
def test_driver_fault_is_reported_once_with_its_remedy(probe_host: ProbeHost, fault: str) -> None:
    files, options, message = DRIVER_FAULTS[fault]
    (problem,) = probe_host.probe("nvidia_driver", files, *options).problems
    assert re.search(message, problem)


LOST = "Unable to determine the device handle for GPU0000:5D:00.0: GPU is lost.  Reboot the system to recover this GPU"
FALLEN = "Unable to determine the device handle for GPU0000:5D:00.0: Unknown Error"
CORRUPT = "WARNING: infoROM is corrupted at gpu 0000:5D:00.0"
ROWS = "\n".join(f"580.126.20, {index}, Enabled" for index in range(7))
GPU_FAULTS = {
    "corrupt infoROM": (f"{ROWS}\n580.126.20, 7, Enabled\n{CORRUPT}", 14),
    "corrupt infoROM, exit code 0": (f"{ROWS}\n580.126.20, 7, Enabled\n{CORRUPT}", 0),
    "corrupt infoROM of the first GPU": (f"{CORRUPT}\n{ROWS}", 14),
    "lost GPU between the others": (ROWS.replace("580.126.20, 3, Enabled", LOST), 15),
    "lost GPU after the others": (f"{ROWS}\n{LOST}", 255),
    "lost GPU, no other listed": (LOST, 15),
    "GPU without handle, no other listed": (FALLEN, 255),
    "GPU off the bus, no other listed": ("The GPU has fallen off the bus or has otherwise become inaccessible", 15),
    "GPU with an interrupt problem, no row": ("", 10),
    "row without values": (f"{ROWS}\n[Unknown Error], 7, [Unknown Error]", 0),
    "row with a lost GPU": (f"{ROWS}\n[GPU is lost], [GPU is lost], [GPU is lost]", 15),
    "row with ERR!": (f"{ROWS}\nERR!, 7, ERR!", 0),
    "row without persistence mode": (f"{ROWS}\n580.126.20, 7, [N/A]", 0),
}
"""Fault of one of eight GPUs -> what nvidia-smi prints, and its exit code."""


def failing_smi(output: str, code: int, stream: int = 1) -> str:
    """Return a fake nvidia-smi that prints this output and ends with this exit code."""
    return f"#!/bin/sh\ncat <<'END' >&{stream}\n{output}\nEND\nexit {code}\n"


@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_fault_of_one_gpu_is_no_problem_of_the_driver(probe_host: ProbeHost, fault: str) -> None:
    """The judge reports the faulty GPU later, from the readings of the run."""
    files = {f"{BIN}/nvidia-smi": failing_smi(*GPU_FAULTS[fault])}
    for version in ("", "580"):
        probe = probe_host.probe("nvidia_driver", files, f"--version={version}", "--modules=open")
        assert (probe.problems, probe.facts["version"]) == ([], "580.126.20")
        assert not probe.facts["installation_helps"]
        assert not probe.facts["reboot_helps"]


@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_driver_of_another_version_is_a_problem_also_if_a_gpu_has_a_fault(probe_host: ProbeHost, fault: str) -> None:
    files = {f"{BIN}/nvidia-smi": failing_smi(*GPU_FAULTS[fault])}
    probe = probe_host.probe("nvidia_driver", files, "--version=570")
    assert re.fullmatch("wanted: driver 570; found: 580.126.20; .*", probe.problems[0].strip())
    assert probe.facts["installation_helps"]


UNLOADED: Files = {"/tmp/module/nvidia/refcnt": None, "/tmp/driver/nvidia/version": None}
DRIVER_PROBLEMS: dict[str, tuple[Files, str]] = {
    "no device": ({f"{BIN}/nvidia-smi": failing_smi("No devices were found", 6)}, "nothing"),
    "unknown error of NVML": ({f"{BIN}/nvidia-smi": FAILING.format("Unknown Error")}, "nothing"),
    "no output": ({f"{BIN}/nvidia-smi": "#!/bin/sh\n"}, "nothing"),
    "no permission": ({f"{BIN}/nvidia-smi": FAILING.format("Insufficient Permissions")}, "nothing"),
    "GPU lost, module not loaded": ({f"{BIN}/nvidia-smi": failing_smi(LOST, 15), **UNLOADED}, "reboot"),
    "module not loaded": (
        {
            f"{BIN}/nvidia-smi": failing_smi(
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", 9
            ),
            **UNLOADED,
        },
        "reboot",
    ),
    "no library": (
        {f"{BIN}/nvidia-smi": failing_smi("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.", 12)},
        "reboot",
    ),
    "libraries upgraded": ({f"{BIN}/nvidia-smi": FAILING.format("Driver/library version mismatch")}, "reboot"),
    "no driver": ({f"{BIN}/nvidia-smi": None, **UNLOADED}, "reboot"),
    "persistence off": ({f"{BIN}/nvidia-smi": smi(persistence=("Enabled", "Disabled"))}, "installation"),
    "no fabric manager": ({f"{BIN}/nv-fabricmanager": None}, "installation"),
    "nouveau loaded": ({"/tmp/module/nouveau/refcnt": "1\n"}, "reboot"),
}
"""Problem -> files of the host, and what playbooks/drivers.yml does about the problem."""


@pytest.mark.parametrize("problem", DRIVER_PROBLEMS)
def test_driver_is_installed_or_the_host_rebooted_only_if_this_can_solve_the_problem(
    probe_host: ProbeHost, problem: str
) -> None:
    files, action = DRIVER_PROBLEMS[problem]
    probe = probe_host.probe("nvidia_driver", files)
    assert probe.problems
    helps = [probe.facts["installation_helps"], probe.facts["reboot_helps"]]
    assert helps == {"nothing": [False, False], "installation": [True, False], "reboot": [True, True]}[action]


def test_fabric_manager_that_does_not_run_is_reported(probe_host: ProbeHost) -> None:
    (problem,) = probe_host.probe("nvidia_driver", {}, running=()).problems
    assert re.search(r"found: it is not running; start it with `systemctl enable --now nvidia-fabricmanager`", problem)


def test_fabric_manager_and_persistence_mode_are_not_always_needed(probe_host: ProbeHost) -> None:
    """Fabric manager is optional if the inventory ignores it or the host has no NVSwitch.

    Persistence mode is optional if nvidia-persistenced runs.
    """
    without = {f"{BIN}/nv-fabricmanager": None}
    assert probe_host.probe("nvidia_driver", without, "--fabric-manager=ignored").problems == []
    assert probe_host.probe("nvidia_driver", {**without, **SWITCHLESS}).problems == []
    daemon = ("nv-fabricmanager", "nvidia-persistenced")
    off = {f"{BIN}/nvidia-smi": smi(persistence=("Disabled", "Disabled"))}
    assert probe_host.probe("nvidia_driver", off, running=daemon).problems == []


def test_process_that_uses_a_gpu_is_named(site: Site, probe_host: ProbeHost) -> None:
    site.lab.on("node1", "touch", "/dev/nvidia-uvm")
    user = site.lab.start("node1", "bash", "-c", "exec 9</dev/nvidia-uvm; exec -a trainer sleep 60")
    try:
        (process,) = probe_host.probe("nvidia_driver", {}).facts["in_use"]
    finally:
        user.kill()
        site.lab.on("node1", "rm", "/dev/nvidia-uvm")
    assert re.fullmatch(r"trainer \(process \d+\)", process)


PODMAN: Files = {f"{BIN}/docker": None, f"{BIN}/podman": docker(), "/etc/cdi/nvidia.yaml": CDI.format("580.126.20")}
CONTAINERD: Files = {
    f"{BIN}/docker": None,
    f"{BIN}/containerd": "#!/bin/sh\necho '[plugins.\"cri\".containerd.runtimes.nvidia]'\n",
}
SMOKE = "--smoke-image=registry/cuda:13"


@pytest.mark.parametrize("files", [{}, PODMAN, CONTAINERD], ids=["docker", "podman", "containerd"])
def test_toolkit_of_the_wanted_version_has_no_problem(probe_host: ProbeHost, files: Files) -> None:
    assert probe_host.probe("container_toolkit", files, "--runtime=auto", "--version=1.18").problems == []


def test_container_with_all_gpus_of_its_host_has_no_problem(probe_host: ProbeHost) -> None:
    assert probe_host.probe("container_toolkit", {}, "--runtime=docker", SMOKE).problems == []
    assert probe_host.probe("container_toolkit", PODMAN, "--runtime=podman", SMOKE).problems == []


def test_corrupt_inforom_is_no_problem_of_the_toolkit(probe_host: ProbeHost) -> None:
    warning = {f"{BIN}/nvidia-smi": smi().replace("esac", f"esac; echo '{CORRUPT}'; exit 14")}
    container = docker().replace("esac", f"esac; [ $1 = run ] || exit 0; echo '{CORRUPT}'; exit 14")
    for runtime, files in (("docker", {}), ("podman", PODMAN)):
        fakes = {**files, **warning, f"{BIN}/{runtime}": container}
        assert probe_host.probe("container_toolkit", fakes, f"--runtime={runtime}", SMOKE).problems == []


TOOLKIT_FAULTS: dict[str, tuple[Files, tuple[str, ...], str]] = {
    "no toolkit": (
        {f"{BIN}/nvidia-ctk": None},
        (),
        r"NVIDIA container toolkit; found: nvidia-ctk is not installed; set",
    ),
    "another version": ({}, ("--version=1.1",), r"toolkit 1.1; found: 1.18.1; correct container_toolkit_version"),
    "docker without the runtime": (
        {f"{BIN}/docker": docker('{"runc":{}}')},
        (),
        r"the runtime nvidia in docker; found: only runc; run `nvidia-ctk runtime configure --runtime=docker`",
    ),
    "docker not restarted": (
        {f"{BIN}/docker": docker('{"runc":{}}'), "/etc/docker/daemon.json": '{"runtimes": {"nvidia": {}}}\n'},
        (),
        r"found: /etc/docker/daemon.json has it, but docker has not loaded this file; restart docker",
    ),
    "docker does not run": (
        {f"{BIN}/docker": FAILING.format("no daemon")},
        (),
        r"found: docker exits with 18: .*; start docker",
    ),
    "containerd without the runtime": (
        {**CONTAINERD, f"{BIN}/containerd": "#!/bin/sh\necho '[plugins]'\n"},
        (),
        r"the runtime nvidia in containerd; found: its configuration has no such runtime;",
    ),
    "no CDI specification": (
        {**PODMAN, "/etc/cdi/nvidia.yaml": None},
        (),
        r"found: none in /etc/cdi or /var/run/cdi; run",
    ),
    "CDI specification of another driver": (
        {**PODMAN, "/etc/cdi/nvidia.yaml": CDI.format("570.195.03")},
        (),
        r"/etc/cdi/nvidia.yaml for driver 570.195.03, but the driver is 580.126.20; run `nvidia-ctk cdi generate",
    ),
    "CDI specification in /var/run precedes that in /etc": (
        {**PODMAN, "/var/run/cdi/nvidia.yaml": CDI.format("570.195.03")},
        (),
        r"/var/run/cdi/nvidia.yaml for driver 570.195.03",
    ),
    "CDI specification lacks a GPU": (
        {**PODMAN, "/dev/nvidia2": ""},
        (),
        r"/etc/cdi/nvidia.yaml without /dev/nvidia2;",
    ),
    "no container runtime": (
        {f"{BIN}/docker": None},
        (),
        r"one of docker, podman, containerd; found: none; install one",
    ),
    "GPU missing in the container": (
        {f"{BIN}/docker": docker(uuids=UUIDS[:1])},
        (SMOKE,),
        r"a container of registry/cuda:13 has the host's 2 GPUs; found: 1, missing: GPU-1, not on the host: none;",
    ),
    "another GPU in the container": (
        {f"{BIN}/docker": docker(uuids=("GPU-0", "GPU-9"))},
        (SMOKE,),
        r"found: 2, missing: GPU-1, not on the host: GPU-9; check for",
    ),
    "GPU missing in the container, corrupt infoROM": (
        {f"{BIN}/nvidia-smi": failing_smi(f"GPU-0\nGPU-1\n{CORRUPT}", 14), f"{BIN}/docker": docker(uuids=UUIDS[:1])},
        (SMOKE,),
        r"a container of registry/cuda:13 has the host's 2 GPUs; found: 1, missing: GPU-1, not on the host: none;",
    ),
    "container does not start": (
        {f"{BIN}/docker": docker().replace("printf '%s", "exit 125; printf '%s")},
        (SMOKE,),
        r"found: docker exits with 125: ; run this manually: docker run .*--gpus=all registry/cuda:13 nvidia-smi -L",
    ),
    "smoke image without a runtime": (
        {},
        ("--runtime=none", SMOKE),
        r"found: container_toolkit_runtime is none; set it to the runtime",
    ),
}


@pytest.mark.parametrize("fault", TOOLKIT_FAULTS)
def test_toolkit_fault_is_reported_once_with_its_remedy(probe_host: ProbeHost, fault: str) -> None:
    files, options, message = TOOLKIT_FAULTS[fault]
    (problem,) = probe_host.probe("container_toolkit", files, "--runtime=auto", *options).problems
    assert re.search(message, problem)


def test_kernel_modules_of_the_wrong_kind_are_reported(probe_host: ProbeHost) -> None:
    assert probe_host.probe("nvidia_driver", {}, "--modules=open").problems == []
    (problem,) = probe_host.probe("nvidia_driver", {}, "--modules=proprietary").problems
    assert "wanted: proprietary kernel modules; found: open ones" in problem


# --- check and installation by the playbooks


CHECK = """
- hosts: gpu_hosts
  gather_facts: false
  roles: [nvidia_driver, container_toolkit]
"""


def tasks(playbook_run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the names of the tasks in the output, in order, without argument validation and the role `plan`."""
    names = re.findall(r"^(?:TASK|RUNNING HANDLER) \[(.*?)\]", playbook_run.stdout, re.MULTILINE)
    return [name for name in names if "Validating arguments" not in name and not name.startswith("plan : ")]


def outcome(playbook_run: subprocess.CompletedProcess[str], what: str) -> dict[str, int]:
    """Return host -> number of its tasks with the outcome `what`, such as `changed` or `failed`."""
    recap = playbook_run.stdout.rpartition("PLAY RECAP")[2]
    return {host: int(count) for host, count in re.findall(rf"^(\w+) .*\b{what}=(\d+)", recap, re.MULTILINE)}


NO_TASKS = {"node1": 0, "node2": 0, "node3": 0}


def test_check_mode_changes_nothing_on_bare_hosts(site: Site) -> None:
    """The test uses one host for each package manager: apt and dnf."""
    hosts = ("node1", "node3")
    playbook_run = site.install("--check", "--limit", ",".join(hosts))
    assert playbook_run.returncode == 0
    assert outcome(playbook_run, "failed") == dict.fromkeys(hosts, 0)
    assert min(outcome(playbook_run, "changed").values()) >= 3
    for host in hosts:
        assert site.versions(host) == {}
        written = site.lab.on(
            host, "find", "/etc/apt", "/etc/yum.repos.d", "/etc/modprobe.d", "-newer", "/etc/os-release"
        )
        assert not re.search("nvidia|cuda|rackproof", written.stdout)


@pytest.fixture(scope="module")
def installed(site: Site) -> subprocess.CompletedProcess[str]:
    """Install driver and toolkit on all hosts, and return the result of the playbook."""
    return site.install()


def test_driver_and_toolkit_are_installed_in_the_wanted_version(
    site: Site, installed: subprocess.CompletedProcess[str]
) -> None:
    assert installed.returncode == 0
    toolkit = dict.fromkeys(
        (
            "nvidia-container-toolkit",
            "nvidia-container-toolkit-base",
            "libnvidia-container-tools",
            "libnvidia-container1",
        ),
        "1.18.1-1",
    )
    assert site.versions("node1") == {
        **toolkit,
        **dict.fromkeys(
            ("nvidia-driver-cuda", "libcuda1", "nvidia-persistenced", "nvidia-kernel-open-dkms"), "580.126.20-1"
        ),
    }
    assert site.versions("node2") == {
        **toolkit,
        **dict.fromkeys(("nvidia-open", "libnvidia-compute"), "580.126.20-1ubuntu1"),
    }
    assert site.versions("node3") == {
        **toolkit,
        **dict.fromkeys(("nvidia-driver-cuda", "nvidia-persistenced", "kmod-nvidia-open-dkms"), "580.126.20-1"),
    }
    calls = {host: site.lab.on(host, "cat", "/var/log/initramfs").stdout for host in RELEASES}
    assert calls == {"node1": "update-initramfs -u\n", "node2": "update-initramfs -u\n", "node3": "dracut --force\n"}
    for host in RELEASES:
        assert site.lab.on(host, "cat", "/etc/modprobe.d/rackproof-nouveau.conf").stdout.startswith(
            "blacklist nouveau\n"
        )
        assert "libcuda.so.580.126.20" in site.lab.on(host, "cat", "/etc/cdi/nvidia.yaml").stdout


def test_second_run_changes_nothing_and_uses_the_given_batch_size(
    site: Site, installed: subprocess.CompletedProcess[str]
) -> None:
    again = site.install(nvidia_driver_serial=2)
    assert again.returncode == 0
    assert outcome(again, "changed") == NO_TASKS
    assert set(tasks(again)) == {
        "nvidia_driver : Check the driver",
        "container_toolkit : Check the container toolkit",
    }
    assert again.stdout.count("PLAY [Install drivers]") == again.stdout.count("PLAY [Install container toolkits]") == 2
    assert installed.stdout.count("PLAY [Install drivers]") == 1


def test_host_that_is_set_up_is_checked_by_one_task_per_role(
    site: Site, installed: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    playbook = tmp_path / "check.yml"
    playbook.write_text(CHECK)
    site.lab.on("node2", "mv", "/usr/bin/nvidia-smi", "/root")
    try:
        playbook_run = site.play(
            playbook,
            *("-e", "_rackproof_run_dir=/nowhere"),
            container_toolkit_state="checked",
            container_toolkit_version="1.18.1",
            container_toolkit_runtime="podman",
            nvidia_driver_version="580",
        )
    finally:
        site.lab.on("node2", "mv", "/root/nvidia-smi", "/usr/bin")
    assert tasks(playbook_run) == [
        "nvidia_driver : Check the driver",
        "container_toolkit : Check the container toolkit",
    ]
    assert outcome(playbook_run, "failed") == {"node1": 0, "node2": 1, "node3": 0}
    assert "wanted: driver 580; found: nvidia-smi is not installed; set nvidia_driver_state" in playbook_run.stdout


def test_driver_is_not_installed_again_if_gpus_do_not_respond(
    site: Site, installed: subprocess.CompletedProcess[str]
) -> None:
    """On node1 one of eight GPUs is lost, and on node2 no GPU responds. A later check (playbooks/inspect.yml) fails node2."""
    before = {host: site.versions(host) for host in RELEASES}
    fakes = {"node1": failing_smi(f"{ROWS}\n{LOST}", 15), "node2": failing_smi("No devices were found", 6)}
    modules = "mkdir -p /tmp/module/nvidia && mount --bind /tmp/module /sys/module"
    site.lab.on("node2", "sh", "-c", modules)
    try:
        for host, fake in fakes.items():
            site.lab.put(host, f"{BIN}/nvidia-smi", fake, mode=0o755)
        playbook_run = site.install(container_toolkit_state="ignored")
    finally:
        site.lab.on("node2", "umount", "/sys/module")
        for host in fakes:
            site.lab.on(host, "rm", f"{BIN}/nvidia-smi")
    assert (playbook_run.returncode, outcome(playbook_run, "changed")) == (0, NO_TASKS)
    assert {host: site.versions(host) for host in RELEASES} == before
    shown = " ".join(playbook_run.stdout.partition("Show the problem that an installation cannot solve")[2].split())
    assert "nvidia-smi exits with 6: No devices were found; check `dmesg | grep NVRM`" in shown
    assert "ok: [node1]" not in shown


def test_driver_in_use_is_not_changed_and_fabric_manager_gets_the_version_of_the_driver(
    site: Site, installed: subprocess.CompletedProcess[str]
) -> None:
    """node1 and node3 are downgraded; the GPUs of node2 are in use."""
    before = site.versions("node2")
    site.lab.on("node2", "touch", "/dev/nvidia-uvm")
    user = site.lab.start("node2", "bash", "-c", "exec 9</dev/nvidia-uvm; exec -a trainer sleep 100")
    managers = [site.lab.start(host, "bash", "-c", "exec -a nv-fabricmanager sleep 100") for host in ("node1", "node3")]
    try:
        playbook_run = site.install(
            nvidia_driver_version="580.105.08",
            nvidia_driver_fabric_manager="required",
            container_toolkit_state="ignored",
        )
    finally:
        for process in (user, *managers):
            process.kill()
        site.lab.on("node2", "rm", "/dev/nvidia-uvm")
    assert outcome(playbook_run, "failed") == {"node1": 0, "node2": 1, "node3": 0}
    assert re.search(
        r"the driver cannot be changed while processes use the GPUs: stop trainer \(process \d+\)", playbook_run.stdout
    )
    assert site.versions("node2") == before
    for host in ("node1", "node3"):
        drivers = {name: version for name, version in site.versions(host).items() if "container" not in name}
        assert "nvidia-fabricmanager" in drivers
        assert set(drivers.values()) == {"580.105.08-1"}


# --- teardown


def test_teardown_keeps_a_broken_agent_that_may_have_started_processes(site: Site) -> None:
    """On every host `rackproof stop` fails, so teardown cannot end processes of the agent.

    On node1 the installation was complete (installed-x), and on node2 a run holds the host (lease.json). On both, the agent may
    have started processes, so teardown fails and keeps it. On node3 teardown removes the agent.
    """
    message = "rackproof stop: pynvml is not installed for /opt/rackproof/bin/python: use the Python"
    for host in RELEASES:
        site.lab.put(host, "/opt/rackproof/bin/rackproof", f"#!/bin/sh\necho {message} >&2\nexit 2\n", mode=0o755)
        site.lab.put(host, "/opt/rackproof/wheels/rackproof-2.0.0-py3-none-any.whl", "")
    site.lab.put("node1", "/opt/rackproof/installed-x", "")
    site.lab.put("node2", "/var/lib/rackproof/lease.json", "")
    teardown = site.play(ROOT / "playbooks" / "teardown.yml")
    assert teardown.returncode == 2
    assert outcome(teardown, "failed") == {"node1": 1, "node2": 1, "node3": 0}
    listed = ("ls", "-d", "/opt/rackproof", "/opt/rackproof/bin/rackproof")
    left = {host: len(site.lab.on(host, *listed, check=False).stdout.split()) for host in RELEASES}
    assert left == {"node1": 2, "node2": 2, "node3": 0}


# --- the exporter as a systemd service


UNIT = "/etc/systemd/system/rackproof-exporter.service"
DIRECTORIES = ("/etc", "/home", "/opt", "/root", "/srv", "/usr/local", "/var")
# Files that systemd and Ansible themselves change.
UNRELATED = re.compile(r"/root/\.ansible|/var/(log|tmp|lib/systemd|lib/private|cache/private|log/private)\b")
FIND_FORMAT = ("(", "-type", "d", "-printf", "%p\\t%y %m %u\\n", ")", "-o", "-printf", "%p\\t%y %m %u %s\\n")


PYTHON = "/usr/local/lib/lab/bin/python3"
# Create a virtual environment with the packages of the Python that runs these tests, so that the host needs no package index.
INSTALL_PYTHON = f"""
{BASE}/bin/python{sys.version_info.major}.{sys.version_info.minor} -m venv --without-pip {Path(PYTHON).parents[1]}
rm -r "$({PYTHON} -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
ln -s {PACKAGES} "$({PYTHON} -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"""
# Harden a host: new files of root are not readable by other users, pip installs for one user, and sudo needs a terminal.
HARDEN = """
echo 'Defaults requiretty' >>/etc/sudoers
echo 'umask 027' >/root/.bashrc
printf '[global]\\nuser = true\\n' >/etc/pip.conf
"""


@dataclass(frozen=True)
class Service:
    """A host with systemd, which playbooks set up."""

    host: SystemdHost
    directory: Path
    began: float
    """Time before the first playbook, in seconds since the epoch."""

    def play(self, name: str, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        """Run a playbook of this checkout."""
        group = {
            "rackproof_profile": "rehearsal",
            "rackproof_gang": "none",
            "rackproof_python": PYTHON,
            "rackproof_system_torch": True,
            "rackproof_minimum_free_bytes": 1_000_000,
            "rackproof_runs_directory": str(self.directory),
            **variables,
        }
        playbook = ROOT / "playbooks" / f"{name}.yml"
        command: list[str | Path] = [ANSIBLE, "-i", self.host.inventory(**group), playbook, *options]
        playbook_run = self.host.control(command, cwd=ROOT, check=False, timeout=180)
        print(playbook_run.stdout[-6000:], playbook_run.stderr[-2000:])
        return playbook_run

    def exporter_pid(self) -> str:
        """Return the PID of the exporter, or `0` if it does not run."""
        return self.host.on("systemctl", "show", "--property=MainPID", "--value", "rackproof-exporter").stdout.strip()


def changed_files(host: SystemdHost, since: float) -> set[str]:
    """Return the files that were written (`PATH ATTRIBUTES`) or removed (`lacks PATH`) on the host since that time.

    The host sees a copy-on-write view of this machine's files, so changes of this machine also appear on the host. They do not
    count.
    """
    changed = ("find", *DIRECTORIES, "-xdev", "-newerct", f"@{since}", "(", *FIND_FORMAT, ")")
    attributes = dict(line.split("\t") for line in host.on(*changed, check=False).stdout.splitlines())
    candidates = {
        path: text for path, text in attributes.items() if not UNRELATED.match(path) and not changed_here(path, since)
    }
    written = {path: text for path, text in candidates.items() if text != attributes_here(path)}
    directories = [path for path, text in candidates.items() if text.startswith("d ")]
    missing = {path for directory in directories for path in removed(host, directory, since)}
    return {f"{path} {text}" for path, text in written.items()} | {f"lacks {path}" for path in missing}


def changed_here(path: str, since: float) -> bool:
    """Return whether the file changed on this machine since that time."""
    return os.path.lexists(path) and os.lstat(path).st_ctime > since


def attributes_here(path: str) -> str:
    """Return kind, mode, owner and size of a file of this machine, in the format of FIND_FORMAT."""
    return (
        processes.run(["find", path, "-maxdepth", "0", *FIND_FORMAT], check=False)
        .stdout.rstrip("\n")
        .partition("\t")[2]
    )


def removed(host: SystemdHost, directory: str, since: float) -> set[str]:
    """Return the files of a directory that exist on this machine but not on the host.

    Files that changed on this machine since that time do not count.
    """
    here = {str(path) for path in Path(directory).iterdir()} if Path(directory).is_dir() else set()
    on_host = host.on("find", directory, "-mindepth", "1", "-maxdepth", "1").stdout.splitlines() if here else []
    return {path for path in here.difference(on_host) if not changed_here(path, since) and not UNRELATED.match(path)}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Boot a hardened host with systemd, and deploy the agent to it. The exporter is not yet a service."""
    directory = tmp_path_factory.mktemp("service")
    with SystemdHost(directory / "host") as host:
        host.on("sh", "-c", INSTALL_PYTHON + HARDEN)
        # The root of this host is an overlay, like that of a container. On other hosts /var is on a file system of a disk.
        host.on("mount", "--bind", "/var", "/var")
        new_service = Service(host, directory / "runs", time.time())
        assert new_service.play("deploy", rackproof_exporter_service=False, rackproof_run_id="first").returncode == 0
        yield new_service


def test_exporter_without_a_service_runs_only_during_the_run(service: Service) -> None:
    assert service.host.on("test", "-e", UNIT, check=False).returncode == 1
    assert "rackproof export" in service.host.on("pgrep", "-af", processes.AGENT).stdout
    report = service.play("report", rackproof_exporter_service=False, rackproof_run_id="first")
    assert report.returncode == 2  # nothing was measured
    assert service.host.on("pgrep", "-f", processes.AGENT, check=False).stdout == ""


def test_exporter_runs_as_a_dynamic_user_and_can_read_its_sources(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `ansible_become`, Ansible uses sudo. Here sudo needs a terminal (HARDEN), so the playbook turns pipelining off."""
    monkeypatch.setenv("ANSIBLE_BECOME_ALLOW_SAME_USER", "1")  # use sudo although the user is already root
    deployed = service.play("deploy", ansible_become=True)
    assert (deployed.returncode, "Turn pipelining off for this host" in deployed.stdout) == (0, True)
    pid = service.exporter_pid()
    status = service.host.on("cat", f"/proc/{pid}/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert 61184 <= int(fields["Uid"].split()[0]) <= 65519  # the range of systemd's dynamic users
    assert {fields[key] for key in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert service.host.on("readlink", f"/proc/{pid}/fd/0").stdout == "/dev/kmsg\n"
    scraped = service.host.control(["curl", "--silent", "http://127.0.0.1:9836/metrics"]).stdout
    assert re.search(r"^rackproof_host_memory_total_bytes [1-9]", scraped, re.MULTILINE)
    assert 'rackproof_collector_success{collector="host"} 1.0' in scraped
    assert "\nrackproof_storage_state_read_only 0.0\n" in scraped


def test_unit_is_valid_and_hardened(service: Service) -> None:
    assert service.host.on("systemd-analyze", "verify", UNIT).stderr == ""
    threshold = ("security", "--offline=yes", "--threshold=15", "--no-pager", UNIT)
    security = service.host.on("systemd-analyze", *threshold, check=False)
    print(security.stdout)
    assert security.returncode == 0
    assert "DeviceAllow=char-nvidia* rw\n" in service.host.on("cat", UNIT).stdout


def test_service_restarts_only_if_the_agent_changes(service: Service) -> None:
    before = service.exporter_pid()
    again = service.play("deploy")
    assert outcome(again, "changed") == {"node1": 1}  # only Prometheus' list of targets changes: it has the new run id
    assert service.exporter_pid() == before
    upgraded = service.play("deploy", rackproof_wheelhouse=str(ROOT / "build" / "wheelhouse"))
    assert upgraded.returncode == 0
    assert service.host.on("sh", "-c", "ls /opt/rackproof/wheels | grep -c prometheus_client").stdout == "1\n"
    assert service.exporter_pid() not in ("0", before)


def test_teardown_leaves_nothing_behind(service: Service) -> None:
    service.host.on("mkdir", f"{UNIT}.d")  # drop-ins of an operator
    assert service.play("teardown").returncode == 0
    assert changed_files(service.host, service.began) == set()
    for listing in ("list-units", "list-unit-files"):
        assert "0 " in service.host.on("systemctl", listing, "--all", "rackproof*", check=False).stdout
    assert service.host.on("id", "rackproof", check=False).returncode != 0
    assert service.host.on("pgrep", "-f", processes.AGENT, check=False).stdout == ""
