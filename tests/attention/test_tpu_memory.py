"""Memory of transformers that are computed again, held against libtpu's."""

from __future__ import annotations

from typing import Any

import pytest

from autoshard.api import capture
from autoshard.comparison.compared import compare_program
from autoshard.mesh import Mesh
from autoshard.sources import load_source

pytest.importorskip("libtpu")
pytest.importorskip("transformers")

VIT = {"hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 16, "patch_size": 14}
MIXTURE = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "num_local_experts": 8},
}


@pytest.mark.parametrize(
    ("source", "target", "given"),
    [
        ("hf:vit", "tpu-v5e:2x4", {"batch": 256, "layers": 4, "settings": VIT}),
        ("hf:gemma2", "tpu-v5p:2x2x2", {"batch": 8, "seq": 2048, "layers": 4, "settings": {}}),
        ("hf:mixtral", "tpu-v5p:2x2x2", {"batch": 16, "seq": 4096, "layers": 2, "settings": MIXTURE}),
    ],
    ids=["ViT", "Gemma 2", "Mixtral"],
)
def test_memory_of_the_automatic_plan_is_what_is_compiled(source: str, target: str, given: dict[str, Any]) -> None:
    settings = {name: str(value) for name, value in given.pop("settings").items()}
    loaded = load_source(source, train="adamw", dtype="bf16", checkpoint=True, settings=settings, **given)
    mesh = Mesh((2, 4), device=target)
    program = capture(
        loaded.model, loaded.inputs, loss_fn=loaded.loss_fn, optimizer=loaded.optimizer, device=mesh.device
    )
    (row,) = compare_program(program, mesh, plans=["auto"], target=target).rows
    assert row.compiled is not None
    assert row.predicted.peak_memory_bytes == pytest.approx(row.compiled.peak_memory_bytes, rel=0.06)
