"""Ops on which torch_xla ends the process are rewritten, or refused before it meets them."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

from autoshard.frontends.torch_xla import probe

INDEXED = {
    "topk": "h.index_select(0, h.sum(1).topk(3).indices)",
    "argsort": "h.index_select(0, h.sum(1).argsort())",
    "max": "h.index_select(0, h.max(0).indices % 8)",
    "copied": "h.index_select(0, h.sum(1).sort().indices.clone())",
    "whole": "h.index_select(0, h.sum(1).sort().indices[:8].expand(8).contiguous())",
    "index_add": "h.index_add(0, h.sum(1).topk(3).indices, h[:3])",
    "index_copy": "h.index_copy(0, h.sum(1).topk(3).indices, h[:3])",
    "index_fill": "h.index_fill(0, h.sum(1).topk(3).indices, 2.0)",
    "embedding": "torch.nn.functional.embedding(h.sum(1).topk(3).indices, h)",
}


def run(code, cache, **more):
    """A script in a process of its own, with a cache of its own: (exit status, standard output, standard error)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "AUTOSHARD_CACHE": str(cache), **more},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


MODEL = """
    import torch, autoshard
    class M(torch.nn.Module):
        def __init__(self, f):
            super().__init__()
            self.l, self.f = torch.nn.Linear(16, 16), f
        def forward(self, x):
            return self.f(self.l(x))
    def loss(y):
        return y.float().square().mean()
"""


def test_an_index_that_is_one_of_several_results(tmp_path):
    """The same ops through both front ends; torch_xla alone ends the process (SIGABRT)."""
    bodies = "\n".join(f"    bodies[{name!r}] = lambda h: {body}" for name, body in INDEXED.items())
    code = f"""{MODEL}
    bodies = {{}}
{bodies}
    for name, body in bodies.items():
        ops = []
        for frontend in ("torch_xla", "torchax"):
            program = autoshard.capture(M(body), torch.zeros(8, 16), loss_fn=loss, frontend=frontend)
            ops.append([(op.name, op.inputs) for op in program.ops])
        assert ops[0] == ops[1], name
        print(name)
    """
    status, out, err = run(code, tmp_path)
    assert status == 0, err[-2000:]
    assert out.split() == list(INDEXED)


def test_numbers_of_an_index_that_is_one_of_several_results(tmp_path):
    """A step under a plan, on virtual devices, moves parameters as PyTorch does."""
    code = f"""{MODEL}
    import copy
    torch.manual_seed(0)
    model, x = M(lambda h: h.index_select(0, h.sum(1).topk(3).indices)), torch.randn(8, 16)
    eager = copy.deepcopy(model)
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    plan = autoshard.plan(model, x, mesh=(1,), loss_fn=loss, optimizer=sgd)
    step = sgd(model.parameters())
    plan.apply(model, step)
    x = x.to("xla")
    with plan.annotate():
        loss(model(x)).backward()
        step.step()
    step = sgd(eager.parameters())
    loss(eager(x.cpu())).backward()
    step.step()
    torch.testing.assert_close(model.l.weight.cpu(), eager.l.weight, atol=1e-6, rtol=1e-5)
    print("equal")
    """
    status, out, err = run(code, tmp_path)
    assert (status, out.split()) == (0, ["equal"]), err[-2000:]


GROUPED = f"""{MODEL}
    import time
    w = torch.nn.Parameter(torch.zeros(2, 16, 16))
    model = M(lambda h: torch._grouped_mm(h, w.to(h.device), offs=h.new_ones(2, dtype=torch.int32)))
    model.experts = w
    try:
        autoshard.capture(model, torch.zeros(8, 16), frontend="torch_xla")
    except autoshard.CaptureError as error:
        print(error)
"""


def test_an_op_that_ends_the_process_is_refused_by_name(tmp_path):
    """Where it is: the module, the op, what it was given, and how it ends; what was answered is kept."""
    code = GROUPED.replace("w.to(h.device)", "model.experts")
    status, out, err = run(code, tmp_path)
    assert status == 0, err[-2000:]
    assert re.match(r"the model \(M\) uses aten\._grouped_mm, .* \(SIG(SEGV|ABRT)\)", out)
    assert out.count("\n") == 1
    (kept,) = (tmp_path / "ops").glob("*.json")
    answers = json.loads(kept.read_text())
    assert any(way.startswith("aten._grouped_mm") and ends.startswith("SIG") for way, ends in answers.items())
    for broken in ("[1, 2", "[]", '{"aten._grouped_mm": 1}'):
        kept.write_text(broken)
        assert run(code, tmp_path)[1] == out
        assert json.loads(kept.read_text()) == answers


def test_the_table_is_for_the_versions_that_are_pinned():
    """And knows what common models use, so that planning them tries nothing."""
    known = probe.safe_ops()
    common = "add.Tensor mm.default bmm.default mul.Tensor gelu.default _softmax.default index.Tensor view_copy.default"
    assert {f"aten.{name}" for name in common.split()} <= known
    assert "aten._grouped_mm.default" not in known


@pytest.mark.parametrize(("trial", "ends"), [("pass", ""), ("raise", ""), ("abort", "SIGABRT"), ("hang", None)])
def test_how_a_fork_ends(trial, ends, monkeypatch):
    """An error is left to be raised again; one that does not answer is ended."""
    import time

    monkeypatch.setattr(probe, "TIME_LIMIT_S", 0.5 if trial == "hang" else 60.0)
    trials = {"pass": int, "raise": lambda: 1 / 0, "abort": os.abort, "hang": lambda: time.sleep(60)}
    assert probe._forked(trials[trial]) == ends


def test_ways_tell_what_may_matter():
    """Sizes of 0 and 1 and options; not the sizes of a batch."""
    from types import SimpleNamespace

    def way(*args):
        call = SimpleNamespace(name="aten.roll.default", args=args, kwargs={})
        return probe.way_of(call, lambda tensor: False)

    assert way(torch.zeros(3, 4), [1]) == way(torch.zeros(5, 7), [1]) == "aten.roll.default (float32[n,n], (1))"
    assert len({way(torch.zeros(*shape), [1]) for shape in ((3, 4), (3, 1), (0, 4), (3,))}) == 4
