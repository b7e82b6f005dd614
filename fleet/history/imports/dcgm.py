"""Read the output of `dcgmi diag -j`: whether each test passed on each GPU, and the figures in the text of its result."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from fleet.history.imports.common import Imported, NotThisTool, as_dict, as_list, number, row
from fleet.history.rows import Row, clean_text

SOURCE = "DCGM"
_FIGURE = re.compile(r"([A-Za-z][A-Za-z ]{2,60}?):\s*([0-9][0-9.]*)\s*(GB/s|MB/s|us|W|GFLOPS|TFLOPS)\b")
_UNITS = {"GB/s": ("B/s", 1e9), "MB/s": ("B/s", 1e6), "us": ("s", 1e-6), "W": ("W", 1.0), "GFLOPS": ("FLOP/s", 1e9),
          "TFLOPS": ("FLOP/s", 1e12)}  # fmt: skip
_PASSED = {"pass": 1.0, "fail": 0.0}
_COPY_DIRECTIONS = {"gpu to host bandwidth": "device_to_host", "host to gpu bandwidth": "host_to_device"}


def read_dcgm(text: str, file: str) -> Imported:
    """Return the figures in output of DCGM 3 or 4; raise NotThisTool if the text is not output of `dcgmi diag -j`."""
    try:
        document = as_dict(json.loads(text))
    except (ValueError, RecursionError):
        raise NotThisTool from None
    diagnostic = as_dict(document.get("DCGM Diagnostic") or document.get("DCGM GPU Diagnostic"))
    categories = as_list(diagnostic.get("test_categories"))
    if not categories:
        raise NotThisTool
    metadata = as_dict(document.get("metadata"))
    driver = str(metadata.get("Driver Version Detected") or diagnostic.get("Driver Version Detected") or "")
    version = str(metadata.get("version") or diagnostic.get("version") or "unknown")
    rows = tuple(
        item
        for category in categories
        for test in as_list(as_dict(category).get("tests"))
        for item in _test(as_dict(test), driver)
    )
    return Imported(source=SOURCE, version=clean_text(version), rows=rows)


def _test(test: dict[str, object], driver: str) -> Iterator[Row]:
    name = str(test.get("name", "")).strip().lower().replace(" ", "_")
    for result in map(as_dict, as_list(test.get("results"))):
        ids = str(result.get("entity_id", result.get("gpu_id", result.get("gpu_ids", "")))).split(",")
        passed = _PASSED.get(str(result.get("status", "")).lower())
        is_gpu = str(result.get("entity_group", "GPU")) == "GPU"
        if passed is None or not is_gpu:
            continue  # the test was skipped, or did not test a GPU
        for gpu in filter(str.isdigit, map(str.strip, ids)):
            place = {"tool_name": name, "slot": f"gpu={gpu}", "driver": driver}
            yield row(f"dcgm.{name}.passed", passed, "1", {}, **place)
            info = result.get("info", "")
            for line in as_list(info) or [info]:
                yield from _figures(name, str(line), place)


def _figures(test: str, text: str, place: dict[str, str]) -> Iterator[Row]:
    """Yield the figures in one line of the text that a test reports for a GPU.

    Copies between GPU and host are named `host_copy.bandwidth`, as in Rackproof; any other figure is named `dcgm.<test>.<label>`.
    """
    for label, digits, unit in _FIGURE.findall(text):
        value, (si, factor) = number(digits), _UNITS[unit]
        if value is None:
            continue
        label = label.strip().lower()
        if label in _COPY_DIRECTIONS:
            settings: dict[str, object] = {"direction": _COPY_DIRECTIONS[label], "sharing": "alone"}
            yield row("host_copy.bandwidth", value * factor, si, settings, **place)
        else:
            yield row(f"dcgm.{test}.{label.replace(' ', '_')}", value * factor, si, {}, **place)
