"""Find versions that changed. The same change on several hosts is listed once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fleet.records.host_state import HostState
from schemas.baselines import VERSION, Change

MAX_VERSION_CHARACTERS = 1000
"""Longer versions are cut."""
_MAX_NAMED_HOSTS = 6


def changed_versions(old: HostState, new: HostState) -> Iterator[tuple[str, str, str]]:
    """Yield component, old version and new version of each component that changed."""
    before, after = _by_component(old.versions), _by_component(new.versions)
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield name, before[name], after[name]


def version_changes(hosts_by_change: Mapping[tuple[str, str, str], Sequence[str]]) -> Iterator[Change]:
    """Yield each change of a version once, even if several hosts have it."""
    for (name, before, after), hosts in hosts_by_change.items():
        more = f" and {len(hosts) - _MAX_NAMED_HOSTS} more" if len(hosts) > _MAX_NAMED_HOSTS else ""
        text = f"{', '.join(hosts[:_MAX_NAMED_HOSTS])}{more}: {name} {before} → {after}"
        yield Change(kind=VERSION, host=hosts[0], scope="host", what=name, old=before, new=after, text=text)


def _by_component(versions: Mapping[str, str]) -> dict[str, str]:
    """Return component -> its version. The versions of several parts, such as `NAME[gpu=3]`, are joined under `NAME`."""
    components: dict[str, set[str]] = defaultdict(set)
    for name, version in versions.items():
        components[name.partition("[")[0]].add(version)
    return {
        name: ", ".join(sorted(versions_of_parts))[:MAX_VERSION_CHARACTERS]
        for name, versions_of_parts in components.items()
    }
