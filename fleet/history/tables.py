"""The tables of the history, and the SQL that writes them as Parquet files.

The table `figures` has the value of each figure, and `levels` has the medians of each host and each rack. Both have the column
`relative`: the logarithm of (value / median of the peers). Peers are in the same run and have the same GPU model and driver. So
`relative` does not depend on what all peers have in common, such as the driver, a warm week or the version of the benchmark.

In `figures`, the peers of a GPU are the GPUs of its host. In `levels`, the peers of a host are the hosts of its rack, and the
peers of a rack are all racks of the run. A GPU or host with fewer than MIN_PEERS peers is compared with all GPUs or hosts of the
run instead. The column `reference` states where the peers are: in the same `host`, `rack` or `run`. If there are too few in the
run as well, `reference` is empty and `relative` is the logarithm of the value itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MIN_PEERS = 3
RUN = {"run": "VARCHAR", "nonce": "VARCHAR", "began": "TIMESTAMP"}
PLACE = {"host": "VARCHAR", "rack": "VARCHAR", "slot": "VARCHAR", "serial": "VARCHAR"}
FIGURE = dict.fromkeys(("name", "stage", "within", "settings", "unit"), "VARCHAR")
INPUT: Mapping[str, Mapping[str, str]] = {
    "figures": {**PLACE, "model": "VARCHAR", "driver": "VARCHAR", "accepted": "BOOLEAN", **FIGURE, "value": "DOUBLE"},
    "parts": {
        **PLACE,
        **dict.fromkeys(("part", "model", "driver", "decision", "address", "uuid"), "VARCHAR"),
    },
    "causes": {
        **PLACE,
        **dict.fromkeys(("problem", "title", "action", "severity", "confidence"), "VARCHAR"),
        "waived": "BOOLEAN",
    },
    "tests": {
        **dict.fromkeys(("host", "stage", "benchmark"), "VARCHAR"),
        "measured": "BOOLEAN",
        "failed": "BOOLEAN",
        "seconds": "DOUBLE",
    },
    "imported": {
        **dict.fromkeys(("source", "version", "file", "sha256", "tool_name", "name", "settings", "unit"), "VARCHAR"),
        "host": "VARCHAR",
        "slot": "VARCHAR",
        "model": "VARCHAR",
        "driver": "VARCHAR",
        "value": "DOUBLE",
    },
}
"""Table -> columns and types of its input rows. The package `imports` makes those of `imported`, and `rows.py` all others."""
TREND_KEY = ("level", "id", "rack", "model", "name", "settings", "stage", "within", "unit", "driver", "reference")
TREND: Mapping[str, str] = {
    **dict.fromkeys(TREND_KEY, "VARCHAR"),
    **dict.fromkeys(("n", "sx", "sy", "sxx", "sxy", "syy", "log_sum"), "DOUBLE"),
    "first": "TIMESTAMP",
    "last": "TIMESTAMP",
}
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "figures": {**RUN, **INPUT["figures"], "duplicate": "BOOLEAN", "relative": "FLOAT", "reference": "VARCHAR"},
    "levels": {
        **RUN,
        **dict.fromkeys(("level", "id", "rack", "model", "driver", *FIGURE), "VARCHAR"),
        "accepted": "BOOLEAN",
        "value": "DOUBLE",
        "relative": "FLOAT",
        "reference": "VARCHAR",
    },
    "parts": {**RUN, **INPUT["parts"], "duplicate": "BOOLEAN"},
    "causes": {**RUN, **INPUT["causes"]},
    "tests": {**RUN, **INPUT["tests"]},
    "trends": TREND,
    "spreads": {
        **dict.fromkeys(("name", "settings", "stage", "within", "model", "driver"), "VARCHAR"),
        "is_gpu": "BOOLEAN",
        "values": "BIGINT",
        "parts": "BIGINT",
        "quantiles": "DOUBLE[]",
    },
    "imported": INPUT["imported"],
}
"""Table -> columns and types of its Parquet files.

Two tables are written only when the runs of a month are merged. `trends` has the sums from which a line can be fitted
(`trend_sums`); the sums of several months can be added. `spreads` has QUANTILES quantiles of each figure of accepted hosts.
"""
LATER_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "imported": ("sha256",),
    "parts": ("address", "uuid"),
    "spreads": ("within",),
}
"""Table -> columns that files of older versions of Rackproof lack. Such a column is read as empty text. In
`within`, empty text means the part as a whole. So links and peers are not compared with a `spreads` file without `within`."""
SORTED = {
    "figures": "name, settings, stage, within, serial, host, began",
    "levels": "level, name, settings, stage, within, id, began",
    "parts": "serial, host, slot, began",
    "causes": "serial, host, began",
    "tests": "host, began, stage, benchmark",
    "trends": "level, name, settings, stage, within, id, driver",
    "spreads": "name, settings, stage, within, model, driver",
    "imported": "source, name, settings",
}
QUANTILES = 200
PER_RUN = ("figures", "levels", "parts", "causes", "tests")
"""The tables that have one file for each run, until the run is merged into the file of its month."""
ROW_GROUP = 16384
"""Number of rows in a row group of a Parquet file of one run. A query for one figure reads only the row groups with its name."""
ROW_GROUP_MERGED = 122_880
DAYS = '(epoch("began") / 86400.0 - 18262.0)'
"""SQL expression for the time of a point of a trend: days from 2020-01-01 to the start of the run."""


def within_kind(within: str) -> str:
    """Return `within`, the scope below the part, with `*` in place of each name or number: `peer=*` for `peer=3`."""
    return re.sub("=[^,]*", "=*", within)


def literal(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def paths(files: Iterable[Path]) -> str:
    """Return the paths of files as an SQL list."""
    return "[" + ", ".join(literal(str(path)) for path in files) + "]"


def parquet(files: Iterable[Path]) -> str:
    """Return the SQL that reads Parquet files. A directory name such as `rack=9/` in their paths does not become a column."""
    return f"read_parquet({paths(files)}, hive_partitioning = false)"


def table_rows(table: str, files: Iterable[Path]) -> str:
    """Return the query of the rows of a table. A column of LATER_COLUMNS that a file lacks is filled with empty text."""
    if table not in LATER_COLUMNS:
        return f"select * from {parquet(files)}"
    known = f"read_parquet({paths(files)}, hive_partitioning = false, union_by_name = true)"
    filled = ", ".join(f'coalesce("{column}", \'\') as "{column}"' for column in LATER_COLUMNS[table])
    return f"select * replace ({filled}) from ({empty(table)} union all by name select * from {known})"


def empty(table: str) -> str:
    """Return a query with the columns of a table and no rows."""
    return "select " + ", ".join(f'null::{kind} as "{name}"' for name, kind in COLUMNS[table].items()) + " where false"


def read_rows(table: str, file: Path) -> str:
    """Return the SQL that reads input rows (INPUT) from a file with one JSON object a line."""
    columns = ", ".join(f"{literal(name)}: {literal(kind)}" for name, kind in INPUT[table].items())
    options = f"format = 'newline_delimited', columns = {{{columns}}}, hive_partitioning = false"
    return f"read_json({literal(str(file))}, {options})"


def copy(query: str, table: str, path: Path, *, merged: bool = False) -> str:
    """Return the statement that writes the result of a query as the Parquet file of a table."""
    columns = ", ".join(f'"{name}"::{kind} as "{name}"' for name, kind in COLUMNS[table].items())
    size = ROW_GROUP_MERGED if merged else ROW_GROUP
    return (
        f"copy (select {columns} from ({query}) order by {SORTED[table]}) to {literal(str(path))} "
        f"(format parquet, compression zstd, row_group_size {size})"
    )


def run_columns(nonce: str, entry: Mapping[str, Any]) -> str:
    """Return the SQL of the columns RUN, which have the same values in all rows of a run."""
    return f'{literal(entry["run"])} as run, {literal(nonce)} as nonce, {literal(entry["began"])}::timestamp as "began"'


WITHIN_KIND = "regexp_replace(within, '=[^,]*', '=*', 'g')"
"""SQL expression for `within_kind(within)`. With it, the figures of `link=1` and `link=2` are compared with each other."""
_KEY = "name, settings, stage, within_kind, model, driver"
_RELATIVE = """
create temp table figures_with_peers as
with base as (
  select *, {within} as within_kind, serial in (select unnest({duplicates}::varchar[])) as duplicate,
    case when value > 0 then ln(value) end as log_value
  from {source}
), of_host as (
  select host, {key}, median(log_value) as middle, count(distinct serial) as peers
  from base where serial <> '' and not duplicate group by all
), of_run as (
  select {key}, serial <> '' as of_gpu, median(log_value) as middle, count(distinct host || serial) as peers
  from base where not duplicate group by all
)
select base.*, case when h.peers >= {least} then 'host' when r.peers >= {least} then 'run' else '' end as reference,
  log_value - case when h.peers >= {least} then h.middle when r.peers >= {least} then r.middle else 0 end as relative
from base
left join of_host h on base.serial <> '' and h.host = base.host and h.name = base.name and h.settings = base.settings
  and h.stage = base.stage and h.within_kind = base.within_kind and h.model = base.model and h.driver = base.driver
left join of_run r on r.of_gpu = (base.serial <> '') and r.name = base.name and r.settings = base.settings
  and r.stage = base.stage and r.within_kind = base.within_kind and r.model = base.model and r.driver = base.driver
"""
_LEVELS = """
create temp table group_levels as
with hosts as (
  select 'host' as level, host as id, any_value(rack) as rack, model, driver, name, settings, stage, within_kind as within,
    any_value(unit) as unit, bool_and(accepted) as accepted, median(log_value) as middle
  from figures_with_peers where log_value is not null and not duplicate group by host, {key}
), racks as (
  select 'rack' as level, rack as id, rack, model, driver, name, settings, stage, within, any_value(unit) as unit,
    bool_and(accepted) as accepted, median(middle) as middle, count(*) as peers
  from hosts group by rack, {figure}
), fleet as (
  select {figure}, median(middle) as middle, count(*) as peers from racks group by {figure}
), every_host as (
  select {figure}, median(middle) as middle, count(*) as peers from hosts group by {figure}
)
select hosts.*, exp(hosts.middle) as "value",
  case when racks.peers >= {least} then 'rack' when e.peers >= {least} then 'run' else '' end as reference,
  hosts.middle - case when racks.peers >= {least} then racks.middle when e.peers >= {least} then e.middle else 0 end
    as relative
from hosts join racks using (rack, {figure}) join every_host e using ({figure})
union all by name
select racks.* exclude (peers), exp(racks.middle) as "value", case when fleet.peers >= {least} then 'run' else '' end
  as reference, racks.middle - case when fleet.peers >= {least} then fleet.middle else 0 end as relative
from racks join fleet using ({figure})
"""


def with_peers(source: str, duplicates: Iterable[str]) -> str:
    """Return the SQL that creates the table `figures_with_peers` from the figures of one run.

    `duplicates`: serials that are in several places of the run. Their rows are marked and do not count in the medians.
    """
    serials = "[" + ", ".join(map(literal, duplicates)) + "]"
    return _RELATIVE.format(source=source, duplicates=serials, key=_KEY, within=WITHIN_KIND, least=MIN_PEERS)


def group_levels() -> str:
    """Return the SQL that creates the table `group_levels` (the medians of hosts and racks) from `figures_with_peers`."""
    return _LEVELS.format(key=_KEY, figure=_KEY.replace("within_kind", "within"), least=MIN_PEERS)


def trend_sums(figures: str, levels: str) -> str:
    """Return the query of the sums of each series, over all runs in the relations `figures` and `levels`.

    A series is one figure of one GPU, host or rack under one driver and with one `reference`. In the names of the sums, x is the
    time in days (DAYS) and y is `relative`: `sxy` is the sum of x * y.
    """
    points = f"""
      select 'gpu' as level, serial as id, rack, model, name, settings, stage, within, unit, driver, reference,
        "began", relative as y, ln(value) as log_value
      from {figures} where serial <> '' and not duplicate and relative is not null and isfinite(relative)
      union all
      select level, id, rack, model, name, settings, stage, within, unit, driver, reference,
        "began", relative, ln(value) from {levels} where relative is not null and isfinite(relative)"""
    key = ", ".join(TREND_KEY)
    return f"""select {key}, count(*) as n, sum({DAYS}) as sx, sum(y) as sy, sum({DAYS} ** 2) as sxx, sum({DAYS} * y) as sxy,
      sum(y::double ** 2) as syy, sum(log_value) as log_sum, min("began") as first, max("began") as last
      from ({points}) group by {key}"""


def weighted(source: str, key: str) -> str:
    """Return the query of the rows of `source` with two more columns, `weight` and `position`.

    `weight` is WEIGHT. `position` is the weight of all values up to this one, as a share of the total weight of its distribution.
    `key` has the columns that identify a distribution, separated by commas.
    """
    return f"""
      select *, sum(weight) over (partition by {key} order by value rows unbounded preceding)
        / sum(weight) over (partition by {key}) + 1e-9 as position
      from (select *, {WEIGHT} as weight from {source})"""


WEIGHT = f"1.0 / count(*) over (partition by nonce, host, serial, name, settings, stage, model, {WITHIN_KIND})"
"""SQL expression for the weight of a value. A part has the weight 1 for each run and figure, and the values of its links, peers
or adapters share this weight equally."""


def spreads(figures: str) -> str:
    """Return the query of the distribution of each figure of accepted hosts, over all rows of the relation `figures`."""
    steps = ", ".join(str((number + 0.5) / QUANTILES) for number in range(QUANTILES))
    key = "name, settings, stage, model, driver, is_gpu"
    on = " and ".join(f"steps.{column} = ranked.{column}" for column in (*key.split(", "), "kind"))
    kinds = f"serial <> '' as is_gpu, {WITHIN_KIND} as kind"
    chosen = f"(select *, {kinds} from {figures} where accepted and not duplicate and within"
    return f"""
    with ranked as ({weighted(f"{chosen} <> '')", f"{key}, kind")}), totals as (
      select {key}, kind, count(distinct (nonce, host, serial)) as values, count(distinct host || ' ' || serial) as parts,
        max(value) as highest
      from ranked group by {key}, kind
    ), steps as (select *, unnest([{steps}]) as step from totals), nearest as (
      select steps.*, coalesce(ranked.value, highest) as value from steps asof left join ranked on {on} and steps.step <= position
    )
    select {key}, '' as within, count(*) as values, count(distinct host || ' ' || serial) as parts,
      quantile_disc(value, [{steps}]) as quantiles
    from {chosen} = '') group by {key}
    union all by name
    select {key}, kind as within, any_value(values) as values, any_value(parts) as parts, list(value order by step) as quantiles
    from nearest group by {key}, kind"""
