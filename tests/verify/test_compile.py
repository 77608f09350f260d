"""Programs that XLA really compiles: for virtual CPU devices, and for TPU and GPU devices if a compiler is there.

What was compiled once stays in the user's cache (`AUTOSHARD_CACHE`), so that only the first run takes the time.
"""

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.predict import predict
from autoshard.files import cache_dir
from autoshard.graph.annotations import Annotations
from autoshard.mesh import Mesh
from autoshard.stablehlo.annotate import annotate, donated
from autoshard.verify import compile as compiling
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import CompileError, OutOfMemoryError, compile_module, failure
from autoshard.verify.judge import judge
from autoshard.verify.targets import TargetError, on_target, parse_target
from autoshard.verify.work import compiled_work
from tests.verify.small import MESH, W, X, program

ROWS, COLUMNS, WHOLE = (("data",), ()), ((), ("model",)), ((), ())


def bytes_of(annotate_with, target="cpu:8", mesh=MESH, **sizes):
    """(kind, axes) -> bytes per device of the small program, its gradient's reduction included, and the program."""
    made, graph = program(**sizes)
    module = annotate(made, graph, annotate_with(graph), mesh)
    compiled = compile_module(module, target, donate=donated(made))
    return normalise(compiled_collectives(compiled.hlo_text, mesh, compiled.target.family)), compiled


def test_data_parallel_reduces_the_gradient():
    found, compiled = bytes_of(lambda graph: Annotations({X: ((*MESH.axis_names,), ())}))
    assert found == {("all-reduce", ("data", "model")): 4 * 32 * 16}
    assert compiled.rematerializations == ()
    # x is split eight ways; w is donated to its update; y leaves split eight ways.
    assert compiled.memory.argument == 4 * (64 * 32 // 8 + 32 * 16)
    assert compiled.memory.alias == 4 * 32 * 16
    assert compiled.memory.peak >= 4 * (64 * 32 // 8 + 32 * 16 + 64 * 16 // 8)


def sharded_update(graph):
    """FSDP over data: gathered for the product, the gradient reduced and scattered."""
    gradient = graph.aten_outputs[3, 0]
    pins = {X: ROWS, W: ROWS, gradient: WHOLE, graph.aten_outputs[0, 0]: ROWS}
    return Annotations(pins, {(W, 0): WHOLE, (gradient, 4): ROWS})


def test_on_cpu_fsdp_gathers_and_reduce_scatters():
    mesh = Mesh((16,), ("data",))  # so many that offsets per device are longer than what XLA prints by default
    found, compiled = bytes_of(sharded_update, "cpu:16", mesh)
    assert found == {("all-gather", ("data",)): 4 * 32 * 16, ("reduce-scatter", ("data",)): 4 * 32 * 16}
    assert "reduce-scatter(" not in compiled.hlo_text, "XLA's CPU compiler writes none"


def test_on_cpu_bf16_counts_as_bf16():
    mesh = Mesh((2,), ("data",))
    found, compiled = bytes_of(sharded_update, "cpu:2", mesh, dtype="bf16")
    assert "f32" in compiled.hlo_text
    assert found == {("all-gather", ("data",)): 2 * 32 * 16, ("reduce-scatter", ("data",)): 2 * 32 * 16}


def test_a_column_parallel_product_computes_a_part_without_communication():
    def columns(graph):
        return Annotations({X: ROWS, W: COLUMNS, **{graph.aten_outputs[k, 0]: (("data",), ("model",)) for k in (0, 2)}})

    found, compiled = bytes_of(columns)
    assert found == {("all-reduce", ("data",)): 4 * 32 * 16 // 4}
    work = compiled_work(compiled.hlo_text, "cpu")
    assert work.flops == 2 * (2 * 64 * 32 * 16) // 8
    judged = judge(compiled, MESH)
    assert judged.step_time_s == judged.communication_s + judged.compute_s > 0
    assert judged.memory_bytes == compiled.memory.peak


RESHARD = b"""module @m {
  func.func @main(%x: tensor<256x256xf32> {mhlo.sharding = "{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"})
      -> (tensor<256x256xf32> {mhlo.sharding = "{devices=[1,2,4]<=[8] last_tile_dim_replicate}"}) {
    %0 = stablehlo.custom_call @Sharding(%x) {mhlo.sharding = "{devices=[1,2,4]<=[8] last_tile_dim_replicate}"}
      : (tensor<256x256xf32>) -> tensor<256x256xf32>
    return %0 : tensor<256x256xf32>
  }
}"""


def test_hops_avoid_a_rematerialisation_and_are_predicted():
    """x split by model on rows is read split by data on columns: over (model, data) it moves a half."""
    source, hop, wanted = (("model",), ()), (("model",), ("data",)), ((), ("data",))
    found = {}
    for hops in ((), (hop,)):
        made, graph = program(batch=256, inner=256)
        product = graph.aten_outputs[0, 0]
        annotations = Annotations(
            {X: source, W: (("data",), ()), product: WHOLE}, {(X, 0): wanted}, {(X, wanted): hops} if hops else {}
        )
        compiled = compile_module(annotate(made, graph, annotations, MESH), "cpu:8", donate=donated(made))
        seen = normalise(compiled_collectives(compiled.hlo_text, MESH, "cpu"))
        predicted = predict(graph, annotations, MESH, load_device("cpu"))
        said: dict[object, int] = {}
        for each in predicted.collectives:
            said[each.kind, each.axes] = said.get((each.kind, each.axes), 0) + each.bytes * each.count
        assert said == seen
        found[hops] = seen, len(compiled.rematerializations)
    direct, detour = found[()], found[(hop,)]
    assert direct[1] == 1
    assert detour[1] == 0
    whole = 4 * 256 * 256
    assert direct[0]["all-gather", ("model",)] - detour[0]["all-gather", ("model",)] == whole // 2


def test_an_involuntary_rematerialisation_is_heard():
    compiled = compile_module(RESHARD, "cpu:8")
    assert len(compiled.rematerializations) == 1
    assert compiled.rematerializations[0].startswith("Involuntary full rematerialization")
    assert "devices=[1,2,4]<=[8] last_tile_dim_replicate" in compiled.rematerializations[0]


@pytest.mark.parametrize("target", ["tpu-v5e:2x4", "h100:8", "tpu-v5e:2x2:2slices"])
def test_devices_that_are_not_there(target):
    try:
        parse_target(target).packages()
    except TargetError as error:
        pytest.skip(str(error))
    mesh = on_target(Mesh((2, 4), device=target.partition(":")[0]), parse_target(target))
    found, compiled = bytes_of(lambda graph: Annotations({X: ((*MESH.axis_names,), ())}), target, mesh)
    assert found == {("all-reduce", ("data", "model")): 4 * 32 * 16}
    assert compiled.num_devices == 8
    assert judge(compiled, mesh).step_time_s > 0
    assert ("_xla_megascale_target" in compiled.hlo_text) == ("slices" in target)


# ---- the cache and what goes wrong


@pytest.fixture
def fake_worker(monkeypatch, tmp_path):
    """Runs Python code instead of the compiler; `request` is its request file."""

    def install(code):
        head = "import json, os, pathlib, sys, time; request = pathlib.Path(sys.argv[1]);"
        monkeypatch.setattr(compiling, "COMPILE_COMMAND", (sys.executable, "-c", head + code))

    return install


WRITES = (
    "import gzip; gzip.open(request.parent / 'hlo.txt.gz', 'wt').write('HloModule m');"
    "(request.parent / 'result.json').write_text(json.dumps({'seconds': 1.5,"
    "'memory': {'argument': 1, 'output': 2, 'temp': 3, 'alias': 1}}));"
)


def test_a_program_is_compiled_once_for_each_target_donation_and_flags(fake_worker, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "WORKER_VERSION", 99)
    fake_worker(WRITES)
    first = compile_module(b"a", "cpu:8", cache_dir=tmp_path)
    assert (first.cached, first.memory.peak, first.hlo_text) == (False, 5, "HloModule m")
    again = compile_module(b"a", "cpu:8", cache_dir=tmp_path)
    assert again.cached
    assert again.path == first.path
    others = [
        compile_module(b"b", "cpu:8", cache_dir=tmp_path),
        compile_module(b"a", "cpu:4", cache_dir=tmp_path),
        compile_module(b"a", "cpu:8", donate={0: 1}, cache_dir=tmp_path),
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    others.append(compile_module(b"a", "cpu:8", cache_dir=tmp_path))
    assert not any(other.cached for other in others)
    assert len({first.path, *(other.path for other in others)}) == 5
    kept = sorted(path.name for path in (tmp_path / "compiled").iterdir())
    assert len(kept) == 5, "nothing unfinished is left behind"


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("hlo.txt.gz", lambda content: content[: len(content) // 2]),
        ("hlo.txt.gz", lambda content: b""),
        ("hlo.txt.gz", lambda content: gzip.compress(b"HloModule another")),
        ("result.json", lambda content: b"{}"),
        ("result.json", lambda content: b"[1]"),
        ("result.json", lambda content: content[:-5]),
        ("result.json", lambda content: content.replace(b'"argument": 1', b'"argument": 7')),
    ],
)
def test_a_damaged_entry_is_compiled_again(fake_worker, tmp_path, name, spoil):
    fake_worker(WRITES)
    first = compile_module(b"a", "cpu:8", cache_dir=tmp_path)
    damaged = first.path.with_name(name)
    damaged.write_bytes(spoil(damaged.read_bytes()))
    again = compile_module(b"a", "cpu:8", cache_dir=tmp_path)
    assert (again.cached, again.memory.peak, again.hlo_text) == (False, 5, "HloModule m")
    assert compile_module(b"a", "cpu:8", cache_dir=tmp_path).cached


ENDLESS = "pathlib.Path(os.environ['STARTED']).write_text(str(os.getpid())); time.sleep(600)"
COMPILES = """
import signal, sys
from autoshard.verify import compile
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
compile.COMPILE_COMMAND = (sys.executable, "-P", "-c", sys.argv[1])
compile.compile_module(b"a", "cpu:8", cache_dir=sys.argv[2])
"""


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_ends_with_who_started_it(fake_worker, tmp_path, signal_):
    """However that ends; and what it left is removed by the next that compiles."""
    started = tmp_path / "started"
    code = "import os, pathlib, time; from autoshard.workers import end_with_parent; end_with_parent();" + ENDLESS
    parent = subprocess.Popen(
        [sys.executable, "-c", COMPILES, code, str(tmp_path)], env=os.environ | {"STARTED": str(started)}
    )
    pid = int(waited_for(lambda: started.exists() and started.read_text()))
    parent.send_signal(signal_)
    assert parent.wait(30) != 0
    waited_for(lambda: not running(pid))
    left = list((tmp_path / "compiled").iterdir())
    assert len(left) == (0 if signal_ == signal.SIGINT else 1)
    fake_worker(WRITES)
    compile_module(b"a", "cpu:8", cache_dir=tmp_path)
    assert [path.name for path in (tmp_path / "compiled").iterdir() if path in left] == []


def waited_for(condition):
    for _ in range(600):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it took more than half a minute")


def running(pid):
    try:
        os.kill(pid, 0)
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].lstrip().startswith("Z")
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("AUTOSHARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform != "darwin":
        assert cache_dir() == tmp_path / "xdg" / "autoshard"


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match="set AUTOSHARD_CACHE to a directory"):
        compile_module(b"a", "cpu:8", cache_dir=tmp_path / "file")


def test_a_crash_is_told_with_its_last_words(fake_worker, tmp_path):
    fake_worker("print('F0000 12:00:00 x.cc:1] Check failed: rank == 2', file=sys.stderr, flush=True); os.abort()")
    with pytest.raises(CompileError) as error:
        compile_module(b"a", "cpu:8", cache_dir=tmp_path)
    assert "the compiler for cpu:8 crashed (SIGABRT): F0000 12:00:00 x.cc:1] Check failed" in str(error.value)
    assert list((tmp_path / "compiled").iterdir()) == []


UNEVEN = """module { func.func public @main(%i: tensor<3xi64>, %u: tensor<64x3xf32>) -> tensor<64x90xf32> {
  %z = stablehlo.constant dense<0.0> : tensor<64x90xf32>
  %v = stablehlo.custom_call @Sharding(%u) {mhlo.sharding = "{devices=[2,4]<=[8]}"}
    : (tensor<64x3xf32>) -> tensor<64x3xf32>
  %s = "stablehlo.scatter"(%z, %i, %v) <{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [0],
      inserted_window_dims = [1], scatter_dims_to_operand_dims = [1], index_vector_dim = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<64x90xf32>, tensor<3xi64>, tensor<64x3xf32>) -> tensor<64x90xf32>
  return %s : tensor<64x90xf32> } }"""


def test_a_crash_that_is_known_is_explained(tmp_path):
    # DLRM under Megatron on v5e: the pairs that an index_select takes are split unevenly, as the columns beside them.
    with pytest.raises(CompileError, match="cannot pad the indices of a scatter"):
        compile_module(UNEVEN.encode(), "tpu-v5e:2x4", cache_dir=tmp_path)


def test_a_compiler_that_hangs_is_stopped(fake_worker, tmp_path):
    fake_worker("time.sleep(60)")
    with pytest.raises(CompileError, match="took longer than 1 s and was stopped"):
        compile_module(b"a", "cpu:8", cache_dir=tmp_path, timeout=1)
    assert list((tmp_path / "compiled").iterdir()) == []


def test_a_program_that_xla_refuses(tmp_path):
    with pytest.raises(CompileError, match="the compiler for cpu:2 refused the program"):
        compile_module(b"module @m { func.func @other() { return } }", "cpu:2", cache_dir=tmp_path)


def doubled(size):
    """A program whose argument and result take `size` bytes each, in blocks of 64 KiB."""
    kind = f"tensor<{int(size) // 2**16}x128x128xf32>"
    return (
        f"func.func public @main(%x: {kind}) -> {kind} {{ %0 = stablehlo.exponential %x : {kind} return %0 : {kind} }}"
    )


@pytest.mark.parametrize("target", ["tpu-v4:2x2x1", "tpu-v5e:2x4", "tpu-v5p:2x2x1", "tpu-v6e:2x4"])
def test_the_memory_limit_of_a_tpu_is_what_libtpu_compiles_for(target, tmp_path):
    try:
        parse_target(target).packages()
    except TargetError as error:
        pytest.skip(str(error))
    limit = load_device(target).memory_limit
    compiled = compile_module(doubled(limit / 2 - 2**17).encode(), target, cache_dir=tmp_path)
    assert compiled.memory.peak == pytest.approx(limit, rel=1e-4)
    with pytest.raises(OutOfMemoryError, match="CompileTimeHbmOom") as refused:
        compile_module(doubled(limit / 2 + 2**20).encode(), target, cache_dir=tmp_path)
    assert refused.value.needed == pytest.approx(limit, rel=2e-3)
    assert refused.value.available == pytest.approx(limit, rel=2e-3)


@pytest.mark.parametrize(
    ("said", "figures"),
    [
        ("Ran out of memory in memory space hbm. Used 21.50G of 15.50G hbm.", (21.5 * 2**30, 15.5 * 2**30)),
        (
            "TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: 95.74G",
            (None, None),
        ),
        ("Out of memory while trying to allocate 123 bytes.", (None, None)),
    ],
)
def test_a_program_that_is_too_large_is_told_from_one_that_is_wrong(said, figures):
    found = failure(parse_target("tpu-v5e:2x4"), 1, f"jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: {said}")
    assert isinstance(found, OutOfMemoryError)
    assert (found.needed, found.available) == figures


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %k",
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: 20.00M and limit 16.00M",
        "INVALID_ARGUMENT: shapes differ",
    ],
)
def test_a_kernel_that_exceeds_memory_on_chip_says_nothing_of_the_device(said):
    found = failure(parse_target("tpu-v5e:2x4"), 1, f"jax.errors.JaxRuntimeError: {said}")
    assert not isinstance(found, OutOfMemoryError)
    assert said in str(found)


FACTORS = """
func.func public @main(%x: tensor<16x8x8xf32> {mhlo.sharding = "{devices=[8,1,1]<=[8]}"}) -> tensor<16x8x8xf32> {
  %0:2 = stablehlo.custom_call @lapack_spotrf_ffi(%x) {
    api_version = 4 : i32, mhlo.backend_config = {uplo = 76 : ui8}, mhlo.frontend_attributes = {num_batch_dims = "1"},
    operand_layouts = [dense<[1, 2, 0]> : tensor<3xindex>],
    result_layouts = [dense<[1, 2, 0]> : tensor<3xindex>, dense<0> : tensor<1xindex>]
  } : (tensor<16x8x8xf32>) -> (tensor<16x8x8xf32>, tensor<16xi32>)
  return %0#0 : tensor<16x8x8xf32>
}
"""


def test_a_custom_call_keeps_the_layouts_that_it_reads():
    compiled = compile_module(FACTORS.encode(), "cpu:8")
    (call,) = re.findall(r".*custom-call\(.*lapack_spotrf_ffi.*", compiled.hlo_text)
    assert "f32[2,8,8]{1,2,0}" in call, "LAPACK's matrices lie by columns; jax has a partitioner along the batch"
