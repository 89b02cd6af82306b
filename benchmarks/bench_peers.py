"""The same small GPT-2 trained by others, on this computer: time and memory of a step each, and why some do not run.

GPT-2 with 8 blocks of width 512 (41.6 million parameters, head not tied), 4 sequences of 128 tokens in 4 microbatches,
Adam, one thread a process, processes that are pipeline stages or data-parallel ranks side by side. Every system trains
in processes of its own; losses are compared with those of the plain loop. Times are wall-clock medians; CPU seconds are
those of the busiest process, and say more on a computer that is shared.

Those that are not installed are named. DeepSpeed and RoundPipe pull in much: put them into an environment of their own
with the versions of constraints.txt, and give its interpreter::

    python benchmarks/bench_peers.py --python PATH-OF-THAT-PYTHON
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

PARTS, SEQUENCE, VOCABULARY, WIDTH, BLOCKS = 4, 128, 16000, 512, 8
STEPS = 8
WARMUPS = 2
LIMIT_S = 400
ROOT = Path(__file__).resolve().parent.parent

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], float | None]
"""Trains on a minibatch and returns its loss (None on ranks that do not know it)."""


def model() -> nn.Module:
    """The model, always with the same weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    sizes = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 8, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    made: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **tokens, tie_word_embeddings=False))
    return made.train()


def batch(number: int) -> Batch:
    """Tokens and those that follow, int64 [PARTS, SEQUENCE] each."""
    tokens = torch.randint(VOCABULARY, (PARTS, SEQUENCE + 1), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of all that let us choose."""
    return torch.optim.Adam(parameters, lr=3e-4, fused=True)


def accumulate(forward: Callable[[Tensor], Any], backward: Callable[[Tensor], object], inputs: Tensor, labels: Tensor):
    """Forward and backward of all microbatches, one after the other; the minibatch's loss."""
    total = 0.0
    for x, y in zip(inputs.split(1), labels.split(1), strict=True):
        loss = loss_fn(forward(x), y) / PARTS
        backward(loss)
        total += float(loss.detach())
    return total


def plain() -> Step:
    """A plain loop."""
    net = model()
    optimizer = adam(net.parameters())

    def step(inputs: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = accumulate(lambda x: net(x, use_cache=False).logits, torch.autograd.backward, inputs, labels)
        optimizer.step()
        return loss

    return step


def harmony() -> Step:
    """Harmony on one emulated GPU, unpaced, that holds a third of the state, and links without limit."""
    from bench_executor import roomy
    from msgspec.structs import replace

    import sim
    from executor import DeviceKind, Workload, profile
    from executor.devices.facade import open_devices
    from executor.running.session import Session

    workload = Workload("gpt2", model(), loss_fn, lambda samples, seed: tuple(part[:samples] for part in batch(seed)))
    machine = roomy(sim.load_machine("emulated"))
    state_bytes = 16 * sum(parameter.numel() for parameter in workload.model.parameters())
    machine = replace(machine, gpus=(replace(machine.gpus[0], memory_bytes=state_bytes // 3),))
    trace = profile(workload, microbatches=(1,), optimizer=adam, budget_s=10)
    policies = (sim.Policy.HARMONY_DP,)
    schedule = sim.search(trace, machine, PARTS, policies=policies, max_simulated=30).best.schedule
    devices = open_devices(DeviceKind.EMULATED, machine)
    session = Session(schedule, workload.layers(PARTS), adam(workload.model.parameters()), devices)
    return lambda inputs, labels: session.step(inputs, labels).loss


def pipeline(kind: str) -> Step:
    """torch.distributed.pipelining: two processes, one or two stages each."""
    from torch import distributed
    from torch.distributed import pipelining

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    net: Any = model()
    count = 2 * ranks if kind == "Interleaved1F1B" else ranks
    per = BLOCKS // count

    class Stage(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            body = net.transformer
            self.first, self.last = number == 0, number == count - 1
            self.blocks = body.h[number * per : (number + 1) * per]
            self.wte, self.wpe = (body.wte, body.wpe) if self.first else (None, None)
            self.norm, self.head = (body.ln_f, net.lm_head) if self.last else (None, None)

        def forward(self, x: Tensor) -> Tensor:
            if self.wte is not None and self.wpe is not None:
                x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
                x = x[0] if isinstance(x, tuple) else x
            return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x

    numbers = range(rank, count, ranks)
    parts = [Stage(number) for number in numbers]
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(part, number, count, device) for part, number in zip(parts, numbers, strict=True)
    ]
    given: Any = stages if kind == "Interleaved1F1B" else stages[0]
    make = getattr(pipelining, f"Schedule{kind}")
    schedule = make(given, n_microbatches=PARTS, loss_fn=loss_fn)
    optimizer = adam([parameter for part in parts for parameter in part.parameters()])

    def step(inputs: Tensor, labels: Tensor) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == ranks - 1:
            schedule.step(*([inputs] if rank == 0 else []), target=labels, losses=losses)
        else:
            schedule.step(*([inputs] if rank == 0 else []))
        optimizer.step()
        return float(torch.stack(losses).mean().detach()) if losses else None

    return step


def fsdp2(*, offload: bool) -> Step:
    """FSDP2 over two processes; each has half of the microbatches."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    net: Any = model()
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    mesh = init_device_mesh("cpu", (ranks,))
    for block in net.transformer.h:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(net, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)

    def step(inputs: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        own = slice(rank, None, ranks)
        total = torch.zeros(())
        for x, y in zip(inputs[own].split(1), labels[own].split(1), strict=True):
            loss = loss_fn(net(x, use_cache=False).logits, y) / (PARTS // ranks)
            torch.autograd.backward(loss)
            total += loss.detach() / ranks
        optimizer.step()
        distributed.all_reduce(total)
        return float(total)

    return step


def deepspeed() -> Step:
    """DeepSpeed ZeRO-3 with parameters and optimizer in the host."""
    import deepspeed as package

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": PARTS,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "adam_w_mode": False}},
    }
    engine, *_ = package.initialize(model=model(), config=config)

    def step(inputs: Tensor, labels: Tensor) -> float:
        total = 0.0
        for x, y in zip(inputs.split(1), labels.split(1), strict=True):
            loss = loss_fn(engine(x, use_cache=False).logits, y)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / PARTS
        return total

    return step


def roundpipe() -> Step:
    """RoundPipe."""
    import roundpipe as package

    raise NotImplementedError(f"it imports here, which it did not when this was written: {package.__version__}")


def trainstream() -> Step:
    """trainstream."""
    import trainstream as package

    raise NotImplementedError(f"it imports here, which it did not when this was written: {package}")


PEERS: dict[str, tuple[int, Callable[[], Step]]] = {
    "plain PyTorch": (1, plain),
    "Harmony, 1 emulated GPU": (1, harmony),
    "pipelining GPipe": (2, lambda: pipeline("GPipe")),
    "pipelining 1F1B": (2, lambda: pipeline("1F1B")),
    "pipelining Interleaved1F1B": (2, lambda: pipeline("Interleaved1F1B")),
    "FSDP2": (2, lambda: fsdp2(offload=False)),
    "FSDP2 CPUOffloadPolicy": (2, lambda: fsdp2(offload=True)),
    "DeepSpeed ZeRO-3 offload": (1, deepspeed),
    "RoundPipe": (1, roundpipe),
    "trainstream": (1, trainstream),
}
"""Processes, and what makes the step in each of them."""


@contextmanager
def group(ranks: int):
    """A process group, for those with more than one process."""
    if ranks == 1:
        yield
        return
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()


def child(name: str, output: Path) -> None:
    """Train, and write what was measured. Runs in each process of a peer."""
    torch.set_num_threads(1)
    ranks, make = PEERS[name]
    with group(ranks):
        step = make()
        seconds, cpu, losses = [], [], []
        for number in range(WARMUPS + STEPS):
            started, used = time.perf_counter(), time.process_time()
            loss = step(*batch(number))
            seconds.append(time.perf_counter() - started)
            cpu.append(time.process_time() - used)
            losses.append(loss)
    found = {
        "seconds": median(seconds[WARMUPS:]),
        "cpu_seconds": median(cpu[WARMUPS:]),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }
    (output / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def measured(name: str, python: str) -> list[dict[str, Any]] | str:
    """What each process of a peer found, or the last line of why it did not run."""
    ranks, _ = PEERS[name]
    with tempfile.TemporaryDirectory() as folder:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        try:
            ran = subprocess.run(
                [python, *launch, __file__, "--peer", name, "--output", folder],
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"not done within {LIMIT_S} s"
        if ran.returncode:
            lines = [line.split("]:")[-1].strip() for line in ran.stderr.splitlines() if "Error: " in line]
            return next(iter(lines), f"exit status {ran.returncode}")[:120]
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def row(name: str, found: list[dict[str, Any]] | str, expected: list[float] | None) -> tuple[str, ...]:
    """Figures of a peer."""
    if isinstance(found, str):
        return name, "", "", "", "", found
    losses = next(each["losses"] for each in found if each["losses"][0] is not None)
    apart = max(abs(a - b) for a, b in zip(losses, expected or losses, strict=True))
    return (
        name,
        str(len(found)),
        f"{max(each['seconds'] for each in found):.2f}",
        f"{max(each['cpu_seconds'] for each in found):.2f}",
        f"{sum(each['peak_bytes'] for each in found) / 2**30:.2f}",
        f"losses within {apart:.1e}",
    )


def main() -> None:
    """Print the table, or be a process of a peer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="where DeepSpeed and the like are installed")
    parser.add_argument("--only", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--peer", choices=list(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        child(options.peer, options.output)
        return
    from rich.console import Console

    from sim.tables import Table

    expected, rows = None, []
    for name in options.only:
        ours = name in ("plain PyTorch", "Harmony, 1 emulated GPU")
        found = measured(name, sys.executable if ours else options.python)
        if name == "plain PyTorch" and not isinstance(found, str):
            expected = found[0]["losses"]
        rows.append(row(name, found, expected))
    columns = (
        "",
        "processes",
        "s a step",
        "CPU s",
        "peak GiB",
        "losses beside plain PyTorch's, or why it does not run",
    )
    Console(width=150).print(Table("GPT-2, 41.6 M parameters, 4 x 128 tokens", columns, tuple(rows)))


if __name__ == "__main__":
    main()
