"""Workloads: a model, its loss and its batches, by name, from a configuration file, or from the user's own code.

Built-in models have random weights and deterministic data, so that nothing is downloaded: language models read the
bytes of Python's own standard library.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..errors import WorkloadError
from .inputs import Inputs
from .layers import LayerModel, LossFunction, decompose

BatchFunction = Callable[[int, int], tuple[Any, Tensor]]
"""(samples, seed) → (inputs, labels), batch dimension first; the same arguments give the same batch. Inputs are a
tensor, a tuple of tensors, or a dictionary of them by the names of the model's arguments."""


@dataclass(frozen=True)
class Workload:
    """What to train: ``model`` with ``loss_fn(logits, labels)`` on ``batch(samples, seed) -> (inputs, labels)``."""

    name: str
    model: nn.Module
    loss_fn: LossFunction
    batch: BatchFunction

    def layers(self, samples: int = 1) -> LayerModel:
        """The model as layers, found with a batch of so many samples (it does not matter how many).

        Raises ModelError if it cannot be cut, WorkloadError for its batches.
        """
        return decompose(self.model, self.loss_fn, self.checked_batch(samples, 0)[0])

    def checked_batch(self, samples: int, seed: int) -> tuple[Inputs, Tensor]:
        """A batch. Raises WorkloadError unless the batch function makes inputs and labels of ``samples`` each."""
        try:
            batch: object = self.batch(samples, seed)
        except Exception as error:
            raise WorkloadError(
                f"{self.name}: its batch function, called with ({samples}, {seed}) for (samples, seed), failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise WorkloadError(f"the batch function returned {_describe(batch)}; it must return (inputs, labels)")
        inputs, labels = Inputs.of(batch[0]), batch[1]
        if not isinstance(labels, Tensor):
            raise WorkloadError(f"the batch's labels are {type(labels).__name__}; they must be one tensor")
        for what, tensor in (*inputs.labelled, ("labels", labels)):
            if tensor.ndim == 0 or len(tensor) != samples:
                raise WorkloadError(
                    f"the batch's {what} have shape {tuple(tensor.shape)}, but {samples} samples were asked for; the "
                    "first dimension must be the samples"
                )
        return inputs, labels


def adam(parameters: Any) -> Optimizer:
    """The optimizer where none is given: Adam in one fused operator per step, where torch has one."""
    return torch.optim.Adam(parameters, lr=3e-4, fused=True)


@dataclass(frozen=True)
class Gpt2Sizes:
    """Sizes of a GPT-2. ``sequence`` is in tokens; ``dropout`` holds everywhere (GPT-2's own is 0.1)."""

    blocks: int
    width: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1


@dataclass(frozen=True)
class MlpSizes:
    """Sizes of a multi-layer perceptron that classifies vectors of ``features`` into ``classes``."""

    features: int
    width: int
    hidden_layers: int
    classes: int


BUILT_IN: dict[str, Gpt2Sizes | MlpSizes] = {
    "gpt2-demo": Gpt2Sizes(blocks=16, width=256, heads=4, sequence=128, vocabulary=256, dropout=0.0),
    "gpt2": Gpt2Sizes(blocks=12, width=768, heads=12),
    "gpt2-medium": Gpt2Sizes(blocks=24, width=1024, heads=16),
    "gpt2-xl": Gpt2Sizes(blocks=48, width=1600, heads=25),
    "mlp": MlpSizes(features=64, width=256, hidden_layers=4, classes=10),
}


def load_workload(spec: str, *, seed: int = 0) -> Workload:
    """A workload by ``spec``: a name of :data:`BUILT_IN`, ``hf:CONFIG.json`` (a transformers configuration of a causal
    language model) or ``module:callable``, whose call returns (model, loss_fn, batch_fn(n, seed)).

    ``seed`` fixes the initial weights; the global random state is left as it was. Raises WorkloadError for what cannot
    be found or is not of that form, ModelError for a configuration whose model cannot be split into layers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if spec.startswith("hf:"):
            return _from_configuration(spec)
        if ":" in spec:
            return _from_user_code(spec)
        match BUILT_IN.get(spec):
            case Gpt2Sizes() as sizes:
                return _gpt2(spec, sizes)
            case MlpSizes() as sizes:
                return _mlp(spec, sizes)
            case None:
                raise WorkloadError(
                    f"there is no model {spec!r}{_did_you_mean(spec, BUILT_IN)}; built in are {', '.join(BUILT_IN)}. "
                    "Or give hf:CONFIG.json, or module:callable"
                )


def _did_you_mean(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ---------------------------------------------------------------------------------------------- language models


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, sequence, vocabulary] against the next tokens [batch, sequence]."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def _corpus() -> Tensor:
    """The standard library's top-level sources, joined in order of their names: bytes, as uint8 [n]."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def text_batches(sequence: int) -> BatchFunction:
    """Batches of ``sequence`` consecutive bytes of source text, from random places: int64 [n, sequence] twice, the
    labels being the bytes that follow."""

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        corpus = _corpus()
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(corpus) - sequence, (samples, 1), generator=generator)
        text = corpus[starts + torch.arange(sequence + 1)].long()
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


def _gpt2(name: str, sizes: Gpt2Sizes) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=sizes.blocks,
        n_embd=sizes.width,
        n_head=sizes.heads,
        n_positions=sizes.sequence,
        vocab_size=sizes.vocabulary,
        resid_pdrop=sizes.dropout,
        embd_pdrop=sizes.dropout,
        attn_pdrop=sizes.dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Workload(name, GPT2LMHeadModel(config), next_token_loss, text_batches(sizes.sequence))


def _from_configuration(spec: str) -> Workload:
    import transformers

    path = Path(spec.removeprefix("hf:"))
    try:
        options = json.loads(path.read_text())
    except OSError as error:
        raise WorkloadError(f"{spec}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"{spec}: {path} is not JSON: {error}") from error
    if not isinstance(options, dict) or not isinstance(options.get("model_type"), str):
        raise WorkloadError(f'{spec}: {path} names no "model_type"; a transformers config.json does, such as "gpt2"')
    vocabulary = options.get("vocab_size", sys.maxsize)
    if isinstance(vocabulary, int) and vocabulary < 256:
        raise WorkloadError(
            f"{spec}: vocab_size is {vocabulary}; the built-in text has bytes, so at least 256 is needed"
        )
    # Training never looks at these, but transformers warns when its defaults lie outside a small vocabulary.
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not (isinstance(options.get(token), int) and options[token] < vocabulary):
            options[token] = None
    make_model: Any = transformers.AutoModelForCausalLM.from_config
    try:
        config = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
        with torch.device("meta"):
            shapes = make_model(config)
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{spec}: transformers makes no causal language model of {path}: {error}") from error
    batch = text_batches(config.max_position_embeddings)
    Workload(spec, shapes.train(), next_token_loss, batch).layers()  # refused before memory is spent on it
    return Workload(spec, make_model(config).train(), next_token_loss, batch)


# ----------------------------------------------------------------------------------------------------- vectors


def vector_batches(features: int, classes: int) -> BatchFunction:
    """Normal vectors [n, features], labelled by the largest of ``classes`` fixed random projections: int64 [n]."""
    projection = torch.randn(features, classes, generator=torch.Generator().manual_seed(0))

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, features, generator=torch.Generator().manual_seed(seed))
        return inputs, (inputs @ projection).argmax(1)

    return batch


def _mlp(name: str, sizes: MlpSizes) -> Workload:
    widths = [sizes.features] + sizes.hidden_layers * [sizes.width]
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    model = nn.Sequential(*hidden, nn.Linear(sizes.width, sizes.classes))
    return Workload(name, model, nn.functional.cross_entropy, vector_batches(sizes.features, sizes.classes))


# --------------------------------------------------------------------------------------------------- user's code


def _from_user_code(spec: str) -> Workload:
    module_name, _, function_name = spec.partition(":")
    module = _import(spec, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        callables = (name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        near = _did_you_mean(function_name, callables)
        raise WorkloadError(f"{spec}: {module_name} has no callable {function_name!r}{near}")
    try:
        made = function()
    except Exception as error:
        raise WorkloadError(f"{spec}: calling it failed: {type(error).__name__}: {error}") from error
    match made:
        case (nn.Module() as model, loss_fn, batch) if callable(loss_fn) and callable(batch):
            _check_values(spec, model)
            return Workload(spec, model, loss_fn, batch)
        case _:
            raise WorkloadError(
                f"{spec}: it returned {_describe(made)}; expected (model: nn.Module, loss_fn(logits, labels), "
                "batch_fn(n, seed) -> (inputs, labels))"
            )


def _check_values(spec: str, model: nn.Module) -> None:
    """Every parameter and buffer has values."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WorkloadError(f"{spec}: {name} has no shape yet; call the model on a batch before you return it")
        if tensor.is_meta:
            raise WorkloadError(f"{spec}: {name} is on device meta, without values; make the model on the CPU")


def _import(spec: str, module_name: str) -> Any:
    """Import as ``python -m`` would: the current directory first."""
    if module_name.endswith(".py"):
        raise WorkloadError(f"{spec}: write the module's name, not its file: {module_name.removesuffix('.py')}:…")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise WorkloadError(f"{spec}: importing {module_name} failed: {error}") from error
        raise WorkloadError(
            f"{spec}: there is no module {error.name!r} in {here} or on the Python path; run the command where it is, "
            "or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise WorkloadError(f"{spec}: importing {module_name} failed: {type(error).__name__}: {error}") from error


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
