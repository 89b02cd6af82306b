"""Options that several commands share, one by one and in groups; ``words.py`` makes values of what is written.

A group is a frozen dataclass whose fields are options. A command takes the group as one parameter; :func:`spread` shows
its fields to typer as that command's own options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, get_type_hints

import typer

from ..plan import Reduce, Residency, UpdateOn, UpdateWhen, Writeback
from ..planner.choice import PlanChoice
from . import words

if TYPE_CHECKING:
    from ..hardware.machine import Machine

P = ParamSpec("P")
R = TypeVar("R")


def spread(command: Callable[P, R]) -> Callable[..., R]:
    """Replace every parameter whose type is an option group by the group's fields, all keyword-only."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: hint for name, hint in hints.items() if is_dataclass(hint) and isinstance(hint, type) and name != "return"
    }
    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name])
            for field in fields(group)
        ]

    @wraps(command)
    def gathered(**given: Any) -> R:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        return command(**given)  # type: ignore[call-arg]

    gathered.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    gathered.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return gathered


Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout; everything else on stderr.")]
TraceName = Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or the name of a shipped trace.")]
MachineName = Annotated[
    str, typer.Option("--machine", "-m", metavar="M", help="A machine file, or the name of a shipped machine.")
]
Extrapolate = Annotated[
    bool, typer.Option("--extrapolate", help="Answer outside the profiled microbatch sizes, along the nearest line.")
]
Minibatch = Annotated[int, typer.Option("--minibatch", metavar="D", min=1, help="Samples in a step, in all.")]
TimelineOutput = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="TL",
        callback=words.timeline,
        help="Write the timeline here: .parquet, .csv, or - for CSV.",
    ),
]
TimelineFile = Annotated[Path, typer.Argument(metavar="TIMELINE", help="A timeline file, .parquet or .csv.")]
TimelineFiles = Annotated[list[Path], typer.Argument(metavar="TIMELINE…", help="Timeline files, .parquet or .csv.")]
Picture = Annotated[
    Path,
    typer.Option("-o", "--output", metavar="PNG", callback=words.picture, help="Picture to write: .png, .svg, .pdf."),
]
ChromeTrace = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="X.json.gz",
        callback=words.chrome_trace,
        help="Chrome trace to write: .json or .json.gz.",
    ),
]
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A built-in name, hf:CONFIG.json, or module:callable in your own code."),
]

SampleTokens = Annotated[
    int | None,
    typer.Option("--sequence", metavar="N", min=1, help="Tokens of a sample; default as is usual for the model."),
]

Device = Annotated[Literal["emulated", "cuda"], typer.Option("--device", help="What plays the machine's GPUs.")]

_WHAT_IF = "Machine, what if"
_PLAN = "Plan"


@dataclass(frozen=True)
class MachineOverrides:
    """What to change about the machine."""

    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Number of GPUs; default all", rich_help_panel=_WHAT_IF),
    ] = None
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            parser=words.size,
            help='Usable memory of every GPU, such as "9 GB".',
            rich_help_panel=_WHAT_IF,
        ),
    ] = None
    host_memory: Annotated[
        float | None,
        typer.Option(
            "--host-memory",
            metavar="SIZE",
            parser=words.size_or_unlimited,
            help='Host memory, such as "300 GB", or "unlimited".',
            rich_help_panel=_WHAT_IF,
        ),
    ] = None

    def applied_to(self, machine: Machine) -> Machine:
        """The machine with these changes."""
        if self.gpus is not None:
            machine = machine.with_gpus(self.gpus)
        if self.gpu_memory is not None:
            machine = machine.with_usable_memory(self.gpu_memory)
        if self.host_memory is not None:
            machine = machine.with_host_memory(None if self.host_memory == words.UNLIMITED else int(self.host_memory))
        return machine


def _choice(flag: str, help_text: str, **more: Any) -> Any:
    return typer.Option(flag, help=help_text, rich_help_panel=_PLAN, **more)


@dataclass(frozen=True)
class PlanOptions:
    """One option per field of a plan but its policy and minibatch; None leaves it open."""

    u_fwd: Annotated[int | None, _choice("--u-fwd", "Forward microbatch size; default --u-bwd, or 1", min=1)] = None
    u_bwd: Annotated[int | None, _choice("--u-bwd", "Backward microbatch size; default --u-fwd", min=1)] = None
    packs_fwd: Annotated[
        Any,
        _choice(
            "--packs-fwd",
            "Forward packs: a count, balanced by time, or layers 0-4,5-9; default as few as fit",
            metavar="PACKS",
            parser=words.packs,
        ),
    ] = None
    packs_bwd: Annotated[
        Any,
        _choice(
            "--packs-bwd",
            "Backward packs, the last one fused with its forward; default as few as fit",
            metavar="PACKS",
            parser=words.packs,
        ),
    ] = None
    update: Annotated[UpdateOn | None, _choice("--update", "Where the optimizer runs; default cpu")] = None
    update_when: Annotated[
        UpdateWhen | None,
        _choice(
            "--update-when",
            "jit: each pack just after its backward; end: all after the last one and the norm of the whole gradient, "
            "as clipping and skipping need it; default jit",
        ),
    ] = None
    reduce: Annotated[
        Reduce | None,
        _choice("--reduce", "How harmony-dp adds gradients (scatter: each GPU updates its shard); default ring"),
    ] = None
    slots: Annotated[
        int | None, _choice("--slots", "Boundary buffers a harmony-pp GPU receives into; default enough", min=1)
    ] = None
    prefetch: Annotated[
        bool | None,
        _choice("--prefetch/--no-prefetch", "Bring the next weights and inputs in early; default prefetch"),
    ] = None
    stash: Annotated[
        Any,
        _choice(
            "--stash",
            "Where the inputs of backward packs wait: swap, keep (on the GPU) or recompute (nowhere); or a list, one "
            "for each backward pack but the first and the last; default swap",
            metavar="PLACES",
            parser=words.stash,
        ),
    ] = None
    overlap_steps: Annotated[
        bool | None,
        _choice("--overlap-steps/--no-overlap-steps", "Start the next step before this one has ended; default not"),
    ] = None
    gpu_order: Annotated[
        Any,
        _choice(
            "--gpu-order",
            "Order in which packs are dealt to GPUs (harmony-dp: in which GPUs update), such as 0,2,1,3; default "
            "ascending",
            metavar="GPUS",
            parser=words.gpu_order,
        ),
    ] = None
    split_backward: Annotated[
        int | None,
        _choice(
            "--split-backward",
            "How far harmony-pp computes inputs' gradients ahead of weights', in microbatches; default 0: together",
            min=0,
        ),
    ] = None
    resident_weights: Annotated[
        Any,
        _choice(
            "--resident-weights",
            "Backward packs whose weights stay on their GPUs from step to step, such as 0,3-5 (from 0); default none",
            metavar="PACKS",
            parser=words.indices,
        ),
    ] = None
    resident_state: Annotated[
        Any,
        _choice(
            "--resident-state",
            "Backward packs whose optimizer state stays on the GPU that updates it; default none",
            metavar="PACKS",
            parser=words.indices,
        ),
    ] = None
    residency: Annotated[
        Residency | None, _choice("--residency", "What a baseline keeps on the GPU between tasks; default lru")
    ] = None
    writeback: Annotated[
        Writeback | None, _choice("--writeback", "Whether a baseline writes unchanged tensors back; default always")
    ] = None
    recompute: Annotated[
        bool | None,
        _choice(
            "--recompute/--no-recompute",
            "Whether a baseline's backward repeats the forward or keeps what it saved; default recompute",
        ),
    ] = None
    prefetch_depth: Annotated[
        int | None, _choice("--prefetch-depth", "Steps ahead of which a baseline brings tensors in; default 0", min=0)
    ] = None

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name.replace('_', '-')}" for name in self.choice().fixed()]

    def choice(self) -> PlanChoice:
        """The options as what is fixed of a plan."""
        return PlanChoice(**{field.name: getattr(self, field.name) for field in fields(self)})
