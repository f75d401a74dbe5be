"""Numbers as people read them."""

from __future__ import annotations


def human_bytes(size: float) -> str:
    """ "512 B", "1.5 MB", in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def percent(share: float | None) -> str:
    """A score from 0 to 1 as "41.7"; "-" for None."""
    return "-" if share is None else f"{100 * share:.1f}"


def percent_interval(interval: tuple[float, float] | None) -> str:
    """An interval of scores from 0 to 1 as "22.0-61.4"; "-" for None."""
    return "-" if interval is None else f"{100 * interval[0]:.1f}-{100 * interval[1]:.1f}"
