"""`all` and `any` of numbers that are split over devices: no runtime adds up what torch_xla makes of them."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import numpy as np, torch, torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
from autoshard.frontends.switches.table import active
xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (8,), ("data",))
calls = [torch.all, torch.Tensor.any, lambda t: t.all(dim=0), lambda t: torch.any(t, 1, keepdim=True)]
for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
    given = torch.arange(32).view(8, 4).sub(3).clamp(min=0).to(dtype)
    for number, call in enumerate(calls):
        tensor = given.to("xla")
        xs.mark_sharding(tensor, mesh, ("data", None))
        with active():
            found = call(tensor)
        expected = call(given)
        assert found.dtype == expected.dtype, (dtype, number, found.dtype)
        assert torch.equal(found.cpu(), expected), (dtype, number)
print("equal")
"""


def test_truth_of_numbers_that_are_split() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "CPU_NUM_DEVICES": "8", "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]
