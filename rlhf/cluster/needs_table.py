"""What a run needs, as people read it: sizes, and a table with a row for each pool. Pure text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rlhf.cluster.needs import DeviceBytes, Needs


def size(count: int) -> str:
    """Bytes for people: `1.5 GiB`; `-` for none."""
    if count == 0:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def render_table(needs: Needs, available: str | None = None) -> str:
    """The placement table as plain text: a row a pool, with bytes per device; a total; `available` as the last line."""
    noun = "slots" if needs.device == "cpu" else "GPUs"
    columns = [field.name.replace("_", " ") for field in fields(DeviceBytes)]
    rows: list[list[str]] = [["pool", "units", noun, *columns, "per device", "on host", "pool total"]]
    for pool in needs.pools:
        parts = [size(getattr(pool.bytes, field.name)) for field in fields(DeviceBytes)]
        held = [*parts, size(pool.bytes.total), size(pool.host_bytes), size(pool.total_bytes)]
        rows.append([pool.pool, str(pool.units), str(pool.devices), *held])
    blanks = [""] * (len(columns) + 2)
    rows.append(["all", "", str(needs.devices), *blanks, size(needs.total_bytes)])
    lines = _aligned(rows)
    if available is not None:
        lines.append(f"available: {available}")
    return "\n".join([*lines, *(f"problem: {problem}" for problem in needs.problems)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
