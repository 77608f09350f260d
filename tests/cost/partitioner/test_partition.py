"""What the partitioner is said to emit, held against what XLA's CPU compiler emits; and what follows from it."""

import math
from collections import Counter

import pytest

from autoshard.cost.machine.device import load_device
from autoshard.cost.partitioner.ops.halo import Window, exchange
from autoshard.cost.partitioner.partition import Partitioner, partition
from autoshard.cost.partitioner.propagate import Shardings, propagate
from autoshard.cost.partitioner.tiling import Subaxes
from autoshard.cost.predict import predict
from autoshard.graph.annotations import Annotations
from autoshard.graph.ops import Value
from autoshard.mesh import Mesh, replicated
from autoshard.stablehlo.annotate import annotate
from autoshard.verify.collectives import compiled_collectives, normalise
from autoshard.verify.compile import compile_module
from autoshard.verify.fidelity import fidelity
from tests.cost.zoo import OPS, WINDOWS, program, random_annotations
from tests.graph.helpers import graph_from_text, only

MESH = Mesh((2, 4), ("data", "model"))


def predicted(graph, annotations, mesh=MESH, target="cpu"):
    found = partition(graph, propagate(graph, annotations, mesh), target).collectives
    totals = Counter()
    for each in found:
        totals[each.kind, each.axes] += each.bytes * each.count
    return dict(totals)


def alone(name, *specs, result=None, target="cpu", mesh=MESH):
    """Collectives of one op of the zoo, its operands' specs given, and its result's if `result` is."""
    _, graph = program([name], OPS | WINDOWS)
    pins = {Value(i): spec for i, spec in enumerate(specs)}
    if result is not None:
        pins[graph.outputs[0]] = result
    return predicted(graph, Annotations(pins), mesh, target)


# --- held against the compiler ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "seed", "results"),
    [((2, 4), 0, 1.0), ((2, 4), 3, 1.0), ((2, 4), 8, 1.0), ((2, 4), 3, 0.0), ((4, 2), 2, 1.0), ((8,), 1, 0.5)],
)
def test_random_shardings_of_single_ops_compile_to_what_is_predicted(shape, seed, results):
    mesh = Mesh(shape)
    made, graph = program()
    annotations = random_annotations(graph, mesh, seed, results)
    compiled = compile_module(annotate(made, graph, annotations, mesh), f"cpu:{mesh.size}")
    found = compiled_collectives(compiled.hlo_text, mesh, "cpu")
    said = partition(graph, propagate(graph, annotations, mesh), "cpu").collectives
    compared = fidelity(said, found, aten_of=lambda op: graph.ops[op].aten)
    assert predicted(graph, annotations, mesh) == normalise(found), compared.table()


@pytest.mark.parametrize(("seed", "results"), [(5, 1.0), (7, 1.0), (2, 0.0)])
def test_random_shardings_of_convolutions_and_pools_compile_to_what_is_predicted(seed, results):
    # Data parallelism of a convolution used to be predicted as an all-gather of its input.
    made, graph = program(ops=WINDOWS)
    annotations = random_annotations(graph, MESH, seed, results)
    compiled = compile_module(annotate(made, graph, annotations, MESH), "cpu:8")
    found = compiled_collectives(compiled.hlo_text, MESH, "cpu")
    said = partition(graph, propagate(graph, annotations, MESH), "cpu").collectives
    compared = fidelity(said, found, aten_of=lambda op: graph.ops[op].aten)
    assert predicted(graph, annotations) == normalise(found), compared.table()


# --- textbook cases, on paper -------------------------------------------------------------------------------------

ROWS, COLUMNS, WHOLE = (("data",), ()), ((), ("model",)), ((), ())


def test_a_column_parallel_product_needs_nothing():
    assert alone("product", ROWS, COLUMNS) == {}


def test_a_row_parallel_product_is_summed():
    size = 64 // 2 * 96 * 4
    assert alone("product", (("data",), ("model",)), (("model",), ())) == {("all-reduce", ("model",)): size}


def test_a_row_parallel_product_split_further_is_reduce_scattered():
    found = alone("product", ((), ("model",)), (("model",), ()), result=(("model",), ()))
    assert found == {("reduce-scatter", ("model",)): 64 * 96 * 4}


def test_a_weight_split_like_the_batch_is_gathered():
    everyone = (("data", "model"), ())
    assert alone("product", everyone, everyone) == {("all-gather", ("data", "model")): 128 * 96 * 4}


def test_a_tpu_gathers_f32_operands_in_bf16():
    everyone = (("data", "model"), ())
    found = alone("product", everyone, everyone, target="tpu")
    assert found == {("all-gather", ("data", "model")): 128 * 96 * 2}


def test_a_weight_split_like_the_batch_is_summed_over_an_idle_axis():
    # The compiler splits the contraction over half of the idle axis instead: compiled so on CPU and GPU.
    found = alone("product", ROWS, (("data",), ()))
    assert found == {("collective-permute", ("data", "model")): 12288, ("all-reduce", ("model",)): 12288}


def test_an_idle_axis_is_used_behind_the_plans_back():
    # Summed over data, wanted split over data, model idle: half of model splits the product, a permute moves it back.
    found = alone("gradient", *[(("data",), (), ())] * 2, result=(("data",), ()))
    assert found == {("all-reduce", ("data",)): 32 * 96 * 4, ("collective-permute", ("data", "model")): 32 * 96 * 4}


def test_heads_split_like_the_features_need_nothing():
    assert alone("heads", (("data",), (), ("model",))) == {}


IMAGES, IN_SPACE = (("data",), (), (), ()), (("data",), (), ("model",), ())


def test_a_convolution_of_split_images_needs_nothing_and_its_weight_gradient_one_sum():
    assert alone("conv", IMAGES, ((),) * 4) == {}
    assert alone("conv_weight", IMAGES, IMAGES) == {("all-reduce", ("data",)): 3 * 3 * 32 * 64 * 4}


def test_a_convolution_split_in_space_exchanges_its_edges():
    row = 16 // 2 * 32 * 32 * 4
    assert alone("conv", IN_SPACE, ((),) * 4) == {("collective-permute", ("model",)): 2 * row}
    # The weight's gradient: edges again, and a sum in space beside the one over the images.
    assert alone("conv_weight", IN_SPACE, IN_SPACE) == {
        ("collective-permute", ("model",)): 2 * row,
        ("all-reduce", ("model",)): 3 * 3 * 32 * 64 * 4,
        ("all-reduce", ("data",)): 3 * 3 * 32 * 64 * 4,
    }


def test_convolutions_split_by_features():
    assert alone("conv", IMAGES, (("model",), (), (), ())) == {}
    summed = alone("conv", (("data",), ("model",), (), ()), ((), ("model",), (), ()))
    assert summed == {("all-reduce", ("model",)): 16 // 2 * 64 * 32 * 32 * 4}
    both = (("data",), ("model",), (), ())
    assert alone("depthwise", both, (("model",), (), (), ()), result=both) == {}


def test_a_sum_whose_result_is_split_further_is_scattered():
    # Compiled so for GPUs (a layer of a U-Net): it was predicted as an all-reduce and a slice.
    features, fine = ((), ("model",), (), ()), ((), ("data", "model"), (), ())
    found = alone("conv", features, (("data",), ("model",), (), ()), result=fine, target="gpu")
    assert found == {("reduce-scatter", ("model",)): 16 * 64 // 2 * 32 * 32 * 4}


def test_an_uneven_split_of_a_sum_is_no_reduce_scatter_on_gpus():
    # Compiled so for 8 H100, as for 252 columns over four; XLA pads what was summed before it slices it.
    found = {}
    for columns in (250, 252):
        graph = graph_from_text(
            f"""func.func @main(%a: tensor<64x{columns}xf32>, %b: tensor<64x32xf32>) -> tensor<{columns}x32xf32> {{
              %0 = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0]
                : (tensor<64x{columns}xf32>, tensor<64x32xf32>) -> tensor<{columns}x32xf32>
              return %0 : tensor<{columns}x32xf32>
            }}"""
        )
        rows, out = (("model",), ()), (("model",), ())
        pins = {Value(0): rows, Value(1): rows, graph.outputs[0]: out}
        found[columns] = {kind for kind, _ in predicted(graph, Annotations(pins), target="gpu")}
    assert found[252] == {"reduce-scatter"}
    assert "all-reduce" in found[250]
    assert "reduce-scatter" not in found[250]


@pytest.mark.parametrize(("whole", "size"), [((("data",), (), ()), 40960), (((), (), ()), 2 * 40960)])
def test_halves_of_a_whole_value_that_are_split_are_exchanged(whole, size):
    # Compiled so for CPU and 8 H100, gate and up in one weight: it was predicted to take nothing.
    graph = graph_from_text(
        """func.func @main(%a: tensor<8x16x256xf32>) -> tensor<8x16x128xf32> {
          %0 = stablehlo.slice %a [0:8, 0:16, 0:128] : (tensor<8x16x256xf32>) -> tensor<8x16x128xf32>
          %1 = stablehlo.slice %a [0:8, 0:16, 128:256] : (tensor<8x16x256xf32>) -> tensor<8x16x128xf32>
          %2 = stablehlo.multiply %0, %1 : tensor<8x16x128xf32>
          return %2 : tensor<8x16x128xf32>
        }"""
    )
    pins = {Value(0): whole, graph.outputs[0]: (*whole[:2], ("model",))}
    assert predicted(graph, Annotations(pins)) == {("collective-permute", ("model",)): size}


def test_pools_that_do_not_overlap_need_no_edges():
    assert alone("pool", IN_SPACE) == alone("pool_back", IN_SPACE, IN_SPACE) == {}


def test_patches_split_in_space_need_no_edges():
    assert alone("conv_patches", IN_SPACE, ((),) * 4, result=IN_SPACE) == {}


def test_a_sum_over_a_split_dim():
    assert alone("total", (("data",), ("model",))) == {("all-reduce", ("data",)): 128 // 4 * 4}


def test_several_sums_are_one_on_gpus_and_tpus():
    specs = [(("data",), ("model",), ())] * 2
    size = 64 * 96 * 4
    on_cpu = alone("gradient", *specs, result=WHOLE)
    assert on_cpu == {("all-reduce", ("data",)): size, ("all-reduce", ("model",)): size}
    for target in ("gpu", "tpu"):
        assert alone("gradient", *specs, result=WHOLE, target=target) == {("all-reduce", ("data", "model")): size}


def test_a_value_resharded_twice_alike_is_resharded_once():
    _, graph = program(["sum"])
    add = only(graph, "add")
    pins = {Value(0): ROWS, Value(1): COLUMNS, Value(add.id): WHOLE}
    found = predicted(graph, Annotations(pins))
    assert found == {("all-gather", ("data",)): 64 * 128 * 4, ("all-gather", ("model",)): 64 * 128 * 4}


def test_replicated_programs_communicate_nothing_and_split_nothing():
    _, graph = program()
    shardings = propagate(graph, Annotations({}), MESH)
    partitioned = partition(graph, shardings, "cpu")
    assert partitioned.collectives == ()
    assert all(run.share == 1.0 for run in partitioned.runs)


def test_each_device_computes_its_share():
    _, graph = program(["product"])
    shardings = propagate(graph, Annotations({Value(0): ROWS, Value(1): COLUMNS}), MESH)
    partitioned = partition(graph, shardings, "cpu")
    assert partitioned.runs[only(graph, "dot_general").id].share == pytest.approx(1 / 8)


def test_padding_is_computed_too():
    mesh = Mesh((5,), ("data",))
    _, graph = program(["product"])
    shardings = propagate(graph, Annotations({Value(0): (("data",), ())}), mesh)
    share = partition(graph, shardings, "cpu").runs[only(graph, "dot_general").id].share
    assert share == pytest.approx(math.ceil(64 / 5) / 64)


# --- halos ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "extents"),
    [(0, [384, 192]), (768, [384, 384]), (1536, [192, 192, 192])],
)
def test_slicing_fused_heads_permutes_what_was_measured(start, extents):
    # q, k and v of GPT-2 out of one product of 3 x 768, four ways: 7 permutes in all three compilers.
    extent, permutes = exchange(Window(2304, 768, start), 4)
    assert extent == 192
    assert [permute.extent for permute in permutes] == extents


def test_halos_between_neighbours():
    assert exchange(Window(64, 64, 0), 4) == (16, ())
    extent, permutes = exchange(Window(64, 60, 4), 4)
    assert extent == 15
    assert {permute.extent for permute in permutes} == {4 - 0 if permutes else 0} or permutes


# --- the whole prediction ------------------------------------------------------------------------------------------


def test_a_prediction_adds_up():
    _, graph = program()
    device = load_device("tpu-v5e")
    annotations = random_annotations(graph, Mesh((2, 4), ("data", "model"), "tpu-v5e"), 3)
    found = predict(graph, annotations, Mesh((2, 4), ("data", "model"), "tpu-v5e"), device)
    assert found.step_time_s == pytest.approx(found.compute_s + found.communication_s)
    assert found.compute_s <= found.overlapped_s <= found.step_time_s * (1 + 1e-9)
    assert 0 < found.mfu < 1
    assert found.replicated_ops == ()
    assert found.peak_memory_bytes > 0


def test_splitting_pays_in_compute_and_memory():
    _, graph = program(["product", "linear"])
    mesh, device = Mesh((2, 4), ("data", "model"), "tpu-v5e"), load_device("tpu-v5e")
    whole = {Value(op): replicated(len(graph.ops[op].results[0].shape)) for op in graph.arguments}
    rows = {
        Value(op): (("data", "model"), *spec[1:]) if place % 2 == 0 else spec
        for place, (op, spec) in enumerate(zip(graph.arguments, whole.values(), strict=True))
    }
    before, after = (predict(graph, Annotations(pins), mesh, device) for pins in (whole, rows))
    assert after.compute_s < before.compute_s
    assert after.peak_memory_bytes < before.peak_memory_bytes
    assert after.communication_s == before.communication_s == 0
    assert len(OPS) > len(graph.arguments) // 2


def test_an_uneven_result_is_gathered_before_the_program_returns_it():
    kind = "tensor<103xf32>"
    graph = graph_from_text(f"""func.func @main(%a: {kind}, %b: {kind}) -> {kind} {{
      %0 = stablehlo.add %a, %b : {kind}
      return %0 : {kind}
    }}""")
    split = (("model",),)
    assert predicted(graph, Annotations({Value(0): split, Value(1): split})) == {("all-gather", ("model",)): 104 * 4}


def test_a_tpu_normalises_a_split_batch_where_a_cpu_gathers_it():
    graph = graph_from_text("""func.func @main(%x: tensor<64x16xf32>, %a: tensor<16xf32>, %b: tensor<16xf32>)
        -> (tensor<64x16xf32>, tensor<16xf32>, tensor<16xf32>) {
      %0:3 = "stablehlo.batch_norm_training"(%x, %a, %b) {epsilon = 1.0e-5 : f32, feature_index = 1 : i64}
        : (tensor<64x16xf32>, tensor<16xf32>, tensor<16xf32>) -> (tensor<64x16xf32>, tensor<16xf32>, tensor<16xf32>)
      return %0#0, %0#1, %0#2 : tensor<64x16xf32>, tensor<16xf32>, tensor<16xf32>
    }""")
    op = only(graph, "batch_norm_training")
    rows, none = (("data",), ()), ((),)
    specs = ([rows, none, none], [rows, none, none])

    def alone_on(target):
        shardings = Shardings(Subaxes(MESH), {}, (), (), {}, {})
        found = Partitioner(graph, shardings, target).op_collectives(op, *specs)
        return [(each.kind, each.axes, each.bytes) for each in found]

    assert alone_on("tpu") == [("all-reduce", ("data",), 64)] * 2
    assert alone_on("cpu") == [("all-gather", ("data",), 64 * 16 * 4)]
