"""Sign a run and verify it: `SHA256SUMS` covers its files including `signed.json`, `SHA256SUMS.sig` covers `SHA256SUMS`."""

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
from fleet.report.formats import FORMATS
from fleet.report.formatting import clean, status
from fleet.signature import ssh, views
from fleet.signature.rejudged import Judge, Rules, digests, judge_again
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
"""Exit codes of `verify`: unchanged and confirmed; changed; unchanged, but the judgement cannot be repeated here."""
_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of a verification."""

    code: int
    signer: str = ""
    statement: Mapping[str, Any] = field(default_factory=dict)
    files: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sign(run_dir: Path, key: Path, rules: Rules, judge: Judge) -> tuple[FleetReport, int, tuple[str, ...]]:
    """Sign the run after judging it and rendering its views again, so that the signed report matches the records.

    Returns:
        The report, the number of files with a checksum, and notes on files that could not be rendered again.

    Raises:
        RunError: there is no report, it or a view of it does not match the records, a file changed meanwhile, or the key
            cannot be used.
        HeldError: the run is in progress.
    """
    owner = run_lock.holder(run_dir)
    if owner and owner.lives():
        raise HeldError(
            f"{run_dir}: run locked by {owner.who()} since {owner.since}: sign it after its report is written"
        )
    before = sums(run_dir)  # first, so that exactly the judged files are signed
    rejudged = judge_again(run_dir, rules, judge)
    if rejudged.differences:
        raise RunError(
            f"{run_dir}: report.json does not match the records under these criteria and waivers: "
            f"{rejudged.differences[0]}{_more(rejudged.differences)}: run rackproof report {run_dir}, read it, then sign"
        )
    compared = views.compare_views(run_dir, rejudged.report, before)
    if compared.differ:
        raise RunError(
            f"{run_dir}: {', '.join(compared.differ)}: does not match report.json: run "
            f"{' '.join(['rackproof report', str(run_dir), *_flags(compared)])}, read it, then sign"
        )
    statement = _statement(run_dir, rejudged.report, rules)
    text = json.dumps(statement, ensure_ascii=False, indent=1) + "\n"
    _refuse_changed(run_dir, before)
    checksums = {**before, STATEMENT: hashlib.sha256(text.encode()).hexdigest()}
    signed = as_text(dict(sorted(checksums.items())))
    signature = ssh.sign(signed.encode(), key)
    # Remove the old signature first, so that checksums and signature of two signings never lie side by side.
    (run_dir / SIGNATURE).unlink(missing_ok=True)
    documents.write_text(run_dir / STATEMENT, text)
    documents.write_text(run_dir / SUMS, signed)
    documents.write_text(run_dir / SIGNATURE, signature)
    return rejudged.report, len(checksums), _not_rendered(compared)


def _refuse_changed(run_dir: Path, before: Mapping[str, str]) -> None:
    after = sums(run_dir)
    if changed := sorted({path for path, _ in before.items() ^ after.items()}):
        raise RunError(
            f"{run_dir}: {clean(changed[0])}{_more(changed)} changed while the run was judged: wait until no process writes "
            "to the run directory, then sign"
        )


def _flags(compared: views.Compared) -> list[str]:
    """Return the flags with which `rackproof report` writes the files that differ."""
    return sorted({FORMATS[name].only_with for name in compared.differ} - {""})


def _not_rendered(compared: views.Compared) -> tuple[str, ...]:
    return tuple(f"{name} was not rendered again: {why}" for name, why in compared.not_rendered.items())


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
    """Check that the run is unchanged, that an allowed signer signed it, and that its records give its report.

    Args:
        run_dir: directory of the run.
        allowed: file of allowed signers.
        judge: judges the run again; None: only checksums and signature are checked.
        identity: the required signer; None: any allowed signer.
        rules: used in place of those that the signer named; None: those of the signer.

    Raises:
        RunError: the run is not signed, or it cannot be verified here.
    """
    if not (run_dir / SUMS).exists() or not (run_dir / SIGNATURE).exists():
        raise RunError(f"{run_dir}: not signed: {SUMS} or {SIGNATURE} is missing: rackproof sign {run_dir} --key …")
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
    result = Verified(code=HOLDS, signer=signer, statement=statement, files=len(listed))
    signed_rules = Rules(criteria=tuple(statement["criteria"]), waivers=tuple(statement["waivers"]))
    return _with_judgement(result, run_dir, rules or signed_rules, judge, listed) if judge else result


def _changed(run_dir: Path, listed: Mapping[str, str]) -> list[str]:
    """Return a line for each file that is not as it was signed."""
    return [f"{what}: {path}" for what, path in _changes(run_dir, listed)]


def _changes(run_dir: Path, listed: Mapping[str, str]) -> list[tuple[str, str]]:
    """List the files that are missing, added or changed since signing, each with its path."""
    changes = []
    present = set(files(run_dir))
    for path in sorted(listed.keys() | present):
        if path not in present:
            changes.append(("missing", clean(path)))
        elif path not in listed:
            changes.append(("not signed", clean(path)))
        else:
            try:
                if digest(run_dir / path) != listed[path]:
                    changes.append(("changed", clean(path)))
            except RunError as error:
                changes.append(("changed", clean(str(error))))
    return changes


def _with_judgement(result: Verified, run_dir: Path, rules: Rules, judge: Judge, listed: Mapping[str, str]) -> Verified:
    """Judge the run again. A difference proves nothing if packs, waivers or Rackproof changed as well."""
    try:
        current = digests(run_dir, rules)
        rejudged = judge_again(run_dir, rules, judge)
    except UsageError as error:
        return replace(result, code=UNSURE, notes=(f"not judged again: {error}",))
    notes = _changed_rules(result.statement, current)
    if not rejudged.differences:
        same = f"judged again: the records {'still ' if notes else ''}give this report"
        return _with_views(replace(result, notes=(*notes, same)), run_dir, rejudged.report, listed)
    if notes:
        return replace(result, code=UNSURE, notes=(*notes, *(f"judged again: {text}" for text in rejudged.differences)))
    problems = tuple(f"report.json does not match the records: {text}" for text in rejudged.differences)
    return replace(result, code=BROKEN, problems=problems)


def _with_views(result: Verified, run_dir: Path, report: FleetReport, listed: Mapping[str, str]) -> Verified:
    """Render the views again, if this is the version that wrote them."""
    if result.statement["rackproof"] != VERSION:
        return replace(
            result, notes=(*result.notes, "views not rendered again: another version of Rackproof wrote them")
        )
    compared = views.compare_views(run_dir, report, listed)
    result = replace(result, notes=(*result.notes, *_not_rendered(compared)))
    problems = tuple(f"{name} does not match report.json" for name in compared.differ if not FORMATS[name].library)
    if problems:
        return replace(result, code=BROKEN, problems=problems)
    unsure = tuple(
        f"{name} differs when written again: another version of {FORMATS[name].library}?" for name in compared.differ
    )
    return replace(result, code=UNSURE, notes=(*result.notes, *unsure)) if unsure else result


def _changed_rules(statement: Mapping[str, Any], current: Mapping[str, str]) -> tuple[str, ...]:
    """Describe what changed in packs, waivers and Rackproof since the run was signed."""
    signed: Mapping[str, str] = statement["packs"]
    changed = sorted(name for name in {*signed, *current} if signed.get(name) != current.get(name))
    notes = [f"packs and waivers that changed since signing: {', '.join(changed)}"] if changed else []
    if statement["rackproof"] != VERSION:
        notes.append(f"signed with Rackproof {statement['rackproof']}, judged again with {VERSION}")
    return tuple(notes)


def outdated(run_dir: Path) -> str:
    """Return a warning if the run was signed and its files changed since; else an empty string."""
    with contextlib.suppress(RunError, OSError):
        if (run_dir / SIGNATURE).exists() and (run_dir / SUMS).exists():
            listed = from_text(read(run_dir / SUMS).decode("utf-8", errors="replace"))
            changed = [path for _, path in _changes(run_dir, listed)]
            if changed:
                names = f"{', '.join(changed[:_SHOWN])}{_more(changed, _SHOWN)}"
                return f"{run_dir} changed since it was signed: {names}: read it, then run rackproof sign {run_dir} --key …"
    return ""


def _more(items: Sequence[str], shown: int = 1) -> str:
    return f" (and {len(items) - shown} more)" if len(items) > shown else ""
