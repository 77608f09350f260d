"""What a report of a compiled plan says."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.check import compare_compiled
from autoshard.verify.targets import parse_target
from tests.cost.few_ops import Annotations, graph_of

MESH = Mesh((2, 4), ("data", "model"))


def test_a_report_says_where_a_gpu_runs_without_triton_kernels() -> None:
    """An H100's step with 1,021 rows: its products were padded library calls, and memory 43 % above the prediction."""
    graph = graph_of(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    module = annotate(graph.program, graph, Annotations(), MESH)
    report, _ = compare_compiled(graph, Annotations(), MESH, parse_target("cpu:8", 8), module)
    without = replace(report, libraries=True)
    assert (report.as_dict()["libraries"], without.as_dict()["libraries"]) == (False, True)
    assert "compiled without them" in str(without)
    assert "compiled without them" not in str(report)
