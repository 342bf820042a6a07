"""The values of options: what a text means, or the sentence that refuses it and says where it was written."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from pytest_ckpt.errors import SettingError, unknown_name
from pytest_ckpt.measure.hardware_id import check_id
from pytest_ckpt.model.budget import parse_tokens
from pytest_ckpt.units import parse_bytes, parse_seconds

_TRAIN = {"cpu": "1x64", "cuda": "1x2048"}
"""What `--ckpt-train on` means: tokens of a rank in a step."""
_TOLERANCE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*")


def one_of(kind: str, known: Collection[str]) -> Callable[[str, str], str]:
    """Return a parser of one of the `known` names; `kind` says in the refusal what they are names of."""

    def parse(text: str, source: str) -> str:
        if text not in known:
            raise unknown_name(kind, text, known, source)
        return text

    return parse


def some_of(kind: str, known: Collection[str]) -> Callable[[str, str], tuple[str, ...]]:
    """Return a parser of `known` names, each once, with commas between them."""
    parse_one = one_of(kind, known)

    def parse(text: str, source: str) -> tuple[str, ...]:
        names = (part.strip() for part in text.split(","))
        return tuple(dict.fromkeys(parse_one(name, source) for name in names if name))

    return parse


def on_or_off(text: str, source: str) -> bool:
    """Return whether a switch is on."""
    return one_of("value of a switch", ("on", "off"))(text, source) == "on"


def positive(text: str, source: str) -> int:
    """Return a whole number above zero."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        several = f"; several values: {source} once for each" if "," in text else "; write 1, 2, 4 ..."
        raise SettingError(f"{text!r} (from {source}) is no whole number above zero{several}")
    return number


def seconds(text: str, source: str) -> float:
    """Return a duration in seconds; zero for an empty text."""
    if not text:
        return 0.0
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SettingError(f"{error} (from {source})") from error


def probe_bytes(text: str, source: str) -> int:
    """Return a size in bytes; zero for `off`."""
    if text == "off":
        return 0
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise SettingError(f"{error}, or off (from {source})") from error


def train_on(device: str) -> Callable[[str, str], str | None]:
    """Return a parser of what `--ckpt-train` means on `device`: tokens as BATCHxSEQUENCE, or None for `off`."""

    def parse(text: str, source: str) -> str | None:
        if text == "off":
            return None
        if text == "on":
            return _TRAIN[device]
        try:
            return str(parse_tokens(text, source))
        except SettingError as error:
            raise SettingError(f"{error}; or on, or off") from None

    return parse


def tolerance(text: object, source: str) -> float:
    """Return the share that `text` names (`10%`, `0.1`); `SettingError` where it is not between 0 and 1."""
    match = _TOLERANCE.fullmatch(str(text))
    share = round(float(match[1]) / (100 if match[2] else 1), 12) if match else 0.0
    if not 0 < share < 1:
        raise SettingError(
            f"tolerance {str(text)!r} (from {source}) is no share between 0 and 100 %; write it as 10% or 0.1"
        )
    return share


def labelled_id(text: str, source: str) -> tuple[str | None, str]:
    """Return the label of a target and a hardware id, from `LABEL=ID` or, for every target, `ID`."""
    label, equals, name = text.rpartition("=")
    return (label if equals else None), check_id(name, source)
