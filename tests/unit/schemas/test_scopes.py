"""Test `Scope` and `pci_address`.

A scope says which part of a host, or which gang (the hosts of one multi-node launch), was observed. `Scope` is its parsed form.
Only schemas/scopes.py splits the strings of scopes. `pci_address` returns a PCI address in the form of sysfs.
"""

from __future__ import annotations

import re

import pytest

from schemas.scopes import Scope, pci_address
from tests import ROOT


@pytest.mark.parametrize(
    ("text", "kind", "device", "below", "part", "index"),
    [
        ("host", "host", "host", "", "host", None),
        ("gpu=0", "gpu", "gpu=0", "", "gpu=0", 0),
        ("gpu=12,link=3", "link", "gpu=12", "link=3", "gpu=12", 12),
        ("gpu=1,peer=2", "peer", "gpu=1", "peer=2", "gpu=1", 1),
        ("gang=rack12", "gang", "gang=rack12", "", "gang=rack12", None),
        ("pci=0000:1b:00.0,xid=79", "xid", "pci=0000:1b:00.0", "xid=79", "pci=0000:1b:00.0", None),
        ("mc=0,dimm=2", "dimm", "mc=0", "dimm=2", "mc=0,dimm=2", 0),
        ("gpu=123456", "gpu", "gpu=123456", "", "gpu=123456", None),  # an index has at most five digits
        ("gpu=٣", "gpu", "gpu=٣", "", "gpu=٣", None),  # an index has only ASCII digits
        ("", "", "", "", "", None),
    ],
)
def test_scope_has_kind_device_and_part(
    text: str, kind: str, device: str, below: str, part: str, index: int | None
) -> None:
    scope = Scope.parse(text)
    assert (scope.text, scope.kind, scope.device, scope.below, scope.part) == (text, kind, device, below, part)
    assert scope.index == index


def test_labels_are_read_by_kind() -> None:
    """`gpu=0` is a label of kind `gpu`. The part is the hardware that can be exchanged, such as a GPU or a DIMM."""
    scope = Scope.parse("gpu=0,link=3")
    assert scope.labels == {"gpu": "0", "link": "3"}
    assert (scope.get("link"), scope.get("peer")) == ("3", "")
    assert Scope.parse("gpu=0,link=3").below_part == "link=3"
    assert Scope.parse("mc=0,dimm=2").below_part == ""


def test_same_text_is_parsed_to_the_same_object() -> None:
    assert Scope.parse("gpu=0,link=3") is Scope.parse("gpu=0,link=3")


def test_scope_contains_itself_and_narrower_scopes() -> None:
    gpu = Scope.parse("gpu=1")
    assert gpu.contains("gpu=1")
    assert gpu.contains("gpu=1,link=0")
    assert not gpu.contains("gpu=12")
    assert not gpu.contains("host")


def test_same_scope_on_another_device() -> None:
    assert Scope.parse("pci=0000:1b:00.0,xid=79").on("gpu=3") == "gpu=3,xid=79"
    assert Scope.parse("pci=0000:1b:00.0").on("gpu=3") == "gpu=3"


def test_only_a_whole_gpu_or_whole_process_is_one_device() -> None:
    """`cpu=0` is a process of a rehearsal."""
    assert Scope.parse("gpu=0").is_one_device
    assert Scope.parse("cpu=0").is_one_device
    assert not any(Scope.parse(text).is_one_device for text in ("gpu=0,link=1", "host", "hca=0", "gpu=x"))


def test_repeated_kind_of_label_is_detected() -> None:
    assert Scope.parse("gpu=0,gpu=1").has_repeated_kind
    assert not any(Scope.parse(text).has_repeated_kind for text in ("host", "gpu=0", "gpu=0,link=1"))


def test_only_the_module_scopes_splits_scopes() -> None:
    split = re.compile(
        r'scope\.(?:r?split|r?partition|startswith|endswith|remove\w+)\(|startswith\(\(?"(?:gang|gpu|pci)='
    )
    matches = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("agent", "collectors", "fleet", "schemas", "rackproof")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if split.search(line) and path.name != "scopes.py"
    ]
    assert matches == []


def test_last_label_is_removed_if_it_has_the_given_kind_and_is_not_the_only_label() -> None:
    assert Scope.parse("hca=a,port=1,lane=3").without("lane") == "hca=a,port=1"
    assert Scope.parse("hca=a,port=1").without("lane") == "hca=a,port=1"
    assert Scope.parse("lane=3").without("lane") == "lane=3"


@pytest.mark.parametrize(
    ("address", "result"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"), ("0000:1b:00.0", "0000:1b:00.0"), ("00000009:01:00.0", "0009:01:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"), ("10000:01:00.0", "10000:01:00.0"),
    ],
)  # fmt: skip
def test_pci_address_has_the_form_of_sysfs_and_keeps_its_domain(address: str, result: str) -> None:
    assert pci_address(address) == result
