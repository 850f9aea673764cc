"""Values in a configuration file, checked: what is wrong is said with the entry's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 1 << 40  # of anything: sizes multiply, and stay numbers that a file could hold


def integer(entries: Mapping[str, Any], name: str) -> int:
    """An integer of a size that anything could have."""
    value = entries[name]
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def number(entries: Mapping[str, Any], name: str) -> float:
    """A finite number, of such a size."""
    value = entries[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return value


def flag(entries: Mapping[str, Any], name: str) -> bool:
    """True or false."""
    value = entries[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def pair(entries: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Height and width from one number or two."""
    value = entries[name]
    both = value if isinstance(value, list | tuple) else (value, value)
    try:
        height, width = (integer({name: n}, name) for n in both)
    except ValueError as error:
        raise ValueError(f"{name} must be one integer or two, got {value!r}") from error
    return height, width


def numbers(entries: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    """As many numbers as asked for."""
    value = entries[name]
    try:
        if not isinstance(value, list | tuple) or len(value) != count:
            raise ValueError
        return tuple(number({name: n}, name) for n in value)
    except ValueError as error:
        raise ValueError(f"{name} must be {count} number(s), got {value!r}") from error


def mapping(entries: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; an empty one where it is left out or null."""
    value = {} if entries.get(name) is None else entries[name]
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {value!r}")
    return value


def choice(entries: Mapping[str, Any], name: str, choices: Mapping[Any, str]) -> str:
    """Our word for one of theirs."""
    value = entries[name]
    if not isinstance(value, str | int) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
    return choices[value]
