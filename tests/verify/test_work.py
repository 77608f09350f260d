import base64
from pathlib import Path

import pytest

from autoshard.verify.work import compiled_work

# 3 layers, per device: forwards x[32,256] @ up[256,128] and hidden[32,128] @ down[128,256], twice that backwards.
SCAN_FLOPS = 3 * 3 * 2 * (2 * 32 * 256 * 128)


@pytest.mark.parametrize(("family", "dtype"), [("cpu", "f32"), ("gpu", "bf16"), ("tpu", "bf16")])
def test_flops_of_a_recorded_program(family, dtype):
    text = (Path(__file__).parent / "hlo" / f"scan_{family}.txt").read_text()
    work = compiled_work(text, family)
    assert work.flops_by_dtype == {dtype: SCAN_FLOPS}
    assert work.bytes > 0
    assert {kernel.count for kernel in work.kernels if kernel.flops} == {3}


def kernels(body, more="", family="gpu"):
    text = f"""HloModule m, num_partitions=8
{more}
ENTRY %main (p: f32[64,32]) -> f32[8] {{
  %p = f32[64,32]{{1,0}} parameter(0)
  %w = f32[32,16]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %chip = f32[64,32]{{1,0:T(8,128)S(1)}} parameter(3)
  %image = f32[2,8,8,3]{{3,2,1,0}} parameter(4)
  %filter = f32[3,3,3,5]{{3,2,1,0}} parameter(5)
  %grad = f32[2,8,8,5]{{3,2,1,0}} parameter(6)
  %q = bf16[4,64,32]{{2,1,0}} parameter(7)
  %k = bf16[4,48,32]{{2,1,0}} parameter(8)
{body}
}}
"""
    return {kernel.name: kernel for kernel in compiled_work(text, family).kernels}


def one(body, **arguments):
    found = kernels(f"  ROOT %x = {body}", **arguments)
    return found["x"]


def test_a_dot():
    kernel = one("f32[64,16]{1,0} dot(%p, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}")
    assert kernel.flops == {"f32": 2 * 64 * 16 * 32}
    assert kernel.bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_a_batched_dot_with_narrow_operands():
    dims = "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}"
    assert one(f"f32[4,64,48] dot(%q, %k), {dims}").flops == {"bf16": 2 * 4 * 64 * 48 * 32}


def test_cublas_calls_are_dots():
    config = (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}'
    )
    call = f'(f32[64,16], s8[4194304]) custom-call(%p, %w), custom_call_target="__cublas$gemm", {config}'
    assert one(call).flops == {"f32": 2 * 64 * 16 * 32}


@pytest.mark.parametrize(
    ("result", "operands", "flops"),
    [
        ("f32[64,48]", "%i, %p, %k", {"f32": 2 * 64 * 32 * 48}),  # rows by the matrix of their group
        ("f32[4,32,32]", "%i, %p, %p", {"f32": 2 * 64 * 32 * 32}),  # and the gradient of these
        ("f32[64,32]", "%p", {}),  # a kernel of someone else
        ("s32[]", "%i", {}),
    ],
)
def test_a_grouped_product_in_a_triton_kernel(result, operands, flops):
    call = f'{result} custom-call({operands}), custom_call_target="__gpu$xla.gpu.triton"'
    assert one(call).flops == flops
    split = f'{call}, metadata={{op_name="grouped_product_of_2"}}'  # every other row is of another device's expert
    assert one(split).flops == {dtype: count / 2 for dtype, count in flops.items()}


def test_a_tpus_kernel_of_attention_holds_a_product():
    call = 'f32[64,16] custom-call(%p, %w), custom_call_target="tpu_custom_call", metadata={op_name="online-softmax"}'
    assert one(call).flops == {"f32": 2 * 64 * 16 * 32}
    assert one(call.replace("online-softmax", "mine")).flops == {}


def test_a_kernel_of_a_whole_attention_says_its_flops():
    call = (
        'bf16[4,64,32] custom-call(%q, %k, %k), custom_call_target="tpu_custom_call", backend_config={'
        '"custom_call_config":{"body":"","cost_estimate":{"bytes_accessed":"9","flops":"786432"}}}'
    )
    assert one(call, family="tpu").flops == {"bf16": 786432}


@pytest.mark.parametrize(("bounds", "times"), [("4, 1, 1", 1), ("4, 2, 1", 1), ("4, 1, 3", 1), ("4, 2, 3", 2)])
def test_it_reads_keys_and_values_again_for_each_block_of_rows(bounds, times):
    grid = f"attributes {{iteration_bounds = array<i64: {bounds}>, scratch_operands = 2 : i64}}"
    body = base64.b64encode(grid.encode()).decode()
    config = f'custom_call_target="tpu_custom_call", backend_config={{"custom_call_config":{{"body":"{body}"}}}}'
    q, k = 2 * 4 * 64 * 32, 2 * 4 * 48 * 32
    assert one(f"bf16[4,64,32] custom-call(%q, %k, %k), {config}", family="tpu").bytes == 2 * q + 2 * k * times


# 8 positions a dim, 3 taps, padding 1: 8 * 3 - 2 pairs meet the image.
CONVOLUTION = 2 * (2 * 5 * 3) * (8 * 3 - 2) ** 2


def test_a_convolution_counts_what_meets_the_image():
    window = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
    assert one(f"f32[2,8,8,5] convolution(%image, %filter), {window}").flops == {"f32": CONVOLUTION}


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("__cudnn$convForward", "f32[2,8,8,5]{3,2,1,0}, u8[0]{0}) custom-call(%image, %filter)"),
        ("__cudnn$convBackwardInput", "f32[2,8,8,3]{3,2,1,0}, u8[0]{0}) custom-call(%grad, %filter)"),
        ("__cudnn$convBackwardFilter", "f32[3,3,3,5]{3,2,1,0}, u8[0]{0}) custom-call(%image, %grad)"),
    ],
)
def test_cudnn_calls_are_the_forward_convolution(call, result):
    window = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
    assert one(f'({result}, {window}, custom_call_target="{call}"').flops == {"f32": CONVOLUTION}


def test_a_batched_dot_as_tpu_writes_it():
    """One of the 4 positions of a dilated convolution for each batch entry: no more FLOPs than the dot."""
    labels = "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0oi->0bf"
    assert one(f"f32[4,64,48] convolution(%q, %k), {labels}").flops == {"bf16": 2 * 4 * 64 * 48 * 32}


def test_fusions_hold_dots_and_touch_slices():
    more = """
%inside (a: f32[64,32], b: f32[32,16], n: s32[]) -> f32[8,16] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = f32[32,16]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %none = s32[] constant(0)
  %view = f32[64,32]{1,0} bitcast(%a)
  %rows = f32[8,32]{1,0} dynamic-slice(%view, %n, %none), dynamic_slice_sizes={8,32}
  ROOT %d = f32[8,16]{1,0} dot(%rows, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (a: f32[64,32], u: f32[8,32], n: s32[]) -> f32[64,32] {
  %a = f32[64,32]{1,0} parameter(0)
  %u = f32[8,32]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %d = f32[64,32]{1,0} dynamic-update-slice(%a, %u, %n, %none)
}
"""
    kernel = one("f32[8,16]{1,0} fusion(%p, %w, %i), kind=kOutput, calls=%inside", more=more)
    assert kernel.flops == {"f32": 2 * 8 * 16 * 32}
    assert kernel.bytes == 4 * (8 * 32 + 32 * 16 + 1 + 8 * 16)
    body = "  %s = f32[8,32] slice(%p), slice={[0:8], [0:32]}\n"
    found = kernels(f"{body}  ROOT %x = f32[64,32] fusion(%p, %s, %i), kind=kLoop, calls=%update", more=more)
    assert found["x"].bytes == 4 * (8 * 32 + 1 + 8 * 32)
    assert found["s"].bytes == 2 * 4 * 8 * 32


def test_on_tpu_only_device_memory_costs():
    add = "f32[64,32]{1,0} add(%p, %chip)"
    assert one(add, family="tpu").bytes == 2 * 4 * 64 * 32
    assert one(add, family="gpu").bytes == 2 * 4 * 64 * 32 + 4 * 64 * 128
    padded = "f32[64,32]{1,0:T(8,128)} add(%p, %chip)"  # what it writes lies in tiles of 128 lanes
    assert one(padded, family="tpu").bytes == 4 * 64 * 32 + 4 * 64 * 128
    fetch = "(f32[64,32]{1,0:T(8,128)S(1)}, f32[64,32]{1,0}, u32[]{:S(2)}) copy-start(%p)"
    kernel = one(fetch, family="tpu")
    assert (kernel.bytes, kernel.launches) == (4 * 64 * 32, 0)


def test_numbers_of_a_tpu_are_no_kernels():
    """The body of a loop of permutes: 22 of its 31 instructions count, or say where parts begin."""
    body = "  %n = s32[] constant(3)\n  %m = s32[] add(%n, %i)\n  ROOT %x = f32[64,32]{1,0} add(%p, %p)"
    assert {name: kernel.launches for name, kernel in kernels(body, family="tpu").items()} == {"m": 0, "x": 1}
    assert {name: kernel.launches for name, kernel in kernels(body, family="gpu").items()} == {"m": 1, "x": 1}


def test_rows_that_a_sparse_core_looks_up_are_not_the_whole_table():
    """TPU v5p: the lookup runs in a computation of its own, which a custom call calls; the table was read whole."""
    more = """%rows (t: f32[125000,64], j: s32[128]) -> f32[128,64] {
  %t = f32[125000,64]{1,0} parameter(0)
  %j = s32[128]{0} parameter(1)
  ROOT %g = f32[128,64]{1,0} gather(%t, %j), offset_dims={1}, slice_sizes={1,64}
}
%inner (t: f32[125000,64], j: s32[128]) -> f32[128,64] {
  %t = f32[125000,64]{1,0} parameter(0)
  %j = s32[128]{0} parameter(1)
  ROOT %looked_up = f32[128,64]{1,0} fusion(%t, %j), kind=kCustom, calls=%rows
}"""
    body = """  %table = f32[125000,64]{1,0} parameter(9)
  %j = s32[128]{0} parameter(10)
  ROOT %x = f32[128,64]{1,0} custom-call(%table, %j), custom_call_target="Wrapped", called_computations={%inner}"""
    (kernel,) = kernels(body, more=more, family="tpu").values()
    assert kernel.bytes == 4 * (2 * 128 * 64 + 128)


def test_names_views_collectives_and_async_ends_are_no_kernels():
    body = """  %b = f32[2048] bitcast(%p)
  %r = f32[64,32] all-reduce(%p), replica_groups=[2,4]<=[8]
  %s = (f32[64,32], f32[64,32]) all-gather-start(%p), replica_groups=[2,4]<=[8]
  %d = f32[64,32] all-gather-done(%s)
  ROOT %t = (f32[2048], f32[64,32]) tuple(%b, %d)"""
    assert kernels(body) == {}


@pytest.mark.parametrize(("onto", "written"), [("%o", 64 * 16), ("%zeros", 1024 * 16)])
def test_a_fused_scatter_changes_what_it_scatters_into_in_place(onto, written):
    """8 H100, data parallel: GPT-2's table had been read and written whole, 0.1 ms of 4.3 (DLRM: 1.0 of 12.7)."""
    more = f"""%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
%fused (o: f32[1024,16], i: s32[64,1], u: f32[64,16]) -> f32[1024,16] {{
  %o = f32[1024,16]{{1,0}} parameter(0)
  %j = s32[64,1]{{1,0}} parameter(1)
  %u = f32[64,16]{{1,0}} parameter(2)
  %zero = f32[] constant(0)
  %zeros = f32[1024,16]{{1,0}} broadcast(%zero), dimensions={{}}
  %t = f32[64,16]{{1,0}} tanh(%u)
  ROOT %s = f32[1024,16]{{1,0}} scatter({onto}, %j, %t), update_window_dims={{1}}, to_apply=%add
}}"""
    body = """  %table = f32[1024,16]{1,0} parameter(9)
  %rows = s32[64,1]{1,0} parameter(10)
  %update = f32[64,16]{1,0} parameter(11)
  ROOT %x = f32[1024,16]{1,0} fusion(%table, %rows, %update), kind=kInput, calls=%fused"""
    read = 64 * 16 * (2 if onto == "%o" else 1) + 64
    assert kernels(body, more=more)["x"].bytes == 4 * (read + written)


def test_the_vector_unit_reads_the_slices_that_a_fusion_takes_of_an_operand():
    """A decoding step's head was charged all of a table of which it reads an eighth, and a lookup of one row too."""
    more = """
%inner (a: f32[64,32], b: s32[]) -> f32[8,32] {
  %a = f32[64,32]{1,0} parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[8,32]{1,0} dynamic-slice(%a, %b, %zero), dynamic_slice_sizes={8,32}
}
%outer (c: f32[64,32], d: s32[]) -> f32[8,32] {
  %c = f32[64,32]{1,0} parameter(0)
  %d = s32[] parameter(1)
  %sliced = f32[8,32]{1,0} fusion(%c, %d), kind=kLoop, calls=%inner
  ROOT %less = f32[8,32]{1,0} negate(%sliced)
}
%whole (e: f32[64,32], f: s32[]) -> f32[8,32] {
  %e = f32[64,32]{1,0} parameter(0)
  %f = s32[] parameter(1)
  %all = f32[64,32]{1,0} negate(%e)
  %none = s32[] constant(0)
  ROOT %cut = f32[8,32]{1,0} dynamic-slice(%all, %f, %none), dynamic_slice_sizes={8,32}
}
"""
    sliced = one("f32[8,32]{1,0} fusion(%p, %i), kind=kLoop, calls=%outer", more=more, family="tpu").registers
    whole = one("f32[8,32]{1,0} fusion(%p, %i), kind=kLoop, calls=%whole", more=more, family="tpu").registers
    assert whole.vector["read"] == pytest.approx(8 * sliced.vector["read"], rel=0.01)
    assert sliced.vector["tiles"] < whole.vector["tiles"]
