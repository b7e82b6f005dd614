"""A signed run, by the real ssh-keygen: every change is named, nobody else can sign, and the report is what the records give."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fleet.records import run_lock
from fleet.report import hosts
from fleet.report.judge_run import judge_report
from fleet.signature import signing
from fleet.signature.rejudged import Rules
from fleet.signature.sums import LEFT_OUT, from_text
from rackproof.main import main
from schemas import documents
from schemas.errors import RunError
from schemas.reports import FleetReport
from tests import builders
from tests.unit.fleet.planning.test_plan import ROOT
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", profile="smoke", rackproof_gang="none")
PACK = """---
schema: rackproof.criteria/1
summary: ours
criteria:
  - id: gemm-ours
    name: gemm.throughput
    scope: gpu
    where: {dtype: bf16}
    operator: ge
    value: LIMIT
    unit: FLOP/s
    action: inspect_hardware
    source: "ours, for a test"
"""


def key(directory: Path, name: str, passphrase: str = "") -> Path:
    path = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", name, "-f", path], check=True)
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys, and a file that allows the first of them to sign."""
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
        capsys.readouterr()
        code = main(["verify", str(run), "--allowed-signers", str(keys / "signers"), *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


Verify = Callable[..., tuple[int, str]]


def test_a_signed_run_holds_and_says_who_signed_what(run: Path, verify: Verify) -> None:
    code, said = verify(run)
    assert code == 0
    assert "run r1: PASS" in said
    assert "signed by alice@example.com (ED25519 SHA256:" in said
    assert "the records give this report" in said


def test_other_programs_can_check_it(run: Path, keys: Path) -> None:
    assert (
        subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=run, check=False).returncode
        == 0
    )
    command = ["ssh-keygen", "-Y", "verify", "-n", "rackproof", "-I", "alice@example.com"]
    command += ["-f", str(keys / "signers"), "-s", str(run / "SHA256SUMS.sig")]
    sums = (run / "SHA256SUMS").read_bytes()
    assert subprocess.run(command, input=sums, check=False, capture_output=True).returncode == 0


def test_every_file_is_signed_but_for_what_is_said_to_be_left_out(run: Path) -> None:
    listed = set(from_text((run / "SHA256SUMS").read_text()))
    present = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert present - listed == {"SHA256SUMS", "SHA256SUMS.sig"}
    assert {"plan.json", "hosts/h1.json", "hosts/h2.json", "report.json", "report.html", "observations.csv"} <= listed
    statement = documents.read(run / "signed.json", "signed")
    assert statement["left_out"] == dict(LEFT_OUT)
    assert (statement["decision"], statement["mark"]) == ("accepted", "")


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


@pytest.mark.parametrize(
    ("what", "change", "named"),
    [
        ("hosts/h1.json", append, "changed: hosts/h1.json"),
        ("report.html", append, "changed: report.html"),
        ("signed.json", append, "changed: signed.json"),
        ("hosts/h2.json", Path.unlink, "missing: hosts/h2.json"),
        ("hosts/h3.json", Path.touch, "not signed: hosts/h3.json"),
        (".report.html.abcd1234", Path.touch, "not signed: .report.html.abcd1234"),
        ("notes/x.txt", lambda path: path.parent.mkdir() or path.touch(), "not signed: notes/x.txt"),
        ("junit.xml", lambda path: path.unlink() or path.symlink_to("/dev/zero"), "changed: "),
        ("report.md", lambda path: path.unlink() or os.mkfifo(path), "report.md: not a regular file"),
        ("SHA256SUMS", append, "signature: "),
        ("SHA256SUMS", lambda path: path.write_text(""), "signature: "),
        ("SHA256SUMS.sig", lambda path: path.write_text("nonsense"), "signature: "),
    ],
)
def test_whatever_was_changed_is_named(
    run: Path, verify: Verify, what: str, change: Callable[[Path], object], named: str
) -> None:
    change(run / what)
    code, said = verify(run)
    assert code == 1
    assert f"- {named}" in said or named in said
    assert "DOES NOT HOLD" in said


def test_what_is_left_out_may_change(run: Path, verify: Verify) -> None:
    (run / "journal.jsonl").write_text("{}\n")
    (run / "rma" / "x").mkdir(parents=True)
    (run / "rma" / "x" / "README.md").touch()
    assert main(["report", str(run), "--host", "h1"]) == 0
    assert (run / "pages" / "h1.html").exists()
    assert verify(run, "--no-judge")[0] == 0


def test_only_an_allowed_key_signs(run: Path, keys: Path, verify: Verify) -> None:
    assert main(["sign", str(run), "--key", str(keys / "mallory")]) == 0
    code, said = verify(run)
    assert code == 1
    assert "which is not an allowed signer" in said


def test_a_signature_for_another_use_is_none(run: Path, keys: Path, verify: Verify) -> None:
    (run / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(keys / "alice"), str(run / "SHA256SUMS")]
    subprocess.run(command, check=True, capture_output=True)
    assert verify(run)[0] == 1


def test_the_signer_asked_for_must_be_the_one(run: Path, verify: Verify) -> None:
    assert verify(run, "--no-judge", "--signer", "alice@example.com")[0] == 0
    code, said = verify(run, "--no-judge", "--signer", "bob@example.com")
    assert (code, "not by bob@example.com" in said) == (1, True)


def test_json_output_agrees(run: Path, verify: Verify) -> None:
    (run / "hosts" / "h2.json").unlink()
    code, said = verify(run, "--json")
    document = json.loads(said)
    assert (document["code"], document["problems"]) == (code, ["missing: hosts/h2.json"])


def test_report_that_differs_from_its_records_is_not_signed(
    run: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "hosts" / "h2.json").unlink()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 2
    said = capsys.readouterr().err
    assert "decision: accepted in report.json, incomplete from the records" in said
    assert f"rackproof report {run}" in said


def test_every_view_that_a_report_leaves_is_made_again_before_it_is_signed(
    keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "r1", PLAN)
    before = set((tmp_path / "r1").iterdir())
    assert main(["report", str(tmp_path / "r1")]) == 0
    made = {path for path in set((tmp_path / "r1").iterdir()) - before if path.name not in LEFT_OUT}
    made -= {tmp_path / "r1" / "report.json"}
    assert len(made) >= 5
    for path in made:
        content = path.read_bytes()
        append(path)
        capsys.readouterr()
        assert main(["sign", str(tmp_path / "r1"), "--key", str(keys / "alice")]) == 2, path
        assert f"r1: {path.name}: does not match report.json: run rackproof report" in capsys.readouterr().err
        path.write_bytes(content)
    assert not (tmp_path / "r1" / "SHA256SUMS").exists()
    assert main(["sign", str(tmp_path / "r1"), "--key", str(keys / "alice")]) == 0


@pytest.mark.parametrize("options", [(), ("--all-observations",)])
def test_a_large_fleet_is_signed_with_the_observations_that_were_asked_for(
    options: tuple[str, ...], keys: Path, tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "FULL_HOSTS", 1)
    write_run(tmp_path / "r1", PLAN)
    assert main(["report", str(tmp_path / "r1"), *options]) == 0
    assert main(["sign", str(tmp_path / "r1"), "--key", str(keys / "alice")]) == 0
    assert verify(tmp_path / "r1")[0] == 0


def test_forged_view_is_detected_despite_a_good_signature(run: Path, keys: Path, verify: Verify) -> None:
    (run / "report.html").write_text("<h1>All hosts are faster than ever</h1>")
    by_hand(run, keys)
    code, said = verify(run)
    assert (code, "report.html does not match report.json" in said) == (1, True)
    assert verify(run, "--no-judge")[0] == 0


def test_a_view_that_cannot_be_made_again_is_signed_and_said_to_be(
    run: Path, keys: Path, verify: Verify, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as where it is not installed
    (run / "observations.parquet").write_bytes(b"PAR1")
    capsys.readouterr()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 0
    reported = "observations.parquet was not rendered again: pyarrow is not installed here"
    assert reported in capsys.readouterr().out
    code, said = verify(run)
    assert (code, reported in said) == (0, True)


def test_views_of_another_version_are_not_made_again(
    run: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.signature.signing.VERSION", "99.0")
    code, said = verify(run)
    assert (code, "views not rendered again: another version" in said) == (0, True)


def test_what_changes_while_it_is_judged_is_not_signed(run: Path, keys: Path) -> None:
    (run / "SHA256SUMS.sig").unlink()

    def judged_and_changed(directory: Path, criteria: Sequence[str], waivers: Sequence[str]) -> FleetReport:
        report = judge_report(directory, criteria, waivers)
        append(directory / "hosts" / "h2.json")
        return report

    with pytest.raises(RunError, match=r"hosts/h2\.json changed while the run was judged"):
        signing.sign(run, keys / "alice", Rules(), judged_and_changed)
    assert not (run / "SHA256SUMS.sig").exists()


@pytest.mark.parametrize("path", [".report.html.abcd1234", "hosts/.h2.json.a_c4e6g8"])
def test_a_file_that_was_left_half_written_is_not_signed(
    path: str, run: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / path).touch()
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 2
    assert f"{run / path}: temporary file of an interrupted write: remove" in capsys.readouterr().err


def by_hand(run: Path, keys: Path) -> None:
    """Sums and signature as somebody makes them who has the key and not our scruples."""
    paths = sorted(from_text((run / "SHA256SUMS").read_text()))
    done = subprocess.run(["sha256sum", *paths], cwd=run, check=True, capture_output=True)
    (run / "SHA256SUMS").write_bytes(done.stdout)
    (run / "SHA256SUMS.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "rackproof", "-f", str(keys / "alice"), str(run / "SHA256SUMS")]
    subprocess.run(command, check=True, capture_output=True)


def test_forged_report_is_detected_despite_a_good_signature(run: Path, keys: Path, verify: Verify) -> None:
    record = json.loads((run / "hosts" / "h2.json").read_text())
    record["observations"] = [observation for observation in record["observations"] if observation["scope"] != "gpu=1"]
    documents.write(run / "hosts" / "h2.json", record)
    by_hand(run, keys)
    code, said = verify(run)
    assert code == 1
    assert (
        "report.json does not match the records: decision: accepted in report.json, incomplete from the records" in said
    )
    assert verify(run, "--no-judge")[0] == 0


def test_a_pack_that_changed_since_is_named_and_the_run_is_not_called_forged(
    run: Path, keys: Path, verify: Verify, tmp_path: Path
) -> None:
    pack = tmp_path / "ours.yml"
    pack.write_text(PACK.replace("LIMIT", "5.0e+14"))
    assert main(["report", str(run), "--criteria", str(pack)]) == 0
    assert main(["sign", str(run), "--key", str(keys / "alice"), "--criteria", str(pack)]) == 0
    assert verify(run)[0] == 0, "the signer's own packs are used where they still are"
    pack.write_text(PACK.replace("LIMIT", "5.1e+14"))
    code, said = verify(run)
    assert code == 2, "the limit in the report is another"
    assert f"packs and waivers that changed since signing: {pack}" in said
    assert "judged again: h1 gpu=0 (serial h1-0): gemm.throughput[" in said
    assert ": gemm-ours: pass, with another limit or reason" in said
    pack.unlink()
    code, said = verify(run)
    assert (code, "not judged again: " in said) == (2, True)
    assert verify(run, "--no-judge")[0] == 0


def test_reporting_again_keeps_the_signature_or_says_that_it_is_void(
    run: Path, verify: Verify, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""
    assert verify(run)[0] == 0
    (run / "hosts" / "h2.json").unlink()
    assert main(["report", str(run)]) == 2
    said = capsys.readouterr().err
    assert "changed since it was signed: hosts/h2.json" in said
    assert f"rackproof sign {run}" in said


def sign_without_terminal(path: Path, **environment: str) -> str:
    """The signature of a few bytes, or what is told where there is none."""
    kept = {
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
        env={**kept, **environment},
    )
    return done.stdout or done.stderr.splitlines()[-1]


def test_passphrase_without_a_terminal_is_reported(tmp_path: Path) -> None:
    said = sign_without_terminal(key(tmp_path, "locked", "secret"))
    assert "wrong passphrase" in said
    assert "ssh-add" in said


def test_a_key_that_cannot_be_used_leaves_the_old_signature(
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


def test_a_key_in_an_agent_signs(keys: Path, tmp_path: Path, agent: str) -> None:
    environment = {**os.environ, "SSH_AUTH_SOCK": agent}
    subprocess.run(["ssh-add", "-q", str(keys / "alice")], check=True, env=environment)
    public = Path(shutil.copy(keys / "alice.pub", tmp_path / "alice.pub"))
    assert sign_without_terminal(public, SSH_AUTH_SOCK=agent).startswith("-----BEGIN SSH SIGNATURE-----")
    subprocess.run(["ssh-add", "-q", "-D"], check=True, env=environment)
    assert "no SSH agent has its private key" in sign_without_terminal(public, SSH_AUTH_SOCK=agent)


def test_missing_files_are_reported(
    run: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        return main(list(arguments)), capsys.readouterr().err

    run_, signers = str(run), str(keys / "signers")
    assert said("sign", run_, "--key", str(tmp_path / "none"))[0] == 64
    assert said("verify", run_, "--allowed-signers", str(tmp_path / "none"))[0] == 64
    assert said("verify", str(tmp_path), "--allowed-signers", signers)[0] == 2
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        code, text = said("verify", run_, "--allowed-signers", signers)
        assert (code, "ssh-keygen is not installed: install OpenSSH" in text) == (2, True)
    (run / "SHA256SUMS.sig").unlink()
    code, text = said("verify", run_, "--allowed-signers", signers)
    assert (code, "not signed" in text) == (2, True)


def test_a_run_that_goes_on_is_not_signed(run: Path, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_lock.acquire(run)
    assert main(["sign", str(run), "--key", str(keys / "alice")]) == 75
    assert "sign it after its report is written" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["nonsense", f"{'0' * 64} one-space", f"{'0' * 63}g  x"])
def test_a_line_that_is_no_sum_is_refused(line: str) -> None:
    with pytest.raises(Exception, match="not a checksum and a path"):
        from_text(f"{'0' * 64}  a\n{line}\n")
    with pytest.raises(Exception, match="duplicate path"):
        from_text(f"{'0' * 64}  a\n{'1' * 64}  a\n")
