"""Install packages with pip into the virtual environment whose Python runs this script. Arguments: those of `pip install`.

Of the settings of the host's pip (/etc/pip.conf, PIP_* variables), only those for the source of packages apply. Others, such as
`user`, `target` and `require-hashes`, could break this installation: with `user`, pip refuses to use a virtual environment.
For the locations of pip's configuration files, see https://pip.pypa.io/en/stable/topics/configuration/.
"""

import configparser
import os
import sys

SOURCES = (
    "index-url",
    "extra-index-url",
    "find-links",
    "no-index",
    "trusted-host",
    "proxy",
    "cert",
    "client-cert",
    "keyring-provider",
    "timeout",
    "default-timeout",
    "retries",
)


def normal_name(name):
    """Return the name of a setting as pip's options are spelled: pip also accepts `index_url` and `--index-url`."""
    return name.lower().replace("_", "-").removeprefix("--")


# As in pip, a later file overrides an earlier one. If PIP_CONFIG_FILE names an existing file, the user's files are not
# read. If it is /dev/null, no file is read.
given_file = os.environ.get("PIP_CONFIG_FILE", "")
directories = (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
files = [*(f"{directory}/pip/pip.conf" for directory in directories), "/etc/pip.conf"]
if not os.path.exists(given_file):
    files += ["~/.pip/pip.conf", (os.environ.get("XDG_CONFIG_HOME") or "~/.config") + "/pip/pip.conf"]
if given_file == os.devnull:
    files = []
settings = {"global": {}, "install": {}}
try:
    for file in [*map(os.path.expanduser, files), given_file]:
        parser = configparser.RawConfigParser()
        parser.read(file, encoding="utf-8")
        for section, values in settings.items():
            if parser.has_section(section):
                values.update({normal_name(name): value for name, value in parser.items(section)})
except (configparser.Error, UnicodeDecodeError) as error:
    sys.exit(f"a configuration file of pip cannot be read: {' '.join(str(error).split())}: correct or remove the file")

environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
variables = {normal_name(name[4:]): value for name, value in os.environ.items() if name.startswith("PIP_")}
for option in SOURCES:
    values = [source.get(option) for source in (variables, settings["install"], settings["global"])]
    if value := next(filter(None, values), ""):
        environment["PIP_" + option.replace("-", "_").upper()] = value
environment["PIP_CONFIG_FILE"] = os.devnull
# With -I, Python ignores the user's site-packages and PYTHONPATH, so pip does not count packages there as installed.
os.execve(sys.executable, [sys.executable, "-I", "-m", "pip", "install", *sys.argv[1:]], environment)
