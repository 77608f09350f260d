"""Which dims of an array make its tiles."""

import pytest

from autoshard.cost.machine.tiles import minor_dims, reshapes_in_place


@pytest.mark.parametrize(
    ("shape", "lane", "row"), [((256, 4, 64), 0, 2), ((8, 3, 7, 7), 3, 0), ((2, 5, 64), 2, 0), ((8, 128), 1, 0)]
)
def test_the_dims_that_pad_least_are_within_tiles(shape: tuple[int, ...], lane: int, row: int) -> None:
    assert minor_dims(shape) == (lane, row)


@pytest.mark.parametrize(
    ("before", "after", "in_place"),
    [
        ((8, 255, 1000), (2040, 1000), False),  # positions are neither lanes nor sublanes of whole tiles
        ((8, 256, 1000), (2048, 1000), True),
        ((1, 255, 1000), (255, 1000), True),
        ((2040, 1000), (8, 255, 1000), False),
        ((4, 255, 12, 64), (4, 255, 768), True),  # batch and positions are in tiles
        ((64, 512, 7, 7), (64, 512, 49), True),
        ((64, 512, 7, 7), (64, 25088), False),
        ((8, 255), (2040,), True),
    ],
)
def test_a_reshape_that_no_tiles_keep_is_a_copy(before: tuple[int, ...], after: tuple[int, ...], in_place) -> None:
    assert reshapes_in_place(before, after) == in_place
