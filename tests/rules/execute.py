"""Run a batch: `python -m tests.rules.execute FOLDER`, once under its annotations and once on one device.

What lies beyond the edge of an unevenly split tensor is NaN (or the largest integer): nothing may depend on it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Compare the two runs; write one number per result."""
    folder = Path(sys.argv[1])
    request = json.loads((folder / "request.json").read_text())
    arguments = [
        draw(np.random.default_rng(place), shape, dtype, how, below)
        for place, ((shape, dtype), (how, below)) in enumerate(zip(request["types"], request["fills"], strict=True))
    ]
    expected = execute((folder / "plain.mlir").read_bytes(), arguments, 1)
    found = execute((folder / "annotated.mlir").read_bytes(), arguments, request["devices"])
    differences = [worst(parts, whole[0][1]) for parts, whole in zip(found, expected, strict=True)]
    (folder / "result.json").write_text(json.dumps(differences))


def draw(rng: np.random.Generator, shape: list[int], dtype: str, how: str, below: int) -> np.ndarray:
    """One argument's numbers (see `snippets.Fill`)."""
    if how in ("ints", "bools", "state"):
        below = 2 if how == "bools" else below
        return rng.integers(0, below, shape).astype(numpy_dtype(dtype))
    made = rng.standard_normal(shape)
    if how in ("positive", "negative"):
        made = 0.5 + 1.5 * rng.random(shape)
        made = -made if how == "negative" else made
    elif how == "one":
        made = np.ones(shape)
    elif how == "unit":
        made = 1.8 * rng.random(shape) - 0.9
    elif how == "above one":
        made = 1.1 + rng.random(shape)
    elif how == "near one":
        made = 1 + 0.01 * made
    elif how == "spd":
        made = made @ np.swapaxes(made, -1, -2) + shape[-1] * np.eye(shape[-1])
    elif how == "triangle":
        made = np.tril(made) + 2 * shape[-1] * np.eye(shape[-1])
    return made.astype(numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> Any:
    """StableHLO's word as numpy's dtype."""
    import ml_dtypes

    named = {"i1": np.bool_, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
    named |= {f"i{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)} | {
        f"ui{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)
    }
    return named[dtype]


Slices = tuple[slice, ...]


def execute(module: bytes, arguments: list[np.ndarray], devices: int) -> list[list[tuple[Slices, np.ndarray]]]:
    """Per result, per device: the part of the whole that it holds, and its numbers."""
    import jax
    from jax._src.interpreters import mlir as jax_mlir
    from jax._src.lib import _jax
    from jax._src.lib import xla_client as xc
    from jaxlib.mlir import ir

    from autoshard.verify.worker import _drop_layouts, _prepare_main

    jax.config.update("jax_enable_x64", True)
    local = jax.local_devices(backend="cpu")[:devices]
    with jax_mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        _drop_layouts(parsed.operation)
        results = _prepare_main(parsed, {})
        if devices == 1:
            _drop_annotations(parsed)
        options = xc.CompileOptions()
        build = options.executable_build_options
        options.num_replicas = build.num_replicas = 1
        options.num_partitions = build.num_partitions = devices
        build.use_spmd_partitioning = devices > 1
        build.use_shardy_partitioner = False
        build.allow_spmd_sharding_propagation_to_output = [not annotated for annotated in results] or [True]
        options.device_assignment = xc.DeviceAssignment.create(np.array([[device.id for device in local]]))
        build.debug_options.xla_backend_optimization_level = 0
        build.debug_options.xla_llvm_disable_expensive_passes = True
        executable = local[0].client.compile_and_load(parsed, _jax.DeviceList(tuple(local)), options)
    into = executable.get_parameter_shardings() if devices > 1 else [None] * len(arguments)
    placed = [place(value, sharding, local) for value, sharding in zip(arguments, into or [None], strict=True)]
    made = executable.execute_sharded(placed)
    outs = executable.get_output_shardings() if devices > 1 else None
    if outs is not None and len(outs) == 1 and outs[0].type == xc.OpSharding.Type.TUPLE:
        outs = outs[0].tuple_shardings
    found = []
    for number, shards in enumerate(made.disassemble_into_single_device_arrays()):
        tiles = tiles_of(outs[number], devices) if outs is not None else [None]
        parts = []
        for device, (shard, tile) in enumerate(zip(shards, tiles, strict=True)):
            own = np.asarray(shard)
            del device
            slices = tuple(
                slice((tile[dim] if tile else 0) * size, ((tile[dim] if tile else 0) + 1) * size)
                for dim, size in enumerate(own.shape)
            )
            parts.append((slices, own))
        found.append(parts)
    return found


def _drop_annotations(module: Any) -> None:
    from autoshard.stablehlo.context import entry_block, functions_of

    for view in list(entry_block(functions_of(module)["main"]).operations):
        op = view.operation
        if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "Sharding":
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()


def tiles_of(sharding: Any, devices: int) -> list[list[int] | None]:
    """Per device the tile that it holds, one coordinate per dim; None where it holds everything."""
    from jax._src.lib import xla_client as xc

    found: list[list[int] | None] = [None] * devices
    if sharding is None or sharding.type != xc.OpSharding.Type.OTHER:
        return found
    shape = list(sharding.tile_assignment_dimensions)
    if sharding.tile_assignment_devices:
        grid = np.array(list(sharding.tile_assignment_devices)).reshape(shape)
    else:
        grid = np.arange(devices).reshape(list(sharding.iota_reshape_dims))
        grid = grid.transpose(list(sharding.iota_transpose_perm)).reshape(shape)
    rank = len(shape) - bool(sharding.replicate_on_last_tile_dim) - len(sharding.last_tile_dims)
    for index in np.ndindex(*shape):
        found[int(grid[index])] = list(index[:rank])
    return found


def place(value: np.ndarray, sharding: Any, devices: list[Any]) -> Any:
    """The argument on the devices, padded with rubbish where its parts are uneven."""
    import jax

    tiles = tiles_of(sharding, len(devices)) if sharding is not None else [None] * len(devices)
    counts = [max(tile[dim] for tile in tiles if tile) + 1 if any(tiles) else 1 for dim in range(value.ndim)]
    sizes = [-(-size // count) for size, count in zip(value.shape, counts, strict=True)]
    edges = [(0, size * count - whole) for size, count, whole in zip(sizes, counts, value.shape, strict=True)]
    rubbish = (
        np.nan if value.dtype.kind not in "iub" else True if value.dtype.kind == "b" else np.iinfo(value.dtype).max
    )
    padded = np.pad(value, edges, constant_values=rubbish) if value.ndim else value
    shards = []
    for device, tile in zip(devices, tiles, strict=True):
        part = padded
        if tile is not None:
            part = padded[tuple(slice(t * size, (t + 1) * size) for t, size in zip(tile, sizes, strict=True))]
        shards.append(jax.device_put(part, device))
    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    # What the program sees are the buffers; the sharding only has to fit their shapes.
    stacked = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*(("all",) if value.ndim else ())))
    shape = (sizes[0] * len(devices), *sizes[1:]) if value.ndim else ()
    return jax.make_array_from_single_device_arrays(shape, stacked, shards)


def worst(parts: list[tuple[Slices, np.ndarray]], whole: np.ndarray) -> float:
    """The largest difference of any device's part, relative to the largest number; infinite for wrong shapes or NaN."""
    exact = whole.astype(np.complex128)
    finite = np.abs(exact[np.isfinite(exact)])
    largest = max(float(finite.max()) if finite.size else 0.0, 1e-30)
    found = 0.0
    for slices, own in parts:
        part = exact[slices] if exact.ndim else exact
        mine = own.astype(np.complex128)[tuple(slice(0, size) for size in part.shape)]
        if mine.shape != part.shape:
            return float("inf")
        same = (mine == part) | (np.isnan(mine) & np.isnan(part))
        difference = np.where(same, 0.0, np.abs(mine - part))
        if difference.size:
            found = max(found, float(np.nan_to_num(difference.max(), nan=np.inf, posinf=np.inf)) / largest)
    return found


if __name__ == "__main__":
    main()
