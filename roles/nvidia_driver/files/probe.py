"""Compare the NVIDIA driver with the inventory.

Print facts as JSON, and each problem with its remedy on stderr; exit 1 if there is a problem. This script may run before
anything is installed, so it needs only Python.
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


def run(*command):
    """Run a program. Return (output, "") if it succeeds, and ("", error message) if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120
        )
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} does not respond: {error}"
    output = done.stdout.decode(errors="replace").strip()
    short = " ".join(output.split())[:MESSAGE_CHARACTERS]
    return (output, "") if done.returncode == 0 else ("", f"{command[0]} exits with {done.returncode}: {short}")


def read(path):
    """Return the text of a file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def matches_version(version, wanted):
    """Return whether the version equals `wanted` or starts with its components: 580 matches 580.159.04 but not 5801."""
    return (version + ".").startswith(wanted.rstrip(".") + ".")


def is_loaded(module):
    """Return whether a kernel module is loaded."""
    return os.path.isdir(f"/sys/module/{module}")


def loaded_module_type():
    """Return the type of the loaded kernel modules, open or proprietary; empty if it is unknown."""
    version = read("/proc/driver/nvidia/version")
    return ("open" if "Open Kernel Module" in version else "proprietary") if version else ""


def count_nvswitches():
    """Return the number of NVSwitches on the PCI bus: NVIDIA devices with PCI class 0x0680, "other bridge"."""
    devices = glob.glob("/sys/bus/pci/devices/*")
    return [read(f"{device}/vendor") + read(f"{device}/class") for device in devices].count("0x10de0x068000")


def list_programs():
    """Return process id -> program, for every visible process with a command line, so not for kernel threads."""
    lines = {pid: read(f"/proc/{pid}/cmdline").split("\0")[0] for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: os.path.basename(line) for pid, line in lines.items() if line}


def list_gpu_users(programs):
    """Yield the processes that compute on GPUs: they have /dev/nvidia-uvm open. (Monitoring programs do not open this file.)"""
    for pid, program in sorted(programs.items()):
        try:
            files = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue
        if "/dev/nvidia-uvm" in files and program != "nvidia-persistenced":
            yield f"{program} (process {pid})"


def distribution():
    """Return the name of the distribution in NVIDIA's repositories, such as ubuntu2204 or rhel9."""
    lines = (line.partition("=") for line in read("/etc/os-release").splitlines())
    release = {key: value.strip("\"'") for key, _, value in lines}
    version = release.get("VERSION_ID", "")
    if {"rhel", "centos"} & {release.get("ID"), *release.get("ID_LIKE", "").split()}:
        return "rhel" + version.split(".")[0]
    return release.get("ID", "") + version.replace(".", "")


def driver_problems(options, gpus, error):
    """Yield the problems of the driver itself."""
    wanted = f"driver {options.version}" if options.version else "a driver that responds"
    if error:
        yield f"wanted: {wanted}; found: {error}; {cause_and_remedy(error)}"
        return
    versions = sorted({gpu[0] for gpu in gpus})
    if options.version and not all(matches_version(version, options.version) for version in versions):
        yield f"wanted: {wanted}; found: {', '.join(versions)}; correct nvidia_driver_version, or {INSTALL}"
    if options.modules and loaded_module_type() not in ("", options.modules):
        yield f"wanted: {options.modules} kernel modules; found: {loaded_module_type()} ones; {INSTALL}"


def cause_and_remedy(error):
    """Return the cause, if it is known, and the remedy for a driver that does not respond."""
    if "is not installed" in error:
        return INSTALL
    if "version mismatch" in error:
        return "the loaded kernel module is older or newer than the libraries: reboot the host"
    if is_loaded("nouveau"):
        return "nouveau uses the GPUs: " + INSTALL
    if not is_loaded("nvidia"):
        return "the kernel module nvidia is not loaded: reboot, then check `modprobe nvidia` and `dkms status`"
    return "check `dmesg | grep NVRM` for the GPU that does not respond"


def fabric_problems(policy, switches, version, programs):
    """Yield the problems of the fabric manager, if this host needs one."""
    if policy == "ignored" or (policy == "auto" and not switches):
        return
    reason = f"NVSwitches are on the PCI bus ({switches})" if switches else "nvidia_driver_fabric_manager requires it"
    needed = f"fabric manager {version or 'of any version'} running, because {reason}"
    output, error = run("nv-fabricmanager", "--version")
    installed = (re.findall(r"\d+(?:\.\d+)+", output) or [""])[-1]
    if error or not installed:
        yield f"wanted: {needed}; found: {error or 'no version in ' + repr(output)}; {INSTALL}"
    elif version and installed != version:
        yield f"wanted: {needed}; found: fabric manager {installed}, whose version must be the driver's; {INSTALL}"
    elif "nv-fabricmanager" not in programs.values():
        remedy = "start it with `systemctl enable --now nvidia-fabricmanager`, and check /var/log/fabricmanager.log"
        yield f"wanted: {needed}; found: it is not running; {remedy}"


def problems(options, gpus, error, programs):
    """Yield each problem of the driver and its services, with its remedy."""
    yield from driver_problems(options, gpus, error)
    if is_loaded("nouveau"):
        remedy = "blacklist it in /etc/modprobe.d, rebuild the initramfs and reboot, or " + INSTALL
        yield f"wanted: nouveau not loaded; found: it is loaded; {remedy}"
    yield from fabric_problems(options.fabric_manager, count_nvswitches(), gpus[0][0] if gpus else "", programs)
    off = [f"{gpu[2]} on GPU {gpu[1]}" for gpu in gpus if gpu[2] != "Enabled"]
    if off and "nvidia-persistenced" not in programs.values():
        remedy = "start it with `systemctl enable --now nvidia-persistenced`"
        yield f"wanted: nvidia-persistenced running, or persistence mode Enabled; found: {', '.join(off)}; {remedy}"


def main():
    """Print facts and problems. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", default="")
    parser.add_argument("--modules", default="")
    parser.add_argument("--fabric-manager", default="auto")
    options = parser.parse_args()
    fields = "driver_version,index,persistence_mode"
    output, error = run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    gpus = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    if not error and any(len(gpu) != len(fields.split(",")) for gpu in gpus or [[]]):
        gpus, error = [], f"nvidia-smi prints {output[:MESSAGE_CHARACTERS]!r}"
    programs = list_programs()
    reasons = list(problems(options, gpus, error, programs))
    facts = {
        "version": gpus[0][0] if gpus else "",
        "distribution": distribution(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "nvswitches": count_nvswitches(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "in_use": list(list_gpu_users(programs)),
    }
    print(json.dumps(facts))
    print("; ".join(reasons), file=sys.stderr)
    return 1 if reasons else 0


sys.exit(main())
