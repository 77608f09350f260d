"""A fused attention and its products take as long in the solver's prices as in the prediction, as measured."""

from __future__ import annotations

import pytest

import autoshard

torch = pytest.importorskip("torch")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(1024, 3072, bias=False, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(8, 2048, 3, 8, 128).permute(2, 0, 3, 1, 4)
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(8, 2048, 1024))


def test_price_and_prediction_of_an_attention_agree() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.empty(8, 2048, 1024, dtype=torch.bfloat16)
    plan = autoshard.plan(model, x, mesh="8", device="h100")
    assert plan.predicted is not None
    assert plan.solver is not None
    assert plan.solver.objective == pytest.approx(plan.predicted.step_time_s, rel=1e-6)
    alone = {"batch": 1, "seq": 2048, "heads": 8, "head_dim": 128}
    parts = [
        autoshard.estimate("h100", "attention", **alone),
        *(autoshard.estimate("h100", "matmul", m=2048, k=1024, n=n) for n in (3072, 1024)),
    ]
    # The rest moves data, or is launched with another overhead.
    assert (
        0.8 * sum(each.seconds for each in parts) < plan.predicted.compute_s < 1.6 * sum(each.seconds for each in parts)
    )
