"""The compile worker: `python -m autoshard.verify.worker REQUEST.json`, one program a process.

A process of its own, because XLA's platforms read their environment before the first import, their plugins can abort
the process, and their warnings (`Involuntary full rematerialization`) go to the file descriptor of standard error.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autoshard.stablehlo.context import entries_of, functions_of, ops_inside, set_entries
from autoshard.verify.targets import Target, gpu_limits
from autoshard.workers import end_with_parent

_NO_TILES = "Couldn't find output tile sizes"
_LAYOUTS = ("result_layout", "operand_layouts", "result_layouts", "xla_entry_computation_parameter_layouts")

# XLA prints constants of at most this many elements in full.
_PRINTED_WHOLE = 8

_STEP = "autoshard_step"
"""Module name by which the dump of the program is found: libtpu also compiles small parts as modules of their own."""

_BUFFERS = "after_optimizations-buffer-assignment.txt"
"""The dump of the buffer assignment, before code generation, which takes most of a compiler's time."""

_SCHEDULED = {"tpu": "after_optimizations_after_buffer_assignment.txt", "gpu": "after_optimizations.txt"}
"""Dumps of the scheduled program; libtpu writes it after the buffers, XLA's GPU compiler before them."""

_GENERATED = "after_codegen.txt"
"""libtpu's dump after code generation, with its estimates of cycles. jaxlib (0.10.2) cannot read some of these programs
from memory (with an `async-update` of three operands)."""

_TUPLE_PARTS = re.compile(r"\(size=\d+,offset=\d+\): \(")
"""A heap value that locates the parts of a tuple and occupies no bytes itself."""

_RESERVED = {"tpu": 31 * 512, "gpu": 0}
"""Bytes of a program beside its heap."""

_LOOK_S = 0.05
"""Polling interval for dumps, in seconds."""


def main() -> None:
    """Compile the request; write `hlo.txt.gz` and `result.json` beside it."""
    end_with_parent()
    request_path = Path(sys.argv[1])
    request = json.loads(request_path.read_text())
    target = Target(**{**request["target"], "topology": tuple(request["target"]["topology"])})
    if target.family == "cpu":
        flag = f"--xla_force_host_platform_device_count={target.num_devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    module = (request_path.parent / request["module"]).read_bytes()
    donate = {int(argument): int(output) for argument, output in dict(request["donate"]).items()}

    def compiled() -> tuple[str, dict[str, Any]]:
        return compile_for(module, target, donate, request.get("order", []))

    if target.family == "cpu":
        text, result = compiled()
    else:
        wanted = _GENERATED if request.get("whole") else _SCHEDULED[target.family]
        text, result = _dumped(request_path.parent / "dump", target, compiled, wanted)
    with gzip.open(request_path.parent / "hlo.txt.gz", "wt", compresslevel=3) as out:
        out.write(text)
    (request_path.parent / "result.json").write_text(json.dumps(result))
    if target.family != "cpu":
        os._exit(0)  # the compiler is still generating code that is not needed


def _dumped(
    dump: Path, target: Target, compiled: Callable[[], tuple[str, dict[str, Any]]], wanted: str
) -> tuple[str, dict[str, Any]]:
    """The result of `compiled`, from the compiler's dumps of buffers and of the program (`wanted`) once both are there.

    Passes take seconds, code generation minutes. Without a dump, `compiled` runs to its end.
    """
    dump.mkdir()
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    if target.num_devices > _PRINTED_WHOLE:
        flags += " --xla_dump_large_constants"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    start = time.perf_counter()
    running = ThreadPoolExecutor(1).submit(compiled)
    last = _BUFFERS if target.family == "gpu" else wanted
    size, done = -1, False
    while not done:
        time.sleep(_LOOK_S)
        done = running.done()
        for path in dump.glob(f"*.{_STEP}.*{last}"):
            if done or path.stat().st_size == size > 0:
                seconds = time.perf_counter() - start
                stem = path.name.removesuffix(last)
                memory = laid_out(path.with_name(stem + _BUFFERS).read_text(), _RESERVED[target.family])
                text = _readable(path.with_name(stem + wanted).read_text(), target)
                return text, {"seconds": seconds, "memory": memory}
            size = path.stat().st_size
    return running.result()


def _readable(dumped: str, target: Target) -> str:
    """A dumped program as executables print theirs: a GPU's asynchronous collectives are dumped as calls."""
    from jax._src.lib import xla_client as xc

    if target.family == "gpu":
        return _print(xc.hlo.hlo_module_from_text(dumped), target)
    return _shortened(dumped, target)


def laid_out(assignment: str, reserved: int) -> dict[str, int]:
    """Bytes of arguments, results, those that share a buffer, and the rest, as XLA prints a buffer assignment.

    Counts device memory (color 0) and what is `reserved` beside a heap, as `get_compiled_memory_stats` does.
    """
    memory = {"argument": 0, "output": 0, "temp": 0, "alias": 0}
    for allocation in re.split(r"^allocation \d+: ", assignment, flags=re.MULTILINE)[1:]:
        head, *values = allocation.splitlines()
        size, *words = head.removeprefix("size ").split(", ")
        if any(word.startswith("color ") for word in words):
            continue
        argument, result = any(word.startswith("parameter ") for word in words), "maybe-live-out" in head
        memory["argument"] += int(size) * argument
        memory["output"] += int(size) * result
        memory["alias"] += int(size) * (argument and result)
        if words[-1] == "preallocated-temp:" and not all(_TUPLE_PARTS.search(value) for value in values):
            memory["temp"] += int(size) + reserved
    return memory


def compile_for(
    stablehlo: bytes, target: Target, donate: dict[int, int], order: list[int]
) -> tuple[str, dict[str, Any]]:
    """The optimized HLO text of one device, and its memory in bytes and compile time in seconds.

    `order`: partition -> device in the order of `_devices`; empty for partition i on device i.
    """
    import numpy as np
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc
    from jaxlib.mlir import ir

    with jax_mlir.make_ir_context():
        module = ir.Module.parse(stablehlo)
        module.operation.attributes["sym_name"] = ir.StringAttr.get(_STEP)
        _drop_layouts(module.operation)
        results = _prepare_main(module, donate)
        devices = _devices(target)
        devices = [devices[number] for number in order] or devices
        options = xc.CompileOptions()
        build = options.executable_build_options
        options.num_replicas = build.num_replicas = 1
        options.num_partitions = build.num_partitions = len(devices)
        build.use_spmd_partitioning = True
        build.use_shardy_partitioner = False  # the annotations are GSPMD's
        # A result with a sharding keeps it; propagation chooses the others', as it does for torch_xla.
        build.allow_spmd_sharding_propagation_to_output = [not annotated for annotated in results] or [True]
        options.env_option_overrides = [*target.options.items()]
        options.device_assignment = xc.DeviceAssignment.create(np.array([[device.id for device in devices]]))
        start = time.perf_counter()
        device_list = _jax.DeviceList(tuple(devices))
        if target.family == "cpu":
            # Instruction selection and LLVM's passes do not change the partitioned program and take most of the time.
            debug = build.debug_options
            debug.xla_backend_optimization_level = 0
            debug.xla_llvm_disable_expensive_passes = True
            executable = devices[0].client.compile_and_load(module, device_list, options)
        else:
            executable = _compiled(devices[0].client, module, device_list, options)
        seconds = time.perf_counter() - start
    memory = executable.get_compiled_memory_stats()
    return _optimized(executable, target), {
        "seconds": seconds,
        "memory": {
            name: int(getattr(memory, f"{name}_size_in_bytes")) for name in ("argument", "output", "temp", "alias")
        },
    }


def _compiled(client: Any, module: Any, devices: Any, options: Any) -> Any:
    """The executable; where XLA's GPU compiler finds no tiling for a Triton kernel, without Triton kernels.

    It then calls libraries for such products (jaxlib 0.10.2).
    """
    import jax

    try:
        return client.compile(module, devices, options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
    options.env_option_overrides = [*options.env_option_overrides, ("xla_gpu_enable_triton_gemm", False)]
    return client.compile(module, devices, options)


def _optimized(executable: Any, target: Target) -> str:
    """The optimized program as text."""
    (module, *_) = executable.hlo_modules()
    return _print(module, target)


def _print(module: Any, target: Target) -> str:
    """The module as text. Tables of one offset per device are needed in full; longer constants are left out."""
    from jax._src.lib import xla_client as xc

    options = xc.hlo.HloPrintOptions()
    options.print_metadata = True
    options.print_backend_config = True
    options.print_large_constants = target.num_devices > _PRINTED_WHOLE
    return _shortened(module.to_string(options), target)


def _shortened(text: str, target: Target) -> str:
    """Drop constants longer than a table of one offset per device."""
    if target.num_devices <= _PRINTED_WHOLE:
        return text
    limit = 400 + 12 * target.num_devices
    lines = (
        line.split(" constant(", 1)[0] + " constant({...})" if len(line) > limit and " constant({" in line else line
        for line in text.splitlines()
    )
    return "\n".join(lines) + "\n"


def _drop_layouts(module: Any) -> None:
    """Drop the layouts of the capturing platform, except operands' of custom calls: each compiler picks its own."""
    for op in (module, *ops_inside(module)):
        names = [] if op.name == "stablehlo.custom_call" else [getattr(each, "name", each) for each in op.attributes]
        for name in names:
            if name in _LAYOUTS or (name.startswith("mhlo") and "layout" in name) or "entry_computation" in name:
                del op.attributes[name]


def _prepare_main(module: Any, donate: dict[int, int]) -> list[bool]:
    """Mark donated arguments; return for each result whether it has a sharding."""
    from jaxlib.mlir import ir

    main = functions_of(module).get("main")
    if main is None:
        raise ValueError("the module has no function main")
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    if donate:
        entries = entries_of(main, "arg_attrs", len(kind.inputs))
        integer = ir.IntegerType.get_signless(32)
        for argument, output in donate.items():
            entries[argument]["tf.aliasing_output"] = ir.IntegerAttr.get(integer, output)
        set_entries(main, "arg_attrs", entries)
    return ["mhlo.sharding" in entry for entry in entries_of(main, "res_attrs", len(kind.results))]


def _devices(target: Target) -> list[Any]:
    """The target's devices by slice or host, then by coordinates (dim 0 slowest), then within the chip."""
    if target.family == "cpu":
        import jax

        return list(jax.local_devices(backend="cpu"))
    if target.family == "tpu":
        from jax.experimental import topologies

        name = f"{target.device.removeprefix('tpu-')}:{'x'.join(map(str, target.topology))}"
        extra = {"num_slices": target.slices} if target.slices > 1 else {}
        devices = topologies.get_topology_desc(name, platform="tpu", **extra).devices

        # a topology of one slice has devices without the attribute
        def place(device: Any) -> tuple[Any, ...]:
            return getattr(device, "slice_index", None) or 0, tuple(device.coords), device.core_on_chip

        return sorted(devices, key=place)
    import jax_plugins.xla_cuda12 as plugin
    from jax._src.lib import xla_client as xc

    library = next(Path(path) for folder in plugin.__path__ for path in Path(folder).glob("*.so"))
    api = xc.load_pjrt_plugin_dynamically("cuda", str(library))
    if not xc.pjrt_plugin_initialized("cuda"):
        xc.initialize_pjrt_plugin("cuda")
    hosts, gpus = target.topology
    topology = xc.make_c_api_device_topology(
        api, "", topology=f"1x{hosts}x{gpus}", target_config=gpu_target_config(target.device)
    )
    return list(topology._make_compile_only_devices())


def gpu_target_config(kind: str) -> str:
    """XLA's description of an absent GPU (`stream_executor.GpuTargetConfigProto`, as text)."""
    gpu = gpu_limits()[kind]
    major, minor = gpu["compute_capability"]
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": gpu["threads"],
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": gpu["shared_memory_block"],
        "shared_memory_per_core": gpu["shared_memory"],
        "core_count": gpu["multiprocessors"],
        "fpus_per_core": gpu["fp32_units"],
        "memory_bandwidth": gpu["bandwidth"],
        "device_memory_size": gpu["memory"],
        "l2_cache_size": gpu["l2"],
        "clock_rate_ghz": gpu["clock"],
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in info.items())
    capability = f"  cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f"gpu_device_info {{\n{lines}\n{capability}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 patch: 2 }\n'
        f'device_description_str: "{gpu["description"]}"\n'
    )


if __name__ == "__main__":
    main()
