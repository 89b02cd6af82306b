"""Machine files: TOML, with sizes, rates and times as text with their unit.

    description = "…", sharing = "fair" (or "priority")
    [host]          memory = "375 GB" (or "unlimited"), dram_bandwidth = "60 GB/s", cores = 16 (without these two,
                    host memory and cores slow nothing), speed = 1.0, sockets = 2, memory_on = [0, 1]
    [interconnect]  bandwidth = "16 GB/s", both_directions, latency: between sockets
    [[links]]       name = "switch", bandwidth = "12.35 GB/s", parent = "host", socket = 0, bandwidth_up,
                    both_directions, latency = "2 us", efficiency = [["64 KiB", 0.3], ["4 MiB", 0.9]]
    [[gpus]]        name = "GTX 1080 Ti", count = 4, memory = "11 GiB", reserved, bandwidth, link = "switch", socket,
                    speed, p2p = true, p2p_bandwidth, bandwidth_up, both_directions, copy_overhead = "10 us", efficiency
    [[nvlinks]]     gpus = [0, 1], bandwidth (each direction), efficiency
    [emulation]     pace = 4.0, gpu_bandwidth, p2p_bandwidth, and [emulation.links] with a rate for each link

What the keys mean is said in :mod:`sim.hardware.machine`. A file without ``name`` is called as its file is.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from traces.files import write_atomically

from ..errors import MachineError
from ..units import exact_bytes, exact_ns, exact_rate, parse_bytes, parse_ns, parse_rate
from .machine import MOST_GPUS, Efficiency, Emulation, Gpu, Host, Interconnect, Link, Machine, NvLink, Sharing

_SUFFIX = ".toml"
_UNLIMITED = "unlimited"


def load_machine(path_or_name: str | Path) -> Machine:
    """Read a machine: a TOML file, or the name of a shipped one such as ``4x1080ti``.

    Raises MachineError that says in which file, table and key what was found and what to write instead.
    """
    path, source = Path(path_or_name), str(path_or_name)
    if not path.exists() and source in shipped_machines():
        data = resources.files(__package__).joinpath("machines", f"{source}{_SUFFIX}").read_bytes()
    else:
        data = _read_file(path)
    try:
        document = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _fault(source, "", f"it is not TOML: {error}") from error
    return _read_machine(document, source, name=path.name.removesuffix(_SUFFIX))


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write a machine so that :func:`load_machine` gives an equal one. Raises FileError if it cannot be written."""
    write_atomically(path, tomli_w.dumps(_write_machine(machine)).encode())


def shipped_machines() -> tuple[str, ...]:
    """Names of the machines that come with Harmony, sorted."""
    folder = resources.files(__package__).joinpath("machines")
    names = [entry.name for entry in folder.iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


# What a value may look like -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """A kind of value: from TOML (ValueError says what is wrong with it) and back."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def _quantity(parse: Callable[[str], float], write: Callable[[Any], str]) -> _Kind:
    # A bare number is read as text too: it has no unit, and is refused as that.
    return _Kind(lambda value: parse(str(value)), write)


def _read_rate(value: object) -> float:
    rate = parse_rate(str(value))
    if not 0 < rate < math.inf:
        raise ValueError(f"{value!r} is not a rate above 0")
    return rate


def _read_rates(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table; give each link's rate by its name")
    rates = {}
    for link, rate in value.items():
        try:
            rates[link] = _read_rate(rate)
        except ValueError as error:
            raise ValueError(f"{link}: {error}") from error
    return rates


def _whole_number(at_least: int, at_most: float = math.inf) -> _Kind:
    def read(value: object) -> int:
        if type(value) is not int or value < at_least:
            raise ValueError(f"{value!r} is not a whole number of at least {at_least}")
        if value > at_most:
            raise ValueError(f"{value!r} is more than {at_most}")
        return value

    return _Kind(read)


def _number(what: str, holds: Callable[[float], bool]) -> _Kind:
    def read(value: object) -> float:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not (holds(number) and number < math.inf):
            raise ValueError(f"{value!r} is not a number {what}")
        return number

    return _Kind(read)


def _of_type(type_: type, what: str) -> _Kind:
    def read(value: object) -> object:
        if not isinstance(value, type_):
            raise ValueError(f"{value!r} is not {what}")
        return value

    return _Kind(read)


def _read_pair(value: object) -> tuple[int, int]:
    match value:
        case [int(first), int(second)]:
            return first, second
    raise ValueError(f"{value!r} is not a pair of GPU numbers; write for example [0, 1]")


def _read_sockets(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(socket) is int and socket >= 0 for socket in value):
        raise ValueError(f"{value!r} is not a list of sockets; write for example [0, 1]")
    return tuple(value)


def _read_efficiency(value: object) -> Efficiency:
    points = []
    for point in value if isinstance(value, list) else [value]:
        match point:
            case [str(size), int(share) | float(share)] if 0 < share <= 1:
                points.append((parse_bytes(size), float(share)))
            case _:
                raise ValueError(f'{point!r} is not a size and a share of the bandwidth; write [["64 KiB", 0.3], …]')
    return tuple(points)


def _read_sharing(value: object) -> Sharing:
    known = [sharing.value for sharing in Sharing]
    if value not in known:
        raise ValueError(f"{value!r} is not a way to share links; known: {', '.join(known)}")
    return Sharing(value)


_SIZE = _quantity(parse_bytes, exact_bytes)
_SIZE_OR_UNLIMITED = _Kind(
    lambda value: None if value == _UNLIMITED else _SIZE.read(value),
    lambda size: _UNLIMITED if size is None else exact_bytes(size),
)
_RATE = _Kind(_read_rate, exact_rate)
_RATES = _Kind(_read_rates, lambda rates: {link: exact_rate(rate) for link, rate in rates.items()})
_TIME = _quantity(parse_ns, exact_ns)
_SPEED = _number("above 0", lambda value: value > 0)
_PACE = _number("of at least 1 (or 0, unpaced)", lambda value: value == 0 or value >= 1)
_COUNT = _whole_number(1)
_GPUS = _whole_number(1, MOST_GPUS)
_INDEX = _whole_number(0)
_SOCKETS = _Kind(_read_sockets, list)
_EFFICIENCY = _Kind(_read_efficiency, lambda points: [[exact_bytes(size), share] for size, share in points])
_SHARING = _Kind(_read_sharing, lambda sharing: sharing.value)
_TEXT = _of_type(str, "text; put it in quotes")
_FLAG = _of_type(bool, "true or false")
_PAIR = _Kind(_read_pair, list)


# What each table holds ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Key:
    """A key of a table: the field of the value it describes, and its kind."""

    field: str
    kind: _Kind
    required: bool = False


_HOST_KEYS = {
    "memory": _Key("memory_bytes", _SIZE_OR_UNLIMITED, required=True),
    "dram_bandwidth": _Key("dram_bandwidth", _RATE),
    "cores": _Key("cores", _COUNT),
    "speed": _Key("speed", _SPEED),
    "sockets": _Key("sockets", _COUNT),
    "memory_on": _Key("memory_on", _SOCKETS),
}
_INTERCONNECT_KEYS = {
    "bandwidth": _Key("bandwidth", _RATE, required=True),
    "both_directions": _Key("both_directions", _RATE),
    "latency": _Key("latency_ns", _TIME),
}
_LINK_KEYS = {
    "name": _Key("name", _TEXT, required=True),
    "bandwidth": _Key("bandwidth", _RATE, required=True),
    "parent": _Key("parent", _TEXT),
    "socket": _Key("socket", _INDEX),
    "bandwidth_up": _Key("bandwidth_up", _RATE),
    "both_directions": _Key("both_directions", _RATE),
    "latency": _Key("latency_ns", _TIME),
    "efficiency": _Key("efficiency", _EFFICIENCY),
}
_GPU_KEYS = {
    "name": _Key("name", _TEXT, required=True),
    "memory": _Key("memory_bytes", _SIZE, required=True),
    "reserved": _Key("reserved_bytes", _SIZE),
    "bandwidth": _Key("bandwidth", _RATE, required=True),
    "bandwidth_up": _Key("bandwidth_up", _RATE),
    "both_directions": _Key("both_directions", _RATE),
    "link": _Key("link", _TEXT),
    "socket": _Key("socket", _INDEX),
    "speed": _Key("speed", _SPEED),
    "p2p": _Key("p2p", _FLAG),
    "p2p_bandwidth": _Key("p2p_bandwidth", _RATE),
    "copy_overhead": _Key("copy_overhead_ns", _TIME),
    "efficiency": _Key("efficiency", _EFFICIENCY),
}
_NVLINK_KEYS = {
    "gpus": _Key("gpus", _PAIR, required=True),
    "bandwidth": _Key("bandwidth", _RATE, required=True),
    "efficiency": _Key("efficiency", _EFFICIENCY),
}
_EMULATION_KEYS = {
    "pace": _Key("pace", _PACE, required=True),
    "gpu_bandwidth": _Key("gpu_bandwidth", _RATE, required=True),
    "p2p_bandwidth": _Key("p2p_bandwidth", _RATE),
    "links": _Key("links", _RATES),
}
_LISTS = {
    "links": _LINK_KEYS,
    "gpus": _GPU_KEYS | {"count": _Key("count", _GPUS)},
    "nvlinks": _NVLINK_KEYS,
}
_TOP_KEYS = {
    "name": _Key("name", _TEXT),
    "description": _Key("description", _TEXT),
    "sharing": _Key("sharing", _SHARING),
    "host": _Key("host", _of_type(dict, "a table; write it as [host]"), required=True),
    **{name: _Key(name, _of_type(list, f"a list of tables; write each as [[{name}]]")) for name in _LISTS},
    **{name: _Key(name, _of_type(dict, f"a table; write it as [{name}]")) for name in ("interconnect", "emulation")},
}


# Reading and writing --------------------------------------------------------------------------------------------------


def _fault(source: str, where: str, problem: str) -> MachineError:
    return MachineError(": ".join(part for part in (f"machine file {source}", where, problem) if part))


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        shipped = shipped_machines()
        near = get_close_matches(str(path), shipped, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}? " if near else ""
        problem = f"no such file, nor a shipped machine of that name; {advice}shipped: {', '.join(shipped)}"
        raise _fault(str(path), "", problem) from None
    except OSError as error:
        raise _fault(str(path), "", f"cannot be read: {error.strerror or error}") from error


def _read_machine(document: dict[str, Any], source: str, name: str) -> Machine:
    head = _read_table(document, _TOP_KEYS, source, "")
    host = Host(**_read_table(head.pop("host"), _HOST_KEYS, source, "[host]"))
    lists = {table: list(_read_list(head.pop(table, []), table, keys, source)) for table, keys in _LISTS.items()}
    gpus = [Gpu(**values) for values in lists["gpus"] for _ in range(values.pop("count", 1))]
    if "interconnect" in head:
        values = _read_table(head["interconnect"], _INTERCONNECT_KEYS, source, "[interconnect]")
        head["interconnect"] = Interconnect(**values)
    if "emulation" in head:
        head["emulation"] = Emulation(**_read_table(head["emulation"], _EMULATION_KEYS, source, "[emulation]"))
    try:
        return Machine(
            name=head.pop("name", name),
            host=host,
            gpus=tuple(gpus),
            links=tuple(Link(**values) for values in lists["links"]),
            nvlinks=tuple(NvLink(**values) for values in lists["nvlinks"]),
            **head,
        )
    except MachineError as error:
        raise _fault(source, "", str(error)) from error


def _read_list(tables: list[object], name: str, keys: Mapping[str, _Key], source: str) -> Iterator[dict[str, Any]]:
    for number, table in enumerate(tables, start=1):
        where = f"[[{name}]] {number}"
        if not isinstance(table, dict):
            raise _fault(source, where, f"{table!r} is not a table")
        yield _read_table(table, keys, source, where)


def _read_table(table: Mapping[str, object], keys: Mapping[str, _Key], source: str, where: str) -> dict[str, Any]:
    """Field values of a table; where they are wrong, a MachineError says so."""
    values = {}
    for name, value in table.items():
        key = keys.get(name)
        if key is None:
            near = get_close_matches(name, keys, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(keys)}"
            raise _fault(source, where, f"unknown key {name!r}; {advice}")
        try:
            values[key.field] = key.kind.read(value)
        except ValueError as error:
            raise _fault(source, where, f"{name}: {error}") from error
    for name, key in keys.items():
        if key.required and name not in table:
            raise _fault(source, where, f"{name!r} is missing")
    return values


def _write_machine(machine: Machine) -> dict[str, Any]:
    gpus = [{"count": len(list(equal))} | _write_table(gpu, _GPU_KEYS) for gpu, equal in groupby(machine.gpus)]
    document: dict[str, Any] = {
        "description": machine.description,
        "sharing": "" if machine.sharing is Sharing.FAIR else machine.sharing.value,
        "host": _write_table(machine.host, _HOST_KEYS),
        "links": [_write_table(link, _LINK_KEYS) for link in machine.links],
        "gpus": gpus,
        "nvlinks": [_write_table(edge, _NVLINK_KEYS) for edge in machine.nvlinks],
    }
    if machine.interconnect is not None:
        document["interconnect"] = _write_table(machine.interconnect, _INTERCONNECT_KEYS)
    if machine.emulation is not None:
        document["emulation"] = _write_table(machine.emulation, _EMULATION_KEYS)
    return {"name": machine.name} | {name: value for name, value in document.items() if value}


def _write_table(value: msgspec.Struct, keys: Mapping[str, _Key]) -> dict[str, Any]:
    """The keys whose fields are not at their defaults."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
    table = {}
    for name, key in keys.items():
        content = getattr(value, key.field)
        if content != defaults[key.field]:
            table[name] = key.kind.write(content)
    return table
