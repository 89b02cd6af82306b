"""From JSON text to a Trace: strict types and ranges, and errors that name table, row, layer, column and value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec

from .errors import TraceError
from .schema import FORMAT, VERSION, Layer, Phase, Provenance, SizeRow, TiedWeight, TimeRow, Trace

_ROW_TYPES: dict[str, type[msgspec.Struct]] = {"layers": Layer, "times": TimeRow, "sizes": SizeRow}
_CHOICES: dict[str, type[Phase] | type[Provenance]] = {
    "phase": Phase,
    "provenance": Provenance,
    "memory_provenance": Provenance,
}
_HEADER_KEYS = ("format", "version")

_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(?P<key>.*)`")
_MISSING_KEY = re.compile(r"Object missing required field `(?P<key>.*)`")
_BYTE = re.compile(r"^(?:JSON is malformed: )?(?P<what>.*) \(byte (?P<at>\d+)\)$")
_NOT_A_NUMBER = re.compile(rb"(?<=[\s:,\[])-?(?:nan|inf(?:inity)?)\b", re.IGNORECASE)


def decode_trace(data: bytes, source: str) -> Trace:
    """Decode a trace file's bytes. Raises TraceError for anything that is not JSON, or not a trace of this version.

    Relations between rows are not checked here: see :mod:`traces.checks`.
    """
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(data, str(error), source) from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = repr(raw.get("format")) if isinstance(raw, dict) else "no JSON object"
        raise TraceError(source, "", f'is not a trace: "format" should be {FORMAT!r}, found {found}')
    if raw.get("version") != VERSION or isinstance(raw["version"], bool):
        raise TraceError(
            source, "version", f"is {raw.get('version')!r}; this Harmony reads version {VERSION}: write the trace anew"
        )
    return convert_trace({key: value for key, value in raw.items() if key not in _HEADER_KEYS}, source)


def convert_trace(raw: object, source: str) -> Trace:
    """Turn plain dicts and lists into a Trace. Raises TraceError for a wrong key, type, range or choice."""
    try:
        return msgspec.convert(raw, Trace, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(str(error), raw, source) from None


def _not_json(data: bytes, message: str, source: str) -> TraceError:
    match = _BYTE.match(message)
    if match is None:
        return TraceError(source, "", f"is not JSON: {message[:1].lower()}{message[1:]} (file of {len(data)} bytes)")
    # The parser reports the letter that it could not use, or one after it: up to four into the word.
    at = int(match["at"])
    bad = _NOT_A_NUMBER.search(data, max(at - 4, 0), at + len(b"-infinity") + 1)
    start = bad.start() if bad else at
    line_start = data.rfind(b"\n", 0, start) + 1
    line = data.count(b"\n", 0, start) + 1
    where = f"near line {line}, column {start - line_start + 1}"
    if bad:
        before = data[line_start:start].decode(errors="replace").strip()[-120:]
        return TraceError(
            source,
            where,
            f"{bad[0].decode()} is not a value a trace may hold (after: {before}); "
            "measure that number again and write a whole number",
        )
    return TraceError(source, where, f"is not JSON: {match['what']}")


def _explained(message: str, raw: object, source: str) -> TraceError:
    """A message of msgspec such as ``Expected `int`, got `str` - at `$.times[3].duration_ns``` in the trace's terms."""
    match = _PATH.search(message)
    steps = [
        int(step["index"]) if step["index"] else step["key"] for step in _STEP.finditer(match["path"] if match else "")
    ]
    problem = message[: match.start()] if match else message
    where = _place(raw, steps)
    if unknown := _UNKNOWN_KEY.match(problem):
        return TraceError(source, where, _unknown_key(unknown["key"], steps))
    if missing := _MISSING_KEY.match(problem):
        return TraceError(source, where, f"has no {missing['key']}; every {_noun(steps)} needs one")
    value = _at(raw, steps)
    column = steps[-1] if steps else ""
    expected = problem.replace("`", "")
    if column in _CHOICES and not isinstance(value, (dict, list)):
        known = ", ".join(choice.value for choice in _CHOICES[str(column)])
        expected = f"choose one of {known}"
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
    return TraceError(source, where, f"found {shown}; {expected[:1].lower()}{expected[1:]}{_advice(expected)}")


def _advice(expected: str) -> str:
    if expected.startswith("Expected int"):
        return " (a whole number, without a point or quotes)"
    return ""


def _place(raw: object, steps: list[str | int]) -> str:
    """``times, row 3 (layer 2), duration_ns`` for the path times, 3, duration_ns."""
    if not steps:
        return "header"
    table = steps[0]
    if len(steps) == 1:
        return f"header, {table}" if table not in _ROW_TYPES else str(table)
    row = _at(raw, steps[:2])
    layer: object = steps[1]
    name = row.get("name") if isinstance(row, dict) else None
    if table == "layers":
        words = [f"layers, layer {layer}" + (f" ({name})" if isinstance(name, str) else "")]
    else:
        layer = row.get("layer", "?") if isinstance(row, dict) else "?"
        words = [f"{table}, row {steps[1]} (layer {layer})"]
    return ", ".join(words + [str(step) for step in steps[2:]])


def _unknown_key(key: str, steps: list[str | int]) -> str:
    struct = _struct_at(steps)
    known: Iterable[str] = struct.__struct_fields__
    near = get_close_matches(key, list(known), n=1)
    advice = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"has an unknown key {key!r}; {advice}"


def _struct_at(steps: list[str | int]) -> type[msgspec.Struct]:
    if not steps:
        return Trace
    return TiedWeight if "tied" in steps else _ROW_TYPES[str(steps[0])]


def _noun(steps: list[str | int]) -> str:
    return "trace" if not steps else "tied weight" if "tied" in steps else f"row of {steps[0]}"


def _at(raw: Any, steps: list[str | int]) -> Any:
    for step in steps:
        raw = raw[step]
    return raw
