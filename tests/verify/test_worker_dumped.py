"""Compilers are stopped when their passes have run: what is read then is what the whole compilation gives."""

import gzip
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.verify.collectives import compiled_collectives
from autoshard.verify.compile import COMPILE_COMMAND
from autoshard.verify.hlo_text import parse_hlo
from autoshard.verify.targets import TargetError, parse_target
from autoshard.verify.work import compiled_work
from autoshard.verify.worker import laid_out
from tests.verify.small import W, X, program

WHOLE = """
import json, pathlib, sys
from autoshard.verify import worker
worker._dumped = lambda dump, target, compiled, wanted: compiled()
worker.main()
"""


@pytest.fixture(scope="module", params=["tpu-v5e:2x4", "h100:8"])
def target(request):
    found = parse_target(request.param)
    try:
        found.packages()
    except TargetError as error:
        pytest.skip(str(error))
    return found


def compiled(folder, command, target, size):
    """What the worker writes of a small step; its gradient, of 2 MB, stays on chip or does not."""
    folder.mkdir()
    made, graph = program(batch=1024, inner=size, outer=4096)
    module = annotate(made, graph, Annotations({X: (("data",), ()), W: ((), ("model",))}), Mesh((2, 4)))
    (folder / "module.mlir").write_bytes(module)
    request = {"module": "module.mlir", "target": asdict(target), "donate": donated(made), "order": []}
    (folder / "request.json").write_text(json.dumps(request))
    subprocess.run([*command, str(folder / "request.json")], check=True, capture_output=True)
    with gzip.open(folder / "hlo.txt.gz", "rt") as text:
        return text.read(), json.loads((folder / "result.json").read_text())["memory"]


@pytest.mark.parametrize("size", [2048, 16384])
def test_what_is_dumped_says_what_the_whole_compilation_says(tmp_path, target, size):
    family = target.family
    early, memory = compiled(tmp_path / "early", COMPILE_COMMAND, target, size)
    whole, stated = compiled(tmp_path / "whole", [sys.executable, "-P", "-c", WHOLE], target, size)
    assert (tmp_path / "early" / "dump").exists()
    assert not list((tmp_path / "early" / "dump").glob("*after_codegen*" if family == "tpu" else "*thunk_sequence*"))
    assert not (tmp_path / "whole" / "dump").exists()
    mesh = Mesh((2, 4))
    read, expected = parse_hlo(early), parse_hlo(whole)
    assert compiled_collectives(read, mesh, family) == compiled_collectives(expected, mesh, family)
    assert len(compiled_work(expected, family).kernels) > 1
    assert compiled_work(read, family) == compiled_work(expected, family)
    assert memory == stated
    assert (memory["temp"] > 0) is (size > 2048 or family == "gpu")


def test_bytes_of_a_buffer_assignment():
    text = """BufferAssignment:
allocation 0: size 1024, page 0, thread-local:
allocation 1: size 4096, page 0, parameter 2, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <8 x @0> (size=4096,offset=0): f32[1024]{0:T(1024)}
allocation 2: size 512, page 0, parameter 0, shape |f32[8]| at ShapeIndex {}:
allocation 3: size 512, page 0, output shape is |(f32[], f32[1024])|, maybe-live-out:
allocation 4: size 256, page 0, constant:
allocation 5: size 65536, page 0, preallocated-temp:
 value: <9 copy-start{} @0> (size=512,offset=0): (f32[8]{0:T(128)S(1)}, f32[8]{0:T(128)}, u32[]{:S(2)})
 value: <10 fusion @0> (size=512,offset=16384): f32[8]{0:T(128)}
allocation 6: size 999999, color 1, page 0, preallocated-temp:
 value: <11 add @1> (size=512,offset=0): f32[8]{0:T(128)S(1)}
"""
    assert laid_out(text, 15872) == {"argument": 4608, "output": 4608, "alias": 4096, "temp": 65536 + 15872}
    tables = text.replace(" value: <10 fusion @0> (size=512,offset=16384): f32[8]{0:T(128)}\n", "")
    assert laid_out(tables, 15872)["temp"] == 0


def test_a_part_that_is_copied_in_a_computation_of_its_own_is_a_copy():
    module = parse_hlo("""HloModule m

%async_computation.1 (param_0: f32[384,768]) -> f32[96,768] {
  %param_0 = f32[384,768]{1,0:T(8,128)} parameter(0)
  ROOT %slice.1 = f32[96,768]{1,0:T(8,128)S(1)} slice(%param_0), slice={[0:96], [0:768]}
}

ENTRY %main (p: f32[384,768]) -> f32[96,768] {
  %p = f32[384,768]{1,0:T(8,128)} parameter(0)
  %start = ((f32[384,768]{1,0}), f32[96,768]{1,0:T(8,128)S(1)}, s32[]) async-start(%p), calls=%async_computation.1
  ROOT %done = f32[96,768]{1,0:T(8,128)S(1)} async-done(%start)
}
""")
    start = module.computations["main"].instructions["start"]
    assert (start.opcode, start.called) == ("slice-start", ())
    (kernel,) = compiled_work(module, "tpu").kernels
    assert (kernel.launches, kernel.bytes) == (0, 96 * 768 * 4)
