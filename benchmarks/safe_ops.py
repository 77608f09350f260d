"""Make `autoshard/frontends/torch_xla/safe_ops.json` anew: which ops torch_xla takes without ending the process.

Every sample that torch's own tests have of an op (`pip install expecttest`) is captured, with a backward pass where
there is one, twice: on inputs, and on results of nodes that have several (`max`). No op is known to be safe meanwhile,
so each is tried in a fork (`frontends/torch_xla/probe.py`). An overload is safe if none of its trials on
tensors with elements ended the process. Rows are kept, and a run goes on where another stopped.

    python benchmarks/safe_ops.py rows.jsonl [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from autoshard.frontends.torch_xla import probe

TABLE = Path(probe.__file__).with_name(probe.TABLE)
SAMPLES = {torch.float32: 6, torch.bfloat16: 1, torch.int64: 2, torch.int32: 1, torch.bool: 1, torch.complex64: 1}
"""How many samples of each dtype are captured."""
LIMIT_S = 8.0
"""Seconds for all samples of one op."""


class Sample(torch.nn.Module):
    """One call of an op, on inputs or on results of nodes with several."""

    def __init__(self, op: Any, tree: Any, apart: bool) -> None:
        """`tree`: its arguments, tensors and all."""
        super().__init__()
        self.op, self.apart = op, apart
        self.leaves, self.spec = tree_flatten(tree)

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        """Call it, and add up what can be differentiated."""
        given = map(_one_of_two, tensors) if self.apart else iter(tensors)
        placed = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(placed, self.spec)
        return self.op(*args, **{k: "xla" if k == "device" else v for k, v in kwargs.items()})


def _one_of_two(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex() or tensor.dtype == torch.bool:
        return tensor
    return torch.max(torch.stack([tensor, tensor]), 0).values


def _loss(result: Any) -> torch.Tensor:
    found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    parts = [torch.view_as_real(t).sum() if t.is_complex() else t.float().sum() for t in found]
    return torch.stack(parts).sum()


def samples(info: Any) -> Iterator[Any]:
    """The arguments of each call that is captured: ((args), {kwargs})."""
    for dtype, count in SAMPLES.items():
        if dtype not in info.dtypes:
            continue
        differentiable = dtype.is_floating_point and info.supports_autograd
        for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), count):
            yield (sample.input, *sample.args), dict(sample.kwargs)


def worker(first: int, out: Path) -> None:
    """Capture samples from op `first` on; answers go to `out` after each op."""
    from torch.testing._internal.common_methods_invocations import op_db

    import autoshard

    probe.safe_ops = lambda: frozenset()
    said: set[str] = set()
    with out.open("a") as rows:
        for number, info in enumerate(op_db[first:], first):
            rows.write(json.dumps({"op": number, "name": info.name}) + "\n")
            rows.flush()
            until = time.monotonic() + LIMIT_S
            for tree, apart, train in itertools.product(samples(info), (False, True), (False, True)):
                tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
                if time.monotonic() > until or (train and not any(t.requires_grad for t in tensors)):
                    continue
                model, loss = Sample(info.op, tree, apart), _loss if train else None
                with contextlib.suppress(Exception):  # refused, as it should be
                    autoshard.capture(model, (tensors,), loss_fn=loss, train=train, frontend="torch_xla")
            known = probe._answers(probe._kept())
            for way in known.keys() - said:
                rows.write(json.dumps({"way": way, "ends": known[way]}) + "\n")
            said |= known.keys()
            rows.flush()
        rows.write(json.dumps({"end": True}) + "\n")


def collect(out: Path) -> None:
    """Run workers until every op has been captured; one that dies is said, and the next begins behind it."""
    while True:
        rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if rows and "end" in rows[-1]:
            return
        begun = [row for row in rows if "op" in row]
        first = begun[-1]["op"] + 1 if begun else 0
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, str(out), "--from", str(first)]
            status = subprocess.run(command, env=os.environ | {"AUTOSHARD_CACHE": cache}, check=False).returncode
        if status:
            last = [row for row in map(json.loads, out.read_text().splitlines()) if "op" in row][-1]
            print(f"capture of {last['name']} ended its process ({status})", flush=True)


def table(out: Path) -> dict[str, Any]:
    """What the rows say of every overload."""
    ends: dict[str, set[str]] = {}
    for row in map(json.loads, out.read_text().splitlines()):
        if "way" in row and not re.search(r"\[(\S*,)?0[,\]]", row["way"]):
            ends.setdefault(row["way"].split(" ")[0], set()).add(row["ends"])
    return {"versions": probe.versions(), "safe": sorted(name for name, how in ends.items() if how == {""})}


def main() -> None:
    """Collect, and say or write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--from", type=int, dest="first", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="write the table into the package")
    options = parser.parse_args()
    if options.first is not None:
        worker(options.first, options.rows)
        return
    collect(options.rows)
    made = table(options.rows)
    for row in map(json.loads, options.rows.read_text().splitlines()):
        if row.get("ends"):
            print(row["ends"], row["way"])
    print(len(made["safe"]), "overloads are safe")
    if options.write:
        TABLE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
