"""What `fuzz.py` runs: good files of each kind, and cases made of them. A case is given by kind, seed and number."""

from __future__ import annotations

import gzip
import io
import json
import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import fuzz_mutate as mutate

ROOT = Path(__file__).resolve().parents[1]

TRAINED = b"""module @step {
  func.func public @main(%arg0: tensor<16x32xf32> {tf.aliasing_output = 0 : i32} loc("state['w']"), %arg1: tensor<8x16xf32> loc("batch")) -> (tensor<16x32xf32> {jax.result_info = "state['w']"}, tensor<f32> {jax.result_info = "loss"}) {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.dot_general %arg1, %arg0, contracting_dims = [1] x [0] : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32> loc("jit(step)/jvp(up)/dot_general")
    %1 = call @relu(%0) : (tensor<8x32xf32>) -> tensor<8x32xf32> loc("jit(step)/jvp(up)/relu")
    %2 = stablehlo.reduce(%1 init: %cst) applies stablehlo.add across dimensions = [0, 1] : (tensor<8x32xf32>, tensor<f32>) -> tensor<f32>
    %3 = stablehlo.dot_general %arg1, %1, contracting_dims = [0] x [0] : (tensor<8x16xf32>, tensor<8x32xf32>) -> tensor<16x32xf32> loc("jit(step)/transpose(jvp(up))/dot_general")
    %4 = stablehlo.subtract %arg0, %3 : tensor<16x32xf32>
    return %4, %2 : tensor<16x32xf32>, tensor<f32>
  }
  func.func private @relu(%arg0: tensor<8x32xf32>) -> tensor<8x32xf32> {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<8x32xf32>
    %1 = stablehlo.maximum %arg0, %0 : tensor<8x32xf32>
    return %1 : tensor<8x32xf32>
  }
}
"""  # noqa: E501
LOOPED = b"""module @loop {
  func.func @main(%arg0: tensor<4x8x16xf32>, %arg1: tensor<16x16xf32>, %arg2: tensor<4x8xi32>) -> (tensor<4x8x16xf32>, tensor<4x8x16xf32>) {
    %c = stablehlo.constant dense<0> : tensor<i32>
    %c_0 = stablehlo.constant dense<3> : tensor<i32>
    %c_1 = stablehlo.constant dense<1> : tensor<i32>
    %0:2 = stablehlo.while(%iterArg = %c, %iterArg_2 = %arg0) : tensor<i32>, tensor<4x8x16xf32>
    cond {
      %2 = stablehlo.compare LT, %iterArg, %c_0, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %2 : tensor<i1>
    } do {
      %2 = stablehlo.dot_general %iterArg_2, %arg1, contracting_dims = [2] x [0] : (tensor<4x8x16xf32>, tensor<16x16xf32>) -> tensor<4x8x16xf32>
      %3 = stablehlo.add %iterArg, %c_1 : tensor<i32>
      stablehlo.return %3, %2 : tensor<i32>, tensor<4x8x16xf32>
    }
    %1 = "stablehlo.gather"(%arg1, %arg2) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 16>}> : (tensor<16x16xf32>, tensor<4x8xi32>) -> tensor<4x8x16xf32>
    return %0#1, %1 : tensor<4x8x16xf32>, tensor<4x8x16xf32>
  }
}
"""  # noqa: E501
CONVOLVED = b"""module @convolve {
  func.func @main(%arg0: tensor<4x3x16x16xbf16>, %arg1: tensor<8x3x3x3xbf16>) -> tensor<4x8x8x8xf32> {
    %cst = stablehlo.constant dense<0xFF80> : tensor<bf16>
    %0 = stablehlo.convolution(%arg0, %arg1) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : (tensor<4x3x16x16xbf16>, tensor<8x3x3x3xbf16>) -> tensor<4x8x16x16xbf16>
    %1 = "stablehlo.reduce_window"(%0, %cst) <{window_dimensions = array<i64: 1, 1, 2, 2>, window_strides = array<i64: 1, 1, 2, 2>}> ({
    ^bb0(%arg2: tensor<bf16>, %arg3: tensor<bf16>):
      %3 = stablehlo.maximum %arg2, %arg3 : tensor<bf16>
      stablehlo.return %3 : tensor<bf16>
    }) : (tensor<4x8x16x16xbf16>, tensor<bf16>) -> tensor<4x8x8x8xbf16>
    %2 = stablehlo.convert %1 : (tensor<4x8x8x8xbf16>) -> tensor<4x8x8x8xf32>
    return %2 : tensor<4x8x8x8xf32>
  }
}
"""  # noqa: E501
TEXTS = {"trained": TRAINED, "looped": LOOPED, "convolved": CONVOLVED}

PROBLEM = {
    "problem": {
        "name": "chain",
        "nodes": {
            "intervals": [[0, 2], [1, 3], [0, 3]],
            "costs": [[3, 1, 10**18], [0, 2], [5, 4]],
            "usages": [[1, 9, 2], [3, 4], [0, 7]],
        },
        "edges": {"nodes": [[0, 1], [1, 2]], "costs": [[0, 7, 7, 0, 1, 10**18], [0, 2, 2, 0]]},
        "usage_limit": 15,
    }
}


@dataclass(frozen=True)
class Case:
    """One run of the command line.

    Attributes:
        arguments: of the command.
        files: name -> content, in the folder that it runs in.
    """

    arguments: tuple[str, ...]
    files: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Good:
    """Good files that take long to make: what planning `TRAINED` writes, and modules in other forms."""

    plan: Any
    problem: Any
    modules: dict[str, bytes]

    @classmethod
    def made(cls) -> Good:
        """Make them: in a process that is not forked from later, for jax starts threads."""
        import jax
        import jax.export
        from jaxlib.mlir import ir

        import autoshard
        from autoshard.solver import iopddl
        from autoshard.stablehlo.context import mlir_context
        from autoshard.stablehlo.reader import parse_module
        from tests.solver.random_problems import random_problem

        def exported(x: Any, w: Any) -> Any:
            return jax.numpy.tanh(x @ w)

        of = jax.ShapeDtypeStruct
        shapes = of((8, 16), "float32"), of((16, 4), "float32")
        export = jax.export.export(jax.jit(exported), platforms=["cpu"])(*shapes)
        modules = {"portable.mlirbc": export.mlir_module_serialized, "exported.jax_export": bytes(export.serialize())}
        for name, text in TEXTS.items():
            out = io.BytesIO()
            with mlir_context():
                assert isinstance(ir.Module.parse(text), ir.Module)
                parse_module(text).operation.write_bytecode(out)
            modules[f"{name}.mlirbc"] = out.getvalue()
        program = program_of(TRAINED)
        plan = json.loads(autoshard.plan_program(program, autoshard.Mesh((2, 2), device="tpu-v5e")).to_json())
        return cls(_with_everything(plan), iopddl.to_json(random_problem(5))[0], modules)


def program_of(text: bytes) -> Any:
    """The program of a module's text."""
    import tempfile

    from autoshard.frontends.stablehlo_file import read_program

    with tempfile.NamedTemporaryFile(suffix=".mlir") as file:
        Path(file.name).write_bytes(text)
        return read_program(file.name)


def _with_everything(plan: Any) -> Any:
    """A plan with the parts that only some plans have."""
    read = {
        "before": 1, "op": "aten._local_scalar_dense.default", "module": "up", "value": "1.0",
        "follows_from": ["input"],
    }  # fmt: skip
    tried = {
        "shape": [2, 2], "outcome": "planned", "step_time_s": 1e-5, "objective": 1e-5, "bound": None,
        "peak_memory_bytes": 4096, "note": "",
    }  # fmt: skip
    candidate = {
        "name": "optimum", "predicted_s": 1e-5, "predicted_overlapped_s": 1e-5, "compiled_s": 2e-5,
        "compiled_overlapped_s": 2e-5, "peak_memory_bytes": 4096, "note": "",
    }  # fmt: skip
    return plan | {
        "program": plan["program"] | {"reads": [read]},
        "options": plan["options"] | {"hints": {"state.w": [["data"], []]}},
        "replicated_ops": [{"op": "sort", "module": "up", "reason": "no rule", "cost_s": 1e-6}],
        "wrong_sums": ["a convolution"],
        "search": [tried, tried | {"shape": [4], "outcome": "pruned", "step_time_s": None}],
        "refined": {"target": "tpu-v5e:2x2", "chosen": "optimum", "candidates": [candidate]},
    }


def case(kind: str, seed: int, number: int, good: Good) -> Case:
    """Case `number` of a kind."""
    return KINDS[kind](random.Random(f"{kind} {seed} {number}"), good)


def _damaged(value: Any, write: Callable[[Any], bytes], rng: random.Random) -> bytes:
    where = rng.random()
    if where < 0.02:
        return write(value)
    if where < 0.8:
        return write(mutate.document(value, rng))
    if where < 0.83:
        return write(rng.choice((*mutate.OTHERS, *mutate.TEXTS, *mutate.NUMBERS)))
    return mutate.data(write(value), rng)


def _plans(rng: random.Random, good: Good) -> Case:
    files = {"plan.json": _damaged(good.plan, mutate.to_json, rng), "step.mlir": TRAINED}
    command = rng.choices(("show", "json", "html", "lower", "explain", "compare", "verify"), (30, 10, 20, 25, 5, 8, 2))[
        0
    ]
    arguments = {
        "show": ("show", "plan.json"),
        "json": ("show", "plan.json", "--json"),
        "html": ("show", "plan.json", "--html", "plan.html"),
        "lower": ("lower", "plan.json", "step.mlir", "-o", "out.mlir", "--form", rng.choice(("gspmd", "shardy"))),
        "explain": ("explain", "plan.json", "step.mlir", "state.w", "--time-limit", "3"),
        "compare": ("compare", "step.mlir", "--mesh", "2x2", "--device", "tpu-v5e", "--plans", "plan.json"),
        "verify": ("verify", "plan.json", "step.mlir", "--target", "cpu"),
    }[command]
    return Case(arguments, files)


def _problems(rng: random.Random, good: Good) -> Case:
    content = _damaged(rng.choice((PROBLEM, good.problem)), mutate.to_json, rng)
    name, where = "problem.json", rng.random()
    if where < 0.1:
        name, content = "problem.json.gz", gzip.compress(content, mtime=0)
        if where < 0.07:
            content = mutate.data(content, rng)
    limit = rng.choice(("2", "2", "2", "2", "0.001", "nan", "inf", "0", "-1", "1e400"))
    return Case(("solve", name, "--time-limit", limit, *(("--json",) if rng.random() < 0.5 else ())), {name: content})


def _modules(rng: random.Random, good: Good) -> Case:
    where = rng.random()
    if where < 0.3:
        name, content = "module.mlir", _valid(rng)
        if rng.random() < 0.4:
            content = mutate.mlir(content, rng)
    elif where < 0.7:
        name, content = "module.mlir", mutate.mlir(rng.choice(list(TEXTS.values())), rng)
    else:
        name = rng.choice(sorted(good.modules))
        content = mutate.data(good.modules[name], rng)
    mesh = rng.choice(("2x2", "4", "2x2x2", "3x5", "1"))
    device = rng.choice(("cpu", "tpu-v5e", "h100"))
    return Case(
        ("plan", name, "--mesh", mesh, "--device", device, "--time-limit", "3", "-o", "plan.json"), {name: content}
    )


def _valid(rng: random.Random) -> bytes:
    """A random valid program: a few ops of the rules' own tests."""
    from tests.rules import harness

    kinds = rng.sample(sorted(harness.BUILDERS), rng.choice((1, 2, 4)))
    cases = [harness.Case(kind, rng.randrange(2000)) for kind in kinds]
    return harness.snippets_program(cases).program.stablehlo


@cache
def _devices_good() -> list[Any]:
    document = tomllib.loads((ROOT / "autoshard/cost/machine/devices.toml").read_text())
    return [{name: table} for name, table in document.items()]


def _devices(rng: random.Random, good: Good) -> Case:
    content = _damaged(rng.choice(_devices_good()), mutate.to_toml, rng)
    mesh = rng.choice(
        (("2x2", ""), ("2x2", ""), ("2x4", ":2x4"), ("8", ":8"), ("2x8", ":2x8"), ("4x4", ":2x4:2slices"))
    )
    arguments = ("plan", "step.mlir", "--mesh", mesh[0], "--device", f"kind.toml{mesh[1]}", "--time-limit", "3")
    return Case(arguments, {"kind.toml": content, "step.mlir": TRAINED})


KINDS: dict[str, Callable[[random.Random, Good], Case]] = {
    "plans": _plans,
    "problems": _problems,
    "modules": _modules,
    "devices": _devices,
}
