"""What losses store on GPUs, against XLA's GPU compiler."""

import pytest
import torch

from tests.cost.peaks import peak_and_compiled

pytest.importorskip("jax_plugins.xla_cuda12")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_centred_logits_are_computed_in_each_kernel_that_reads_them(smoothing: float) -> None:
    """Smoothed labels make a fourth kernel of them; logits of bf16 less a maximum read as much as they return."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(256, 32768, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.head(x).float(), labels, label_smoothing=smoothing)

    inputs = (torch.randn(4096, 256, dtype=torch.bfloat16), torch.randint(0, 32768, (4096,)))
    peak, compiled = peak_and_compiled("h100:8", Net().bfloat16(), inputs, lambda loss: loss)
    assert peak == pytest.approx(compiled.memory.peak, rel=0.05)


def test_costly_ops_before_a_softmax_are_stored_in_f32() -> None:
    """Soft-capped logits: the sums of rows and their gradient read one tanh."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(256, 4096, bias=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = torch.tanh(self.head(x) / 30) * 30
            return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none").mean()

    inputs = (torch.randn(8192, 256, dtype=torch.bfloat16), torch.randint(0, 4096, (8192,)))
    peak, compiled = peak_and_compiled("h100:8", Net().bfloat16(), inputs, lambda loss: loss)
    assert "f32[1024,4096]" in compiled.hlo_text[compiled.hlo_text.index("\nENTRY") :]
    assert peak == pytest.approx(compiled.memory.peak, rel=0.05)


def test_a_softmax_holds_no_concatenation_and_no_slice() -> None:
    """Attention sinks (GPT-OSS): one more logit a row, whose probability is left out."""

    class Sinks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.zeros(8))
            self.query, self.key, self.value = (torch.nn.Linear(512, 512, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (
                project(x).unflatten(-1, (8, 64)).transpose(1, 2) for project in (self.query, self.key, self.value)
            )
            scores = query @ key.transpose(2, 3) * 0.125
            sinks = self.sinks.view(1, 8, 1, 1).expand(len(x), -1, x.shape[1], 1)
            logits = torch.cat([scores, sinks], -1)
            shares = torch.softmax((logits - logits.amax(-1, keepdim=True)).float(), -1)[..., :-1].to(x.dtype)
            return shares @ value

    inputs = (torch.randn(16, 1024, 512, dtype=torch.bfloat16),)
    peak, compiled = peak_and_compiled("h100:8", Sinks().bfloat16(), inputs)
    assert peak == pytest.approx(compiled.memory.peak, rel=0.15)  # a pad in f32 is stored in bf16
