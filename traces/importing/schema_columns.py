"""The columns of a table whose rows are of a type of :mod:`traces.schema`: one for each field, by its type and name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from ..schema import TiedWeight
from .cells import Choice, Column, Duration, Whole

_NS = "_ns"


@dataclass(frozen=True)
class Words:
    """Any text."""

    name: str
    required: bool = True

    @property
    def headings(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    def value(self, text: str, heading: str) -> str:
        """The text."""
        return text


@dataclass(frozen=True)
class Flag:
    """``true`` or ``false``."""

    name: str
    required: bool = True

    @property
    def headings(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    def value(self, text: str, heading: str) -> bool:
        """Which of them."""
        if text.lower() not in ("true", "false"):
            raise ValueError("write true or false")
        return text.lower() == "true"


@dataclass(frozen=True)
class Tied:
    """Tied parameters, in JSON."""

    name: str
    required: bool = True

    @property
    def headings(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    def value(self, text: str, heading: str) -> list[dict[str, Any]]:
        """As plain values."""
        try:
            return list(map(msgspec.to_builtins, msgspec.json.decode(text, type=tuple[TiedWeight, ...])))
        except msgspec.DecodeError as error:
            raise ValueError(f'write JSON such as [{{"group": "embedding", "weight_bytes": 400}}] ({error})') from None


def columns_of(row: type[msgspec.Struct]) -> Iterator[Column]:
    """A column for each field of a row's type."""
    info = inspect.type_info(row)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        yield _column(field.name, _without_none(field.type), field.required)


def _without_none(kind: inspect.Type) -> inspect.Type:
    if not isinstance(kind, inspect.UnionType):
        return kind
    return next(each for each in kind.types if not isinstance(each, inspect.NoneType))


def _column(name: str, kind: inspect.Type, required: bool) -> Column:
    match kind:
        case inspect.IntType() if name.endswith(_NS):
            return Duration(name.removesuffix(_NS), required)
        case inspect.IntType():
            return Whole(name, least=kind.ge or 0, most=kind.le or 2**62, required=required)
        case inspect.BoolType():
            return Flag(name, required)
        case inspect.StrType():
            return Words(name, required)
        case inspect.EnumType():
            return Choice(name, tuple(each.value for each in kind.cls), required)
        case _:
            return Tied(name, required)
