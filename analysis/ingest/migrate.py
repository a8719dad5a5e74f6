"""Files of older schema versions, read as if this version had written them. Newer ones are refused.

`MIGRATIONS` has one entry per older version: what it called otherwise. What it did not write is null, with the
reason `not_recorded`; a column that no row can do without is not made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from inpaint_bench.core import schema as contract
from inpaint_bench.core.records import Manifest
from inpaint_bench.core.schema import Null


@dataclass(frozen=True, kw_only=True)
class Migration:
    """From one schema version to the next."""

    lacks: str  # in words
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by table: old name -> new name
    manifest: Mapping[str, str] = field(default_factory=dict)  # old name -> new name


MIGRATIONS: dict[int, Migration] = {
    1: Migration(lacks="the table samples_gpm; in manifests gpu_facts, study, levers, parity, quality and resumed"),
}


def oldest() -> int:
    """The oldest version that can be read."""
    return min((*MIGRATIONS, contract.SCHEMA_VERSION))


def objection(version: object) -> str | None:
    """Why files of this version cannot be read, or None."""
    if isinstance(version, int) and not isinstance(version, bool):
        if oldest() <= version <= contract.SCHEMA_VERSION:
            return None
        if version > contract.SCHEMA_VERSION:
            return (
                f"schema version {version} is newer than {contract.SCHEMA_VERSION}, the newest that this code reads: "
                "it was written by a later inpaint_bench, merge it with that one"
            )
    return f"schema version {version}; this code reads {oldest()} to {contract.SCHEMA_VERSION}"


def version_of(schema: pa.Schema) -> int | str:
    """What a part says of itself; text where that is no number."""
    found = (schema.metadata or {}).get(b"schema_version", b"none").decode(errors="replace")
    return int(found) if found.isdecimal() else found


def names(table: str, version: int, found: Sequence[str]) -> dict[str, str]:
    """This version's name of every column that was found."""
    now = {name: name for name in found}
    for step in range(version, contract.SCHEMA_VERSION):
        renamed = MIGRATIONS[step].columns.get(table, {})
        now = {name: renamed.get(last, last) for name, last in now.items()}
    return now


def lacking(table: str, version: int, found: Sequence[str]) -> list[str]:
    """Columns without which a part of this version is none: of an older one those that are never null."""
    known = set(names(table, version, found).values())
    old = version < contract.SCHEMA_VERSION
    return [f.name for f in contract.SCHEMAS[table] if f.name not in known and not (old and f.nullable)]


def rows(table: str, version: int, found: pa.Table) -> pa.Table:
    """Rows under this version's names; what was not recorded is null, and says so where rows give reasons."""
    if version == contract.SCHEMA_VERSION:
        return found
    found = found.rename_columns(list(names(table, version, found.column_names).values()))
    absent = [f for f in contract.SCHEMAS[table] if f.name not in found.column_names]
    for column in absent:
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        found = found.append_column(column.name, pa.nulls(found.num_rows, kind))
    said = ";".join(f"{column.name}={Null.NOT_RECORDED}" for column in absent if column.name != "nulls")
    if said and "nulls" in found.column_names:
        place = found.column_names.index("nulls")
        given = found["nulls"].cast(pa.string()).to_pylist()
        reasons = pa.array([f"{one};{said}" if one else said for one in given], pa.string())
        found = found.set_column(place, "nulls", reasons)
    return found


def manifest(value: dict[str, Any]) -> dict[str, Any]:
    """A manifest under this version's names, null where it says nothing. Its own version stays in it."""
    now = value
    for step in range(value["schema_version"], contract.SCHEMA_VERSION):
        renamed = MIGRATIONS[step].manifest
        now = {renamed.get(name, name): content for name, content in now.items()}
    return {**dict.fromkeys(Manifest.__struct_fields__), **now}


def reason(manifest: Mapping[str, Any], otherwise: str) -> str:
    """Why a whole table is missing: an older version may not have had it."""
    version = manifest.get("schema_version")
    older = isinstance(version, int) and version < contract.SCHEMA_VERSION
    return f"{Null.NOT_RECORDED} (schema version {version})" if older else otherwise
