"""Do this host's containers get its GPUs? Prints facts as JSON, and each problem with its remedy on stderr.

Runs before anything is installed, so it needs nothing but Python. Exits 1 where there is a problem.
"""

import argparse
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys

INSTALL = "set container_toolkit_state: installed and run playbooks/drivers.yml"
MESSAGE_CHARACTERS = 300
RUNTIMES = ("docker", "podman", "containerd")
SMOKE = {
    "docker": ["docker", "run", "--rm", "--network=none", "--gpus=all"],
    "podman": [
        "podman",
        "run",
        "--rm",
        "--network=none",
        "--device=nvidia.com/gpu=all",
        "--security-opt=label=disable",
    ],
    "containerd": ["nerdctl", "run", "--rm", "--network=none", "--gpus=all"],
}
"""How each runtime starts a container with all GPUs. containerd's own ctr cannot."""


def answer(*command, **options):
    """What a program prints, or why it could not be asked."""
    try:
        timeout = options.get("timeout", 120)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} does not answer: {error}"
    said = done.stdout.decode(errors="replace").strip()
    short = " ".join((said + " " + done.stderr.decode(errors="replace")).split())[:MESSAGE_CHARACTERS]
    return (said, "") if done.returncode == 0 else ("", f"{command[0]} ends with {done.returncode}: {short}")


def running():
    """Number of docker's running containers; None where docker does not say, which is not none."""
    listed, why_not = answer("docker", "ps", "--quiet")
    return None if why_not else len(listed.split())


def read(path):
    """The text of a file; empty where there is none."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_version(found, wanted):
    """Whether a version is the wanted one or begins with its components: 1.18 takes 1.18.1 and not 1.180."""
    return (found + ".").startswith(wanted.rstrip(".") + ".")


def distribution():
    """Name of the distribution and its release, such as ubuntu2204 or rhel9."""
    lines = (line.partition("=") for line in read("/etc/os-release").splitlines())
    says = {key: value.strip("\"'") for key, _, value in lines}
    version = says.get("VERSION_ID", "")
    if {"rhel", "centos"} & {says.get("ID"), *says.get("ID_LIKE", "").split()}:
        return "rhel" + version.split(".")[0]
    return says.get("ID", "") + version.replace(".", "")


def version_problems(wanted):
    """What is wrong with the toolkit's own version."""
    needed = f"NVIDIA container toolkit {wanted}".rstrip()
    said, why_not = answer("nvidia-ctk", "--version")
    found = (re.findall(r"version v?(\d+(?:\.\d+)+)", said) or [""])[0]
    if why_not or not found:
        yield f"wanted: {needed}; found: {why_not or repr(said)}; {INSTALL}"
    elif wanted and not is_version(found, wanted):
        yield f"wanted: {needed}; found: {found}; correct container_toolkit_version, or {INSTALL}"


def runtime_problem(runtime):
    """Why a runtime does not give its containers GPUs; empty where it does."""
    if not runtime:
        return f"wanted: one of {', '.join(RUNTIMES)}; found: none; install one, or set container_toolkit_runtime: none"
    return {"docker": docker, "containerd": containerd, "podman": cdi_problem, "none": str}[runtime]()


def docker():
    """Why docker does not know the nvidia runtime."""
    wanted = "wanted: the runtime nvidia in docker; found: "
    said, why_not = answer("docker", "info", "--format={{json .Runtimes}}")
    if why_not:
        return f"{wanted}{why_not}; start docker, or correct container_toolkit_runtime"
    if '"nvidia"' in said:
        return ""
    if '"nvidia"' in read("/etc/docker/daemon.json"):
        return f"{wanted}it is in /etc/docker/daemon.json, which docker has not read; restart docker"
    remedy = f"run `nvidia-ctk runtime configure --runtime=docker` and restart docker, or {INSTALL}"
    return f"{wanted}only {', '.join(sorted(json.loads(said or '{}')))}; {remedy}"


def containerd():
    """Why containerd does not know the nvidia runtime."""
    said, why_not = answer("containerd", "config", "dump")
    if re.search(r"^\s*\[plugins\..*\.runtimes\.['\"]?nvidia['\"]?\]", said, re.MULTILINE):
        return ""
    found = why_not or "its configuration has none"
    remedy = f"run `nvidia-ctk runtime configure --runtime=containerd` and restart containerd, or {INSTALL}"
    return f"wanted: the runtime nvidia in containerd; found: {found}; {remedy}"


def cdi_problem():
    """Why the CDI specification of the GPUs does not serve: it is missing, of another driver, or lacks a GPU."""
    # A specification in /run wins over one in /etc.
    paths = [path for place in ("/var/run/cdi", "/etc/cdi") for path in sorted(glob.glob(place + "/*"))]
    spec = next((path for path in paths if "nvidia.com/gpu" in read(path)), "")
    remedy = f"run `nvidia-ctk cdi generate --output={spec or '/etc/cdi/nvidia.yaml'}`, or {INSTALL}"
    wanted = "wanted: a CDI specification of the GPUs; found: "
    if not spec:
        return f"{wanted}none in /etc/cdi or /var/run/cdi; {remedy}"
    text = read(spec)
    said, why_not = answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if why_not:
        return f"{wanted}{spec}, which cannot be compared: {why_not}; let the driver be checked first"
    driver = said.split()[0] if said else ""
    stale = sorted(set(re.findall(r"libcuda\.so\.(\d[\d.]*\d)", text)) - {driver})
    if stale:
        return f"{wanted}{spec} of driver {', '.join(stale)} beside driver {driver}; {remedy}"
    missing = [device for device in sorted(glob.glob("/dev/nvidia[0-9]*")) if not re.search(device + r"\b", text)]
    return f"{wanted}{spec} without {', '.join(missing)}; {remedy}" if missing else ""


def smoke_problems(runtime, image):
    """How the GPUs in a container differ from the host's."""
    if runtime not in SMOKE:
        yield f"wanted: a container of {image}; found: container_toolkit_runtime is {runtime}; name the runtime that starts it"
        return
    query = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    host, no_host = answer(*query)
    container, no_container = answer(*SMOKE[runtime], image, *query, timeout=540)
    host, container = host.split(), container.split()
    wanted = f"wanted: a container of {image} has the host's {len(host)} GPUs; found: "
    if no_host or no_container:
        yield f"{wanted}{no_host or no_container}; run the command by hand: {' '.join(SMOKE[runtime])} {image} nvidia-smi -L"
    elif sorted(host) != sorted(container):
        lacks = ", ".join(sorted(set(host) - set(container))) or "none"
        has = ", ".join(sorted(set(container) - set(host))) or "none"
        remedy = "look for a CDI specification or a NVIDIA_VISIBLE_DEVICES that names other GPUs"
        yield f"{wanted}{len(container)}, missing: {lacks}, not the host's: {has}; {remedy}"


def main():
    """Prints facts and problems; 1 where there is a problem."""
    parser = argparse.ArgumentParser()
    for name in ("version", "runtime", "smoke-image"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    found = next((name for name in RUNTIMES if shutil.which(name)), "")
    runtime = found if options.runtime == "auto" else options.runtime
    of_version, of_runtime = list(version_problems(options.version)), runtime_problem(runtime)
    problems = of_version + [of_runtime] * bool(of_runtime)
    if options.smoke_image and not problems:
        problems += smoke_problems(runtime, options.smoke_image)
    facts = {
        "distribution": distribution(),
        "machine": platform.machine(),
        "runtime": runtime,
        "toolkit_wanted": bool(of_version),
        "runtime_wanted": bool(of_runtime),
        "containers": running() if runtime == "docker" else 0,
        "systemd": os.path.isdir("/run/systemd/system"),
    }
    print(json.dumps(facts))
    print("; ".join(problems), file=sys.stderr)
    return 1 if problems else 0


sys.exit(main())
