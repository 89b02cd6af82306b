"""The paper's headline (up to 7.6 times the throughput, up to 100 times less swap), asked of measured layer profiles.

The fastest Harmony plans that a search finds, beside each baseline over paged GPU memory: with microbatches of one
sample and tuned, with and without recompute, writing back always or only what changed, without prefetch and with.
Everything is simulated with unlimited host memory; what needs more than the machine has is marked.

It takes an hour or more, but can be stopped at any time: every finished case is in the CSV, and not done again. Each
round asks one more question of every setting, so that all have answers early. ``--report`` only prints what is there.

    python benchmarks/bench_headline.py -o headline.csv
    python benchmarks/bench_headline.py -o headline.csv --models gpt2_xl,bert_96 --gpus 4 --minibatch 16,64
    python benchmarks/bench_headline.py -o headline.csv --report
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from headline_rows import Row, Setting, case_table, claim_table, load, markdown, save

import sim
from sim.planner.completion import completions
from sim.planner.evaluate import Found, evaluate
from sim.planner.result import describe
from sim.planner.space import Space
from traces.importing import import_trace

PROFILES = Path(__file__).resolve().parents[2] / "shared" / "reference" / "gtx1080ti"
MACHINES = {4: "4x1080ti", 8: "8x1080ti-2switch"}
LARGE, SMALL = ("gpt2_40b", "gpt2_30b", "gpt2_20b", "gpt2_10b"), ("vgg416", "gpt2_xl", "bert_96")
MINIBATCHES = dict.fromkeys(LARGE, (32,)) | dict.fromkeys(SMALL, (16, 64, 256))

HARMONY = (sim.Policy.HARMONY_PP, sim.Policy.HARMONY_DP)
BASELINES = tuple(policy for policy in sim.Policy if policy not in HARMONY)
HARMONY_BUDGET = 6
"""Plans that the search of a Harmony policy simulates, variations of the best not counted."""
HARMONY_SIZES = (1, 2, 4, 8, 16, 32)
MANY_LAYERS = 100
PACKS = (1 / 24, 1 / 16, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)
"""Numbers of packs that are tried if there are many layers: shares of them, made multiples of the GPUs. Else all."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Microbatch sizes among which a baseline is tuned: all of them, as far as the profile covers them."""
DEEP = 16
"""Steps ahead of which a baseline prefetches at most; memory mostly allows no more, and more was no faster."""


class Question(NamedTuple):
    """One way to plan: fields that are fixed, and the microbatch sizes to choose from. If there is one, nothing is
    searched for."""

    name: str
    fixed: dict[str, Any]
    sizes: tuple[int, ...]


class Case(NamedTuple):
    setting: Setting
    policy: sim.Policy
    question: Question

    @property
    def key(self) -> tuple[str, ...]:
        return (*map(str, self.setting), self.policy.value, self.question.name)


def rounds() -> Iterator[list[tuple[sim.Policy, Question]]]:
    """What is asked of every setting, one question after the other."""
    best = Question("searched", {}, HARMONY_SIZES)
    always, drop = sim.Writeback.ALWAYS, sim.Writeback.DROP
    yield [(policy, best) for policy in HARMONY] + _baselines((1,), always, 0)
    yield _baselines(SIZES, drop, DEEP)
    yield _baselines(SIZES, always, 0)
    for writeback, depth in ((drop, DEEP), (always, DEEP), (drop, 0)):
        yield _baselines((1,), writeback, depth)


def _baselines(sizes: tuple[int, ...], writeback: sim.Writeback, depth: int) -> list[tuple[sim.Policy, Question]]:
    """Each baseline this way; with recompute and without if it pages (else it has no such choice)."""
    size = "u 1" if sizes == (1,) else "u tuned"
    asked = []
    for policy in BASELINES:
        if not policy.is_paged:
            asked.append((policy, Question(f"{size}, prefetch {depth}", {"prefetch_depth": depth}, sizes)))
            continue
        for recompute, words in ((True, "recompute"), (False, "no recompute")):
            fixed = {"writeback": writeback, "prefetch_depth": depth, "recompute": recompute}
            question = Question(f"{size}, {writeback.value}, prefetch {depth}, {words}", fixed, sizes)
            asked.append((policy, question))
    return asked


def cases(models: list[str], gpus: list[int], minibatches: list[int] | None) -> Iterator[Case]:
    """All cases; early ones are of early rounds and small minibatches, so that every model soon has some."""
    sizes = {model: minibatches or MINIBATCHES.get(model, (16, 64, 256)) for model in models}
    asked = list(rounds())
    turns = product(range(len(asked)), range(max(map(len, sizes.values()))))
    for number, at in sorted(turns, key=lambda turn: (sum(turn), turn)):
        for model, count in product(models, gpus):
            for minibatch in sizes[model][at : at + 1]:
                for policy, question in asked[number]:
                    yield Case(Setting(model, count, minibatch), policy, question)


@cache
def costs_of(profiles: Path, model: str) -> sim.Costs:
    return sim.Costs(import_trace(profiles / model).trace)


def answer(case: Case, profiles: Path) -> Row:
    """Run a case."""
    setting, policy, question = case
    costs, machine = costs_of(profiles, setting.model), sim.load_machine(MACHINES[setting.gpus])
    started = time.process_time()
    host_cap = machine.host.memory_bytes
    assert host_cap is not None
    about = {
        "model": setting.model,
        "gpus": setting.gpus,
        "minibatch": setting.minibatch,
        "policy": policy.value,
        "variant": question.name,
        "host_cap_bytes": host_cap,
    }
    try:
        found, simulated, gap = _found(case, costs, machine)
    except sim.HarmonyError as error:
        return Row(**about, refusal=str(error).replace("\n", " "), cpu_s=time.process_time() - started)
    return Row(
        **about,
        plan=describe(found.plan),
        step_ns=found.step_time_ns,
        swap_in_bytes=found.swap_in_bytes,
        swap_out_bytes=found.swap_out_bytes,
        gpu_peak_bytes=max(found.gpu_peak_bytes),
        host_peak_bytes=found.host_peak_bytes,
        simulated=simulated,
        gap=gap,
        cpu_s=time.process_time() - started,
    )


def _found(case: Case, costs: sim.Costs, machine: sim.Machine) -> tuple[Found, int, float | None]:
    """The fastest plan on an unlimited host; plans simulated; by how much another could be faster."""
    setting, policy, question = case
    machine = machine.with_host_memory(None)
    if question.sizes == (1,):
        choice = sim.PlanChoice(u_fwd=1, u_bwd=1, **question.fixed)
        plan = next(iter(completions(choice, policy, setting.minibatch, costs, machine)))
        found = evaluate(plan, False, costs, machine)
        if isinstance(found, sim.HarmonyError):
            raise found
        return found, 1, None
    space = _space(case, costs)
    budget = HARMONY_BUDGET if policy in HARMONY else len(SIZES)
    result = sim.search(
        costs.trace, machine, setting.minibatch, policies=(policy,), choice=space, max_simulated=budget, top=1
    )
    return result.best.found, result.counts.simulated, result.gap


def _space(case: Case, costs: sim.Costs) -> Space:
    """What a search chooses from: of the sizes, those that the profile covers."""
    setting, policy, question = case
    covered = tuple(u for u in question.sizes if u <= costs.largest_microbatch())
    fixed = {name: (value,) for name, value in question.fixed.items()}
    if policy in HARMONY and costs.layer_count >= MANY_LAYERS:
        counts = {setting.gpus * max(1, round(share * costs.layer_count / setting.gpus)) for share in PACKS}
        fixed |= dict.fromkeys(("packs_fwd", "packs_bwd"), tuple(sorted(counts)))
    return Space(u_fwd=covered, u_bwd=covered, **fixed)


def main() -> None:
    asked = _arguments()
    rows = load(asked.output)
    if not asked.report:
        done = {row.key for row in rows}
        for case in cases(asked.models, asked.gpus, asked.minibatch):
            if case.key in done or case.policy.value not in asked.policies:
                continue
            done.add(case.key)
            started = time.perf_counter()
            row = answer(case, asked.profiles)
            rows.append(row)
            save(asked.output, rows)
            step = "-" if row.step_ns is None else f"{row.step_ns / 1e9:.2f} s"
            print(f"{case.setting}: {case.policy.value}, {case.question.name}: {step}"
                  f" ({time.perf_counter() - started:.1f} s, {row.cpu_s:.1f} s of CPU)", flush=True)  # fmt: skip
    print(markdown(claim_table(rows)))
    print(markdown(case_table(rows)))


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.csv", help="finished cases")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MINIBATCHES), help="default: all")
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=[policy.value for policy in sim.Policy],
        help="default: all",
    )
    parser.add_argument("--gpus", type=numbers, default=list(MACHINES), help="default: 4,8")
    parser.add_argument("--minibatch", type=numbers, help="samples in a step; default 16,64,256, of large models 32")
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of measured profiles")
    parser.add_argument("--report", action="store_true", help="run nothing, print what is there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
