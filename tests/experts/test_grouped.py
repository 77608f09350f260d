"""Grouped products of each platform's kernel, in Pallas's interpret mode, are those of XLA."""

import numpy as np
import pytest

from autoshard.experts import grouped

ROWS, GROUPS, N, K = 300, 3, 256, 128
SIZES = {"uneven": (130, 0, 100), "one": (0, 300, 0), "none": (0, 0, 0)}


@pytest.fixture(scope="module", params=SIZES)
def given(request):
    generator = np.random.default_rng(0)
    made = [generator.standard_normal(shape, np.float32) for shape in ((ROWS, K), (GROUPS, N, K), (ROWS, N))]
    return *made, grouped.Groups(np.array(SIZES[request.param], np.int32))


@pytest.mark.parametrize("kernel", [grouped._megablox_product, grouped._triton_product])
@pytest.mark.parametrize("across", [False, True])
def test_rows_times_the_matrix_of_their_group(given, kernel, across):
    rows, matrices, wide, groups = given
    read = wide if across else rows
    found = kernel(read, matrices, groups, across, interpret=True)
    expected = grouped.product(read, matrices, groups, "cpu", across=across)
    used = int(groups.sizes.sum())
    np.testing.assert_allclose(found[:used], expected[:used], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", [grouped._megablox_outer, grouped._triton_outer])
def test_sums_of_outer_products_per_group(given, kernel):
    rows, _, wide, groups = given
    found = kernel(wide, rows, groups, interpret=True)
    np.testing.assert_allclose(found, grouped.outer(wide, rows, groups, "cpu"), rtol=1e-3, atol=1e-3)
