"""Which keys a JSON value has."""

from typing import Any


def shape(value: Any, at: str = "") -> set[str]:
    """Every path of keys in a JSON value; what a list holds has the path of its first entry."""
    if isinstance(value, dict):
        return {at, *(path for key, inner in value.items() for path in shape(inner, f"{at}.{key}"))}
    if isinstance(value, list) and value:
        return shape(value[0], f"{at}[]")
    return {at}
