import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from executor.errors import WorkloadError
from executor.models.workloads import load_workload

torch.set_num_threads(1)


class TestBuiltIn:
    def test_the_demo_is_small_and_without_dropout(self):
        workload = load_workload("gpt2-demo")
        layers = workload.layers()
        assert len(layers) == 16 + 4
        assert sum(parameter.numel() for parameter in workload.model.parameters()) == 12_734_976
        assert not any(layer.random for layer in layers.layers)
        inputs, labels = workload.batch(2, 0)
        assert inputs.shape == labels.shape == (2, 128)

    def test_without_values_a_model_has_no_memory(self):
        model = load_workload("gpt2-100b", values=False).model
        assert all(parameter.is_meta for parameter in model.parameters())

    def test_more_parameters_than_memory_are_refused(self):
        assert all(p.is_meta for p in load_workload("gpt2-100b", values=None).model.parameters())
        assert not any(p.is_meta for p in load_workload("mlp", values=None).model.parameters())
        with pytest.raises(WorkloadError, match=r"gpt2-100b: its parameters take .* this machine has .* of memory"):
            load_workload("gpt2-100b")

    def test_the_mlp_learns_its_classes(self):
        workload = load_workload("mlp")
        optimizer = torch.optim.Adam(workload.model.parameters(), lr=1e-3)
        losses = []
        for step in range(60):
            inputs, labels = workload.batch(64, step)
            loss = workload.loss_fn(workload.model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
        assert len(workload.layers()) == 6

    def test_weights_depend_on_the_seed_alone(self):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        first, same, other = (load_workload("mlp", seed=seed).model.state_dict() for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not torch.equal(first["0.0.weight"], other["0.0.weight"])

    def test_samples_have_as_many_tokens_as_are_asked_for(self):
        inputs, labels = load_workload("llama3.1-8b", values=False, sequence=2048).batch(2, 0)
        assert inputs.shape == labels.shape == (2, 2048)
        inputs, labels = load_workload("bert-large", values=False, sequence=128).batch(2, 0)
        assert (inputs.shape, labels.shape) == ((2, 128), (2,))

    @pytest.mark.parametrize(
        ("model", "sequence", "expected"),
        [
            ("gpt2", 1025, "gpt2: samples of 1025 tokens; it takes 1 to 1024"),
            ("gpt2", 0, "samples of 0 tokens"),
            ("resnet1026", 128, "resnet1026: its samples are not made of tokens"),
            ("my_training:make", 128, "its own batch function says"),
        ],
    )
    def test_samples_that_a_model_does_not_take_are_refused(self, model: str, sequence: int, expected: str):
        with pytest.raises(WorkloadError, match=expected):
            load_workload(model, values=False, sequence=sequence)

    def test_an_unknown_name_names_the_nearest(self):
        with pytest.raises(WorkloadError, match=r"did you mean 'gpt2-xl'.*built in are .*mlp"):
            load_workload("gtp2-xl")
        with pytest.raises(WorkloadError, match=r"no model 'zzz'; built in"):
            load_workload("zzz")


def write_configuration(folder: Path, **options) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(options))
    return f"hf:{path}"


SMALL = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 256}


class TestConfiguration:
    def test_makes_the_model_it_describes_without_warnings(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        logger = logging.getLogger("transformers")  # does not propagate to the root
        logger.addHandler(caplog.handler)
        workload = load_workload(write_configuration(tmp_path, model_type="gpt2", **SMALL))
        logger.removeHandler(caplog.handler)
        assert workload.model.training
        assert workload.model.transformer.wte.weight.shape == (256, 16)
        inputs, labels = workload.batch(2, 0)
        assert inputs.shape == (2, 32)
        assert workload.loss_fn(workload.model(inputs).logits, labels).item() > 0
        assert caplog.text == ""

    def test_has_samples_as_long_as_it_can_take(self, tmp_path: Path):
        spec = write_configuration(tmp_path, model_type="gpt2", **SMALL)
        assert load_workload(spec, sequence=8).batch(2, 0)[0].shape == (2, 8)
        with pytest.raises(WorkloadError, match="samples of 33 tokens; it takes 1 to 32"):
            load_workload(spec, sequence=33)

    def test_keeps_token_ids_inside_the_vocabulary(self, tmp_path: Path):
        spec = write_configuration(tmp_path, model_type="gpt2", bos_token_id=3, eos_token_id=999, **SMALL)
        config = load_workload(spec).model.config
        assert (config.bos_token_id, config.eos_token_id) == (3, None)

    def test_any_causal_language_model_will_do(self, tmp_path: Path):
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
        spec = write_configuration(tmp_path, model_type="llama", vocab_size=256, max_position_embeddings=8, **sizes)
        assert [layer.kind for layer in load_workload(spec).layers().layers[1:3]] == 2 * ["LlamaDecoderLayer"]

    @pytest.mark.parametrize(
        ("options", "inputs", "labels"),
        [
            (
                {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 256,
                 "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
                 "max_position_embeddings": 16, "num_labels": 3},
                (2, 16),
                (2,),
            ),
            (
                {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 8, "patch_size": 4,
                 "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1},
                (2, 3, 8, 8),
                (2,),
            ),
        ],
    )  # fmt: skip
    def test_architectures_say_what_it_is_trained_for(self, tmp_path: Path, options: dict, inputs, labels):
        workload = load_workload(write_configuration(tmp_path, **options))
        assert type(workload.model).__name__ == options["architectures"][0]
        batch = workload.batch(2, 0)
        assert (batch[0].shape, batch[1].shape) == (inputs, labels)
        assert workload.loss_fn(workload.model(batch[0]).logits, batch[1]).item() > 0

    def test_an_encoder_and_a_decoder_take_two_inputs(self, tmp_path: Path):
        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        spec = write_configuration(
            tmp_path, model_type="t5", architectures=["T5ForConditionalGeneration"], vocab_size=256, **sizes
        )
        workload = load_workload(spec)
        inputs, labels = workload.batch(2, 0)
        assert {name: tensor.shape for name, tensor in inputs.items()} == {
            "input_ids": (2, 1024),
            "decoder_input_ids": (2, 1024),
        }
        assert torch.equal(inputs["decoder_input_ids"][:, 1:], labels[:, :-1])
        assert [layer.kind for layer in workload.layers().layers] == [
            "Embedding", "T5Block", "T5LayerNorm", "Embedding", "T5Block", "T5LayerNorm", "Linear", "loss",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ('{"model_type": "bert", "architectures": ["BertForPreTraining"]}', "BertForPreTraining is trained for is"),
            ('{"model_type": "bert", "architectures": ["BertForNothing"]}', "no attribute BertForNothing"),
            ("{", "is not JSON"),
            ("[]", "model_type"),
            ('{"n_layer": 1}', "model_type"),
            ('{"model_type": "gtp2"}', "has no model of type 'gtp2' .did you mean 'gpt2'"),
            ('{"model_type": "vit"}', "no causal language model"),
            ('{"model_type": "gpt2", "vocab_size": 100}', "at least 256"),
        ],
    )
    def test_says_what_is_wrong_with_the_file(self, tmp_path: Path, text: str, expected: str):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(WorkloadError, match=expected):
            load_workload(f"hf:{path}")

    def test_says_which_file_is_missing(self, tmp_path: Path):
        with pytest.raises(WorkloadError, match=r"cannot read .*none\.json: No such file"):
            load_workload(f"hf:{tmp_path / 'none.json'}")


USERS_CODE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(3, 2))
    return model, nn.functional.mse_loss, lambda n, seed: (torch.zeros(n, 3), torch.zeros(n, 2))

def broken():
    raise RuntimeError("no data here")

def incomplete():
    return nn.Linear(3, 2), nn.functional.mse_loss

def lazy():
    return nn.Sequential(nn.LazyLinear(2)), nn.functional.mse_loss, print

def empty():
    return nn.Sequential(nn.Linear(3, 2, device="meta")), nn.functional.mse_loss, print

number = 3
"""


class TestUsersCode:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "my_training.py").write_text(USERS_CODE)
        (tmp_path / "my_broken.py").write_text("import a_module_that_is_not_there\n")
        (tmp_path / "my_error.py").write_text("1 / 0\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        yield
        for name in ("my_training", "my_broken", "my_error"):
            sys.modules.pop(name, None)

    def test_is_found_in_the_current_directory(self):
        workload = load_workload("my_training:make")
        assert workload.name == "my_training:make"
        assert isinstance(workload.model, nn.Sequential)
        assert workload.batch(4, 0)[0].shape == (4, 3)

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            ("my_trainnig:make", "no module 'my_trainnig' in .* or on the Python path"),
            ("my_training:maek", "no callable 'maek'.*did you mean 'make'"),
            ("my_training:number", "no callable 'number'($| .did you mean '(?!number))"),
            ("my_training:lazy", r"0\.weight has no shape yet"),
            ("my_training:empty", r"0\.weight is on device meta"),
            ("my_training:broken", "calling it failed: RuntimeError: no data here"),
            ("my_training:incomplete", r"returned \(Linear, function\); expected \(model"),
            ("my_broken:make", "importing my_broken failed: No module named 'a_module_that_is_not_there'"),
            ("my_error:make", "importing my_error failed: ZeroDivisionError"),
            ("my_training.py:make", "module's name, not its file"),
        ],
    )
    def test_says_what_is_wrong(self, spec: str, expected: str):
        with pytest.raises(WorkloadError, match=expected):
            load_workload(spec)
