"""Signing a run and verifying it: `SHA256SUMS` over its files, `signed.json` among them, `SHA256SUMS.sig` over the sums."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet.records import run_lock
from fleet.report.format import clean, status
from fleet.report.formats import PARQUET
from fleet.signature import ssh, views
from fleet.signature.rejudged import Judge, Rules, digests, rejudged
from fleet.signature.sums import (
    LEFT_OUT,
    MOST_BYTES,
    SIGNATURE,
    STATEMENT,
    SUMS,
    as_text,
    digest,
    files,
    from_text,
    read,
    sums,
)
from schemas import VERSION, documents
from schemas.errors import HeldError, RunError, UsageError
from schemas.reports import FleetReport

SCHEMA = "rackproof.signed/1"
HOLDS, BROKEN, UNSURE = 0, 1, 2
"""Exit codes of `verify`: what was signed is there; it is not; it is, and its judgement cannot be repeated here."""
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What became of a verification."""

    code: int
    signer: str = ""
    statement: Mapping[str, Any] = field(default_factory=dict)
    files: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sign(run_dir: Path, key: Path, rules: Rules, judge: Judge) -> tuple[FleetReport, int, tuple[str, ...]]:
    """Signs the run, after judging it again and making its views again: nobody signs what the records do not give.

    Returns:
        The report, of how many files sums were taken, and what was signed unseen.

    Raises:
        RunError: there is no report, it or a view of it is not what the records give, a file changed meanwhile, or the key
            cannot be used.
        HeldError: the run goes on.
    """
    there = run_lock.holder(run_dir)
    if there and there.lives():
        raise HeldError(
            f"{run_dir}: run locked by {there.who()} since {there.since}: sign it after its report is written"
        )
    # Before anything is read: what is judged then must be what is signed.
    before = sums(run_dir)
    again = rejudged(run_dir, rules, judge)
    if again.differences:
        raise RunError(
            f"{run_dir}: report.json is not what the records give by these criteria and waivers: {again.differences[0]}"
            f"{_more(again.differences)}: rackproof report {run_dir}, read it, then sign"
        )
    seen = views.compared(run_dir, again.report, before)
    if seen.differ:
        raise RunError(
            f"{run_dir}: {', '.join(seen.differ)}: not what this Rackproof makes of report.json: "
            f"rackproof report {run_dir}{' --parquet' * (PARQUET in seen.differ)}, read it, then sign"
        )
    statement = _statement(run_dir, again.report, rules)
    text = json.dumps(statement, ensure_ascii=False, indent=1) + "\n"
    _refuse_changed(run_dir, before)
    found = {**before, STATEMENT: hashlib.sha256(text.encode()).hexdigest()}
    signed = as_text(dict(sorted(found.items())))
    signature = ssh.sign(signed.encode(), key)
    # The old signature goes first: at no moment do sums and signature of two signings lie together and look whole.
    (run_dir / SIGNATURE).unlink(missing_ok=True)
    documents.write_text(run_dir / STATEMENT, text)
    documents.write_text(run_dir / SUMS, signed)
    documents.write_text(run_dir / SIGNATURE, signature)
    return again.report, len(found), _unmade(seen)


def _refuse_changed(run_dir: Path, before: Mapping[str, str]) -> None:
    after = sums(run_dir)
    if changed := sorted({path for path, _ in before.items() ^ after.items()}):
        raise RunError(
            f"{run_dir}: {clean(changed[0])}{_more(changed)} changed while the run was judged: let whoever writes there end, "
            "then sign"
        )


def _unmade(seen: views.Compared) -> tuple[str, ...]:
    return tuple(f"{name} was not made again: {why}" for name, why in seen.unmade.items())


def _statement(run_dir: Path, report: FleetReport, rules: Rules) -> dict[str, Any]:
    statement = {
        "schema": SCHEMA,
        "run_id": report.run_id,
        "mark": report.mark,
        "decision": report.decision,
        "status": status(report),
        "signed_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "rackproof": VERSION,
        "criteria": list(rules.criteria),
        "waivers": list(rules.waivers),
        "packs": digests(run_dir, rules),
        "left_out": dict(LEFT_OUT),
    }
    documents.validate(statement, "signed", source="our own statement")
    return statement


def verify(
    run_dir: Path,
    allowed: Path,
    judge: Judge | None,
    *,
    identity: str | None = None,
    rules: Rules | None = None,
) -> Verified:
    """Whether the run is what was signed, by somebody who may, and whether its records give its report.

    Args:
        run_dir: directory of the run.
        allowed: file of allowed signers.
        judge: judges the run again; None: it is not.
        identity: whose signature it must be; None: anybody's in that file.
        rules: in place of those that the signer named; None: those.

    Raises:
        RunError: the run is not signed, or nothing can be verified here.
    """
    if not (run_dir / SUMS).exists() or not (run_dir / SIGNATURE).exists():
        raise RunError(
            f"{run_dir}: not signed, there is no {SUMS} with a {SIGNATURE}: rackproof sign {run_dir} --key …"
        )
    data = read(run_dir / SUMS)
    try:
        signer = str(ssh.verify(data, run_dir / SIGNATURE, allowed, identity))
    except ssh.SignatureError as error:
        return Verified(code=BROKEN, problems=(f"signature: {error}",))
    listed = from_text(data.decode("utf-8", errors="replace"))
    problems = _changed(run_dir, listed)
    if problems:
        return Verified(code=BROKEN, signer=signer, files=len(listed), problems=tuple(problems))
    statement = documents.read(run_dir / STATEMENT, "signed", max_bytes=MOST_BYTES)
    told = Verified(code=HOLDS, signer=signer, statement=statement, files=len(listed))
    theirs = Rules(criteria=tuple(statement["criteria"]), waivers=tuple(statement["waivers"]))
    return _judged_again(told, run_dir, rules or theirs, judge, listed) if judge else told


def _changed(run_dir: Path, listed: Mapping[str, str]) -> list[str]:
    """Return a line for each file that is not as it was signed."""
    return [f"{what}: {path}" for what, path in _changes(run_dir, listed)]


def _changes(run_dir: Path, listed: Mapping[str, str]) -> list[tuple[str, str]]:
    """What is not as it was signed, by its path."""
    found = []
    there = set(files(run_dir))
    for path in sorted(listed.keys() | there):
        if path not in there:
            found.append(("missing", clean(path)))
        elif path not in listed:
            found.append(("not signed", clean(path)))
        else:
            try:
                if digest(run_dir / path) != listed[path]:
                    found.append(("changed", clean(path)))
            except RunError as error:
                found.append(("changed", clean(str(error))))
    return found


def _judged_again(told: Verified, run_dir: Path, rules: Rules, judge: Judge, listed: Mapping[str, str]) -> Verified:
    """The verification with what judging the records again gives; that it differs says nothing where the rules differ too."""
    try:
        here = digests(run_dir, rules)
        again = rejudged(run_dir, rules, judge)
    except UsageError as error:
        return replace(told, code=UNSURE, notes=(f"not judged again: {error}",))
    notes = _since(told.statement, here)
    if not again.differences:
        same = "judged again, the records give this report" + (" all the same" if notes else "")
        return _seen_again(replace(told, notes=(*notes, same)), run_dir, again.report, listed)
    if notes:
        return replace(told, code=UNSURE, notes=(*notes, *(f"judged again: {text}" for text in again.differences)))
    wrong = tuple(f"report.json is not what the records give: {text}" for text in again.differences)
    return replace(told, code=BROKEN, problems=wrong)


def _seen_again(told: Verified, run_dir: Path, report: FleetReport, listed: Mapping[str, str]) -> Verified:
    """The verification with what making the views of the report again gives; only by the version that made them."""
    if told.statement["rackproof"] != VERSION:
        return replace(
            told, notes=(*told.notes, "its views were not made again: another version writes them otherwise")
        )
    seen = views.compared(run_dir, report, listed)
    told = replace(told, notes=(*told.notes, *_unmade(seen)))
    wrong = tuple(f"{name} is not what report.json gives" for name in seen.differ if name != PARQUET)
    if wrong:
        return replace(told, code=BROKEN, problems=wrong)
    if seen.differ:
        return replace(
            told, code=UNSURE, notes=(*told.notes, f"{PARQUET}, made again, is another: by another pyarrow?")
        )
    return told


def _since(statement: Mapping[str, Any], here: Mapping[str, str]) -> tuple[str, ...]:
    """What of the rules is not what it was when the run was signed."""
    signed: Mapping[str, str] = statement["packs"]
    changed = sorted(name for name in {*signed, *here} if signed.get(name) != here.get(name))
    found = [f"packs and waivers that changed since: {', '.join(changed)}"] if changed else []
    if statement["rackproof"] != VERSION:
        found.append(f"signed with Rackproof {statement['rackproof']}, judged again with {VERSION}")
    return tuple(found)


def outdated(run_dir: Path) -> str:
    """A line for people where the run was signed and its reports are no longer those that were; else nothing."""
    with contextlib.suppress(RunError, OSError):
        if (run_dir / SIGNATURE).exists() and (run_dir / SUMS).exists():
            listed = from_text(read(run_dir / SUMS).decode("utf-8", errors="replace"))
            changed = [path for _, path in _changes(run_dir, listed)]
            if changed:
                which = f"{', '.join(changed[:_SHOWN])}{_more(changed, _SHOWN)}"
                return (
                    f"{run_dir} was signed, and is no longer what was signed: {which}: "
                    f"read it, then sign it again (rackproof sign {run_dir} --key …)"
                )
    return ""


def _more(items: Sequence[str], shown: int = 1) -> str:
    return f" (and {len(items) - shown} more)" if len(items) > shown else ""
