"""Videos and images whose dims are exchanged before a convolution, against libtpu."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cost.peaks import peak_and_compiled

pytest.importorskip("libtpu")


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_video_is_copied_for_its_convolution_whatever_the_order_of_its_dims(exchanged: bool) -> None:
    """VideoMAE's: with three channels in 128 lanes, 411 MB for 5; predicted were 48 MB of 470."""

    class Tubelets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.layer = nn.Conv3d(3, 256, (2, 16, 16), (2, 16, 16)), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.project(x.transpose(1, 2) if exchanged else x).flatten(2).mT)

    shape = (8, 16, 3, 224, 224) if exchanged else (8, 3, 16, 224, 224)
    peak, compiled = peak_and_compiled("tpu-v5e:2x4", Tubelets().bfloat16(), (torch.randn(shape).bfloat16(),))
    assert peak == pytest.approx(compiled.memory.peak, rel=0.1)
