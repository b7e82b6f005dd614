"""Test `rackproof upload` with moto's S3 server over HTTP: the uploaded files, their order, and failures."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from botocore.exceptions import EndpointConnectionError
from jinja2.nativetypes import NativeEnvironment
from moto.server import ThreadedMotoServer

from fleet import upload as upload_module
from fleet.inventory.ansible import check_variables
from fleet.records import run_lock
from fleet.upload import upload
from schemas.errors import UsageError
from tests import ROOT
from tests.accepted import rackproof, run_directory

BUCKET, URL = "acceptance", "s3://acceptance/site-a/2026"
SECRET = "secret-of-the-test"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the endpoint of an S3 server."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # without this, the server logs a line for each request
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(scope="module")
def client(server: str) -> Any:
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": SECRET}
    return boto3.session.Session().client("s3", endpoint_url=server, region_name="us-east-1", **keys)


@pytest.fixture
def store(client: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a client with an empty bucket. The credentials are in the environment; no configuration file of AWS exists."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
    files = {name: str(tmp_path / "none") for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")}
    for name, value in (credentials | files).items():
        monkeypatch.setenv(name, value)
    client.create_bucket(Bucket=BUCKET)
    yield client
    for key in objects(client):
        client.delete_object(Bucket=BUCKET, Key=key)
    client.delete_bucket(Bucket=BUCKET)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with its report. Tests that change a file must use a copy."""
    run = run_directory(tmp_path_factory.mktemp("runs") / "r1")
    assert rackproof("report", run).returncode == 0
    return run


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Return a port that is bound without listening, so that connections are refused."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def run(reported: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "runs" / "r1"
    for path in files(reported):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((reported / path).read_bytes())
    return copy


def files(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def contents(run: Path) -> dict[str, bytes]:
    return {path: (run / path).read_bytes() for path in files(run)}


def objects(store: Any) -> dict[str, bytes]:
    pages = store.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
    return {key: store.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys}


def uploaded(run: Path, server: str, url: str = URL) -> dict[str, Any]:
    done = rackproof("upload", run, url, "--endpoint", server, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_files_of_the_run_except_working_files_are_uploaded_and_the_report_is_last(
    run: Path, store: Any, server: str
) -> None:
    (run / "metrics").mkdir()
    for name in ("metrics/wal", "lock.json", "hosts/.h1.json.abcd_123"):
        (run / name).write_text("{}")
    result = uploaded(run, server)
    expected = {
        f"site-a/2026/r1/{path}": data
        for path, data in contents(run).items()
        if path not in ("metrics/wal", "lock.json", "hosts/.h1.json.abcd_123")
    }
    assert objects(store) == expected
    assert {"site-a/2026/r1/plan.json", "site-a/2026/r1/hosts/h1.json", "site-a/2026/r1/report.html"} <= expected.keys()
    assert result["url"] == "s3://acceptance/site-a/2026/r1"
    assert sorted(result["uploaded"]) == sorted(expected)
    assert result["uploaded"][-1] == "site-a/2026/r1/report.json"
    page = store.head_object(Bucket=BUCKET, Key="site-a/2026/r1/report.html")
    assert page["ContentType"] == "text/html"


def test_second_upload_sends_only_changed_and_new_files_and_deletes_nothing(run: Path, store: Any, server: str) -> None:
    first = uploaded(run, server)["uploaded"]
    again = uploaded(run, server)
    assert (again["uploaded"], again["size_bytes"]) == ([], 0)
    assert sorted(again["unchanged"]) == sorted(first)
    text = (run / "report.md").read_text()
    (run / "report.md").write_text(text.replace("a", "b", 1))  # the size of the file stays the same
    (run / "junit.xml").unlink()
    (run / "rma").mkdir()
    (run / "rma" / "part.json").write_text("{}")
    changed = uploaded(run, server)
    assert changed["uploaded"] == ["site-a/2026/r1/report.md", "site-a/2026/r1/rma/part.json"]
    assert "site-a/2026/r1/junit.xml" in objects(store)
    assert objects(store)["site-a/2026/r1/report.md"] == (run / "report.md").read_bytes()


def test_objects_on_all_pages_of_a_listing_are_recognized(
    run: Path, store: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = uploaded(run, server, "s3://acceptance")["uploaded"]
    assert len(first) > 3
    assert all(key.startswith("r1/") for key in first)
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "3")
    assert uploaded(run, server, "s3://acceptance/")["uploaded"] == []


@pytest.mark.parametrize("fault", ["no bucket", "no server", "no credentials"])
def test_failure_is_reported_in_one_line_and_changes_no_file(
    run: Path, store: Any, server: str, closed_port: int, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(run)
    url, endpoint = URL, server
    if fault == "no bucket":
        url = "s3://missing/site-a"
    elif fault == "no server":
        endpoint = f"http://127.0.0.1:{closed_port}"
    else:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    done = rackproof("upload", run, url, "--endpoint", endpoint)
    assert (done.returncode, done.stdout) == (74, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rackproof: {run}: not uploaded to {url}/r1 (before this error, 0 of ")
    assert {"no bucket": "NoSuchBucket", "no server": "Could not connect", "no credentials": "credentials"}[
        fault
    ] in line
    assert SECRET not in line
    assert contents(run) == before
    assert objects(store) == {}


def test_interrupted_upload_leaves_no_report_in_the_store_and_can_be_continued(
    run: Path, store: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content_type = upload_module._content_type

    def disconnect(path: Path) -> str:
        if path.name == "report.html":
            raise EndpointConnectionError(endpoint_url=server)
        return content_type(path)

    monkeypatch.setattr(upload_module, "_content_type", disconnect)
    done = rackproof("upload", run, URL, "--endpoint", server)
    assert done.returncode == 74
    stored = objects(store)
    assert (
        f"(before this error, {len(stored)} of {len(files(run))} files were uploaded or found in the store)"
        in done.stderr
    )
    assert not {"site-a/2026/r1/report.html", "site-a/2026/r1/report.json"} & stored.keys()
    monkeypatch.setattr(upload_module, "_content_type", content_type)
    assert sorted(uploaded(run, server)["unchanged"]) == sorted(stored)


@pytest.mark.parametrize("kind", ["link", "directory link", "control character", "fifo"])
def test_link_fifo_or_unprintable_name_is_refused_before_any_upload(
    run: Path, store: Any, server: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    if kind == "link":
        (run / "hosts" / "a.json").symlink_to("/etc/passwd")
    elif kind == "directory link":
        (run / "a").symlink_to(tmp_path / "outside")
    elif kind == "fifo":
        os.mkfifo(run / "a")
    else:
        (run / "a\x1b[31m").write_text("{}")
    done = rackproof("upload", run, URL, "--endpoint", server)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert objects(store) == {}


def test_run_without_a_report_or_in_progress_is_refused(
    run: Path, store: Any, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "report.json").rename(run / "kept.json")
    done = rackproof("upload", run, URL, "--endpoint", server)
    assert (done.returncode, "run rackproof report" in done.stderr) == (2, True)
    (run / "kept.json").rename(run / "report.json")
    run_lock.acquire(run)
    monkeypatch.setattr(run_lock, "active_holder", run_lock.holder)
    assert rackproof("upload", run, URL, "--endpoint", server).returncode == 75
    assert objects(store) == {}


URLS = ("", "acceptance", "s3://", "s3://ab", "s3://key:SECRET@acceptance", "s3://acceptance/../x", "s3://acceptance//x",
        "s3://acceptance/x?a=SECRET", "s3://acceptance/a b", "https://acceptance", "s3://acceptance/x\n")  # fmt: skip
ENDPOINTS = (
    "minio",
    "ftp://minio",
    "http://key:SECRET@minio",
    "http://minio/SECRET",
    "http://minio:port",
    "http://minio:0",
)


@pytest.mark.parametrize(("url", "endpoint"), [*((url, "") for url in URLS), *((URL, item) for item in ENDPOINTS)])
def test_invalid_url_is_refused_and_not_printed(tmp_path: Path, url: str, endpoint: str) -> None:
    with pytest.raises(UsageError, match="without credentials") as error:
        upload(tmp_path, url, endpoint)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("endpoint", ["http://key:SECRET@127.0.0.1:9", "minio:9000"])
def test_invalid_endpoint_of_the_environment_is_refused_and_not_printed(
    run: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(UsageError, match="without credentials") as error:
        upload(run, URL)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rackproof_upload", "s3://key:SECRET@acceptance"),
        ("rackproof_upload", "acceptance"),
        ("rackproof_upload_endpoint", "http://key:SEC/RET@SECRET@minio"),
    ],
)
def test_invalid_url_in_the_inventory_is_refused_and_not_printed(name: str, value: str) -> None:
    valid = {"rackproof_gpu_count": 1, "rackproof_upload": URL, "rackproof_upload_endpoint": "https://minio:9000"}
    check_variables({"h1": valid})
    with pytest.raises(UsageError, match=f"{name}: ") as error:
        check_variables({"h1": {**valid, name: value}})
    assert "SECRET" not in str(error.value)


def test_missing_package_is_reported_with_the_remedy(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    done = rackproof("upload", run, URL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'rackproof[upload]'" in done.stderr


def test_object_with_the_same_size_but_another_checksum_is_replaced(run: Path, store: Any, server: str) -> None:
    """The test server sets the ETag of an object to its MD5 checksum.

    A store with SSE-KMS or SSE-C does not, so every upload to it sends all files again.
    """
    plan = (run / "plan.json").read_bytes()
    store.put_object(Bucket=BUCKET, Key="site-a/2026/r1/plan.json", Body=b"x" * len(plan))
    uploaded(run, server)
    (item,) = store.list_objects_v2(Bucket=BUCKET, Prefix="site-a/2026/r1/plan.json")["Contents"]
    assert item["ETag"].strip('"') == hashlib.md5(plan, usedforsecurity=False).hexdigest()


@pytest.mark.parametrize(
    ("endpoint", "options"), [("", []), ("http://minio:9000", ["--endpoint", "http://minio:9000"])]
)
def test_playbook_uploads_the_run_before_it_shows_the_decision(endpoint: str, options: list[str]) -> None:
    tasks = yaml.safe_load((ROOT / "roles" / "report" / "tasks" / "judge.yml").read_text())[0]["block"]
    by_name = {task["name"]: task for task in tasks}
    names = list(by_name)
    assert names.index("Judge the run") < names.index("Upload the run") < names.index("Show the decision")
    assert names[-1] == "Check that the run was uploaded", "the decision must be shown even if the upload fails"
    values = {"_rackproof_command": ["rackproof"], "_rackproof_run_dir": "runs/r1", "rackproof_upload": URL}
    template = NativeEnvironment().from_string(by_name["Upload the run"]["ansible.builtin.command"]["argv"])
    rendered: Any = template.render(**values, rackproof_upload_endpoint=endpoint)
    assert rendered == [
        "rackproof",
        "upload",
        "--json",
        "runs/r1",
        URL,
        *options,
    ]
