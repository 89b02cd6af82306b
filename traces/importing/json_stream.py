"""JSON objects read piece by piece, so that a file of any length needs the memory of its largest entry only."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import IO, Any

from ..errors import TraceError

_CHUNK = 1 << 16
_GZIP = b"\x1f\x8b"
_SPACE = " \t\r\n"
_LONGEST_EXPONENT_BEGUN = len("e+") + 1


def entries(path: Path, array: str) -> Iterator[tuple[str, Any]]:
    """The entries of the object in a file (gzip or not), as names and values; of ``array``, each element by itself.

    Raises TraceError if it is cut short, damaged or no JSON object.
    """
    try:
        with path.open("rb") as file:
            zipped = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            with gzip.open(file) if zipped else file as stream:
                yield from _Text(stream, str(path)).entries(array)
    except FileNotFoundError:
        raise TraceError(str(path), "", "no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(str(path), "", f"its compressed data is cut short or damaged: {error}") from None
    except OSError as error:
        raise TraceError(str(path), "", f"cannot be read: {error.strerror or error}") from None


class _Text:
    """The text of a stream from some place on."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, source: str) -> None:
        self._stream, self._source = stream, source
        self._decode = json.JSONDecoder(parse_constant=self._refuse).raw_decode
        self._bytes = b""  # of a letter that has only begun
        self._text, self._at, self._passed = "", 0, 0

    def entries(self, array: str) -> Iterator[tuple[str, Any]]:
        """The names and values of the object that is here."""
        self._expect("{", "an object")
        if self._skip("}"):
            return
        while True:
            name = self._value()
            if not isinstance(name, str):
                raise self._wrong(f"found {name!r} where a name should be")
            self._expect(":", "a colon")
            if name == array and self._skip("["):
                yield from ((name, element) for element in self._elements())
            else:
                yield name, self._value()
            if not self._skip(","):
                self._expect("}", "a comma or the end of the object")
                return

    def _elements(self) -> Iterator[Any]:
        if self._skip("]"):
            return
        while True:
            yield self._value()
            if not self._skip(","):
                self._expect("]", "a comma or the end of the array")
                return

    def _value(self) -> Any:
        self._to_next()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except JSONDecodeError as error:
                if not self._more():
                    raise self._wrong(f"is not JSON: {error.msg}") from None
                continue
            if len(self._text) - end < _LONGEST_EXPONENT_BEGUN and self._more():  # a number may go on
                continue
            self._at = end
            return value

    def _expect(self, letter: str, what: str) -> None:
        if not self._skip(letter):
            raise self._wrong(f"is not JSON: {what} is missing" if self._text else f"is empty, or ends before {what}")

    def _skip(self, letter: str) -> bool:
        """Pass over a letter if it is the next."""
        self._to_next()
        found = self._text.startswith(letter, self._at)
        self._at += found
        return found

    def _to_next(self) -> None:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or not self._more():
                return

    def _more(self) -> bool:
        """Forget what is passed, and read on, as much as there is already. At the end False, and nothing changes."""
        left = self._text[self._at :]
        read = self._stream.read(max(_CHUNK, len(left)))
        if not read:
            if self._bytes:
                raise self._wrong("ends in the middle of a letter")
            return False
        data = self._bytes + read
        try:
            text, self._bytes = data.decode(), b""
        except UnicodeDecodeError as error:
            if len(data) - error.start > 3:
                raise self._wrong("is not UTF-8 text") from None
            text, self._bytes = data[: error.start].decode(), data[error.start :]
        self._passed += self._at
        self._text, self._at = left + text, 0
        return True

    def _refuse(self, constant: str) -> Any:
        raise self._wrong(f"{constant} is not a value that JSON has; measure that number again")

    def _wrong(self, problem: str) -> TraceError:
        return TraceError(self._source, f"after {self._passed + self._at} letters", problem)
