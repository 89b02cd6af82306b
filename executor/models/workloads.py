"""Workloads: a model, its loss and its batches, by name, from a configuration file, or from the user's own code."""

from __future__ import annotations

import copy
import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from sim.units import format_bytes

from ..errors import WorkloadError
from .data import (
    BatchFunction,
    class_loss,
    continued_text_batches,
    image_batches,
    labelled_text_batches,
    next_token_loss,
    text_batches,
)
from .inputs import Inputs
from .layers import LayerModel, decompose
from .losses import LossFunction
from .published import IMAGE_SIZE, PUBLISHED, SEQUENCE, Task, Tokens


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


def load_workload(spec: str, *, seed: int = 0, values: bool | None = True, sequence: int | None = None) -> Workload:
    """A workload by ``spec``: a name of :data:`PUBLISHED`, ``hf:CONFIG.json`` (a configuration of transformers) or
    ``module:callable``, whose call returns (model, loss_fn, batch_fn(n, seed)).

    ``seed`` fixes the initial weights; the global random state is left as it was. Without ``values`` the model has
    shapes but no memory (device ``meta``), unless it is made by the user's code; None: it has values if they fit into
    this machine's memory. Samples have ``sequence`` tokens; None: as many as is usual for the model. Raises
    WorkloadError for what cannot be found, is not of that form, takes no such samples or has more parameters than this
    machine has memory.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" in spec and not spec.startswith("hf:"):
            if sequence is not None:
                raise WorkloadError(
                    f"{spec}: how long its samples are, its own batch function says; leave sequence out"
                )
            return _from_user_code(spec)
        make = (_from_configuration if spec.startswith("hf:") else _published)(spec, sequence)
        with torch.device("meta"):
            shapes = make()
        needed, there = _bytes_of(shapes.model), _memory_bytes()
        if values is False or (values is None and needed > there):
            return shapes
        if spec.startswith("hf:"):
            shapes.layers()  # refused before memory is spent on it
        if needed > there:
            raise WorkloadError(
                f"{shapes.name}: its parameters take {format_bytes(needed)} ({needed} B), and this machine has "
                f"{format_bytes(there)} ({there} B) of memory; harmony layers and harmony profile work without"
            )
        return make()


def _published(name: str, sequence: int | None) -> Callable[[], Workload]:
    published = PUBLISHED.get(name)
    if published is None:
        raise WorkloadError(
            f"there is no model {name!r}{_did_you_mean(name, PUBLISHED)}; built in are {', '.join(PUBLISHED)}. "
            "Or give hf:CONFIG.json, or module:callable"
        )
    batches = _batches(name, published.task, sequence)
    return lambda: Workload(name, published.model(), published.task.loss_fn, batches())


def _batches(spec: str, task: Task, sequence: int | None) -> Callable[[], BatchFunction]:
    """What makes the batch function, of samples with ``sequence`` tokens. Raises WorkloadError if there are no such."""
    if task.tokens is None:
        if sequence is not None:
            raise WorkloadError(f"{spec}: its samples are not made of tokens, so their number cannot be {sequence}")
        return task.batches
    tokens = task.tokens.usual if sequence is None else sequence
    if not 0 < tokens <= task.tokens.most:
        raise WorkloadError(f"{spec}: samples of {tokens} tokens; it takes 1 to {task.tokens.most}")
    return partial(task.batches, tokens)


def _bytes_of(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _did_you_mean(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


# ------------------------------------------------------------------------------------------------ transformers


def _next_tokens(config: Any) -> Task:
    return Task(next_token_loss, text_batches, _tokens(config))


def _continued(config: Any) -> Task:
    return Task(next_token_loss, continued_text_batches, _tokens(config))


def _classified_text(config: Any) -> Task:
    return Task(class_loss, partial(labelled_text_batches, classes=config.num_labels), _tokens(config))


def _classified_images(config: Any) -> Task:
    size = getattr(config, "image_size", IMAGE_SIZE)
    return Task(class_loss, partial(image_batches, config.num_channels, size, config.num_labels))


TASKS: Mapping[str, Callable[[Any], Task]] = {
    "ForCausalLM": _next_tokens,
    "LMHeadModel": _next_tokens,
    "ForConditionalGeneration": _continued,
    "ForSequenceClassification": _classified_text,
    "ForImageClassification": _classified_images,
}
"""What models of transformers are trained for, by the end of their class's name."""


def _tokens(config: Any) -> Tokens:
    most = getattr(config, "max_position_embeddings", sys.maxsize)
    return Tokens(min(most, SEQUENCE), most)


def _from_configuration(spec: str, sequence: int | None) -> Callable[[], Workload]:
    import transformers

    options = _configuration(spec)
    kind, architectures = options.pop("model_type"), options.get("architectures")
    if kind not in transformers.CONFIG_MAPPING:
        raise WorkloadError(
            f"{spec}: transformers {transformers.__version__} has no model of type {kind!r}"
            f"{_did_you_mean(kind, transformers.CONFIG_MAPPING)}"
        )
    vocabulary = options.get("vocab_size", sys.maxsize)
    if isinstance(vocabulary, int) and vocabulary < 256:
        raise WorkloadError(
            f"{spec}: vocab_size is {vocabulary}; the built-in text has bytes, so at least 256 is needed"
        )
    # Training never looks at these, but transformers warns when its defaults lie outside a small vocabulary.
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not (isinstance(options.get(token), int) and options[token] < vocabulary):
            options[token] = None
    try:
        config = transformers.AutoConfig.for_model(kind, **options)
        make = getattr(transformers, architectures[0]) if architectures else _causal_language_model(config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadError(
            f"{spec}: transformers makes no model of it: {error}. A configuration names its model_type, and in "
            "architectures its class; without that, it must be a causal language model's"
        ) from error
    describe = next((describe for end, describe in TASKS.items() if make.__name__.endswith(end)), None)
    if describe is None:
        raise WorkloadError(
            f"{spec}: what {make.__name__} is trained for is not known; known are classes that end in "
            f"{', '.join(TASKS)}. Or write module:callable, with a loss and batches of your own"
        )

    task = describe(config)
    batches = _batches(spec, task, sequence)

    def workload() -> Workload:
        return Workload(spec, make(copy.deepcopy(config)).train(), task.loss_fn, batches())

    return workload


def _configuration(spec: str) -> dict[str, Any]:
    path = Path(spec.removeprefix("hf:"))
    try:
        options = json.loads(path.read_text())
    except OSError as error:
        raise WorkloadError(f"{spec}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"{spec}: {path} is not JSON: {error}") from error
    if not isinstance(options, dict) or not isinstance(options.get("model_type"), str):
        raise WorkloadError(f'{spec}: {path} names no "model_type"; a transformers config.json does, such as "gpt2"')
    return options


def _causal_language_model(config: Any) -> Any:
    """The class. Raises ValueError if there is none."""
    import transformers

    known: Any = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise ValueError(f"no causal language model of type {config.model_type}")
    return known[type(config)]


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
