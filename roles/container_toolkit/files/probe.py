"""Check that containers have access to the GPUs.

Print facts as JSON, and each problem with its remedy on stderr; exit 1 if there is a problem. This script may run before
anything is installed, so it uses only Python's standard library.
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
"""Command with which each runtime starts a container with all GPUs.

The command for containerd is nerdctl, because `ctr run` does not accept `--gpus=all`.
"""


def run(*command, timeout=120):
    """Return the output of a program, and an error message if it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{command[0]} does not respond: {error}"
    output = done.stdout.decode(errors="replace").strip()
    short = " ".join((output + " " + done.stderr.decode(errors="replace")).split())[:MESSAGE_CHARACTERS]
    return output, f"{command[0]} exits with {done.returncode}: {short}" if done.returncode else ""


def query_gpus(pattern, *command, timeout=120):
    """Run a query of nvidia-smi. Return the lines that match `pattern`, and an error message if there is no such line.

    nvidia-smi exits with an error if one GPU does not respond or has a corrupted infoROM. This error is ignored if a line
    matches: the acceptance run finds such a GPU later.
    """
    output, error = run(*command, timeout=timeout)
    lines = [line.strip() for line in output.splitlines()]
    found = [line for line in lines if re.fullmatch(pattern, line)]
    return found, "" if found else error or f"nvidia-smi prints {output[:MESSAGE_CHARACTERS]!r}"


def is_podman(program):
    """Return whether a program named docker is podman: a link to it, or a script that runs it (package podman-docker)."""
    if os.path.basename(os.path.realpath(shutil.which(program) or program)).startswith("podman"):
        return True
    return "podman" in " ".join(run(program, "--version")).lower()


def count_containers():
    """Return the number of docker's running containers; None if it is unknown."""
    output, error = run("docker", "ps", "--quiet")
    return None if error else len(output.split())


def read(path):
    """Return the text of a file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def matches_version(version, wanted):
    """Return whether the version equals `wanted` or starts with its components: wanted 1.18 matches 1.18.1, not 1.180."""
    return (version + ".").startswith(wanted.rstrip(".") + ".")


def distribution():
    """Return the name of the distribution and its release, such as ubuntu2204 or rhel9."""
    lines = (line.partition("=") for line in read("/etc/os-release").splitlines())
    release = {key: value.strip("\"'") for key, _, value in lines}
    # RHEL and its rebuilds (Rocky, Alma, Oracle, CentOS Stream) have the same platform, such as platform:el9.
    platform_id, _, major = release.get("PLATFORM_ID", "").rpartition(":el")
    if platform_id == "platform" and major.isdigit():
        return "rhel" + major
    return release.get("ID", "") + release.get("VERSION_ID", "").replace(".", "")


def version_problems(wanted):
    """Yield a problem if the toolkit is not installed, or if its version does not match `wanted`."""
    needed = f"NVIDIA container toolkit {wanted}".rstrip()
    output, error = run("nvidia-ctk", "--version")
    installed = (re.findall(r"version v?(\d+(?:\.\d+)+)", output) or [""])[0]
    if error or not installed:
        yield f"wanted: {needed}; found: {error or repr(output)}; {INSTALL}"
    elif wanted and not matches_version(installed, wanted):
        yield f"wanted: {needed}; found: {installed}; correct container_toolkit_version, or {INSTALL}"


def runtime_problem(runtime):
    """Return why containers of a runtime have no access to the GPUs; empty if they have access."""
    if not runtime:
        return f"wanted: one of {', '.join(RUNTIMES)}; found: none; install one, or set container_toolkit_runtime: none"
    return {"docker": docker_problem, "containerd": containerd_problem, "podman": cdi_problem, "none": str}[runtime]()


def docker_problem():
    """Return why docker lacks the nvidia runtime; empty if docker has the runtime."""
    wanted = "wanted: the runtime nvidia in docker; found: "
    output, error = run("docker", "info", "--format={{json .Runtimes}}")
    if error:
        return f"{wanted}{error}; start docker, or correct container_toolkit_runtime"
    if '"nvidia"' in output:
        return ""
    if '"nvidia"' in read("/etc/docker/daemon.json"):
        return f"{wanted}/etc/docker/daemon.json has it, but docker has not loaded this file; restart docker"
    remedy = f"run `nvidia-ctk runtime configure --runtime=docker` and restart docker, or {INSTALL}"
    try:
        return f"{wanted}only {', '.join(sorted(json.loads(output)))}; {remedy}"
    except (ValueError, TypeError):
        return f"{wanted}docker info prints {output[:MESSAGE_CHARACTERS]!r}; {remedy}"


def containerd_problem():
    """Return why containerd lacks the nvidia runtime; empty if containerd has the runtime."""
    output, error = run("containerd", "config", "dump")
    if not error and re.search(r"^\s*\[plugins\..*\.runtimes\.['\"]?nvidia['\"]?\]", output, re.MULTILINE):
        return ""
    result = error or "its configuration has no such runtime"
    remedy = f"run `nvidia-ctk runtime configure --runtime=containerd` and restart containerd, or {INSTALL}"
    return f"wanted: the runtime nvidia in containerd; found: {result}; {remedy}"


def cdi_problem():
    """Return the problem of the CDI specification, such as another driver version or a missing GPU; empty if there is none."""
    # A specification in /run takes precedence over one in /etc.
    paths = [path for directory in ("/var/run/cdi", "/etc/cdi") for path in sorted(glob.glob(directory + "/*"))]
    spec = next((path for path in paths if "nvidia.com/gpu" in read(path)), "")
    remedy = f"run `nvidia-ctk cdi generate --output={spec or '/etc/cdi/nvidia.yaml'}`, or {INSTALL}"
    wanted = "wanted: a CDI specification of the GPUs; found: "
    if not spec:
        return f"{wanted}none in /etc/cdi or /var/run/cdi; {remedy}"
    text = read(spec)
    drivers, error = query_gpus(r"\d+(\.\d+)+", "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if error:
        return f"{wanted}{spec}, which cannot be compared with the driver: {error}; check the driver first"
    driver = drivers[0]
    stale = sorted(set(re.findall(r"libcuda\.so\.(\d[\d.]*\d)", text)) - {driver})
    if stale:
        return f"{wanted}{spec} for driver {', '.join(stale)}, but the driver is {driver}; {remedy}"
    missing = [device for device in sorted(glob.glob("/dev/nvidia[0-9]*")) if not re.search(device + r"\b", text)]
    return f"{wanted}{spec} without {', '.join(missing)}; {remedy}" if missing else ""


def smoke_problems(runtime, image):
    """Yield the problem of the test container: it cannot be started, or it has other GPUs than the host."""
    if runtime not in SMOKE:
        yield f"wanted: a container of {image}; found: container_toolkit_runtime is {runtime}; set it to the runtime to test"
        return
    query = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    host, host_error = query_gpus("GPU-.*", *query)
    container, container_error = query_gpus("GPU-.*", *SMOKE[runtime], image, *query, timeout=540)
    wanted = f"wanted: a container of {image} has the host's {len(host)} GPUs; found: "
    if host_error or container_error:
        yield f"{wanted}{host_error or container_error}; run this manually: {' '.join(SMOKE[runtime])} {image} nvidia-smi -L"
    elif sorted(host) != sorted(container):
        missing = ", ".join(sorted(set(host) - set(container))) or "none"
        extra = ", ".join(sorted(set(container) - set(host))) or "none"
        remedy = "check for a CDI specification or NVIDIA_VISIBLE_DEVICES with other GPUs"
        yield f"{wanted}{len(container)}, missing: {missing}, not on the host: {extra}; {remedy}"


def main():
    """Print facts and problems. Return 1 if there is a problem."""
    parser = argparse.ArgumentParser()
    for name in ("version", "runtime", "smoke-image"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    installed = next((name for name in RUNTIMES if shutil.which(name)), "")
    runtime = installed if options.runtime == "auto" else options.runtime
    if runtime == "docker" and is_podman("docker"):
        runtime = "podman"
    toolkit, configuration = list(version_problems(options.version)), runtime_problem(runtime)
    problems = toolkit + [configuration] * bool(configuration)
    if options.smoke_image and not problems:
        problems += smoke_problems(runtime, options.smoke_image)
    facts = {
        "distribution": distribution(),
        "machine": platform.machine(),
        "runtime": runtime,
        "toolkit_wanted": bool(toolkit),
        "runtime_wanted": bool(configuration),
        "containers": count_containers() if runtime == "docker" else 0,
        "systemd": os.path.isdir("/run/systemd/system"),
    }
    print(json.dumps(facts))
    print("; ".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
