"""RunConfig ↔ JSON, exactly: what `run.json` holds is what ran, field for field and type for type."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from piston.config.schema import RunConfig

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def to_dict(run: RunConfig) -> dict[str, Any]:
    """The run as plain JSON values: paths as text, tuples as lists, nested dataclasses as objects."""
    return _encode(run)


def to_json(run: RunConfig) -> str:
    """The run as indented JSON text; `from_json` gives an equal RunConfig back."""
    return json.dumps(to_dict(run), indent=2, allow_nan=False)


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The run of `to_dict`. Unknown fields, missing ones without a default and wrong types raise, naming the path."""
    return _decode(values, RunConfig, "run")


def from_json(text: str) -> RunConfig:
    """The run of `to_json`, or of a whole `run.json`, which holds it under "run" next to versions and hardware."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"run.json is not JSON ({error}); expected the one of a run's directory, whole: copy it again"
        ) from error
    if isinstance(values, dict) and isinstance(values.get("run"), dict):
        values = values["run"]
    return from_dict(values)


def leaves(run: RunConfig) -> dict[str, Any]:
    """Every field as dotted path → JSON value, e.g. "optim.peak_lr" → 2.5e-05."""
    return dict(_leaves(to_dict(run), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _encode(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_encode(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _wrong(path: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{path} is {value!r} ({type(value).__name__}), expected {expected}; correct it in run.json")


def _decode(value: Any, hint: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(value, arguments, path)
    if origin is Literal:
        if value not in arguments:
            raise _wrong(path, value, f"one of {list(arguments)}")
        return value
    if origin is tuple:
        return _decode_tuple(value, arguments, path)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong(path, value, "an object")
        return {key: _decode(inner, arguments[1], f"{path}.{key}") for key, inner in value.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(value, typing.cast(type, hint), path)
    return _decode_scalar(value, hint, path)


def _decode_scalar(value: Any, hint: Any, path: str) -> Any:
    if hint is Path:
        if not isinstance(value, str):
            raise _wrong(path, value, "a path as text")
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(path, value, f"a {hint.__name__}")
    return value


def _decode_union(value: Any, arguments: tuple[Any, ...], path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    others = [a for a in arguments if a is not type(None)]
    assert len(others) == 1, f"{path}: only `T | None` unions are used in the schema"
    return _decode(value, others[0], path)


def _decode_tuple(value: Any, arguments: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(path, value, "a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_decode(inner, arguments[0], f"{path}[{i}]") for i, inner in enumerate(value))
    if len(value) != len(arguments):
        raise _wrong(path, value, f"a list of {len(arguments)}")
    return tuple(_decode(v, a, f"{path}[{i}]") for i, (v, a) in enumerate(zip(value, arguments, strict=True)))


def _decode_dataclass(value: Any, kind: type, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise _wrong(path, value, f"an object with the fields of {kind.__name__}")
    hints = _hints(kind)
    for name in value:
        if name not in hints:
            near = difflib.get_close_matches(str(name), hints, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"its fields are {sorted(hints)}"
            raise ValueError(f"{path} has an unknown field `{name}`; {kind.__name__} does not have it: {hint}")
    for f in dataclasses.fields(kind):
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        if f.name not in value and not optional:
            raise ValueError(f"{path} lacks the field `{f.name}`, which {kind.__name__} needs; add it to run.json")
    return kind(**{name: _decode(inner, hints[name], f"{path}.{name}") for name, inner in value.items()})
