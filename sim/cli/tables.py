"""Tables that commands print for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..hardware.machine import Machine
from ..plan import Policy, fields_of
from ..tables import MISSING, Table, signed_percent
from ..units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from traces.diff import Difference


def machine_table(machines: Sequence[Machine]) -> Table:
    """One machine a row."""
    return Table(
        "Shipped machines",
        ("machine", "what it is", "GPUs", "usable memory each", "own link", "host memory"),
        tuple(
            (
                machine.name,
                machine.description,
                f"{len(machine.gpus)} x {machine.gpus[0].name}",
                format_bytes(min(gpu.usable_bytes for gpu in machine.gpus)),
                format_rate(min(gpu.bandwidth for gpu in machine.gpus)),
                "unlimited" if machine.host.memory_bytes is None else format_bytes(machine.host.memory_bytes),
            )
            for machine in machines
        ),
        words=2,
    )


def layer_table(model: str, layers: Sequence[dict[str, Any]]) -> Table:
    """A layer a row; layers that follow one another and are alike in all but name as one."""
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for layer in layers:
        if rows and _kind_of_layer(rows[-1][1]) == _kind_of_layer(layer):
            rows[-1] = rows[-1][0], layer
        else:
            rows.append((layer, layer))
    return Table(
        f"{model}: {len(layers)} layers",
        ("layer", "name", "kind", "parameters", "weights", "passes on, of one sample", "tied with"),
        tuple(
            (
                str(first["layer"]) if first is last else f"{first['layer']}-{last['layer']}",
                first["name"] if first is last else f"{first['name']} … {last['name']}",
                first["kind"],
                f"{first['parameters']:,}",
                format_bytes(first["weight_bytes"]),
                ", ".join(first["passes_on"]),
                ", ".join(map(str, first["tied_with"])),
            )
            for first, last in rows
        ),
        words=3,
    )


def _kind_of_layer(layer: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for key, value in layer.items() if key not in ("layer", "name"))


def trace_tables(summary: dict[str, Any]) -> Iterator[Table]:
    """What :func:`traces.summary.summarize` found."""

    def seconds(value: float | None) -> str:
        return MISSING if value is None else format_seconds(value)

    yield Table(
        f"{summary['model']} on {summary['device']}",
        ("", "all layers"),
        (
            ("layers", str(summary["layers"])),
            ("dtype", summary["dtype"]),
            ("a sample", summary["sample"] or MISSING),
            ("weights", format_bytes(summary["weight_bytes"])),
            (f"optimizer state ({summary['optimizer']})", format_bytes(summary["optimizer_state_bytes"])),
            ("update on the CPU", seconds(summary["update_cpu_s"])),
            ("update on the GPU", seconds(summary["update_gpu_s"])),
            ("modelled by", summary["modelled_by"] or MISSING),
        ),
    )
    yield Table(
        "By microbatch size, all layers",
        ("samples", "forward", "backward", "inputs of layers", "source of times", "of memory"),
        tuple(
            (
                str(entry["microbatch"]),
                format_seconds(entry["forward_s"]),
                format_seconds(entry["backward_s"]),
                format_bytes(entry["input_bytes"]),
                ", ".join(sorted({entry["provenance"]["forward_s"], entry["provenance"]["backward_s"]})),
                entry["provenance"]["memory"],
            )
            for entry in summary["times"]
        ),
    )
    noise = [("noise", summary["noise"])] if summary["noise"] else []
    yield Table("To keep in mind", ("", ""), (*noise, *(("not seen", each) for each in summary["unseen"])), words=2)


def shipped_table(outlines: Mapping[str, dict[str, Any]]) -> Table:
    """Traces by name, as :func:`traces.summary.outline` says what they are of."""
    return Table(
        "Shipped traces",
        ("trace", "dtype", "a sample", "layers", "weights", "microbatches", "source"),
        tuple(
            (
                name,
                each["dtype"],
                each["sample"] or MISSING,
                str(each["layers"]),
                format_bytes(each["weight_bytes"]),
                ",".join(map(str, each["microbatches"])),
                " ".join([*each["sources"], f"({each['modelled_by']})" if each["modelled_by"] else ""]).strip(),
            )
            for name, each in outlines.items()
        ),
        words=3,
    )


def difference_table(differences: Sequence[Difference]) -> Table:
    """One column of a trace that differs a row."""
    return Table(
        "Differences",
        ("table", "column", "rows", "most in", "first", "second", "change"),
        tuple(
            (
                each.table,
                each.column,
                str(each.rows),
                each.where or MISSING,
                str(each.ours),
                str(each.theirs),
                MISSING if each.change is None else signed_percent(each.change),
            )
            for each in differences
        ),
        words=2,
    )


def summary_tables(summary: dict[str, Any]) -> Iterator[Table]:
    """What a timeline's ``summary()`` says."""
    title = f"{summary['model']} on {summary['machine']}: {summary['policy']}, {summary['source']}"
    yield Table(title, ("", "a step"), tuple(_headlines(summary)))
    moved = [
        (kind, summary["swap_in_bytes"][kind], summary["swap_out_bytes"][kind]) for kind in summary["swap_in_bytes"]
    ]
    totals = sum(into for _, into, _ in moved), sum(out for _, _, out in moved)
    yield Table(
        "Swapped between host and GPUs",
        ("tensor kind", "in", "out"),
        (
            *((kind, format_bytes(into), format_bytes(out)) for kind, into, out in moved if into or out),
            ("all", format_bytes(totals[0]), format_bytes(totals[1])),
        ),
    )
    lanes = list(dict.fromkeys(lane for by_lane in summary["busy_s"].values() for lane in by_lane))
    yield Table(
        "Busy time by lane",
        ("", *lanes),
        tuple(
            (
                "host" if gpu == "host" else f"GPU {gpu}",
                *(format_seconds(by_lane[lane]) if lane in by_lane else MISSING for lane in lanes),
            )
            for gpu, by_lane in summary["busy_s"].items()
        ),
    )


def loss_table(losses: Sequence[float]) -> Table:
    """The loss of each step."""
    return Table(
        "Loss by step", ("step", "loss"), tuple((str(step), f"{loss:.6f}") for step, loss in enumerate(losses))
    )


def _headlines(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "step time", format_seconds(summary["step_time_s"])
    if summary["steps"] > 1 and summary["period_s"] is not None:
        yield "steady period", format_seconds(summary["period_s"])
    throughput = summary["throughput_samples_per_s"]
    yield "throughput", MISSING if throughput is None else f"{throughput:.4g} samples/s"
    yield from _plan_lines(summary["plan"])
    for gpu, (peak, cap) in enumerate(zip(summary["peak_memory_bytes"], summary["memory_cap_bytes"], strict=True)):
        gaps = f", {summary['fragmentation'][gpu]:.0%} of it gaps" if "fragmentation" in summary else ""
        yield f"peak memory GPU {gpu}", f"{format_bytes(peak)} of {format_bytes(cap)}{gaps}"
    yield "peak memory host", format_bytes(summary["host_peak_bytes"])
    for device, peaks in summary.get("held_at_peak", {}).items():
        yield f"held at peak {device if device == 'host' else f'GPU {device}'}", _held(peaks["observed"])
    yield (
        "between GPUs",
        f"{format_bytes(summary['p2p_bytes'])} p2p, {format_bytes(summary['allreduce_bytes'])} collective",
    )
    if "lower_bound_s" in summary:
        yield "lower bound of this plan", format_seconds(summary["lower_bound_s"])
    if "critical_path" in summary:
        shares = sorted(summary["critical_path"].items(), key=lambda item: -item[1])
        yield "time goes to", ", ".join(f"{cause} {share:.0%}" for cause, share in shares if share >= 0.005)
    if "provenance" in summary:
        yield "layer times", ", ".join(f"{count} {source}" for source, count in summary["provenance"].items())
    for caveat in summary["notes"].get("caveats", []):
        yield "note", caveat


def _held(held: dict[str, Any]) -> str:
    """Bytes in all and by tensor kind, largest first; what is under a hundredth goes without saying."""
    kinds = sorted(held["by_kind"].items(), key=lambda item: -item[1])
    parts = [f"{kind} {format_bytes(size)}" for kind, size in kinds if size >= 0.01 * held["bytes"]]
    return f"{format_bytes(held['bytes'])}: {', '.join(parts)}" if parts else "nothing"


def _plan_lines(plan: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What means something in a plan of its policy, under the options' names: packs as their number and sizes, choices
    together."""
    policy = Policy(plan["policy"])
    choices = []
    for name in fields_of(policy):
        value = plan[name]
        option = "--" + name.replace("_", "-")
        match value:
            case bool():
                choices.append(option if value else option.replace("--", "--no-", 1))
            case [] if name == "packs_fwd":
                yield option, "none"
            case None | 0 | []:
                continue
            case [[_, _], *_]:
                yield option, f"{len(value)}: {','.join(f'{first}-{last}' for first, last in value)}"
            case str():
                if name != "policy":
                    choices.append(f"{option} {value}")
            case list():
                yield option, ",".join(map(str, value))
            case _:
                yield option, str(value)
    if choices:
        yield "options", " ".join(choices)
