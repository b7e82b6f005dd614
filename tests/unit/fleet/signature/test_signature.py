"""Test `rackproof sign` and `rackproof verify` with the real ssh-keygen.

`verify` names every changed file, rejects keys that are not allowed, and judges the run again to check the report.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.records import run_lock
from fleet.report import hosts
from fleet.report.formats import FORMATS
from fleet.report.judge_run import judge_report
from fleet.signature import signing
from fleet.signature.rejudged import Rules
from fleet.signature.sums import UNSIGNED_FILES, parse_sums
from rackproof.main import main
from schemas import documents
from schemas.errors import RunError
from schemas.reports import FleetReport
from tests import accepted
from tests.unit.fleet.planning.test_plan import ROOT
from tests.unit.fleet.report.test_report import write_run

PLAN = accepted.small_plan("h1", "h2")
PACK = """---
schema: rackproof.criteria/1
summary: site
criteria:
  - id: stress-site
    name: stress.throughput
    scope: gpu
    where: {dtype: bf16}
    operator: ge
    value: LIMIT
    unit: FLOP/s
    action: inspect_hardware
    source: "a test limit"
"""


def key(directory: Path, name: str, passphrase: str = "") -> Path:
    """Create an SSH key pair, and return the path of the private key."""
    path = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two keys, and a file that allows only the first of them to sign."""
    directory = tmp_path_factory.mktemp("keys")
    for name in ("alice", "mallory"):
        key(directory, name)
    allowed = f'alice@example.com namespaces="rackproof" {(directory / "alice.pub").read_text()}'
    (directory / "signers").write_text(allowed)
    return directory


@pytest.fixture(scope="module")
def signed(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "r1"
    write_run(directory, PLAN)
    assert main(["report", str(directory)]) == 0
    assert main(["sign", str(directory), "--key", str(keys / "alice")]) == 0
    return directory


@pytest.fixture
def run(signed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(signed, tmp_path / "r1"))


@pytest.fixture
def verify(keys: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def call(run: Path, *options: str) -> tuple[int, str]:
        """Return exit code and output of `rackproof verify`."""
        capsys.readouterr()
        code = main(["verify", str(run), "--allowed-signers", str(keys / "signers"), *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


Verify = Callable[..., tuple[int, str]]


def test_signed_run_verifies_and_names_its_signer(run: Path, verify: Verify) -> None:
    code, output = verify(run)
    assert code == 0
    assert "run r1: PASS" in output
    assert "signed by alice@example.com (ED25519 SHA256:" in output
    assert "the report matches the records" in output


def test_signing_and_verifying_need_no_history_directory(run: Path, keys: Path, verify: Verify) -> None:
    # The first report creates the history directory. Only the second report has a section on former runs.
    for _ in range(2):
        assert main(["report", str(run), "--history", str(run.parent / "h")]) == 0
    shutil.rmtree(run.parent / "h")
    assert "history" in json.loads((run / "report.json").read_text())
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 0
    code, output = verify(run)
    assert code == 0
    assert "its comparison with former runs is signed, but cannot be recomputed from the records" in output


def test_sha256sum_and_ssh_keygen_verify_the_run(run: Path, keys: Path) -> None:
    assert (
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=run, check=False).returncode
        == 0
    )
    command = ["ssh-keygen", "-Y", "verify", "-n", "rackproof", "-I", "alice@example.com"]
    command += ["-f", str(keys / "signers"), "-s", str(run / "SHA256SUMS.sig")]
    sums = (run / "SHA256SUMS").read_bytes()
    assert subprocess.run(command, input=sums, check=False, capture_output=True).returncode == 0


def test_sha256sums_lists_every_file_of_the_run_except_itself_and_its_signature(run: Path) -> None:
    listed = set(parse_sums((run / "SHA256SUMS").read_text()))
    present = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert present - listed == {"SHA256SUMS", "SHA256SUMS.sig"}
    assert {"plan.json", "hosts/h1.json", "hosts/h2.json", "report.json", "report.html", "observations.csv"} <= listed
    statement = documents.read(run / "signed.json", "signed")
    assert statement["left_out"] == dict(UNSIGNED_FILES)
    assert (statement["decision"], statement["mark"]) == ("accepted", "")


def append(path: Path) -> None:
    """Append a space to the file."""
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("hosts/h1.json", append, "changed: hosts/h1.json"),
        ("report.html", append, "changed: report.html"),
        ("signed.json", append, "changed: signed.json"),
        ("hosts/h2.json", Path.unlink, "missing: hosts/h2.json"),
        ("hosts/h3.json", Path.touch, "not signed: hosts/h3.json"),
        (".report.html.abcd1234", Path.touch, "not signed: .report.html.abcd1234"),
        ("notes/x.txt", lambda path: path.parent.mkdir() or path.touch(), "not signed: notes/x.txt"),
        (
            "junit.xml",
            lambda path: path.unlink() or path.symlink_to("/dev/zero"),
            "junit.xml: Too many levels of symbolic links",
        ),
        ("report.md", lambda path: path.unlink() or os.mkfifo(path), "report.md: not a regular file"),
        ("SHA256SUMS", append, "signature: "),
        ("SHA256SUMS", lambda path: path.write_text(""), "signature: "),
        ("SHA256SUMS.sig", lambda path: path.write_text("nonsense"), "signature: "),
    ],
)
def test_changed_missing_or_added_file_is_reported(
    run: Path, verify: Verify, path: str, change: Callable[[Path], object], message: str
) -> None:
    change(run / path)
    code, output = verify(run)
    assert code == 1
    assert message in output
    assert "NOT VALID" in output


def test_files_that_the_signature_does_not_cover_may_change(run: Path, verify: Verify) -> None:
    (run / "journal.jsonl").write_text("{}\n")
    (run / "rma" / "x").mkdir(parents=True)
    (run / "rma" / "x" / "README.md").touch()
    assert main(["report", str(run), "--host", "h1"]) == 0
    assert (run / "pages" / "h1.html").exists()
    assert verify(run, "--no-judge")[0] == 0


def test_key_that_is_not_allowed_fails_verification(run: Path, keys: Path, verify: Verify) -> None:
    assert main(["sign", str(run), "--key", str(keys / "mallory")]) == 0
    code, output = verify(run)
    assert code == 1
    assert "the allowed signers have no entry for this key" in output


def sign_at(run: Path, keys: Path, time: str) -> None:
    """Sign the run with the key of alice, as `rackproof sign` would at this time."""
    text = (run / "signed.json").read_text()
    (run / "signed.json").write_text(json.dumps({**json.loads(text), "signed_at": time}))
    sums = (run / "SHA256SUMS").read_text()
    before, after = (
        hashlib.sha256(content.encode()).hexdigest() for content in (text, (run / "signed.json").read_text())
    )
    (run / "SHA256SUMS").write_text(sums.replace(before, after))
    (run / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "rackproof", "-f", str(keys / "alice"), str(run / "SHA256SUMS")]
    subprocess.run(command, check=True, capture_output=True)


IN_2024 = "2024-06-15T12:00:00Z"


@pytest.mark.parametrize(
    ("time", "validity", "code", "is_noted"),
    [
        (IN_2024, 'valid-before="20240701"', 0, True),
        (IN_2024, 'valid-after="20240601",valid-before="20240701"', 0, True),
        (IN_2024, 'valid-after="20240601"', 0, False),
        (IN_2024, 'valid-before="20240601"', 1, False),
        (IN_2024, 'valid-after="20240701"', 1, False),
        ("2199-01-01T00:00:00Z", 'valid-before="20240701"', 1, False),
        ("2199-01-01T00:00:00Z", 'valid-after="21980101"', 1, False),
        ("2199-01-01T00:00:00Z", 'valid-before="21980101"', 0, False),
        ("0001-01-01T00:00:00Z", 'valid-before="20240701"', 1, False),
    ],
)
def test_key_must_be_valid_at_the_time_in_the_signed_statement(
    run: Path, keys: Path, capsys: pytest.CaptureFixture[str], time: str, validity: str, code: int, *, is_noted: bool
) -> None:
    """A time that is in the future, or not after 1970, is not used: the key must then be valid now."""
    sign_at(run, keys, time)
    allowed = f'alice@example.com namespaces="rackproof",{validity} {(keys / "alice.pub").read_text()}'
    (run.parent / "signers").write_text(allowed)
    assert main(["verify", str(run), "--no-judge", "--allowed-signers", str(run.parent / "signers")]) == code
    captured = capsys.readouterr()
    assert ("the signer is no longer allowed" in captured.out) is is_noted
    assert ("the entry was not valid when the run was signed" in captured.err) is bool(code)


@pytest.mark.parametrize("damage", ["another time", "not listed", "no checksums"])
def test_time_that_the_signature_does_not_cover_is_not_used(
    run: Path, keys: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """The key expired in 2024. The signature covers no statement with an earlier time."""
    sums = (run / "SHA256SUMS").read_text()
    if damage == "another time":
        statement = {**json.loads((run / "signed.json").read_text()), "signed_at": IN_2024}
        (run / "signed.json").write_text(json.dumps(statement))
    else:
        sign_at(run, keys, IN_2024)
        lines = [line for line in sums.splitlines(keepends=True) if "signed.json" not in line]
        (run / "SHA256SUMS").write_text("".join(lines) if damage == "not listed" else "x\n")
        (run / "SHA256SUMS.sig").unlink()
        command = [
            "ssh-keygen",
            "-q",
            "-Y",
            "sign",
            "-n",
            "rackproof",
            "-f",
            str(keys / "alice"),
            str(run / "SHA256SUMS"),
        ]
        subprocess.run(command, check=True, capture_output=True)
    allowed = f'alice@example.com namespaces="rackproof",valid-before="20240701" {(keys / "alice.pub").read_text()}'
    (run.parent / "signers").write_text(allowed)
    assert main(["verify", str(run), "--no-judge", "--allowed-signers", str(run.parent / "signers")]) == 1
    assert "the entry was not valid" in capsys.readouterr().err


def test_signature_with_another_namespace_is_rejected(run: Path, keys: Path, verify: Verify) -> None:
    (run / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(keys / "alice"), str(run / "SHA256SUMS")]
    subprocess.run(command, check=True, capture_output=True)
    assert verify(run)[0] == 1


def test_required_signer_must_be_the_signer_of_the_run(run: Path, verify: Verify) -> None:
    assert verify(run, "--no-judge", "--signer", "alice@example.com")[0] == 0
    code, output = verify(run, "--no-judge", "--signer", "bob@example.com")
    assert (code, "not by bob@example.com" in output) == (1, True)


@pytest.mark.parametrize(
    ("principals", "identity", "code"),
    [
        ("*@example.com", "alice@example.com", 0),
        ("?????@example.com", "alice@example.com", 0),
        ("bob@example.com,*@example.com", "alice@example.com", 0),
        ("!bob@example.com,*@example.com", "alice@example.com", 0),
        ("!bob@example.com,*@example.com", "bob@example.com", 1),
        ("*@example.com", "alice@example.org", 1),
        ("*@example.com", "alice", 1),
        ("*@example.com", "*", 1),
    ],
)
def test_required_signer_may_match_a_pattern_of_the_allowed_signers(
    run: Path, keys: Path, tmp_path: Path, verify: Verify, principals: str, identity: str, code: int
) -> None:
    signers = tmp_path / "signers"
    signers.write_text(f'{principals} namespaces="rackproof" {(keys / "alice.pub").read_text()}')
    result, output = verify(run, "--no-judge", "--allowed-signers", str(signers), "--signer", identity)
    assert result == code
    assert (f"signed by {identity} (ED25519" if code == 0 else f", not by {identity}") in output


def test_json_output_matches_exit_code(run: Path, verify: Verify) -> None:
    (run / "hosts" / "h2.json").unlink()
    code, output = verify(run, "--json")
    document = json.loads(output)
    assert (document["code"], document["problems"]) == (code, ["missing: hosts/h2.json"])


def test_report_that_differs_from_its_records_is_not_signed(
    run: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "hosts" / "h2.json").unlink()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 2
    output = capsys.readouterr().err
    assert "decision: accepted in report.json, incomplete when judged again" in output
    assert f"rackproof report {run}" in output


def test_run_with_a_changed_report_file_is_not_signed(
    keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "r1", PLAN)
    before = set((tmp_path / "r1").iterdir())
    assert main(["report", str(tmp_path / "r1")]) == 0
    written = {path for path in set((tmp_path / "r1").iterdir()) - before if path.name not in UNSIGNED_FILES}
    assert {path.name for path in written} == {"report.json", *FORMATS} - {"observations.parquet"}
    for path in written - {tmp_path / "r1" / "report.json"}:
        content = path.read_bytes()
        append(path)
        capsys.readouterr()
        assert main(["sign", str(tmp_path / "r1"), "--key", str(keys / "alice")]) == 2, path
        assert f"r1: {path.name}: does not match report.json: run rackproof report" in capsys.readouterr().err
        path.write_bytes(content)
    assert not (tmp_path / "r1" / "SHA256SUMS").exists()
    assert main(["sign", str(tmp_path / "r1"), "--key", str(keys / "alice")]) == 0


@pytest.mark.parametrize("options", [(), ("--all-observations",)])
def test_large_fleet_is_signed_with_and_without_all_observations(
    options: tuple[str, ...], keys: Path, tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "FULL_HOSTS", 1)  # so two hosts are a large fleet
    write_run(tmp_path / "r1", PLAN)
    assert main(["report", str(tmp_path / "r1"), *options]) == 0
    assert main(["sign", str(tmp_path / "r1"), "--key", str(keys / "alice")]) == 0
    assert verify(tmp_path / "r1")[0] == 0


def test_forged_report_page_is_detected_despite_a_valid_signature(run: Path, keys: Path, verify: Verify) -> None:
    (run / "report.html").write_text("<h1>All hosts are faster than ever</h1>")
    sign_without_judging(run, keys)
    code, output = verify(run)
    assert (code, "report.html does not match report.json" in output) == (1, True)
    assert verify(run, "--no-judge")[0] == 0


def test_parquet_is_signed_but_not_rendered_again_if_pyarrow_is_missing(
    run: Path, keys: Path, verify: Verify, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # makes `import pyarrow` fail, as if it were not installed
    (run / "observations.parquet").write_bytes(b"PAR1")
    capsys.readouterr()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 0
    reported = "observations.parquet was not rendered again: pyarrow is not installed here"
    assert reported in capsys.readouterr().out
    code, output = verify(run)
    assert (code, reported in output) == (0, True)


def test_report_files_of_another_version_are_not_rendered_again(
    run: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.signature.signing.VERSION", "99.0")
    code, output = verify(run)
    assert (code, "report files not rendered again: another version" in output) == (0, True)


def test_file_that_changes_during_judging_prevents_signing(run: Path, keys: Path) -> None:
    (run / "SHA256SUMS.sig").unlink()

    def judge_and_change_a_record(directory: Path, criteria: Sequence[str], waivers: Sequence[str]) -> FleetReport:
        report = judge_report(directory, criteria, waivers)
        append(directory / "hosts" / "h2.json")
        return report

    with pytest.raises(RunError, match=r"hosts/h2\.json changed while the run was judged"):
        signing.sign(run, keys / "alice", Rules(), judge_and_change_a_record)
    assert not (run / "SHA256SUMS.sig").exists()


@pytest.mark.parametrize("path", [".report.html.abcd1234", "hosts/.h2.json.a_c4e6g8"])
def test_temporary_file_prevents_signing(path: str, run: Path, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / path).touch()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 2
    assert f"{run / path}: temporary file of an interrupted write: remove" in capsys.readouterr().err


def sign_without_judging(run: Path, keys: Path) -> None:
    """Sign the run without judging it, as a dishonest owner of the key could."""
    paths = sorted(parse_sums((run / "SHA256SUMS").read_text()))
    done = subprocess.run(["sha256sum", *paths], cwd=run, check=True, capture_output=True)
    (run / "SHA256SUMS").write_bytes(done.stdout)
    (run / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "rackproof", "-f", str(keys / "alice"), str(run / "SHA256SUMS")]
    subprocess.run(command, check=True, capture_output=True)


def test_report_that_contradicts_the_records_is_detected_despite_a_valid_signature(
    run: Path, keys: Path, verify: Verify
) -> None:
    record = json.loads((run / "hosts" / "h2.json").read_text())
    record["observations"] = [observation for observation in record["observations"] if observation["scope"] != "gpu=1"]
    documents.write(run / "hosts" / "h2.json", record)
    sign_without_judging(run, keys)
    code, output = verify(run)
    assert code == 1
    assert (
        "report.json does not match the records: decision: accepted in report.json, incomplete when judged again"
        in output
    )
    assert verify(run, "--no-judge")[0] == 0


def test_remedies_of_sign_keep_the_criteria_and_waivers_of_the_report(
    run: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack, waivers = tmp_path / "my site.yml", tmp_path / "waivers.yml"
    pack.write_text(PACK.replace("LIMIT", "9.9e+15"))
    of_host = "{{criterion: stress-site, host: {}, who: Ann, why: a known fault, until: 2999-12-31}}"
    waived = ", ".join(map(of_host.format, ("h1", "h2")))
    waivers.write_text(f"---\nschema: rackproof.waivers/1\nwaivers: [{waived}]\n")
    rules = ["--criteria", str(pack), "--waivers", str(waivers)]
    command = ["sign", str(run), "--key", str(keys / "alice")]
    assert main(["report", str(run), *rules]) == 0, "every failure is waived"
    written = (run / "report.json").read_bytes()
    capsys.readouterr()
    for fewer in ([], rules[:2]):
        assert main([*command, *fewer]) == 2
        message = capsys.readouterr().err
        assert "give the criteria and waivers with which it was written (--criteria, --waivers)" in message
    (run / "report.md").write_text("altered\n")
    assert main([*command, *rules]) == 2
    advised = re.search(r"run rackproof (report .*), check the report, then sign", capsys.readouterr().err)
    assert advised
    main(shlex.split(advised[1]))
    assert (run / "report.json").read_bytes() == written
    assert main([*command, *rules]) == 0


@pytest.mark.parametrize("has_history", [False, True])
def test_remedies_of_sign_keep_the_comparison_with_former_runs(
    run: Path, keys: Path, has_history: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    history = ["--history", str(run.parent / "h")] if has_history else []
    for _ in range(2):  # the first report begins the history
        assert main(["report", str(run), *history]) == 0
    written = (run / "report.json").read_bytes()
    assert (b'"history"' in written) == has_history
    (run / "report.md").write_text("altered\n")
    capsys.readouterr()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 2
    assert ("(add --history, or the report loses" in capsys.readouterr().err) == has_history
    assert main(["report", str(run), *history]) == 0
    assert (run / "report.json").read_bytes() == written
    (run / "hosts" / "h2.json").unlink()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 2
    assert ("(add --history, or the report loses" in capsys.readouterr().err) == has_history


def test_changed_pack_is_named_and_leaves_the_report_unconfirmed(
    run: Path, keys: Path, verify: Verify, tmp_path: Path
) -> None:
    pack = tmp_path / "site.yml"
    pack.write_text(PACK.replace("LIMIT", "5.0e+14"))
    assert main(["report", str(run), "--criteria", str(pack)]) == 0
    assert main(["sign", str(run), "--key", str(keys / "alice"), "--criteria", str(pack)]) == 0
    assert verify(run)[0] == 0, "verify must read the packs of the signer from the paths that the signer used"
    pack.write_text(PACK.replace("LIMIT", "5.1e+14"))
    code, output = verify(run)
    assert code == 2, "the report cannot be confirmed, because the changed pack has another limit"
    assert f"packs and waivers that differ in path or content from the signed ones: {pack}" in output
    assert "judged again: h1 gpu=0 (serial h1-0): stress.throughput[" in output
    assert ": stress-site: pass in both reports, with different details" in output
    pack.unlink()
    code, output = verify(run)
    assert (code, "not judged again: " in output) == (2, True)
    assert verify(run, "--no-judge")[0] == 0


def test_pack_of_the_plan_may_have_another_path_on_the_machine_that_checks_the_run(
    keys: Path, verify: Verify, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run and its packs are copied to another machine: to other directories, and the paths in the plan do not exist there."""
    pack, other, run = tmp_path / "inventory" / "site.yml", tmp_path / "inventory" / "lab.yml", tmp_path / "r1"
    pack.parent.mkdir()
    pack.write_text(PACK.replace("LIMIT", "5.0e+14"))
    other.write_text(PACK.replace("LIMIT", "4.0e+14").replace("stress-site", "stress-lab"))
    write_run(run, replace(PLAN, criteria=(str(pack), str(other))))
    assert main(["report", str(run)]) == 0
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 0
    copy = Path(shutil.copytree(pack.parent, tmp_path / "copy"))
    shutil.rmtree(pack.parent)
    both = [text for path in sorted(copy.iterdir()) for text in ("--criteria", str(path))]
    code, output = verify(run, *both)
    assert (code, "differ in path" in output) == (0, False), output
    for verb in (["judge", str(run)], ["history", "import", str(run), "--history", str(tmp_path / "history")],
                 ["baseline", "accept", str(run), "--baseline", str(tmp_path / "base")]):  # fmt: skip
        capsys.readouterr()
        for given in ([], both[:2], both[2:]):
            missing = pack if given == both[:2] or not given else other
            assert main([*verb, *given]) in (2, 64)
            captured = capsys.readouterr()
            advice = f"no such file that you can read: give its new path: --criteria DIRECTORY/{missing.name}"
            assert f"{missing}: the plan names this criteria pack, but there is {advice}" in captured.out + captured.err
        assert main([*verb, *both]) == 0
    (copy / "site.yml").write_text(PACK.replace("LIMIT", "5.1e+14"))
    code, output = verify(run, *both)
    assert (code, f"differ in path or content from the signed ones: {pack}" in output) == (2, True)


def test_report_of_a_signed_run_warns_only_if_signed_files_changed(
    run: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""
    assert verify(run)[0] == 0
    (run / "hosts" / "h2.json").unlink()
    assert main(["report", str(run)]) == 2
    output = capsys.readouterr().err
    assert "changed since it was signed, or cannot be read: hosts/h2.json" in output
    assert f"rackproof sign {run}" in output


def sign_without_terminal(path: Path, **environment: str) -> str:
    """Sign one byte without a terminal for a passphrase prompt. Return the signature, or the last line of the error."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("SSH_AUTH_SOCK", "DISPLAY", "SSH_ASKPASS")
    }
    code = "import sys; from pathlib import Path; from fleet.signature import ssh; print(ssh.sign(b'x', Path(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        start_new_session=True,
        env={**inherited, **environment},
    )
    return done.stdout or done.stderr.splitlines()[-1]


def test_key_with_a_passphrase_cannot_sign_without_a_terminal(tmp_path: Path) -> None:
    output = sign_without_terminal(key(tmp_path, "locked", "secret"))
    assert "wrong passphrase" in output
    assert "ssh-add" in output


def test_unusable_key_keeps_the_old_signature(
    run: Path, tmp_path: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (tmp_path / "broken").chmod(0o600)
    assert main(["sign", str(run), "--key", str(tmp_path / "broken")]) == 2
    assert str(tmp_path / "broken") in capsys.readouterr().err
    assert verify(run, "--no-judge")[0] == 0


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    socket = str(tmp_path / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        while not Path(socket).exists():
            assert process.poll() is None
        yield socket
    finally:
        process.terminate()
        process.wait()


def test_key_in_ssh_agent_signs(keys: Path, tmp_path: Path, agent: str) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": agent}
    subprocess.run(["ssh-add", "-q", str(keys / "alice")], check=True, env=environment)
    public = Path(shutil.copy(keys / "alice.pub", tmp_path / "alice.pub"))
    assert sign_without_terminal(public, SSH_AUTH_SOCK=agent).startswith("-----BEGIN SSH SIGNATURE-----")
    subprocess.run(["ssh-add", "-q", "-D"], check=True, env=environment)
    assert "no SSH agent has its private key" in sign_without_terminal(public, SSH_AUTH_SOCK=agent)


def test_missing_files_and_missing_ssh_keygen_are_reported(
    run: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rackproof(*arguments: str) -> tuple[int, str]:
        return main(list(arguments)), capsys.readouterr().err

    directory, signers = str(run), str(keys / "signers")
    assert rackproof("sign", directory, "--key", str(tmp_path / "none"))[0] == 64
    assert rackproof("verify", directory, "--allowed-signers", str(tmp_path / "none"))[0] == 64
    assert rackproof("verify", str(tmp_path), "--allowed-signers", signers)[0] == 2
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        code, error = rackproof("verify", directory, "--allowed-signers", signers)
        assert (code, "ssh-keygen is not installed: install OpenSSH" in error) == (2, True)
    (run / "SHA256SUMS.sig").unlink()
    code, error = rackproof("verify", directory, "--allowed-signers", signers)
    assert (code, "not signed" in error) == (2, True)


def test_run_in_progress_is_not_signed(run: Path, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_lock.acquire(run)
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 75
    assert "sign it after its report is written" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["nonsense", f"{'0' * 64} one-space", f"{'0' * 63}g  x"])
def test_invalid_line_or_duplicate_path_in_sha256sums_is_rejected(line: str) -> None:
    with pytest.raises(Exception, match="not a checksum and a path"):
        parse_sums(f"{'0' * 64}  a\n{line}\n")
    with pytest.raises(Exception, match="duplicate path"):
        parse_sums(f"{'0' * 64}  a\n{'1' * 64}  a\n")
