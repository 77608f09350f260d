"""What gathers along a dim store on GPUs, against XLA's GPU compiler."""

import pytest
import torch

from tests.cost.peaks import peak_and_compiled

pytest.importorskip("jax_plugins.xla_cuda12")


class Net(torch.nn.Module):
    """A gather of an activation, by indices that are given, or that the step makes (DeBERTa's relative positions)."""

    def __init__(self, made: bool) -> None:
        super().__init__()
        self.layer, self.made = torch.nn.Linear(256, 256), made

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if self.made:
            at = torch.arange(256, device=x.device)
            indices = (at[:, None] - at).abs().expand(x.shape)
        return x + torch.gather(torch.tanh(self.layer(x)), -1, indices)


@pytest.mark.parametrize("made", [False, True])
def test_a_gather_and_its_gradient_share_indices_of_every_dim(made: bool) -> None:
    inputs = (torch.randn(256, 256, 256, dtype=torch.bfloat16), torch.randint(0, 256, (256, 256, 256)))
    peak, compiled = peak_and_compiled("h100:8", Net(made).bfloat16(), inputs)
    assert "s32[32,256,256,3]" in compiled.hlo_text[compiled.hlo_text.index("\nENTRY") :]
    assert peak == pytest.approx(compiled.memory.peak, rel=0.1)
