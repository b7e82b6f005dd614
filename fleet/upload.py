"""Upload a run directory to an S3-compatible object store: only changed files, and report.json last."""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from fleet.records import run_lock
from fleet.report.formatting import clean
from fleet.report.stream import is_temporary
from schemas.errors import HeldError, RunError, UsageError, WriteError
from schemas.run_directory import LOCK, REPORT, RunDirectory

LEFT_OUT = (LOCK, "metrics")
"""Entries of the run directory that are not uploaded: the lock, and the data that the run's Prometheus keeps changing."""
_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[A-Za-z0-9_][A-Za-z0-9_.=-]*)*)/?")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+/?")
_TYPES = {".html": "text/html", ".json": "application/json", ".xml": "application/xml"}
_TEXT, _BINARY = "text/plain; charset=utf-8", "application/octet-stream"
_TEXTS = (".md", ".csv", ".jsonl", ".prom", ".sig", ".txt", "")


@dataclass(kw_only=True)
class Upload:
    """The result of an upload."""

    url: str
    """Location of the run in the store: s3://BUCKET/PREFIX/RUN."""
    uploaded: list[str] = field(default_factory=list)
    """Names of the objects that were uploaded."""
    unchanged: list[str] = field(default_factory=list)
    """Names of the objects that the store already had with the same content."""
    size_bytes: int = 0
    """Total size of the uploaded objects."""


def upload(run_dir: Path, url: str, endpoint: str = "") -> Upload:
    """Upload the files of a judged run, except files that the store already has with the same content. Upload report.json last.

    Nothing is deleted in the store. The name of an object is PREFIX/RUN/PATH: the prefix in `url`, the name of the run directory,
    and the path of the file in that directory.

    Args:
        run_dir: the run directory.
        url: s3://BUCKET or s3://BUCKET/PREFIX.
        endpoint: http(s)://HOST[:PORT] of a store other than AWS.

    Raises:
        UsageError: `url` or `endpoint` is not valid.
        RunError: the run has no report, a file is unreadable or not regular, or a file name has a backslash or an unprintable
            character.
        HeldError: the run is in progress.
        WriteError: the store cannot be reached or refuses a request. The files that were already uploaded remain there.
    """
    bucket, prefix = _location(url)
    _check_endpoint(endpoint)
    run_dir = run_dir.resolve()
    paths = _checked_files(run_dir)
    folder = "/".join(part for part in (prefix, run_dir.name) if part)
    result = Upload(url=f"s3://{bucket}/{folder}")
    from botocore.exceptions import BotoCoreError, ClientError  # installed with the extra `upload` of this package

    try:
        store = _client(endpoint)
        stored = dict(_stored(store, bucket, f"{folder}/"))
        for path in paths:
            _upload_file(store, bucket, f"{folder}/{path}", run_dir / path, stored, result)
    except (BotoCoreError, ClientError) as error:
        count = len(result.uploaded) + len(result.unchanged)
        done = f"before this error, {count} of {len(paths)} files were uploaded or found in the store"
        raise WriteError(
            f"{run_dir}: not uploaded to {result.url} ({done}): {clean(str(error))}; the run directory and its decision are "
            "unchanged; check endpoint, bucket and credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), "
            "then run rackproof upload again"
        ) from None
    return result


def _location(url: str) -> tuple[str, str]:
    """Return bucket and prefix. The error message does not contain the URL, which may contain a password by mistake."""
    if not (match := _URL.fullmatch(url)):
        raise UsageError(
            "the upload URL is not valid: give s3://BUCKET or s3://BUCKET/PREFIX without credentials; a bucket has 3 to 63 "
            "lower-case letters, digits, '.' and '-'; a prefix may also have '/', capital letters, '_' and '='"
        )
    return match["bucket"], match["prefix"].strip("/")


def _check_endpoint(endpoint: str) -> None:
    """Refuse an endpoint with a user name, password, path or query. The error message does not contain the endpoint."""
    try:
        valid = not endpoint or (_ENDPOINT.fullmatch(endpoint) and urlsplit(endpoint).port != 0)
    except ValueError:  # the port is not a number, or an IPv6 address is incomplete
        valid = False
    if not valid:
        raise _invalid_endpoint()


def _invalid_endpoint() -> UsageError:
    return UsageError(
        "the endpoint (--endpoint, AWS_ENDPOINT_URL_S3, or endpoint_url in the AWS configuration files) is not valid: "
        "give http(s)://HOST or http(s)://HOST:PORT, without credentials"
    )


def _checked_files(run_dir: Path) -> list[str]:
    """Return the files to upload: their paths relative to the run directory, sorted, but report.json last."""
    if not RunDirectory(run_dir).report.is_file():
        raise RunError(
            f"{run_dir}: no {REPORT}: only a judged run can be uploaded: run rackproof report {run_dir}, then upload"
        )
    if owner := run_lock.active_holder(run_dir):
        raise HeldError(
            f"{run_dir}: run locked by {owner.who()} since {owner.since}: upload it after its report is written"
        )
    paths = sorted(_files(run_dir, run_dir), key=lambda path: (path == REPORT, path))
    for path in paths:
        name = f"{run_dir.name}/{path}"
        if not name.isprintable() or "\\" in name:
            raise RunError(
                f"{name!r}: the name of a file to upload cannot have a backslash or an unprintable character: rename or remove it"
            )
        if not stat.S_ISREG((run_dir / path).lstat().st_mode):  # a link could point to a file outside the run directory
            raise RunError(f"{run_dir / path}: not a regular file, so it cannot be uploaded: remove it")
    return paths


def _files(directory: Path, run_dir: Path) -> Iterator[str]:
    for entry in directory.iterdir():
        path = str(entry.relative_to(run_dir))
        if path in LEFT_OUT or is_temporary(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _files(entry, run_dir)
        else:
            yield path


def _client(endpoint: str) -> Any:
    """Return an S3 client. boto3 finds the credentials, for example in the environment or in the AWS configuration files.

    Stores other than AWS often do not support the bucket's name as a part of the host name, so requests to an `endpoint` have the
    bucket in their path. Many also do not support the checksums that boto3 adds by default since 2025, so these are turned off.
    Each upload has an MD5 checksum instead, which all stores verify.
    """
    import boto3
    from botocore.config import Config

    logging.getLogger("botocore").setLevel(logging.WARNING)  # at INFO, botocore logs where it found the credentials
    config = Config(
        connect_timeout=10,
        read_timeout=60,
        retries={"mode": "standard", "total_max_attempts": 3},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint else "auto"},
    )
    try:
        store = boto3.session.Session().client("s3", endpoint_url=endpoint or None, config=config)
    except ValueError:
        # The endpoint in AWS_ENDPOINT_URL_S3 or in the AWS configuration files is invalid. The message of boto3 contains the
        # endpoint, and so any password in it.
        raise _invalid_endpoint() from None
    _check_endpoint(store.meta.endpoint_url)
    return store


def _stored(store: Any, bucket: str, prefix: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the name of each object under `prefix` with its size in bytes and its ETag."""
    for page in store.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            yield item["Key"], (item["Size"], item["ETag"].strip('"'))


def _upload_file(
    store: Any, bucket: str, key: str, path: Path, stored: dict[str, tuple[int, str]], result: Upload
) -> None:
    """Upload one file, unless the store has an object of the same name, size and MD5."""
    with _open_regular(path) as file:
        md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))  # type: ignore[arg-type]
        size = file.tell()
        if stored.get(key) == (size, md5.hexdigest()):
            result.unchanged.append(key)
            return
        file.seek(0)
        checksum = base64.b64encode(md5.digest()).decode()
        store.put_object(Bucket=bucket, Key=key, Body=file, ContentMD5=checksum, ContentType=_content_type(path))
    result.uploaded.append(key)
    result.size_bytes += size


def _content_type(path: Path) -> str:
    return _TYPES.get(path.suffix, _TEXT if path.suffix in _TEXTS else _BINARY)


def _open_regular(path: Path) -> BinaryIO:
    """Open a file that was regular when the files were listed. Raise RunError if it no longer is, or if it cannot be opened."""
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
        raise RunError(f"{path}: no longer a regular file, so it cannot be uploaded: remove it")
    except OSError as error:
        raise RunError(
            f"{path}: {error.strerror}: the file cannot be uploaded: wait until no process writes to the run directory, or use "
            "an account that can read the file"
        ) from None
