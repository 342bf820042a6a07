"""Units are exact where they are read, and honest to three digits where they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_ckpt.units import format_bytes, format_rate, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("64MiB", 64 * 2**20), ("1.5 GB", 1_500_000_000), ("267 MB", 267_000_000), ("1 GiB", 2**30)],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("15 min", 900), ("2h", 7200), ("250ms", 0.25)]
)
def test_durations_are_read_in_the_units_people_write(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5parsecs", "-1s", "0", "s", "1e999", "nan", "inf", "1 2", "1,5s"])
def test_what_is_no_duration_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="as in 15m"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["", "5 parsecs", "-1MB", "GB", "1e999", "1 GBs"])
def test_what_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ValueError, match="GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (301_271_040, "301 MB"),
        (96_363_134_976, "96.4 GB"),
        (999_999_999, "1.00 GB"),
        (7_100_000_000, "7.10 GB"),
    ],
)
def test_sizes_are_written_in_decimal_units(count: int, text: str) -> None:
    assert format_bytes(count) == text
    assert format_rate(count) == text + "/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00042, "0.42 ms"),
        (0.312, "312 ms"),
        (0.9999, "1.00 s"),
        (4.21, "4.21 s"),
        (376.4, "376 s"),
        (900, "15 min"),
        (3900, "1 h 5 min"),
    ],
)
def test_durations_are_written_with_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(min_value=1, max_value=1e15))
def test_a_written_size_is_within_half_a_percent_of_the_size(count: float) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.0051, abs=0.51)


@given(st.floats(min_value=1e-3, max_value=599))
def test_a_written_duration_is_within_half_a_percent_of_the_duration(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=0.0051)


@given(st.integers(min_value=0, max_value=2**60), st.sampled_from(["B", "kB", "MiB", "GiB", "TB"]))
def test_reading_a_size_is_exact_for_whole_numbers(number: int, unit: str) -> None:
    factor = {"B": 1, "kB": 1000, "MiB": 2**20, "GiB": 2**30, "TB": 10**12}[unit]
    small = number % 2**20  # floats are exact up to 2**53; nobody writes more digits than that
    assert parse_bytes(f"{small} {unit}") == small * factor
