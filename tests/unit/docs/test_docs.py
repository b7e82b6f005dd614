"""Test the commands, links, paths, examples and messages in the documentation.

Commands of Rackproof are parsed by its own parsers, without being run.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import importlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from fleet.inventory.ansible import check_variables
from rackproof.main import VERBS, main
from tests import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/measurements/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "deploy").glob("*/README.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^(?P<mark>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=mark)$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\))?)\)")
SOURCE_FOLDERS = "agent|collectors|deploy|docs|fleet|inventory|playbooks|roles|schemas|tests"
PATH = re.compile(rf"(?:{SOURCE_FOLDERS})/[\w./*-]*\w(?:::\w+)?")
PATHS_ELSEWHERE = {
    "CONTRIBUTING.md": {  # files that do not exist here: readers create them when they follow the guides
        "collectors/fan.py",
        "tests/unit/test_fan.py",
        "agent/benchmarks/compute/sort.py",
        "agent/cli/uptime.py",
        "fleet/report/host_list.py",
        "tests/unit/fleet/report/test_host_list.py",
        "roles/banner/meta/main.yml",
        "roles/banner/tasks/main.yml",
        "playbooks/banner.yml",
    },
}
VARIABLES = json.loads((ROOT / "schemas" / "inventory.schema.json").read_text(encoding="utf-8"))["properties"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Third-party programs. Of their arguments, only paths are checked, and the command that a program in STARTERS starts.
THIRD_PARTY_PROGRAMS = (
    *(
        "ansible",
        "ansible-builder",
        "ansible-navigator",
        "cd",
        "cp",
        "curl",
        "docker",
        "ethtool",
        "export",
        "git",
        "grep",
        "install",
        "kubectl",
        "mlxlink",
    ),
    *(
        "ibnetdiscover",
        "lldpcli",
        "lldpctl",
        "smpquery",
        "ib_write_bw",
        "ib_write_lat",
        "all_reduce_perf",
        "nvidia-imex-ctl",
        "nvidia-smi",
        "oc",
        "podman",
        "promtool",
        "rsync",
        "scp",
        "source",
        "ssh",
        "systemctl",
        "tar",
        ".",
    ),
)
STARTERS = ("docker", "mpirun", "podman", "srun", "sudo", "ansible-navigator")
"""Programs whose last arguments are another command."""


class UnparsedError(Exception):
    """A command line that a parser refuses; the text is the error message of argparse."""


class Parser(argparse.ArgumentParser):
    """A parser that raises UnparsedError on an error instead of exiting."""

    def error(self, message: str) -> Any:
        raise UnparsedError(f"{self.prog}: {message}")


def parser_of_the_command() -> Parser:
    """Return the parser of `rackproof` with all its verbs."""
    parser = Parser(prog="rackproof")
    parser.add_argument("--version", action="version", version="")
    verbs = parser.add_subparsers(parser_class=Parser, required=True)
    for module in dict.fromkeys(VERBS.values()):
        importlib.import_module(module).add_verb(verbs)
    return parser


PARSER = parser_of_the_command()


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(match["language"], match["text"]) for match in FENCE.finditer(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def script(block: Block) -> str:
    """Return the shell commands of a block, or an empty text if it has none.

    If lines begin with `$ `, these lines are the commands. Otherwise, the whole block is a script if its language is sh or
    bash, or if it has no language and begins with a known program.
    """
    lines = block.text.splitlines()
    if prompted := [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]:
        return "\n".join(prompted)
    first = next((line for line in lines if line.strip() and not line.startswith("#")), "").split()
    known = {*CHECKS, *THIRD_PARTY_PROGRAMS}
    while first and re.fullmatch(r"\w+=\S*", first[0]):
        first.pop(0)
    begins = bool(first) and first[0] in known
    return block.text if block.language in ("sh", "bash") or (not block.language and begins) else ""


def commands(text: str) -> Iterator[list[str]]:
    """Yield each simple command of a script as a list of words, and each redirection as `<file>` and the file name."""
    # In the pages, `<name>` is a placeholder and not a redirection.
    text = re.sub(r"<(\w+)>", r"\1", text).replace("\\\n", " ")
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("|&;<>"):
                if words:
                    yield words
                words = ["<file>"] if set(word) <= set("<>") else []
            else:
                words.append(word)
        if words:
            yield words


def script_problems(text: str) -> list[str]:
    """Return the syntax errors of a script and the problems of its commands."""
    problems = []
    checked = subprocess.run(
        ["bash", "-n"], input=re.sub(r"<(\w+)>", r"\1", text), capture_output=True, text=True, check=False
    )
    if checked.returncode:
        problems.append(checked.stderr.strip())
    for words in commands(text):
        problems += [f"{' '.join(words)}: {problem}" for problem in command_problems(words)]
    return problems


def command_problems(words: list[str]) -> Iterator[str]:
    """Yield the problems of one command: missing paths, unknown programs and wrong arguments."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words or words[0] == "<file>":
        return
    program, rest = Path(words[0]).name, words[1:]
    yield from (f"{word} is not in this checkout" for word in rest if is_missing_path(word))
    if program in STARTERS:
        yield from check_started_command(rest)
    elif check := CHECKS.get(program):
        yield from check(rest)
    elif program not in THIRD_PARTY_PROGRAMS:
        yield f"unknown program {program}: add it to {Path(__file__).name}"


def is_missing_path(word: str) -> bool:
    """Return whether a word is a path that this checkout lacks.

    Return False for examples: an inventory such as `inventory/rack12`, or a placeholder such as `fleet/judge/packs/MODEL.yml`.
    """
    word = word.rpartition("=")[2].removeprefix("./")
    if not re.fullmatch(rf"(?:{SOURCE_FOLDERS})/[\w./*-]*", word) or re.search(
        r"^inventory/(?!example|local)|/(?!README\.)[A-Z]+\.\w+$", word
    ):
        return False
    return not (list(ROOT.glob(word)) if "*" in word else (ROOT / word).exists())


def check_started_command(words: list[str]) -> Iterator[str]:
    """Check the command that another program starts, if CHECKS has a check for this command."""
    indexes = [index for index, word in enumerate(words) if word in CHECKS]
    if not indexes or words[0] in ("build", "push", "save"):
        return
    rest = words[indexes[0] + 1 :]
    if words[0] == "run" and words[indexes[0]] == "rackproof":
        # `rackproof` is the name of an image here. Its entry point adds the verb `run` if the arguments have no verb.
        rest = rest[1:] if rest[:1] == ["rackproof"] else rest
        rest = ["run", *rest] if not rest or rest[0].startswith("-") else rest
    yield from CHECKS[words[indexes[0]]](rest)


def check_rackproof(words: list[str]) -> Iterator[str]:
    """Check arguments with the parser of the command."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            PARSER.parse_args(words)
    except UnparsedError as error:
        yield str(error)
    except SystemExit as ended:  # --help, --version
        if ended.code:
            yield f"exits with {ended.code}"


def check_playbook(words: list[str]) -> Iterator[str]:
    """Check playbook, inventory and extra variables of an ansible-playbook command."""
    parser = Parser(prog="ansible-playbook")
    parser.add_argument("-i", action="append", default=[])
    parser.add_argument("-e", action="append", default=[])
    parser.add_argument("--limit")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("playbook", nargs="+")
    try:
        given = parser.parse_args(words)
    except UnparsedError as error:
        yield str(error)
        return
    for playbook in given.playbook:
        name = playbook.removeprefix("rackproof.rackproof.")
        if not (ROOT / (playbook if "/" in playbook else f"playbooks/{name}.yml")).is_file():
            yield f"no playbook {playbook}"
    if not given.i:
        yield "no inventory"
    for text in given.e:
        yield from check_extra(text)


def check_extra(text: str) -> Iterator[str]:
    """Check the variables in the value of one `-e`, which is `NAME=VALUE …` or JSON."""
    if text.startswith("@"):
        return
    is_json = text.startswith("{")
    variables = json.loads(text) if is_json else dict(word.partition("=")[::2] for word in shlex.split(text))
    named = {name: value for name, value in variables.items() if not name.startswith("_rackproof_")}
    yield from (f"no variable {name}" for name in named if name not in VARIABLES)
    known = {name: value for name, value in named.items() if name in VARIABLES}
    # Ansible passes the values of `NAME=VALUE` as strings; the roles convert `true` and `false`.
    known = {name: value == "true" if value in ("true", "false") else value for name, value in known.items()}
    try:
        check_variables({"h1": {"rackproof_gpu_count": 1, **known}})
    except Exception as error:  # noqa: BLE001 - any error is a problem of the page
        yield str(error)


def check_make(words: list[str]) -> Iterator[str]:
    for word in words:
        name, assigned, _ = word.partition("=")
        if assigned:
            match = re.search(rf"^{name} \?=|\$\((?:or \$\()?{name}\b", MAKEFILE, flags=re.MULTILINE)
        else:
            match = re.search(rf"^{re.escape(word)}:", MAKEFILE, flags=re.MULTILINE)
        if not match:
            yield f"the Makefile has no {name}"


def check_python(words: list[str]) -> Iterator[str]:
    if words[:1] != ["-m"]:
        return
    if words[1] == "pip":
        yield from check_pip(words[2:])
    elif words[1] != "venv" and importlib.util.find_spec(words[1]) is None:
        yield f"no module {words[1]}"
    elif words[1] == "agent.benchmarks":
        yield from check_benchmarks(words[2:])


def check_torchrun(words: list[str]) -> Iterator[str]:
    position = words.index("-m")
    yield from check_python(words[position:])


def check_benchmarks(words: list[str]) -> Iterator[str]:
    """Check that the options exist. The parser cannot be imported without torch, so its source text is searched for them."""
    source = (ROOT / "agent" / "benchmarks" / "__main__.py").read_text(encoding="utf-8")
    yield from (
        f"agent.benchmarks has no {word}" for word in words if word.startswith("--") and f'"{word}"' not in source
    )


def check_pip(words: list[str]) -> Iterator[str]:
    for word in words:
        if match := re.search(r"(?:^\.|rackproof)\[([\w,]+)\]", word):
            extras = PROJECT["optional-dependencies"]
            yield from (f"no extra {name}" for name in match[1].split(",") if name not in extras)


def check_galaxy(words: list[str]) -> Iterator[str]:
    if words[:2] not in (["collection", "build"], ["collection", "install"]):
        yield "only `collection build` and `collection install` can be checked"


def check_sbatch(words: list[str]) -> Iterator[str]:
    if not any((ROOT / word).is_file() for word in words):
        yield "no script"


CHECKS: dict[str, Callable[[list[str]], Iterator[str]]] = {
    "rackproof": check_rackproof,
    "ansible-playbook": check_playbook,
    "ansible-galaxy": check_galaxy,
    "make": check_make,
    "mpirun": check_started_command,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "sbatch": check_sbatch,
    "srun": check_started_command,
    "sudo": check_started_command,
    "torchrun": check_torchrun,
}


def test_pages_contain_commands() -> None:
    programs = {words[0] for page in PAGES for block in blocks(page) for words in commands(script(block))}
    assert programs >= {"rackproof", "ansible-playbook", "make", "kubectl", "mpirun", "sudo"}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_in_a_block_is_valid(page: Path) -> None:
    assert [problem for block in blocks(page) for problem in script_problems(script(block))] == []


def verb_of(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser of the innermost verb, and the remaining words."""
    parser: argparse.ArgumentParser = PARSER
    while words:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner or words[0] not in inner[0].choices:
            break
        parser, words = inner[0].choices[words[0]], words[1:]
    return parser, words


def mention_problems(text: str) -> Iterator[str]:
    """Yield the problems of a command that a sentence mentions: unknown verbs, options, variables and make targets.

    The command may be incomplete, for example a verb without its arguments.
    """
    try:
        mentioned = list(commands(re.sub(r"\[[^\]]*\]|…", "", text)))
    except ValueError as error:
        yield f"{text}: {error}"
        return
    for words in mentioned:
        if words[0] == "rackproof":
            parser, rest = verb_of(words[1:])
            choices = next((action.choices for action in parser._actions if not action.option_strings), None)
            if (
                choices is not None
                and (parser is PARSER or re.match("[a-z]", "".join(rest[:1])))
                and rest[:1] != ["--version"]
            ) and (not rest or rest[0] not in choices):
                yield f"{text}: no such verb"
            known = {option for action in parser._actions for option in action.option_strings}
            options = rest[: rest.index("--")] if "--" in rest else rest
            given = [word.partition("=")[0] for word in options if word.startswith("--")]
            yield from (f"{text}: {parser.prog} has no {word}" for word in given if word not in known)
        elif words[0] == "-e":
            yield from (f"{text}: {problem}" for word in words[1:] if word != "-e" for problem in check_extra(word))
        elif (
            words[0] in ("make", "pip", "python", "ansible-playbook", "torchrun", "mpirun", "sudo", "sbatch")
            and len(words) > 1
        ):
            is_complete = "…" not in text
            yield from (f"{text}: {problem}" for problem in (command_problems(words) if is_complete else ()))


def is_command(text: str) -> bool:
    """Return whether a text in backticks is a command whose parts can be checked."""
    return bool(
        re.match(
            r"(rackproof|make|pip|ansible-playbook|torchrun|mpirun -|sudo|sbatch|python -m) [\w'./-]|-e ['{\w]", text
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_in_a_sentence_has_existing_verbs_and_options(page: Path) -> None:
    inline = [text for text in INLINE.findall(prose(page)) if is_command(text)]
    assert [problem for text in inline for problem in mention_problems(text)] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).lower() for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_link_targets_exist(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_paths_named_in_pages_exist(page: Path) -> None:
    named = {text for text in INLINE.findall(prose(page)) if PATH.fullmatch(text)}
    for text in named - PATHS_ELSEWHERE.get(str(page.relative_to(ROOT)), set()):
        path, _, test = text.partition("::")
        assert not is_missing_path(path), text
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), text


def variables_in(value: Any) -> Iterator[str]:
    """Yield the names of Rackproof's inventory variables that an example sets."""
    if isinstance(value, dict):
        yield from (key for key in value if isinstance(key, str) and re.match(r"rackproof_(?!_)", key))
        yield from (name for item in value.values() for name in variables_in(item))
    elif isinstance(value, list):
        yield from (name for item in value for name in variables_in(item))


def check_example(block: Block) -> Iterator[str]:
    """Yield the problems of an example: syntax errors and unknown variables."""
    try:
        if block.language == "yaml":
            for document in yaml.safe_load_all(block.text):
                yield from (f"no variable {name}" for name in variables_in(document) if name not in VARIABLES)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "python":
            compile(block.text, "example", "exec")
        elif block.language == "ini":
            configparser.ConfigParser().read_string(block.text)
    except (yaml.YAMLError, ValueError, SyntaxError, configparser.Error) as error:
        yield str(error)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_examples_are_valid(page: Path) -> None:
    assert [problem for block in blocks(page) for problem in check_example(block)] == []


MESSAGES_ELSEWHERE = (
    "OutOfMemoryError: CUDA out of memory.",
    "unreachable at Preflight",
)
"""Messages that the sources do not contain: the first is a message of torch, the second is composed at run time."""


@pytest.fixture(scope="module")
def sources() -> str:
    """Return the source text of the product, with adjacent string literals joined."""
    suffixes = (".py", ".yml", ".j2")
    folders = (ROOT / name for name in ("agent", "collectors", "fleet", "playbooks", "rackproof", "roles", "schemas"))
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in suffixes]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return " ".join(re.sub(r'"\s*\n\s*f?"', "", text).split())


def test_messages_in_troubleshooting_exist_in_the_sources(sources: str) -> None:
    """The page has the messages in the first column of its tables. In a message, `…` stands for variable text."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = [
        text for line in page.splitlines() if line.startswith("| ") for text in INLINE.findall(line.split(" | ")[0])
    ]
    assert len(messages) > 30
    for text in messages:
        pieces = re.split(r"…|, |: ", text) if not text.startswith(MESSAGES_ELSEWHERE) else ()
        assert [piece for piece in pieces if len(piece) > 12 and piece.strip() not in sources] == [], text


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_readme_shows_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # In README.md, inventory/rack12 is a copy of inventory/example.
    (shown,) = re.findall(r"^\$ rackproof plan -i inventory/rack12\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert main(["plan", "-i", str(ROOT / "inventory" / "example")]) == 0
    without_run_id = [
        re.sub(r"^run \w+:", "run:", output, flags=re.MULTILINE) for output in (capsys.readouterr().out, shown)
    ]
    assert without_run_id[0] == without_run_id[1]


def test_index_lists_every_page() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - linked == set()


@pytest.mark.parametrize(
    "text",
    [
        "rackproof repot runs/a",
        "rackproof report --no-such-option runs/a",
        "rackproof plan --hosts",
        "ansible-playbook -i inventory/example playbooks/acceptence.yml",
        "ansible-playbook -i inventory/example playbooks/acceptance.yml -e rackproof_profil=smoke",
        "ansible-playbook -i inventory/example playbooks/acceptance.yml -e rackproof_epochs=three",
        "ansible-playbook playbooks/acceptance.yml",
        "make aceptance",
        "make acceptance INVENTORRY=inventory/rack12",
        "pip install '.[contrl]'",
        "sudo rackproof docter",
        "mpirun -np 4 python -m agent.benchmark",
        "mpirun --host n1 rackproof launch --launcher pmi --run-dir x",
        "docker run --rm --gpus all rackproof --epoch-count 3",
        "docker run --rm --gpus all rackproof rackproof repot",
        "kubectl apply -k deploy/kubernetes/no-such-overlay",
        "kubectl get nodes | rackproof colect runs/r1 -",
        "srum rackproof bench",
        "if rackproof report runs/a; then",
    ],
)
def test_invalid_command_in_a_page_is_reported(text: str) -> None:
    assert script_problems(text)


@pytest.mark.parametrize(
    "text",
    [
        "rackproof repot",
        "rackproof report --no-such-option",
        "rackproof criteria lnt",
        "make tset",
        "-e rackproof_no_such=1",
        '-e \'{"rackproof_epochs": "three"}\'',
    ],
)
def test_invalid_mention_of_a_command_is_reported(text: str) -> None:
    assert is_command(text)
    assert list(mention_problems(text))
