"""Whatever the program: it is read, planned, predicted and written, for every kind of device.

`benchmarks/never_fails.py` does so with thousands.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoshard.mesh import Mesh
from tests.conftest import MORE

pytest.importorskip("jax")
from tests.random_programs import DEVICES, check, random_program

MESHES = ((2, 2), (4,), (2, 4), (3,))


@example(50035, 9, "tpu-v5e", (2, 4))  # a sum of constants alone, in a kernel between convolutions
@example(20018, 7, "tpu-v5e", (4,))  # a product without elements, each device with a slice of its sum
@example(1338, 7, "cpu", (2, 2))  # a pad of a slice without elements, split
@example(918, 7, "cpu", (2, 2))  # a convolution without elements, both operands split in space
@example(4346, 4, "h100", (4,))  # a barrier, one result of which nothing reads
@example(209, 2, "h100", (3,))  # a broadcast without elements, gathered around a loop
@settings(max_examples=100 * MORE)
@given(st.integers(0, 2**32), st.integers(0, 8), st.sampled_from(DEVICES), st.sampled_from(MESHES))
def test_a_random_program_is_planned_and_predicted(seed, steps, device, mesh):
    check(random_program(seed, steps), Mesh(mesh, device=device), seed)
