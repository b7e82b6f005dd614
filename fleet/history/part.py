"""The history of a part or host: where it was, its figures, the causes of its failures, and its repairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.history.answer import Answer, Section
from fleet.history.database import History
from fleet.history.peers import PeerFigure, percentiles
from fleet.records.host_state import NIC
from schemas import documents
from schemas.errors import UsageError

MAX_KNOWN = 100_000
"""Maximum number of serials and hosts that are searched for a name similar to an unknown one."""
_PART = "(serial = $id or uuid = $id or (part = 'host' and host = $id))"
"""SQL condition for rows of `parts`: $id is the serial or UUID of the part, or the name or chassis serial of the host.

A GPU that shares its serial has its UUID as `serial`, except in a run in which it was the only GPU of its board."""
_SERIALS = f"(select nonce, serial from parts where {_PART} and serial <> '')"
_HOST_RUNS = f"(select nonce, host from parts where part = 'host' and {_PART})"


def part_answer(history: History, name: str, *, values: bool = False) -> Answer:
    """Return the history of the part with the serial or UUID `name`, or of the host with this name or chassis serial.

    The slot of a GPU is its PCI address. Histories that were written by older versions of Rackproof have only its index.

    Raises:
        UsageError: the history has no such part or host.
    """
    places = history.records(
        f"""
        with by_run as (
          select nonce, host, string_agg(distinct slot, ' and ' order by slot) as slot, list(distinct slot) as slots,
            case when count(distinct address) = 1 then any_value(address) else '' end as address,
            any_value("began") as "began", any_value(rack) as rack, any_value(part) as part, any_value(model) as model,
            any_value(driver) as driver, any_value(decision) as decision
          from parts where {_PART} group by nonce, host
        ), ordered as (
          select *, lag(host) over (order by began, host) is distinct from host
            or case when address <> '' and lag(address) over (order by began, host) <> ''
              then lag(address) over (order by began, host) <> address
              else lag(slot) over (order by began, host) <> slot end as moved
          from by_run
        ), numbered as (
          select *, sum(moved::int) over (order by began, host rows unbounded preceding) as number from ordered
        )
        select any_value(part) as part, host, rack, coalesce(nullif(max(address), ''), arg_max(slot, began)) as slot,
          max(address) as address, arg_max(slots, began) as slots, any_value(model) as model, arg_max(nonce, began) as nonce,
          min(began)::varchar as first, max(began)::varchar as last, count(distinct nonce) as runs,
          count(*) filter (decision = 'accepted') as accepted, list_sort(list(distinct driver) filter (driver <> '')) as drivers
        from numbered group by number, host, rack order by first""",
        {"id": name},
    )
    if not places:
        raise _unknown(history, name)
    is_host = places[-1]["part"] == "host"
    causes = _causes(history, name, is_host=is_host)
    sections = [
        Section(name="places", title="Where it was", rows=places, columns={
            "first": "first run", "last": "last run", "host": "host", "rack": "rack", "slot": "slot", "model": "model",
            "runs": "runs", "accepted": "accepted", "drivers": "drivers"}),
        Section(name="causes", title="Causes of failures", rows=causes, columns={
            "began": "run began", "run": "run", "host": "host", "slot": "slot", "problem": "problem", "title": "cause",
            "action": "action", "waived": "waived"}, empty="no failure was attributed to this part or host"),
        Section(name="repairs", title="Repairs", rows=[*_replacements(history, name, places), *_solved(history, name, causes)],
                columns={"began": "run began", "run": "run", "text": "what changed"}),
        Section(name="figures", title="Figures", rows=_figures(history, name, is_host=is_host), columns={
            "name": "figure", "settings": "settings", "stage": "stage", "within": "within", "runs": "runs",
            "last_value": "last", "median": "median", "least": "least", "most": "most",
            "percentile": "percentile of the last value", "peers": "parts compared"}),
    ]  # fmt: skip
    if values:
        sections.append(_values(history, name, is_host=is_host))
    return Answer(sections=sections, notes=_notes(history, name))


def _unknown(history: History, name: str) -> UsageError:
    known = [
        row[0] for row in history.rows(f"select distinct unnest([serial, host]) from parts limit {MAX_KNOWN}") if row[0]
    ]
    near = documents.nearest(name, known)
    return UsageError(
        f"{name!r} is neither a serial nor a host in the history of kind {history.kind} in {history.directory}{near}: "
        'list the parts with: rackproof history sql "select distinct serial, host, slot from parts"'
    )


def _where(*, is_host: bool) -> str:
    """Return the SQL condition for figures of the part or host.

    The condition on (nonce, serial) or (nonce, host) selects the rows. `serial in` and `host in` are redundant, but let DuckDB
    skip rows.
    """
    if not is_host:
        return f"serial in (select serial from {_SERIALS}) and (nonce, serial) in {_SERIALS}"
    return f"serial = '' and host in (select host from {_HOST_RUNS}) and (nonce, host) in {_HOST_RUNS}"


def _causes(history: History, name: str, *, is_host: bool) -> list[dict[str, Any]]:
    if is_host:
        where = f"(nonce, host) in {_HOST_RUNS}"
    else:  # a cause on a part other than a GPU may have only host and slot, without a serial
        where = (
            f"((nonce, serial) in {_SERIALS} or serial = '' and slot <> '' and (nonce, host, split_part(slot, ',', 1)) in "
            f"(select nonce, host, slot from parts where {_PART}))"
        )
    return history.records(
        "select began::varchar as began, run, nonce, host, slot, problem, any_value(title) as title, "
        f"any_value(action) as action, bool_or(waived) as waived from causes where {where} group by all order by began, problem",
        {"id": name},
    )


def _replacements(history: History, name: str, places: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each slot that the part was in, the first later run in which the slot had another part.

    The other part must be new in the host, and this part must be gone from the host. This is required because names of disks and
    NICs, and indexes of GPUs, may change although nobody replaced a part.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for place in places:
        if place["part"] == NIC and len(place["slots"]) > 1:
            continue  # the MAC address is that of a bond or team, not of one NIC
        for slot in [place["slot"]] if place["address"] else filter(None, place["slots"]):
            rows = history.rows(
                f"""
                with present as (select nonce from parts where host = $host and {_PART})
                select began::varchar, run, serial from parts
                where host = $host and part = $part and began > $last::timestamp and serial <> ''
                  and case when $address <> '' and address <> '' then address = $address else list_contains($slots, slot) end
                  and nonce not in (select nonce from present)
                  and serial not in (select serial from parts where nonce = $nonce and host = $host)
                order by began limit 1""",
                {
                    **{key: place[key] for key in ("host", "part", "last", "address", "nonce")},
                    "slots": place["slots"] if place["address"] else [slot],
                    "id": name,
                },
            )
            for began, run, serial in rows:
                text = f"{place['host']} {slot} has another part: {serial}"
                found[began, text] = {"began": began, "run": run, "text": text}
    return list(found.values())


def _solved(history: History, name: str, causes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each problem of the part the run that shows that the problem is gone.

    A problem is gone at the first later run of the part that measured every benchmark that failed on the host in the last run
    with the problem.
    """
    result = []
    for problem in dict.fromkeys(item["problem"] for item in causes):
        last = [item for item in causes if item["problem"] == problem][-1]
        rows = history.rows(
            f"""with failed as (
              select coalesce(list(distinct benchmark), []) as benchmarks from tests
              where nonce = $nonce and host = $host and failed
            ), mine as (select distinct nonce, host, run, "began" from parts where {_PART} and "began" > $last::timestamp
            ), done as (
              select nonce, host, list(distinct benchmark) as benchmarks from tests semi join mine using (nonce, host)
              where measured group by nonce, host
            )
            select mine.began::varchar, run from mine join done using (nonce, host), failed
            where list_has_all(done.benchmarks, failed.benchmarks) order by mine.began limit 1""",
            {"id": name, "last": last["began"], "nonce": last["nonce"], "host": last["host"]},
        )
        result += [
            {"began": began, "run": run, "text": f"{problem} is gone; last found in run {last['run']}"}
            for began, run in rows
        ]
    return result


def _figures(history: History, name: str, *, is_host: bool) -> list[dict[str, Any]]:
    """Return a row for each figure of the part, with the percentile of its last value."""
    rows = history.records(
        f"""select name, settings, stage, within, unit, count(*) as runs, arg_max(value, began) as last_value,
        median(value) as median, min(value) as least, max(value) as most, arg_max(model, began) as model,
        arg_max(driver, began) as driver, arg_max(nonce, began) as nonce
        from figures where {_where(is_host=is_host)} group by name, settings, stage, within, unit
        order by name, settings, stage, within""",
        {"id": name},
    )
    asked = [
        PeerFigure(value=row["last_value"], is_gpu=not is_host,
                   **{key: row[key] for key in ("name", "settings", "stage", "within", "model", "driver")})
        for row in rows
    ]  # fmt: skip
    for row, place in zip(rows, percentiles(history, asked), strict=True):
        row["percentile"] = round(100 * place.below, 1) if place else None
        row["peers"] = place.parts if place else 0
        del row["nonce"]
    return rows


def _values(history: History, name: str, *, is_host: bool) -> Section:
    rows = history.records(
        "select began::varchar as began, run, host, slot, driver, name, settings, stage, within, unit, value from figures "
        f"where {_where(is_host=is_host)} order by name, settings, stage, within, figures.began",
        {"id": name},
    )
    columns = {"name": "figure", "settings": "settings", "stage": "stage", "within": "within", "began": "run began",
               "run": "run", "driver": "driver", "value": "value"}  # fmt: skip
    return Section(name="values", title="Every value", rows=rows, columns=columns)


def _notes(history: History, name: str) -> list[str]:
    """Return a note for each run in which the serial was in several places.

    Also return a note for each pair of runs that overlap in time and have the serial on different hosts.
    """
    twice = history.rows(
        "select run, string_agg(host || ' ' || slot, ', ' order by host, slot) from parts where serial = $id and duplicate "
        "group by run, nonce, began order by began",
        {"id": name},
    )
    notes = [
        f"run {run} has this serial in several places: {places}; trends leave out the figures of the serial in that run"
        for run, places in twice
    ]
    overlapping = history.rows(
        "select distinct a.run, a.host, b.run, b.host from parts a join parts b on a.serial = b.serial and a.host <> b.host "
        "and a.nonce <> b.nonce and a.began <= b.began join runs r on r.nonce = a.nonce and r.ended > b.began "
        "where a.serial = $id",
        {"id": name},
    )
    notes += [
        f"runs {first} ({host}) and {second} ({other}) overlap: the serial was in two hosts at the same time, or a clock is wrong"
        for first, host, second, other in overlapping
    ]
    return notes
