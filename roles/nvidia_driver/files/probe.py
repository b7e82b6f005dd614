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
# A second driver on the host would replace the kernel module that the pods of the cluster use.
DRIVER_CONTAINER = (
    "the driver is in a container (/run/nvidia/driver), as with NVIDIA's GPU operator: measure this host with the manifests for "
    "Kubernetes, or disable the operator's driver (driver.enabled=false), reboot the host and install a driver on it"
)
MESSAGE_CHARACTERS = 300

# What playbooks/drivers.yml does about a problem. NOTHING: it cannot solve the problem. INSTALLATION: install the packages and
# start the services. REBOOT: do the same, and reboot if the problem remains and the inventory allows it.
NOTHING, INSTALLATION, REBOOT = 0, 1, 2

# nvidia-smi's exit codes and messages for a fault of a GPU, not of the driver. The codes are from its manual page: interrupt
# problem, corrupted infoROM, GPU fallen off the bus.
GPU_FAULT_CODES = (10, 14, 15)
GPU_FAULT = re.compile("device handle for GPU|GPU is lost|fallen off the bus|infoROM is corrupted", re.IGNORECASE)


def run(*command):
    """Run a program. Return its output, its exit code and an error message; the code is None if the program did not end."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    except FileNotFoundError:
        return "", None, f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", None, f"{command[0]} does not respond: {error}"
    output = done.stdout.decode(errors="replace").strip()
    short = " ".join((output + " " + done.stderr.decode(errors="replace")).split())[:MESSAGE_CHARACTERS]
    return output, done.returncode, f"{command[0]} exits with {done.returncode}: {short}" if done.returncode else ""


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


def runs_in_container():
    """Return whether a container has loaded the driver. NVIDIA's GPU operator mounts the root of this container on the host."""
    return is_loaded("nvidia") and os.path.isdir("/run/nvidia/driver/usr")


def is_loaded(module):
    """Return whether a kernel module is loaded."""
    return os.path.isdir(f"/sys/module/{module}")


def loaded_module_type():
    """Return the type of the loaded kernel modules, open or proprietary; empty if it is unknown."""
    version = read("/proc/driver/nvidia/version")
    return ("open" if "Open Kernel Module" in version else "proprietary") if version else ""


def loaded_version():
    """Return the version of the loaded kernel module; empty if it is unknown."""
    text = read("/proc/driver/nvidia/version")
    return (re.findall(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.MULTILINE) or [""])[0]


def query_driver():
    """Ask nvidia-smi for the GPUs. Return the driver's versions, GPU -> persistence mode, and an error message of the driver.

    A GPU that does not respond is no error of the driver, because the other GPUs can be measured. nvidia-smi then prints rows
    without values, or other lines between the rows, or no row at all. The readings of the run judge this GPU.
    """
    output, code, message = run(
        "nvidia-smi", "--query-gpu=driver_version,index,persistence_mode", "--format=csv,noheader"
    )
    lines = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    rows = [line for line in lines if len(line) == 3 and line[1].isdigit()]
    versions = sorted({row[0] for row in rows if re.fullmatch(r"\d+(\.\d+)+", row[0])})
    modes = {row[1]: row[2] for row in rows}
    if versions:
        return versions, modes, ""
    error = message or f"nvidia-smi prints {output[:MESSAGE_CHARACTERS]!r}"
    # If the libraries have another version than the loaded module, it is unknown which of the two is the driver's version.
    versions = [loaded_version()] if loaded_version() and "version mismatch" not in error else []
    is_gpu_fault = code in GPU_FAULT_CODES or GPU_FAULT.search(error)
    return versions, modes, "" if versions and is_gpu_fault else error


def count_nvswitches():
    """Return the number of NVSwitches on the PCI bus: NVIDIA devices with PCI class 0x0680, "other bridge"."""
    devices = glob.glob("/sys/bus/pci/devices/*")
    return [read(f"{device}/vendor") + read(f"{device}/class") for device in devices].count("0x10de0x068000")


def list_programs():
    """Return process id -> program, for every visible process with a command line, so not for kernel threads."""
    lines = {pid: read(f"/proc/{pid}/cmdline").split("\0")[0] for pid in os.listdir("/proc") if pid.isdigit()}
    return {pid: os.path.basename(line) for pid, line in lines.items() if line}


def is_running(program, service, programs):
    """Return whether a program runs, or whether systemd says that its service does; None if this is unknown.

    With the option `hidepid` of /proc, only root sees the processes of other users, such as process 1.
    """
    if program in programs.values():
        return True
    if "1" in programs:
        return False
    output, _, _ = run("systemctl", "show", "--property=LoadState", "--property=ActiveState", service)
    state = dict(line.partition("=")[::2] for line in output.splitlines())
    if state.get("LoadState") != "loaded":
        return None  # without a unit, it may have been started in another way
    return {"active": True, "inactive": False, "failed": False}.get(state.get("ActiveState"))


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
    # RHEL and its rebuilds (Rocky, Alma, Oracle, CentOS Stream) have the same platform, such as platform:el9.
    platform_id, _, major = release.get("PLATFORM_ID", "").rpartition(":el")
    if platform_id == "platform" and major.isdigit():
        return "rhel" + major
    return release.get("ID", "") + release.get("VERSION_ID", "").replace(".", "")


def driver_problems(options, versions, error):
    """Yield the problems of the driver itself, each with what drivers.yml does about it."""
    wanted = f"driver {options.version}" if options.version else "a driver that responds"
    if error:
        remedy, action = cause_and_remedy(error)
        yield f"wanted: {wanted}; found: {error}; {remedy}", action
    if options.version and versions and not all(matches_version(version, options.version) for version in versions):
        found = ", ".join(versions)
        yield f"wanted: {wanted}; found: {found}; correct nvidia_driver_version, or {INSTALL}", REBOOT
    if options.modules and loaded_module_type() not in ("", options.modules):
        yield f"wanted: {options.modules} kernel modules; found: {loaded_module_type()} ones; {INSTALL}", REBOOT


def cause_and_remedy(error):
    """Return the remedy for a driver that does not respond, with its cause if that is known, and what drivers.yml does."""
    if "is not installed" in error or "libnvidia-ml" in error:
        return (DRIVER_CONTAINER, NOTHING) if runs_in_container() else (INSTALL, REBOOT)
    if "version mismatch" in error:
        return "the loaded kernel module is older or newer than the libraries: reboot the host", REBOOT
    if is_loaded("nouveau"):
        return "nouveau uses the GPUs: " + INSTALL, REBOOT
    if not is_loaded("nvidia"):
        return "the kernel module nvidia is not loaded: reboot, then check `modprobe nvidia` and `dkms status`", REBOOT
    return "check `dmesg | grep NVRM` for the GPU that does not respond", NOTHING


def fabric_problems(policy, switches, version, programs):
    """Yield the problems of the fabric manager, if this host needs one, each with what drivers.yml does about it."""
    if policy == "ignored" or (policy == "auto" and not switches):
        return
    reason = f"NVSwitches are on the PCI bus ({switches})" if switches else "nvidia_driver_fabric_manager requires it"
    needed = f"fabric manager {version or 'of any version'} running, because {reason}"
    output, _, error = run("nv-fabricmanager", "--version")
    installed = (re.findall(r"\d+(?:\.\d+)+", output) or [""])[-1]
    if error or not installed:
        yield f"wanted: {needed}; found: {error or 'no version in ' + repr(output)}; {INSTALL}", INSTALLATION
    elif version and installed != version:
        found = f"fabric manager {installed}, whose version must be the driver's"
        yield f"wanted: {needed}; found: {found}; {INSTALL}", INSTALLATION
    elif is_running("nv-fabricmanager", "nvidia-fabricmanager", programs) is False:
        remedy = "start it with `systemctl enable --now nvidia-fabricmanager`, and check /var/log/fabricmanager.log"
        yield f"wanted: {needed}; found: it is not running; {remedy}", INSTALLATION


def problems(options, versions, modes, error, programs):
    """Yield each problem of the driver and its services, with its remedy, and what drivers.yml does about it."""
    yield from driver_problems(options, versions, error)
    if is_loaded("nouveau"):
        remedy = "blacklist it in /etc/modprobe.d, rebuild the initramfs and reboot, or " + INSTALL
        yield f"wanted: nouveau not loaded; found: it is loaded; {remedy}", REBOOT
    yield from fabric_problems(options.fabric_manager, count_nvswitches(), versions[0] if versions else "", programs)
    off = [f"{mode} on GPU {index}" for index, mode in modes.items() if mode == "Disabled"]
    if off and is_running("nvidia-persistenced", "nvidia-persistenced", programs) is False:
        remedy = "start it with `systemctl enable --now nvidia-persistenced`"
        found = ", ".join(off)
        yield (
            f"wanted: nvidia-persistenced running, or persistence mode Enabled; found: {found}; {remedy}",
            INSTALLATION,
        )


def main():
    """Print facts and problems. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", default="")
    parser.add_argument("--modules", default="")
    parser.add_argument("--fabric-manager", default="auto")
    options = parser.parse_args()
    versions, modes, error = query_driver()
    programs = list_programs()
    found = list(problems(options, versions, modes, error, programs))
    action = max((action for _, action in found), default=NOTHING)
    facts = {
        "version": versions[0] if versions else "",
        "installation_helps": action >= INSTALLATION,
        "reboot_helps": action >= REBOOT,
        "distribution": distribution(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "nvswitches": count_nvswitches(),
        "systemd": os.path.isdir("/run/systemd/system"),
        "in_use": list(list_gpu_users(programs)),
    }
    print(json.dumps(facts))
    print("; ".join(reason for reason, _ in found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
