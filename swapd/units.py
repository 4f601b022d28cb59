"""Units: text to bytes, amounts, bandwidths and durations, and back.

    bytes      8GiB  512MB  1.5G  65536        KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000;
                                               K, M, G, T alone are powers of 1024; no unit: bytes
    amount     bytes, or 60%                   a percentage of a total that is known later
    bandwidth  10GiB/s  800MB/s  unlimited
    duration   20us  1.5ms  2s                 ns, us, ms, s

Case does not matter, nor does a space before the unit. The result must be a positive number; a duration may be zero.
Everything else raises a UnitError that quotes the text and shows valid forms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
LARGEST_BYTES = 1 << 60
LARGE_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    **{short: 1 << 10 * power for power, short in enumerate("kmgt", 1)},
    **{f"{short}ib": 1 << 10 * power for power, short in enumerate("kmgt", 1)},
    **{f"{short}b": 1000**power for power, short in enumerate("kmgt", 1)},
}
_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}  # divisors: 20 / 1e6 is exactly the float 20e-6
_NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(.*?)\s*", re.DOTALL | re.ASCII)
_BYTES_FORMS = "8GiB, 512MB, 1.5G or 65536"
_AMOUNT_FORMS = "8GiB, 512MB, 65536 or 60%"
_BANDWIDTH_FORMS = "10GiB/s, 800MB/s or unlimited"
_DURATION_FORMS = "20us, 1.5ms or 2s"


class UnitError(ValueError):
    """A text is not a quantity of the kind that is needed; the message says what is wrong and shows valid forms."""

    def __init__(self, text: object, problem: str, forms: str) -> None:
        super().__init__(f"{text!r} {problem}; use for example {forms}")


@dataclass(frozen=True)
class Amount:
    """Bytes, or a share of a total that is not known yet. Exactly one of the two is set."""

    bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.fraction is None):
            raise ValueError("an Amount is either bytes or a fraction")

    def resolve(self, total_bytes: int) -> int:
        """Returns the bytes; a fraction is one of `total_bytes`."""
        if self.fraction is None:
            assert self.bytes is not None
            return self.bytes
        return int(total_bytes * self.fraction)

    def __str__(self) -> str:
        if self.fraction is None:
            assert self.bytes is not None
            return exact_bytes(self.bytes)
        return f"{self.fraction * 100:.10g}%"


def _split(text: str, forms: str) -> tuple[float, str]:
    """The number and the lower-case unit of `text`."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        negative = text.strip().startswith("-")
        raise UnitError(text, "is negative" if negative else "does not start with a number", forms)
    return float(match[1]), match[2].lower()


def _unit(text: str, unit: str, units: dict[str, int] | dict[str, float], forms: str) -> float:
    if unit not in units:
        raise UnitError(text, f"has the unknown unit {unit!r}" if unit else "has no unit", forms)
    return units[unit]


def parse_bytes(text: str | int) -> int:
    """Bytes of `text`, rounded down to a whole byte. Raises UnitError."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise UnitError(text, "is not a number of bytes", _BYTES_FORMS)
    if isinstance(text, int):
        value: float = text
    else:
        number, unit = _split(text, _BYTES_FORMS)
        is_exact = text.isdecimal() and len(text) < 20
        value = int(text) if is_exact else number * _unit(text, unit, _BYTE_UNITS, _BYTES_FORMS)
    if value < 1:
        raise UnitError(text, "is less than one byte", _BYTES_FORMS)
    if value > LARGEST_BYTES:
        raise UnitError(text, "is more than any machine has", _BYTES_FORMS)
    return int(value)


def parse_amount(text: str | int | Amount) -> Amount:
    """Bytes or a percentage, more than 0% and at most 100%. Raises UnitError."""
    if isinstance(text, Amount):
        return text
    if isinstance(text, str) and text.rstrip().endswith("%"):
        number, unit = _split(text, _AMOUNT_FORMS)
        if unit != "%":
            raise UnitError(text, "is not a percentage", _AMOUNT_FORMS)
        if not 0 < number <= 100:
            raise UnitError(text, "is not more than 0% and at most 100%", _AMOUNT_FORMS)
        return Amount(fraction=number / 100)
    try:
        return Amount(bytes=parse_bytes(text))
    except UnitError as error:
        raise UnitError(text, str(error).removeprefix(f"{text!r} ").split("; use")[0], _AMOUNT_FORMS) from None


def parse_bandwidth(text: str | float) -> float:
    """Bytes per second; infinity for ``unlimited``. A number counts as bytes per second. Raises UnitError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    elif not isinstance(text, str):
        raise UnitError(text, "is not a bandwidth", _BANDWIDTH_FORMS)
    elif text.strip().lower() == "unlimited":
        value = math.inf
    else:
        number, unit = _split(text, _BANDWIDTH_FORMS)
        if not unit.endswith("/s"):
            raise UnitError(text, "does not end in '/s'", _BANDWIDTH_FORMS)
        value = number * _unit(text, unit.removesuffix("/s").rstrip(), _BYTE_UNITS, _BANDWIDTH_FORMS)
    if not value > 0:
        raise UnitError(text, "is not more than zero", _BANDWIDTH_FORMS)
    return value


def parse_duration(text: str | float) -> float:
    """Seconds, zero included. A number counts as seconds, a text needs a unit. Raises UnitError."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    elif not isinstance(text, str):
        raise UnitError(text, "is not a duration", _DURATION_FORMS)
    else:
        number, unit = _split(text, _DURATION_FORMS)
        value = number / _unit(text, unit, _PER_SECOND, _DURATION_FORMS)
    if not (value >= 0 and math.isfinite(value)):
        raise UnitError(text, "is not a finite number of seconds", _DURATION_FORMS)
    return value


def exact_bytes(count: int) -> str:
    """`count` without rounding, in the largest unit that divides it: "8GiB", "1536MiB", "65537"."""
    for name, unit in LARGE_UNITS:
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def format_bytes(count: float) -> str:
    """`count` for people: "0 B", "1.50 GiB", "12.3 MiB", "640 KiB"."""
    for name, unit in LARGE_UNITS:
        if abs(count) >= unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:.0f} B"


def format_need(count: int) -> str:
    """`count` for people who may ask for as much: as `format_bytes` where that is exact, else as `exact_bytes`."""
    text = format_bytes(count)
    return text if count and parse_bytes(text) == count else exact_bytes(count)


def format_bandwidth(bytes_per_second: float) -> str:
    """Bytes per second for people: "10.0 GiB/s", or "unlimited"."""
    return "unlimited" if math.isinf(bytes_per_second) else f"{format_bytes(bytes_per_second)}/s"


def format_duration(seconds: float) -> str:
    """Seconds for people: "1.25 s", "20.0 us", "2 min 05 s"."""
    if abs(seconds) >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for name, unit in TIME_UNITS:
        if abs(seconds) >= unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{seconds * 1e9:.0f} ns"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"
