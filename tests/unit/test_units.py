"""Units: every form that is documented, and an error that helps for every one that is not."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapd.units import (
    GIB,
    KIB,
    LARGEST_BYTES,
    MIB,
    TIB,
    Amount,
    UnitError,
    exact_bytes,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_need,
    parse_amount,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("65536", 65536),
        (65536, 65536),
        ("1b", 1),
        ("8GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8 GiB", 8 * GIB),
        (" 8GiB\n", 8 * GIB),
        ("512MB", 512_000_000),
        ("512Mb", 512_000_000),
        ("1.5G", 3 * GIB // 2),
        ("1.5k", 1536),
        ("2T", 2 * TIB),
        (".5MiB", MIB // 2),
        ("3.MiB", 3 * MIB),
        ("0.3KiB", 307),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("8Gb!", "unknown unit 'gb!'"),
        ("8Gi", "unknown unit 'gi'"),
        ("8G iB", "unknown unit"),
        ("", "does not start with a number"),
        ("GiB", "does not start with a number"),
        ("-4GiB", "negative"),
        ("1e9", "unknown unit 'e9'"),
        ("1.2.3GiB", "unknown unit"),
        ("1,5GiB", "unknown unit"),
        ("٣", "does not start with a number"),
        ("nan", "does not start with a number"),
        ("60%", "unknown unit '%'"),
        ("0", "less than one byte"),
        (0, "less than one byte"),
        (-1, "less than one byte"),
        ("0.5", "less than one byte"),
        ("2000000TiB", "more than any machine has"),
        ("9" * 5000, "more than any machine has"),
        (True, "not a number of bytes"),
        (None, "not a number of bytes"),
        (1.5, "not a number of bytes"),
    ],
)
def test_wrong_bytes(text: object, problem: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert problem in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "8GiB" in str(caught.value)


@given(st.integers(min_value=1, max_value=LARGEST_BYTES))
def test_exact_bytes_is_read_back(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count


@given(st.text(max_size=12))
def test_any_text_is_bytes_or_a_unit_error(text: str) -> None:
    with contextlib.suppress(UnitError):
        assert 1 <= parse_bytes(text) <= LARGEST_BYTES


def test_amounts() -> None:
    assert parse_amount("60%") == Amount(fraction=0.6)
    assert parse_amount("60%").resolve(1000) == 600
    assert parse_amount(" 12.5 % ").resolve(8 * GIB) == GIB
    assert parse_amount("100%").resolve(7) == 7
    assert parse_amount("8GiB") == Amount(bytes=8 * GIB)
    assert parse_amount(4096).resolve(1) == 4096
    assert parse_amount(Amount(bytes=3)) == Amount(bytes=3)


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "8GiB%", "60 %%"])
def test_wrong_percentages(text: str) -> None:
    with pytest.raises(UnitError, match="60%"):
        parse_amount(text)


def test_an_amount_in_bytes_suggests_percentages_too() -> None:
    with pytest.raises(UnitError, match=r"^'8Gb!' has the unknown unit 'gb!'; use for example .* or 60%$"):
        parse_amount("8Gb!")


@pytest.mark.parametrize("text", ["60%", "33.3%", "8GiB", "12345", "0.5%"])
def test_amounts_are_read_back(text: str) -> None:
    assert str(parse_amount(text)) == text
    assert parse_amount(str(parse_amount(text))) == parse_amount(text)


@pytest.mark.parametrize("bad", [{}, {"bytes": 1, "fraction": 0.5}])
def test_an_amount_is_one_of_two_things(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="either"):
        Amount(**bad)  # type: ignore[arg-type]


def test_bandwidths() -> None:
    assert parse_bandwidth("10GiB/s") == 10 * GIB
    assert parse_bandwidth("800 MB/s") == 8e8
    assert parse_bandwidth("Unlimited") == math.inf
    assert parse_bandwidth(5e9) == 5e9


@pytest.mark.parametrize("text", ["10GiB", "10", "fast", "0GiB/s", "10GiB/h", "-1GiB/s", "/s", True, 0, math.nan])
def test_wrong_bandwidths(text: object) -> None:
    with pytest.raises(UnitError, match="10GiB/s"):
        parse_bandwidth(text)  # type: ignore[arg-type]


def test_durations() -> None:
    assert parse_duration("20us") == 20e-6
    assert parse_duration("1.5 ms") == 1.5e-3
    assert parse_duration("2s") == 2.0
    assert parse_duration("0s") == 0.0
    assert parse_duration("7NS") == 7e-9
    assert parse_duration(0.25) == 0.25


@pytest.mark.parametrize("text", ["20", "20m", "-1s", "soon", math.inf, -1, False])
def test_wrong_durations(text: object) -> None:
    with pytest.raises(UnitError, match="20us"):
        parse_duration(text)  # type: ignore[arg-type]


def test_formats_for_people() -> None:
    assert [format_bytes(value) for value in (0, 1023, KIB, 1536, 10 * MIB, 1023 * MIB, GIB * 3 // 2, 5000 * TIB)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 MiB", "1023 MiB", "1.50 GiB", "5000 TiB",
    ]  # fmt: skip
    needed = [0, 250_000, MIB * 109 // 2, 1072 * MIB]
    assert [format_need(value) for value in needed] == ["0", "250000", "54.5 MiB", "1072MiB"]
    assert format_bandwidth(10 * GIB) == "10.0 GiB/s"
    assert format_bandwidth(math.inf) == "unlimited"
    assert [format_duration(value) for value in (0, 5e-9, 2e-5, 1.5e-3, 0.0, 1.25, 119.6, 125)] == [
        "0 ns", "5 ns", "20.0 us", "1.50 ms", "0 ns", "1.25 s", "120 s", "2 min 05 s",
    ]  # fmt: skip
