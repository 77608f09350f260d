"""SOURCE on the command line: `hf:TYPE` and `file.py:function`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.errors import SourceError
from autoshard.sources import load_source

FILE = """
import torch
from torch import nn

def mlp(width=8, batch=2):
    return nn.Linear(width, width), torch.empty(batch, width)

def training():
    return {"model": nn.Linear(4, 4), "inputs": (torch.empty(2, 4), torch.empty(2, 4)),
            "loss_fn": lambda out, y: (out - y).sum(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}

def alone():
    return nn.Linear(4, 4)

def number():
    return 4

def misspelled():
    return {"model": nn.Linear(4, 4), "inputs": torch.empty(2, 4), "loss": None}

def beside():
    assert __file__.endswith("models.py")
    return nn.Linear(4, 4), torch.empty(2, 4)

def broken():
    raise RuntimeError("out of luck")
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(FILE)
    return str(path)


def test_a_function_returns_model_and_inputs(file: str) -> None:
    source = load_source(f"{file}:mlp", batch=3, settings={"width": "6"})
    assert source.model.weight.shape == (6, 6)
    assert source.inputs.shape == (3, 6)
    assert source.optimizer is None
    assert not source.train


def test_a_function_returns_a_training_step(file: str) -> None:
    source = load_source(f"{file}:training")
    assert source.loss_fn is not None
    assert isinstance(source.optimizer(source.model.parameters()), torch.optim.SGD)
    assert source.train


def test_a_file_knows_where_it_is(file: str) -> None:
    assert load_source(f"{file}:beside").model.weight.shape == (4, 4)


def test_a_file_that_was_edited_is_read_again(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of one size within the second of the first reading, as scripts make them."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    before = Path(file).stat()
    assert load_source(f"{file}:mlp").model.weight.shape == (8, 8)
    Path(file).write_text(FILE.replace("width=8", "width=6"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_source(f"{file}:mlp").model.weight.shape == (6, 6)


@pytest.mark.parametrize(
    ("function", "settings", "message"),
    [
        ("mpl", {}, "no function 'mpl'; did you mean mlp"),
        ("mlp", {"widht": "3"}, "no parameter 'widht'; did you mean width"),
        ("alone", {}, "returned no sample inputs"),
        ("number", {}, "must return a torch.nn.Module.*not int"),
        ("misspelled", {}, "a dict with 'loss'; it may have model, inputs, loss_fn, optimizer"),
        ("broken", {}, "failed: RuntimeError: out of luck"),
    ],
)
def test_functions_that_give_no_program(file: str, function: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        load_source(f"{file}:{function}", settings=settings)


def test_what_names_nothing() -> None:
    with pytest.raises(SourceError, match="there is no file nowhere"):
        load_source("nowhere.py:model")
    with pytest.raises(SourceError, match="write hf:MODEL_TYPE"):
        load_source("gpt2")
    with pytest.raises(SourceError, match="unknown optimizer 'adam'"):
        load_source("hf:gpt2", train="adam")
    with pytest.raises(SourceError, match="batch must be at least 1"):
        load_source("hf:gpt2", batch=0)


def test_a_transformers_type_with_settings() -> None:
    pytest.importorskip("transformers")
    small = {"n_layer": "1", "n_embd": "16", "n_head": "2", "vocab_size": "50"}
    source = load_source("hf:gpt2", batch=2, seq=6, settings=small, train="sgd")
    config = source.model.config
    assert (config.n_layer, config.hidden_size, config._attn_implementation) == (1, 16, "sdpa")
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0, 0, 0)
    assert {p.device.type for p in source.model.parameters()} == {"meta"}
    assert {name: tuple(t.shape) for name, t in source.inputs.items()} == {"input_ids": (2, 6), "labels": (2, 6)}
    assert source.model.training
    kept = load_source("hf:gpt2", settings={**small, "resid_pdrop": "0.1"})
    assert kept.model.config.resid_pdrop == 0.1
    assert not kept.model.training
    assert kept.inputs["input_ids"].shape == (8, 512)
    assert set(kept.inputs) == {"input_ids"}


def test_the_task_of_a_type() -> None:
    pytest.importorskip("transformers")
    small = {"num_hidden_layers": "1", "hidden_size": "16", "num_attention_heads": "2", "intermediate_size": "8"}
    assert type(load_source("hf:bert", settings=small).model).__name__ == "BertForMaskedLM"
    small["num_key_value_heads"] = "1"
    assert type(load_source("hf:llama", settings=small).model).__name__ == "LlamaForCausalLM"


def test_a_field_that_a_model_may_be_given_is_one() -> None:
    """Heads of 128 features in Qwen 3 30B: refused, as the default configuration has no such field."""
    pytest.importorskip("transformers")
    found = load_source("hf:qwen3_moe", settings={"head_dim": "128"}, layers=1)
    shapes = {name: tuple(each.shape) for name, each in found.model.named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32 * 128, 2048)


@pytest.mark.parametrize(("train", "text"), [("adamw", "labels"), (None, "decoder_input_ids")])
def test_speech_is_heard(train: str | None, text: str) -> None:
    """Whisper is also a causal language model, which is its decoder alone."""
    found = load_source("hf:whisper", train=train, batch=2, layers=1, dtype="bf16")
    assert type(found.model).__name__ == "WhisperForConditionalGeneration"
    shapes = {name: tuple(tensor.shape) for name, tensor in found.inputs.items()}
    assert shapes == {"input_features": (2, 80, 3000), text: (2, 448)}


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("hf:gpt22", {}, "no model type 'gpt22'; did you mean gpt2"),
        ("hf:gpt2", {"n_layers": "2"}, "no field 'n_layers'; did you mean .*n_layer"),
        ("hf:gpt2", {"n_layer": "two"}, "n_layer is of type int.*not 'two'"),
        ("hf:gpt2", {"n_layer": "1.5"}, "n_layer is of type int.*not '1.5'"),
        ("hf:gpt2", {"scale_attn_weights": "maybe"}, "of type bool"),
    ],
)
def test_unknown_types_and_fields(source: str, settings: dict[str, str], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SourceError, match=message):
        load_source(source, settings=settings)


def test_more_tokens_than_positions() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SourceError, match="1024 positions, fewer than --seq 2000"):
        load_source("hf:gpt2", seq=2000)


SMALL_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 100,
}


def written(tmp_path: Path, fields: Any) -> str:
    """`hf:` and a configuration file."""
    path = tmp_path / "config.json"
    path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return f"hf:{path}"


def test_a_configuration_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = written(tmp_path, SMALL_LLAMA | {"model_type": "llama", "dtype": "bfloat16"})
    model = load_source(source, layers=2, settings={"vocab_size": "50"}).model
    assert (model.config.num_hidden_layers, model.config.vocab_size, model.config.hidden_size) == (2, 50, 32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    full = load_source(source, dtype="f32", train="sgd", checkpoint=True).model
    assert (len(full.model.layers), full.model.embed_tokens.weight.dtype) == (6, torch.float32)
    assert any(module.gradient_checkpointing for module in full.modules() if hasattr(module, "gradient_checkpointing"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [("{", "is not JSON"), ([], "no field model_type"), ({"model_type": "lama"}, "no model type 'lama'; did you mean")],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, fields: Any, message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SourceError, match=message):
        load_source(written(tmp_path, fields))


def test_layers_of_an_encoder_and_a_decoder() -> None:
    pytest.importorskip("transformers")
    small = {"d_model": "16", "d_ff": "32", "num_heads": "2", "d_kv": "8", "vocab_size": "50"}
    config = load_source("hf:t5", layers=2, settings=small).model.config
    assert (config.num_layers, config.num_decoder_layers) == (2, 2)
    with pytest.raises(SourceError, match="does not count its layers"):
        load_source("hf:resnet", layers=2)


def test_precision_and_checkpoints_of_a_function(file: str) -> None:
    source = load_source(f"{file}:mlp", dtype="bf16", autocast=True)
    assert {tensor.dtype for tensor in (*source.model.parameters(), source.inputs)} == {torch.bfloat16}
    with pytest.raises(SourceError, match=r"no checkpoints to turn on: write torch\.utils\.checkpoint"):
        load_source(f"{file}:mlp", checkpoint=True)
    for dtype, message in (("fp8", "fp8 goes through kernels"), ("f64", "dtype is f32, bf16, f16, not 'f64'$")):
        with pytest.raises(SourceError, match=message):
            load_source(f"{file}:mlp", dtype=dtype)


def test_products_under_autocast_are_in_bf16(file: str) -> None:
    source = load_source(f"{file}:mlp", autocast=True)
    program = autoshard.capture(source.model, source.inputs)
    assert {op.outputs[0].dtype for op in program.ops if "_to_copy" not in op.name} == {"bf16"}
    assert {argument.type.dtype for argument in program.arguments if argument.role == "parameter"} == {"f32"}


def test_lists_with_an_entry_for_each_layer_are_cut(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    types = ["full_attention"] * 6
    source = written(tmp_path, SMALL_LLAMA | {"model_type": "qwen2", "layer_types": types})
    assert load_source(source, layers=2).model.config.layer_types == types[:2]


def test_images_have_the_dtype_that_a_configuration_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    source = load_source(written(tmp_path, small | {"model_type": "vit", "dtype": "bfloat16"}))
    assert source.inputs["pixel_values"].dtype == torch.bfloat16
