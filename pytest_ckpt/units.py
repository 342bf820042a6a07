"""Units: bytes, rates, durations and shares, read from and written for people.

Sizes and rates are decimal (1 GB = 1e9 bytes), as disks and links are sold; binary units are spelled GiB.
"""

from __future__ import annotations

import math
import re

_DECIMAL = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*")


def format_bytes(count: float) -> str:
    """Return a size in decimal units with three significant digits: `301 MB`, `96.4 GB`, `0 B`."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_rate(bytes_per_second: float) -> str:
    """Return a rate in decimal units with three significant digits: `267 MB/s`, `7.10 GB/s`."""
    return format_bytes(bytes_per_second) + "/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: `0.42 ms`, `312 ms`, `4.21 s`, `15 min`, `1 h 5 min`."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 0.9995:
        return f"{three_digits(seconds * 1e3)} ms"
    if seconds < 600:
        return f"{three_digits(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 session`, `2 sessions`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` names (`64MiB`, `1.5 GB`, `4096`); `ValueError` where it names none."""
    number, unit = _quantity(text)
    factor = _DECIMAL.get(unit) or _BINARY.get(unit)
    if factor is None:
        raise ValueError(f"{text!r} is no size: write bytes, or a unit of kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return round(number * factor)


def parse_seconds(text: str) -> float:
    """Return the seconds that `text` names (`90`, `90s`, `15m`, `15 min`, `2h`); `ValueError` where it names none."""
    number, unit = _quantity(text)
    if unit not in _SECONDS or number <= 0:
        raise ValueError(f"{text!r} is no duration above zero: write seconds, or a unit of s, m, min, h, as in 15m")
    return number * _SECONDS[unit]


def _quantity(text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        return math.nan, "?"
    return float(match[1]), match[2]


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{three_digits(value)} {unit}"
        value /= 1000
    return f"{three_digits(value)} {units[-1]}"


def three_digits(value: float) -> str:
    """Return a number below 1000 with three significant digits, and never more than two behind the point."""
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
