"""Every plan written by hand trains its program on eight virtual devices, beside one; for `test_manual_plans.py`.

python -m tests.manual.eight_devices OUT.json [PLAN...]
"""

import os
from functools import partial

os.environ.update(
    PJRT_DEVICE="CPU",
    CPU_NUM_DEVICES="8",
    XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    TF_CPP_MIN_LOG_LEVEL="3",
)

import autoshard
from autoshard.api import Plan
from autoshard.manual import PLANS
from autoshard.planning.written import written_plan
from autoshard.stablehlo.reader import build_graph
from autoshard.verify.run import _report
from autoshard.verify.run_worker import compare
from tests.lower.torch_xla import scenarios
from tests.manual import models


def trained(name):
    """Whether numbers are equal, and the report."""
    source = models.source(models.TRIED[name])
    program = autoshard.capture(source.model, source.inputs, loss_fn=source.loss_fn, optimizer=source.optimizer)
    graph = build_graph(program)
    plan = Plan.of(written_plan(graph, models.MESH, PLANS[name](graph, models.MESH)))
    report = _report(compare(plan, source, steps=2))
    return {"equal": report.equal, "compiled_once": report.compiled_once, "said": str(report)}


if __name__ == "__main__":
    scenarios.main({name: partial(trained, name) for name in models.TRIED})
