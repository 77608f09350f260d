"""Plans carried out by DTensor in four processes (gloo; NCCL where there are four GPUs), against one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.errors import LoweringError
from autoshard.lower.dtensor.distribute import in_order, placements
from autoshard.lower.module_values import module_values
from autoshard.mesh import Mesh
from tests.lower.dtensor.dtensor_ops import CASES, SPLIT, WRITES
from tests.lower.dtensor.dtensor_processes import REFUSED, SCENARIOS
from tests.plans import made as plans

ROOT = Path(__file__).resolve().parents[3]
EQUAL, HALF = 1e-5, 2e-2
MESH = Mesh((2, 2), device="h100")
MANUAL = {
    "megatron": "megatron",
    "fsdp": "fsdp",
    "masked": "fsdp-tp",
    "fsdp_tp": "fsdp-tp",
    "written": "fsdp-tp",
    "autocast": "fsdp-tp",
}
HINTS = {
    "automatic": {"tokens": "[data],[]", "blocks.0.up.weight": "[data],[model]", "blocks.1.down.weight": "[model],[]"},
    "masters": {
        "tokens": "[data],[]", "blocks.0.up.weight": "[data],[model]", "blocks.1.down.weight": "[model],[]",
    },
    "gpt2": {
        "input_ids": "[data],[]", "transformer.wte.weight": "[model],[]",
        "transformer.h.0.attn.c_attn.weight": "[],[model]", "transformer.h.1.mlp.c_fc.weight": "[data],[model]",
    },
    "llama": {
        "input_ids": "[data],[]", "model.layers.0.self_attn.q_proj.weight": "[model],[]",
        "model.layers.0.self_attn.k_proj.weight": "[model],[]", "model.layers.1.mlp.gate_proj.weight": "[model],[data]",
    },
    "convolutional": {
        "tokens": "[data],[]", "wide.weight": "[model],[],[]", "narrow.weight": "[],[model],[]",
        "norm.running_mean": "[model]",
    },
    "attentive": {
        "tokens": "[data],[]", "own.in_proj_weight": "[model],[]", "own.out_proj.weight": "[],[model]",
        "cross.q_proj_weight": "[model],[]", "layer.self_attn.in_proj_weight": "[data],[model]",
        "layer.linear1.weight": "[model],[]",
    },
    "recurrent": {
        "tokens": "[data],[]", "both.weight_ih_l0": "[model],[]", "both.weight_hh_l1_reverse": "[data],[model]",
        "later.weight_hh_l0": "[],[model]",
    },
    "packed": {"tokens": "[data],[]", "packed.weight": "[model],[]", "embed.weight": "[model],[]"},
    "packed_whole": {"head.weight": "[model],[]"},
    "interleaved": {"tokens": "[data],[]", "both.weight": "[model],[]", "down.weight": "[],[model]"},
}  # fmt: skip
"""Programs as small as these are planned whole; this makes their plans worth carrying out."""


HINTS |= dict.fromkeys(("recomputed", "accumulated"), HINTS["llama"])
REMAT = {"recomputed": {"model.layers.0": "all", "model.layers.1": "products"}}

MICRO_BATCHES = {"accumulated": 2}


def planned(name):
    build, sample, loss_fn, optimizer = SCENARIOS[name]
    with torch.device("meta"):
        model = build()
    program = autoshard.capture(
        model,
        sample(),
        loss_fn=loss_fn,
        optimizer=optimizer,
        remat=REMAT.get(name),
        micro_batches=MICRO_BATCHES.get(name, 1),
    )
    if name in MANUAL:
        return autoshard.manual_plan(MANUAL[name], program, MESH)
    return autoshard.plan_program(program, MESH, hints=HINTS[name])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dtensor")
    for name in SCENARIOS:
        planned(name).save(directory / f"plan_{name}.json")
    command = [sys.executable, "-m", "tests.lower.dtensor.dtensor_processes", str(directory)]
    processes = [
        subprocess.Popen([*command, str(rank), "4"], cwd=ROOT, stderr=subprocess.PIPE, text=True) for rank in range(4)
    ]
    try:
        said = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert (directory / "seen.json").exists(), said[0][-3000:]
    return json.loads((directory / "seen.json").read_text())


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in REFUSED])
def test_numbers_are_those_of_one_process(seen, name):
    assert name in seen, f"not reached: {next(each['failed'] for each in seen.values() if 'failed' in each)}"
    found = seen[name]
    assert "failed" not in found, found.get("failed")
    equal = HALF if name == "autocast" else EQUAL
    assert found["losses"] < equal
    assert found["gradients"] < equal
    if SCENARIOS[name][3].__name__ in ("sgd", "masters"):
        assert found["parameters"] < equal
    assert found["buffers"] < EQUAL
    assert found["as_planned"]
    assert found["states_as_planned"]


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="ops are compared on CPUs")
@pytest.mark.parametrize("case", CASES)
def test_ops_give_the_numbers_of_one_process(seen, case):
    found = {name: by for name, by in seen["ops"].items() if name.startswith(f"{case}, ")}
    assert len(found) == len(SPLIT)
    assert max(found.values()) < EQUAL, found


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="ops are compared on CPUs")
@pytest.mark.parametrize("case", WRITES)
def test_no_write_is_lost(seen, case):
    """DTensor redistributes a tensor for a view that its parts do not have: that is a copy."""
    found = {name: said for name, said in seen["writes"].items() if name.startswith(f"{case}, ")}
    assert len(found) == len(SPLIT) + 1
    assert found.pop(f"{case}, whole") is True
    assert all(said is True or len(said.splitlines()) == 1 for said in found.values() if said), found
    assert False not in found.values()


def test_what_dtensor_cannot_run_is_refused_in_one_line(seen):
    said = seen["written"]["refused"]
    assert said.startswith("inner.scale: DTensor cannot run aten.add_.Tensor of [16, 32] placed")
    assert "Partial" in said
    assert len(said.splitlines()) == 1


def test_what_is_planned_is_communicated(seen):
    assert seen["megatron"]["local"]["blocks.0.up.weight"] == [64, 32]
    assert seen["megatron"]["communicated"].keys() >= {"all_reduce"}
    scattered = seen["megatron"]["communicated"].get("reduce_scatter_tensor", 0)
    if torch.__version__.startswith("2.9."):
        assert scattered == 0
    else:  # DTensor's own propagation, in the backward pass: 2.13 scatters two sums there, and gathers them again
        assert scattered < seen["fsdp"]["communicated"]["reduce_scatter_tensor"]
    assert seen["fsdp"]["local"]["blocks.0.up.weight"] == [32, 32]
    assert seen["fsdp"]["communicated"]["reduce_scatter_tensor"] > 4
    assert seen["fsdp"]["communicated"]["all_gather_into_tensor"] > 4


def test_a_plan_that_transformers_can_say_is_said_so(seen):
    said, lost = seen["megatron"]["tp_plan"]
    head = {"head": "colwise_gather_output"}  # tied to the embedding, and nobody reads slices of what it makes
    assert said == {"embed": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise", **head}
    assert lost == []
    assert any(line == "embed: Embedding split [data,model],[]" for line in seen["fsdp"]["tp_plan"][1])


def test_what_dtensor_cannot_express_is_named(seen):
    lines = seen["llama"]["inexpressible"]
    assert any("inside model.layers.*.self_attn follow DTensor's own propagation" in line for line in lines)
    assert any("of the backward pass" in line for line in lines)


def test_attention_that_dtensor_cannot_split_by_heads_is_named(seen):
    lines = [line for line in seen["attentive"]["inexpressible"] if "MultiheadAttention" in line]
    assert {line.partition(" ")[0] for line in lines} == {"own", "cross", "layer.self_attn"}


def test_recurrent_modules_that_dtensor_cannot_split_are_named(seen):
    lines = [line for line in seen["recurrent"]["inexpressible"] if "(recurrent)" in line]
    assert {line.partition(" ")[0] for line in lines} == {"both", "later"}


class Devices:
    """What `to_dtensor` asks of a device mesh."""

    ndim = 2
    shape = (4, 2)
    mesh_dim_names = ("data", "model")


def test_another_mesh_is_refused_with_the_one_that_is_needed():
    wanted = r"mesh data=2, model=4, the device mesh has data=4, model=2: init_device_mesh\(device_type, \(2, 4\)"
    with pytest.raises(LoweringError, match=wanted):
        plans.plan(plans.program()).to_dtensor(Devices())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (((), ()), (Replicate(), Replicate())),
        ((("data",), ()), (Shard(0), Replicate())),
        (((), ("data", "model")), (Shard(1), Shard(1))),
        ((("model",), ("data",)), (Shard(1), Shard(0))),
    ],
)
def test_placements(spec, expected):
    assert placements(MESH, spec) == expected


def test_axes_in_another_order_are_named():
    assert in_order(MESH, (("data", "model"), ()))
    assert not in_order(MESH, (("model", "data"), ()))


def test_values_that_leave_a_module_are_found():
    values = module_values(planned("automatic"))
    assert [value.shape for value in values.outputs["blocks.0.up"]] == [(8, 16, 128)]
    assert [value.shape for value in values.outputs["blocks.0"]] == [(8, 16, 32)]
    assert values.inside["blocks.0.up"] == 1, "the product, before its bias is added"
    assert values.backward > 50
    assert values.reads["blocks.0.up.weight"] == (("data",), ()), "kept split over model too, and gathered to be read"
    assert module_values(planned("accumulated")).inputs["model.embed_tokens"], "tokens, gathered to be read"


def test_a_planned_model_that_is_dropped_leaves_the_others(tmp_path):
    code = f"""
import gc, torch, autoshard
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.arange(8, device=x.device)
x = torch.ones(4, 8)
plan = autoshard.plan(Scaled(8, 8), x, mesh=(1, 1), device="cpu", loss_fn=torch.sum)
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
lowered = plan.to_dtensor(init_device_mesh("cpu", (1, 1), mesh_dim_names=plan.mesh.axis_names))
first, second = Scaled(8, 8), Scaled(8, 8)
lowered.apply(first)
lowered.apply(second)
del first
gc.collect()
print(second(x).shape)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["torch.Size([4, 8])"], done.stderr[-2000:]
