"""Which dims of an array make its tiles."""

import pytest

from autoshard.cost.machine.tiles import minor_dims


@pytest.mark.parametrize(
    ("shape", "lane", "row"), [((256, 4, 64), 0, 2), ((8, 3, 7, 7), 3, 0), ((2, 5, 64), 2, 0), ((8, 128), 1, 0)]
)
def test_the_dims_that_pad_least_are_within_tiles(shape: tuple[int, ...], lane: int, row: int) -> None:
    assert minor_dims(shape) == (lane, row)
