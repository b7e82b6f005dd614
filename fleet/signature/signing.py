"""Sign a run and verify it.

`SHA256SUMS` has the checksums of all files in the run directory except UNSIGNED_FILES. `SHA256SUMS.sig` is the signature of
`SHA256SUMS`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet.records import run_lock
from fleet.report.formats import FORMATS
from fleet.report.formatting import clean, status
from fleet.signature import ssh, views
from fleet.signature.rejudged import Judge, Rules, judge_again, rule_digests
from fleet.signature.sums import (
    MAX_SUMS_BYTES,
    SIGNATURE,
    STATEMENT,
    SUMS,
    UNSIGNED_FILES,
    digest,
    files,
    format_sums,
    hash_files,
    parse_sums,
    read,
)
from schemas import VERSION, documents
from schemas.errors import HeldError, RunError, UsageError
from schemas.reports import FleetReport
from schemas.times import epoch_seconds

SCHEMA = "rackproof.signed/1"
VALID, CHANGED, UNCONFIRMED = 0, 1, 2
"""Exit codes of `verify`.

VALID: nothing is wrong. CHANGED: the signature, a file or the report is wrong. UNCONFIRMED: signature and files are right, but it
could not be confirmed that the report matches the records.
"""
_MAX_NAMES = 5
_EXPIRED = (
    "the signer is no longer allowed, but was allowed at {}, the time of signing by the clock of the signer's machine"
)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a verification."""

    code: int
    """VALID, CHANGED or UNCONFIRMED."""
    signer: str = ""
    """Identity and key of the signer; empty if the signature is invalid."""
    statement: Mapping[str, Any] = field(default_factory=dict)
    """The content of signed.json; empty if the signature or a file is wrong."""
    files: int = 0
    """Number of files with a checksum."""
    problems: tuple[str, ...] = ()
    """What is wrong with the signature, the files or the report."""
    notes: tuple[str, ...] = ()
    """Results of judging and rendering again, what could not be judged or rendered again, and that the signer has expired."""


def sign(run_dir: Path, key: Path, rules: Rules, judge: Judge) -> tuple[FleetReport, int, tuple[str, ...]]:
    """Judge the run and render its report again. If the results equal the files in the run directory, sign the run.

    Returns:
        The report, the number of files with a checksum, and notes on files that could not be rendered again.

    Raises:
        RunError: report.json is missing or does not match the records, a report file does not match report.json, a file
            changed meanwhile, or the key cannot be used.
        HeldError: the run is in progress.
        UsageError: the key file does not exist, or a pack or waiver file cannot be read.
    """
    owner = run_lock.holder(run_dir)
    if owner and owner.is_running():
        raise HeldError(
            f"{run_dir}: run locked by {owner.who()} since {owner.since}: sign it after its report is written"
        )
    before = hash_files(run_dir)  # before judging, so that a file which changes meanwhile is noticed
    rejudged = judge_again(run_dir, rules, judge)
    if rejudged.differences:
        raise RunError(
            f"{run_dir}: report.json does not match the records under these criteria and waivers: "
            f"{rejudged.differences[0]}{_more(rejudged.differences)}: give the criteria and waivers with which it was written "
            f"(--criteria, --waivers), or run `{shlex.join(['rackproof', 'report', str(run_dir)])}` again"
            f"{_with_history(rejudged.report)} and read it; then sign"
        )
    compared = views.compare_views(run_dir, rejudged.report, before)
    if compared.differ:
        raise RunError(
            f"{run_dir}: {', '.join(compared.differ)}: does not match report.json: run "
            f"{shlex.join(['rackproof', 'report', str(run_dir), *_flags(compared, rules)])}{_with_history(rejudged.report)}, "
            "check the report, then sign"
        )
    statement = _statement(run_dir, rejudged.report, rules)
    text = json.dumps(statement, ensure_ascii=False, indent=1) + "\n"
    _refuse_changed(run_dir, before)
    checksums = {**before, STATEMENT: hashlib.sha256(text.encode()).hexdigest()}
    sums_text = format_sums(dict(sorted(checksums.items())))
    signature = ssh.sign(sums_text.encode(), key)
    # Remove the old signature first, so that the directory never has the new checksums with the old signature.
    (run_dir / SIGNATURE).unlink(missing_ok=True)
    documents.write_text(run_dir / STATEMENT, text)
    documents.write_text(run_dir / SUMS, sums_text)
    documents.write_text(run_dir / SIGNATURE, signature)
    return rejudged.report, len(checksums), _not_rendered(compared)


def _refuse_changed(run_dir: Path, before: Mapping[str, str]) -> None:
    after = hash_files(run_dir)
    if changed := sorted({path for path, _ in before.items() ^ after.items()}):
        raise RunError(
            f"{run_dir}: {clean(changed[0])}{_more(changed)} changed while the run was judged: wait until no process writes "
            "to the run directory, then sign"
        )


def _flags(compared: views.Compared, rules: Rules) -> list[str]:
    """Return the flags that `rackproof report` needs to write the files that differ, by these rules."""
    chosen = [("--criteria", name) for name in rules.criteria] + [("--waivers", name) for name in rules.waivers]
    formats = sorted({FORMATS[name].only_with for name in compared.differ} - {""})
    return [*formats, *(word for option in chosen for word in option)]


def _with_history(report: FleetReport) -> str:
    """Return that `rackproof report` needs --history too; empty if the report has no comparison with former runs."""
    return " (add --history, or the report loses its comparison with former runs)" if report.history else ""


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
        "packs": rule_digests(run_dir, rules),
        "left_out": dict(UNSIGNED_FILES),
    }
    documents.validate(statement, "signed", source="generated statement")
    return statement


def verify(
    run_dir: Path,
    allowed: Path,
    judge: Judge | None,
    *,
    identity: str | None = None,
    rules: Rules | None = None,
) -> Verification:
    """Check that an allowed signer signed the run, that its files are unchanged, and that its report matches its records.

    Args:
        run_dir: directory of the run.
        allowed: file of allowed signers.
        judge: function that judges the run again; None: check only the signature and the checksums.
        identity: the required signer; None: any allowed signer.
        rules: packs and waivers with which the run is judged again; None: those with which the signer judged it.

    Raises:
        RunError: the run is not signed, a file needed for the verification cannot be read, or ssh-keygen is missing or too old.
        UsageError: there is no file of allowed signers.
    """
    if not (run_dir / SUMS).exists() or not (run_dir / SIGNATURE).exists():
        raise RunError(f"{run_dir}: not signed: {SUMS} or {SIGNATURE} is missing: run rackproof sign {run_dir} --key …")
    data, now = read(run_dir / SUMS), time.time()
    signed_at = min(_signed_at(run_dir, data) or now, now)  # a time in the future is wrong
    try:
        signer = str(ssh.verify(data, run_dir / SIGNATURE, allowed, identity, signed_at))
    except ssh.SignatureError as error:
        return Verification(code=CHANGED, problems=(f"signature: {error}",))
    listed = parse_sums(data.decode("utf-8", errors="replace"))
    problems = tuple(f"{kind}: {path}" for kind, path in _changes(run_dir, listed))
    if problems:
        return Verification(code=CHANGED, signer=signer, files=len(listed), problems=problems)
    statement = documents.read(run_dir / STATEMENT, "signed", max_bytes=MAX_SUMS_BYTES)
    result = Verification(code=VALID, signer=signer, statement=statement, files=len(listed))
    try:
        ssh.verify(data, run_dir / SIGNATURE, allowed, identity, now)
    except ssh.SignatureError:
        result = replace(result, notes=(_EXPIRED.format(statement["signed_at"]),))
    signed_rules = Rules(criteria=tuple(statement["criteria"]), waivers=tuple(statement["waivers"]))
    return _with_judgement(result, run_dir, rules or signed_rules, judge, listed) if judge else result


def _signed_at(run_dir: Path, data: bytes) -> float | None:
    """Return the time in signed.json in seconds since 1970; None if `data` (SHA256SUMS) lacks the checksum of signed.json.

    If the signature of `data` is valid, it covers this time too.
    """
    with contextlib.suppress(RunError, ValueError):
        if parse_sums(data.decode("utf-8", errors="replace")).get(STATEMENT) == digest(run_dir / STATEMENT):
            statement = documents.read(run_dir / STATEMENT, "signed", max_bytes=MAX_SUMS_BYTES)
            return max(epoch_seconds(str(statement["signed_at"])), 0.0)
    return None


def _changes(run_dir: Path, listed: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return each difference between the run directory and `listed` (path -> checksum) as kind and text.

    The kind is `missing`, `not signed` (a file without a checksum) or `changed`. The text is the path, or the reason if the file
    cannot be read.
    """
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


def _with_judgement(
    result: Verification, run_dir: Path, rules: Rules, judge: Judge, listed: Mapping[str, str]
) -> Verification:
    """Judge the run again and add the result.

    If the report does not match the records, the result is CHANGED. But if packs, waivers or Rackproof have changed since the run
    was signed, this may be the reason, so the result is UNCONFIRMED.
    """
    try:
        current = rule_digests(run_dir, rules)
        rejudged = judge_again(run_dir, rules, judge)
    except UsageError as error:
        return replace(result, code=UNCONFIRMED, notes=(*result.notes, f"not judged again: {error}"))
    notes = _changed_rules(result.statement, current)
    if not rejudged.differences:
        same = f"judged again: the report {'still ' if notes else ''}matches the records"
        if rejudged.report.history:
            same += "; its comparison with former runs is signed, but cannot be recomputed from the records"
        return _with_views(replace(result, notes=(*result.notes, *notes, same)), run_dir, rejudged.report, listed)
    if notes:
        differences = (f"judged again: {text}" for text in rejudged.differences)
        return replace(result, code=UNCONFIRMED, notes=(*result.notes, *notes, *differences))
    problems = tuple(f"report.json does not match the records: {text}" for text in rejudged.differences)
    return replace(result, code=CHANGED, problems=problems)


def _with_views(result: Verification, run_dir: Path, report: FleetReport, listed: Mapping[str, str]) -> Verification:
    """Render the files of the report again and add the result, if this version of Rackproof signed the run."""
    if result.statement["rackproof"] != VERSION:
        return replace(
            result,
            notes=(*result.notes, "report files not rendered again: another version of Rackproof signed the run"),
        )
    compared = views.compare_views(run_dir, report, listed)
    result = replace(result, notes=(*result.notes, *_not_rendered(compared)))
    problems = tuple(f"{name} does not match report.json" for name in compared.differ if not FORMATS[name].library)
    if problems:
        return replace(result, code=CHANGED, problems=problems)
    notes = tuple(
        f"{name} differs when rendered again: perhaps another version of {FORMATS[name].library} wrote it"
        for name in compared.differ
    )
    return replace(result, code=UNCONFIRMED, notes=(*result.notes, *notes)) if notes else result


def _changed_rules(statement: Mapping[str, Any], current: Mapping[str, str]) -> tuple[str, ...]:
    """Describe what changed since the run was signed: path or content of packs and waivers, and the version of Rackproof."""
    signed: Mapping[str, str] = statement["packs"]
    changed = sorted(name for name in {*signed, *current} if signed.get(name) != current.get(name))
    notes = (
        [f"packs and waivers that differ in path or content from the signed ones: {', '.join(changed)}"]
        if changed
        else []
    )
    if statement["rackproof"] != VERSION:
        notes.append(f"signed with Rackproof {statement['rackproof']}, judged again with {VERSION}")
    return tuple(notes)


def warn_if_changed(run_dir: Path) -> str:
    """Return a warning if files of a signed run changed or cannot be read; otherwise an empty string."""
    with contextlib.suppress(RunError, OSError):
        if (run_dir / SIGNATURE).exists() and (run_dir / SUMS).exists():
            listed = parse_sums(read(run_dir / SUMS).decode("utf-8", errors="replace"))
            changed = [path for _, path in _changes(run_dir, listed)]
            if changed:
                names = f"{', '.join(changed[:_MAX_NAMES])}{_more(changed, _MAX_NAMES)}"
                return (
                    f"{run_dir}: changed since it was signed, or cannot be read: {names}: check the report, then run "
                    f"rackproof sign {run_dir} --key …"
                )
    return ""


def _more(items: Sequence[str], shown: int = 1) -> str:
    return f" (and {len(items) - shown} more)" if len(items) > shown else ""
