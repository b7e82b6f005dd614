"""`rackproof upload`: upload a run directory to an S3-compatible object store."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from fleet.quantities import counted
from fleet.records.load import require_run
from fleet.upload import upload


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add upload to the command."""
    verb = verbs.add_parser(
        "upload",
        help="upload a reported run to S3, MinIO, Ceph or another S3-compatible store",
        description="Uploads new and changed files (by size and MD5), report.json last. Deletes nothing. Credentials come from "
        "the environment (AWS_PROFILE, AWS_ACCESS_KEY_ID …) or the configuration files of AWS.",
        epilog="example: rackproof upload runs/rack12 s3://acceptance/site-a --endpoint https://minio.example.com:9000. "
        "Exit codes: 0 uploaded, whatever the decision; 2 there is no report, a file is unreadable, is not a regular file or "
        "has an invalid name, or boto3 is not installed; 64 wrong usage, such as an invalid URL or endpoint; 74 the store "
        "cannot be reached or refuses a request: nothing or only a part was uploaded; 75 the run is in progress.",
    )
    verb.add_argument("run_dir", type=Path, help="directory of the run")
    verb.add_argument("url", help="s3://BUCKET or s3://BUCKET/PREFIX; the run becomes a folder in it")
    verb.add_argument("--endpoint", default="", help="URL of the store (default: AWS, or AWS_ENDPOINT_URL_S3)")
    verb.add_argument(
        "--json", action="store_true", help="print as JSON: URL, uploaded files, unchanged files, and uploaded bytes"
    )
    verb.set_defaults(call=call)


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    require_run(options.run_dir)
    result = upload(options.run_dir, options.url, options.endpoint)
    if options.json:
        print(json.dumps(asdict(result)))
        return 0
    size = f"{result.size_bytes / 1e6:.1f} MB"
    print(f"{counted(len(result.uploaded), 'file')} uploaded ({size}), {len(result.unchanged)} unchanged: {result.url}")
    return 0
