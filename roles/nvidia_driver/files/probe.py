"""Is the NVIDIA driver as the inventory wants it? Prints the host's facts as JSON, and each problem with its remedy on stderr.

Runs before anything is installed, so it needs nothing but Python. Exits 1 where there is a problem.
"""

import argparse
import glob
import json
import os
import platform
import re
import subprocess
import sys

INSTALL = "set nvidia_driver_state: installed and run playbooks/drivers.yml"
MESSAGE_CHARACTERS = 300


def answer(*command):
    """What a program prints, or why it could not be asked."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} does not answer: {error}"
    said = done.stdout.decode(errors="replace").strip()
    short = " ".join(said.split())[:MESSAGE_CHARACTERS]
    return (said, "") if done.returncode == 0 else ("", f"{command[0]} ends with {done.returncode}: {short}")


def read(path):
    """The text of a file; empty where there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_version(found, wanted):
    """Whether a version is the wanted one or begins with its components: 580 takes 580.159.04 and not 5801."""
    return (found + ".").startswith(wanted.rstrip(".") + ".")


def loaded(module):
    """Whether the kernel has a module."""
    return os.path.isdir(f"/sys/module/{module}")


def flavour():
    """open or proprietary, as the loaded kernel module says; empty where it does not say."""
    said = read("/proc/driver/nvidia/version")
    return ("open" if "Open Kernel Module" in said else "proprietary") if said else ""


def nvswitches():
    """How many NVSwitches are on the PCI bus: NVIDIA's bridges of the class "other"."""
    devices = glob.glob("/sys/bus/pci/devices/*")
    return [read(f"{device}/vendor") + read(f"{device}/class") for device in devices].count("0x10de0x068000")


def commands():
    """Process id -> program, for every process that can be seen."""
    lines = {pid: read(f"/proc/{pid}/cmdline").split("\0")[0] for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: os.path.basename(line) for pid, line in lines.items() if line}


def users_of_gpus(programs):
    """The processes that compute: each has /dev/nvidia-uvm open. Monitors only open the GPUs themselves."""
    for pid, program in sorted(programs.items()):
        try:
            held = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue
        if "/dev/nvidia-uvm" in held and program != "nvidia-persistenced":
            yield f"{program} (process {pid})"


def distribution():
    """Name of the distribution in NVIDIA's repositories, such as ubuntu2204 or rhel9."""
    lines = (line.partition("=") for line in read("/etc/os-release").splitlines())
    says = {key: value.strip("\"'") for key, _, value in lines}
    version = says.get("VERSION_ID", "")
    if {"rhel", "centos"} & {says.get("ID"), *says.get("ID_LIKE", "").split()}:
        return "rhel" + version.split(".")[0]
    return says.get("ID", "") + version.replace(".", "")


def driver_problems(options, gpus, why_not):
    """What is wrong with the driver itself."""
    wanted = f"driver {options.version}" if options.version else "a driver that answers"
    if why_not:
        yield f"wanted: {wanted}; found: {why_not}; {cause_and_remedy(why_not)}"
        return
    versions = sorted({gpu[0] for gpu in gpus})
    if options.version and not all(is_version(found, options.version) for found in versions):
        yield f"wanted: {wanted}; found: {', '.join(versions)}; correct nvidia_driver_version, or {INSTALL}"
    if options.modules and flavour() not in ("", options.modules):
        yield f"wanted: {options.modules} kernel modules; found: {flavour()} ones; {INSTALL}"


def cause_and_remedy(why_not):
    """Why a driver does not answer, as far as the host shows it, and what to do."""
    if "is not installed" in why_not:
        return INSTALL
    if "version mismatch" in why_not:
        return "the loaded kernel module is older or newer than the libraries: reboot the host"
    if loaded("nouveau"):
        return "nouveau holds the GPUs: " + INSTALL
    if not loaded("nvidia"):
        return "the kernel module nvidia is not loaded: reboot, then see `modprobe nvidia` and `dkms status`"
    return "see `dmesg | grep NVRM` for the GPU that does not answer"


def fabric_problems(policy, switches, version, programs):
    """What is wrong with the fabric manager, where this host needs one."""
    if policy == "ignored" or (policy == "auto" and not switches):
        return
    why = f"{switches} NVSwitches are on the PCI bus" if switches else "nvidia_driver_fabric_manager asks for it"
    needed = f"fabric manager {version or 'of the driver'} running, since {why}"
    said, why_not = answer("nv-fabricmanager", "--version")
    found = (re.findall(r"\d+(?:\.\d+)+", said) or [""])[-1]
    if why_not or not found:
        yield f"wanted: {needed}; found: {why_not or 'no version in ' + repr(said)}; {INSTALL}"
    elif version and found != version:
        yield f"wanted: {needed}; found: fabric manager {found}, which refuses another driver; {INSTALL}"
    elif "nv-fabricmanager" not in programs.values():
        remedy = "start it with `systemctl enable --now nvidia-fabricmanager`, and see /var/log/fabricmanager.log"
        yield f"wanted: {needed}; found: it does not run; {remedy}"


def problems(options, gpus, why_not, programs):
    """Every way in which the host is not as the inventory wants it."""
    yield from driver_problems(options, gpus, why_not)
    if loaded("nouveau"):
        remedy = "blacklist it in /etc/modprobe.d, renew the initramfs and reboot, or " + INSTALL
        yield f"wanted: nouveau not loaded; found: it is loaded; {remedy}"
    yield from fabric_problems(options.fabric_manager, nvswitches(), gpus[0][0] if gpus else "", programs)
    off = [f"{gpu[2]} on GPU {gpu[1]}" for gpu in gpus if gpu[2] != "Enabled"]
    if off and "nvidia-persistenced" not in programs.values():
        remedy = "start it with `systemctl enable --now nvidia-persistenced`"
        yield f"wanted: nvidia-persistenced running, or persistence mode Enabled; found: {', '.join(off)}; {remedy}"


def main():
    """Prints facts and problems; 1 where there is a problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", default="")
    parser.add_argument("--modules", default="")
    parser.add_argument("--fabric-manager", default="auto")
    options = parser.parse_args()
    fields = "driver_version,index,persistence_mode"
    said, why_not = answer("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    gpus = [[field.strip() for field in line.split(",")] for line in said.splitlines()]
    if not why_not and any(len(gpu) != len(fields.split(",")) for gpu in gpus or [[]]):
        gpus, why_not = [], f"nvidia-smi answers {said[:MESSAGE_CHARACTERS]!r}"
    programs = commands()
    found = list(problems(options, gpus, why_not, programs))
    facts = {
        "version": gpus[0][0] if gpus else "",
        "distribution": distribution(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "nvswitches": nvswitches(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "in_use": list(users_of_gpus(programs)),
    }
    print(json.dumps(facts))
    print("; ".join(found), file=sys.stderr)
    return 1 if found else 0


sys.exit(main())
