"""The paper's training checks at a size for this computer: does training come out the same, and does it scale?

curves     a small GPT-2 (next bytes) and a small BERT (classes) learn from Python's standard library for 200 steps: by
           the best Harmony-DP and Harmony-PP schedules on two emulated GPUs that hold half of the state together, and
           by a plain PyTorch loop. Draws the losses, and says how far they are apart. In float64: what they are apart
           in float32 (0.05 was seen) is what training makes of the first step's roundings
scaling    the demo's model on 1, 2 and 3 emulated GPUs: throughput, predicted and measured

    python benchmarks/bench_training.py [-o FOLDER] [curves] [scaling]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_executor import roomy
from matplotlib import pyplot
from msgspec.structs import replace
from rich.console import Console
from torch import nn

import sim
from executor import DeviceKind, Trainer, Workload, calibrate, load_workload, profile, run
from executor.models.data import class_loss, labelled_text_batches, next_token_loss, text_batches
from executor.models.inputs import Inputs, call_model, logits_of
from sim.planner.choice import PlanChoice
from sim.tables import Table

STEPS = 200
MINIBATCH = 8
SEQUENCE = 32
SIZES = {"vocab_size": 256}


def gpt2() -> Workload:
    """Small; no dropout, as the plain loop draws other masks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(n_embd=96, n_layer=6, n_head=4, n_positions=SEQUENCE, **SIZES, **dropout, **tokens)
    return Workload("GPT-2", GPT2LMHeadModel(config).double().train(), next_token_loss, text_batches(SEQUENCE))


def bert() -> Workload:
    """As :func:`gpt2`; tells two kinds of text apart by the byte that follows."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 384}
    config = BertConfig(**sizes, **SIZES, **dropout, max_position_embeddings=SEQUENCE, num_labels=2)
    model = BertForSequenceClassification(config).double().train()
    return Workload("BERT", model, class_loss, labelled_text_batches(SEQUENCE, 2))


def batches(workload: Workload) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same ones each time."""
    return (workload.batch(MINIBATCH, number) for number in range(STEPS))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The same one each time."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain_losses(workload: Workload) -> list[float]:
    """A plain loop."""
    optimizer, losses = optimizer_of(workload.model), []
    for inputs, labels in batches(workload):
        optimizer.zero_grad()
        loss = workload.loss_fn(logits_of(call_model(workload.model, Inputs.of(inputs))), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def harmony_losses(workload: Workload, policy: sim.Policy) -> tuple[list[float], sim.Schedule]:
    """The same loop with a Trainer, on two GPUs without pace and links without limit."""
    state_bytes = 32 * sum(parameter.numel() for parameter in workload.model.parameters())
    machine = roomy(sim.load_machine("emulated")).with_gpus(2).with_usable_memory(state_bytes // 4)
    optimizer = optimizer_of(workload.model)
    trainer = Trainer(workload.model, workload.loss_fn, optimizer, machine=machine, policies=[policy])
    return [trainer.step(inputs, labels) for inputs, labels in batches(workload)], trainer.schedule


def curves(output: Path) -> Table:
    """Train, draw, and say how far apart losses are."""
    rows = []
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    makers: tuple[Callable[[], Workload], ...] = (gpt2, bert)
    for axis, make in zip(axes, makers, strict=True):
        plain = plain_losses(make())
        axis.plot(plain, label="plain PyTorch", linewidth=3, color="0.75")
        for policy, style in ((sim.Policy.HARMONY_DP, "-"), (sim.Policy.HARMONY_PP, "--")):
            losses, schedule = harmony_losses(make(), policy)
            axis.plot(losses, style, label=policy.value, linewidth=1)
            apart = [abs(ours - theirs) for ours, theirs in zip(losses, plain, strict=True)]
            plan = schedule.plan
            rows.append(
                (
                    make().name,
                    policy.value,
                    f"{len(getattr(plan, 'packs_bwd', ()))} packs, u {plan.u_fwd}/{plan.u_bwd}",
                    f"{sum(plain[:10]) / 10:.3f} to {sum(plain[-10:]) / 10:.3f}",
                    f"{sum(losses[:10]) / 10:.3f} to {sum(losses[-10:]) / 10:.3f}",
                    f"{apart[0]:.1e}",
                    f"{max(apart):.1e}",
                )
            )
        axis.set(title=make().name, xlabel="step", ylabel="loss")
        axis.legend()
    figure.savefig(output / "losses.png", dpi=120)
    columns = ("", "policy", "plan", "plain losses", "ours", "apart at first", "at most")
    return Table(f"{STEPS} steps of {MINIBATCH} samples, first ten to last ten", columns, tuple(rows))


def scaling() -> Table:
    """Throughput by number of GPUs."""
    described = sim.load_machine("emulated").with_gpus(3)
    assert described.emulation is not None
    pace = 6.0  # the mathematics of three GPUs takes turns
    slow = replace(
        described,
        gpus=tuple(replace(gpu, speed=1 / pace) for gpu in described.gpus),
        host=replace(described.host, speed=1 / pace),
        emulation=replace(described.emulation, pace=pace),
    )
    machine = calibrate(slow, DeviceKind.EMULATED)
    trace = profile(load_workload("gpt2-demo"), microbatches=(1, 2, 4), budget_s=20)
    rows, first = [], (0.0, 0.0)
    for gpus in (1, 2, 3):
        for policy in (sim.Policy.HARMONY_DP, sim.Policy.HARMONY_PP)[: 1 if gpus == 1 else 2]:
            there = machine.with_gpus(gpus)
            choice = PlanChoice(overlap_steps=False)
            best = sim.search(trace, there, 12, policies=(policy,), choice=choice, max_simulated=60).best
            ran = run(best.schedule, load_workload("gpt2-demo"), there, steps=3).timeline
            predicted, measured = (each.summary()["throughput_samples_per_s"] for each in (best.timeline, ran))
            if gpus == 1:
                first = predicted, measured
            rows.append(
                (
                    str(gpus),
                    policy.value,
                    f"{predicted:.2f}",
                    f"{measured:.2f}",
                    f"{predicted / measured - 1:+.1%}",
                    f"{predicted / first[0]:.2f}x",
                    f"{measured / first[1]:.2f}x",
                )
            )
    columns = ("GPUs", "policy", "predicted", "measured", "error", "speed-up predicted", "measured")
    return Table("gpt2-demo, minibatch 12, samples/s", columns, tuple(rows))


def main() -> None:
    """Print the tables that are named, or both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wanted", nargs="*", choices=["curves", "scaling", []], default=[])
    parser.add_argument("-o", "--output", type=Path, default=Path("training-output"), help="folder for the picture")
    options = parser.parse_args()
    console = Console(width=140)
    if "curves" in options.wanted or not options.wanted:
        options.output.mkdir(parents=True, exist_ok=True)
        console.print(curves(options.output))
    if "scaling" in options.wanted or not options.wanted:
        console.print(scaling())


if __name__ == "__main__":
    main()
