"""The verbs `help`, `version` and `completion`."""

from __future__ import annotations

import argparse
from pathlib import Path

from schemas import VERSION

SHELLS = ("bash", "zsh", "fish")


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add help, version and completion to the command."""
    help_parser = verbs.add_parser("help", help="show the verbs, or one verb with its options and an example")
    help_parser.add_argument("verb", nargs="?", metavar="VERB", help="the verb (default: list all)")
    help_parser.set_defaults(call=_help)
    version = verbs.add_parser("version", help="print the version")
    version.set_defaults(call=_version)
    completion = verbs.add_parser(
        "completion",
        help="print completions for a shell",
        epilog="examples: rackproof completion bash > ~/.local/share/bash-completion/completions/rackproof (create the directory "
        "first: mkdir -p); "
        "rackproof completion zsh > DIRECTORY/_rackproof, where DIRECTORY is in $fpath; "
        "rackproof completion fish > ~/.config/fish/completions/rackproof.fish",
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(call=_completion)


def _help(options: argparse.Namespace) -> int:
    from rackproof.main import build_parser, main

    if options.verb:
        return main([options.verb, "--help"])
    build_parser().print_help()
    return 0


def _version(options: argparse.Namespace) -> int:
    print(f"rackproof {VERSION}")
    return 0


def _completion(options: argparse.Namespace) -> int:
    import shtab

    from rackproof.main import build_parser

    parser = build_parser()
    for verb in parser.verbs.choices.values():
        for action in verb._actions:
            if action.type is Path:
                kind = shtab.DIRECTORY if action.dest.endswith("dir") else shtab.FILE
                setattr(action, "complete", kind)  # noqa: B010 - shtab reads `complete`, which argparse does not declare
    print(shtab.complete(parser, options.shell))
    return 0
