"""Tensor operations that no other entry of `coverage.py` uses: indexing, sorting, scans, algebra, unusual programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.zoo_entry import BATCH, SEQ, WIDTH, classes, entry, floats, mean_square, tokens, uniform
from benchmarks.zoo_modules import Lambda


class Inner(nn.Module):
    """A function of a projection."""

    def __init__(self, function: Any, out: int = 32) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, out), function

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.function(self.inner(x), *more)


@entry
def scans_along_a_dim() -> Any:
    def scans(x: Tensor) -> Tensor:
        y = x.cumsum(1) + torch.sigmoid(x).cumprod(1) + x.flip(1).cumsum(1).flip(1)
        return y + x.cummax(1).values + torch.logcumsumexp(x, 1)

    return Inner(scans), (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def sums_along_a_dim() -> Any:
    return (
        Inner(lambda x: x.cumsum(1) + torch.sigmoid(x).cumprod(1) + x.roll((1, 2), (1, 2)) + x.flip(0, 2)),
        (floats(BATCH, SEQ, WIDTH),),
        mean_square,
    )


@entry
def sorted_and_ranked() -> Any:
    def ranks(x: Tensor) -> Tensor:
        ordered, places = x.sort(-1, descending=True)
        top = x.topk(5, -1)
        taken = torch.gather(x * 2, -1, places[..., :5])
        return ordered.cumsum(-1).mean() + (top.values * taken).mean() + x.kthvalue(3, -1).values.mean()

    return Inner(ranks), (floats(BATCH, SEQ, WIDTH),), None


@entry
def medians_and_quantiles() -> Any:
    def found(x: Tensor) -> Tensor:
        return x.median(-1).values.mean() + x.std(-1).mean() + x.var(0).mean() + torch.logsumexp(x, -1).mean()

    return Inner(found), (floats(BATCH, SEQ, WIDTH),), None


@entry
def mixture_of_experts_by_top_k() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 8)
            self.up, self.down = nn.Parameter(floats(8, WIDTH, 32) / 8), nn.Parameter(floats(8, 32, WIDTH) / 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(0, 1)
            weights, chosen = torch.softmax(self.router(x), -1).topk(2, -1)
            weights = weights / weights.sum(-1, keepdim=True)
            made = torch.zeros_like(x)
            for e in range(8):
                share = ((chosen == e) * weights).sum(-1, keepdim=True)
                made = made + share * (torch.relu(x @ self.up[e]) @ self.down[e])
            busy = F.one_hot(chosen, 8).float().mean((0, 1))
            return made.square().mean() + (busy * torch.softmax(self.router(x), -1).mean(0)).sum()

    return Net(), (floats(BATCH, SEQ, WIDTH),), None


@entry
def messages_by_scatter() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor, edges: Tensor, of_graph: Tensor) -> Tensor:
            for _ in range(2):
                said = torch.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
                heard = torch.zeros_like(x).scatter_add(0, edges[1].unsqueeze(-1).expand_as(said), said)
                loudest = torch.zeros_like(x).scatter_reduce(
                    0, edges[1].unsqueeze(-1).expand_as(said), said, "amax", include_self=True
                )
                x = x + self.update(torch.cat([heard, loudest], -1))
            return x.new_zeros(4, WIDTH).index_add(0, of_graph, x)

    return Net(), (floats(32, WIDTH), tokens(2, 96, below=32, least=0), torch.arange(32) // 8), mean_square


@entry
def written_through_indices() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("memory", floats(40, WIDTH))

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            made = self.inner(x)
            kept = self.memory.index_put((at,), made)
            added = self.memory.clone().index_put_((at,), made, accumulate=True)
            copied = self.memory.index_copy(0, at, made) + self.memory.index_fill(0, at[:2], 0.5)
            kept[1:3, ::2] = 0.0
            return (kept * added + copied).square().mean() + made.masked_fill(made > 1, 0).sum()

    return Net(), (floats(BATCH, WIDTH), torch.randperm(40, generator=torch.Generator().manual_seed(1))[:BATCH]), None


@entry
def indexed_in_all_ways() -> Any:
    def taken(x: Tensor, at: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        parts = x[rows, at].mean() + x[:, 2:9:3].mean() + x[..., -1].mean() + x[None, :, at].mean()
        parts = parts + torch.take_along_dim(x, at.view(-1, 1, 1), 1).mean() + x.index_select(1, at).mean()
        parts = parts + x[at.unsqueeze(1), at.unsqueeze(0)].mean() + x.diagonal(dim1=0, dim2=1).mean()
        return parts + x.tril().mean() + x.narrow(1, 1, 4).unbind(1)[0].mean() + x.movedim(0, 1)[3].square().mean()

    return Inner(taken), (floats(BATCH, SEQ, WIDTH), tokens(BATCH, below=8, least=0)), None


@entry
def products_in_all_ways() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(floats(16, 16) / 4), nn.Parameter(floats(4, 16) / 4)
            self.core = nn.Parameter(floats(4, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            low = torch.einsum("bi,ri->br", x, self.b)
            mixed = torch.einsum("br,bs,rst->bt", low, low, self.core)
            chain = torch.linalg.multi_dot([x, self.a, self.a, self.b.T])
            whole = torch.kron(self.a[:4, :4], self.b[:, :4])
            outer = (
                torch.outer(x[0], x[1])
                + torch.addmm(self.a, self.a, self.a)
                + torch.baddbmm(self.a.unsqueeze(0), self.a.unsqueeze(0), self.a.unsqueeze(0))[0]
            )
            more = torch.tensordot(x, self.a, dims=([1], [0])) + x @ torch.matrix_power(self.a, 3)
            return mixed.mean() + chain.mean() + whole.square().mean() + outer.mean() + more.square().mean()

    return Net(), (floats(BATCH, 16),), None


@entry
def cholesky_whitening() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            x = x - x.mean(1, keepdim=True)
            spread = x.mT @ x / x.shape[1] + 0.5 * torch.eye(8, device=x.device)
            low = torch.linalg.cholesky(spread)
            white = torch.linalg.solve_triangular(low, x.mT, upper=False)
            return white.square().mean() + low.diagonal(dim1=-2, dim2=-1).log().sum(-1).mean()

    return Net(), (floats(BATCH, SEQ, WIDTH),), None


@entry
def gaussian_process() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.width = nn.Linear(WIDTH, 4), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.inner(x)
            far = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(-1)
            kernel = torch.exp(-far / self.width.square()) + 0.1 * torch.eye(len(x), device=x.device)
            return y @ torch.linalg.solve(kernel, y) + torch.logdet(kernel)

    return Net(), (floats(16, WIDTH), floats(16)), None


@entry
def spectral_filter() -> Any:
    """A layer that filters in the frequency domain, as FNet's and GFNet's do."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real, self.imaginary = nn.Parameter(floats(SEQ // 2 + 1, 32)), nn.Parameter(floats(SEQ // 2 + 1, 32))
            self.inner = nn.Linear(WIDTH, 32)

        def forward(self, x: Tensor) -> Tensor:
            made = torch.fft.rfft(self.inner(x), dim=1) * torch.complex(self.real, self.imaginary)
            return torch.fft.irfft(made, n=SEQ, dim=1)

    return Net(), (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def mixed_by_fourier() -> Any:
    return (
        Inner(lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real),
        (floats(BATCH, SEQ, WIDTH),),
        mean_square,
    )


@entry
def normalized_in_all_ways() -> Any:
    def normed(x: Tensor) -> Tensor:
        total = torch.linalg.vector_norm(x, 1, -1) + torch.linalg.vector_norm(x, torch.inf, -1) + x.norm(dim=-1)
        return total.mean() + F.normalize(x, p=3, dim=1).abs().mean() + torch.linalg.matrix_norm(x).mean()

    return Inner(normed), (floats(BATCH, SEQ, WIDTH),), None


@entry
def looked_up_in_bins() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.linspace(-2, 2, 15))
            self.table, self.inner = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.table(torch.searchsorted(self.edges, x))).mean(1)

    return Net(), (floats(BATCH, SEQ),), mean_square


@entry
def choices_and_limits() -> Any:
    def chosen(x: Tensor) -> Tensor:
        y = torch.where(x > 0, x, x.exp() - 1).clamp(-2, 2) + torch.maximum(x, x.flip(0)) + torch.fmod(x, 0.7)
        y = y + torch.lerp(x, x.roll(1, 0), 0.3) + torch.nan_to_num(x / x.abs()) + x.sign() * x.abs().sqrt()
        return y + torch.atan2(x, x + 3) + torch.special.expit(x) + torch.erf(x) + (1 - x) + torch.log1p(x.square())

    return Inner(chosen), (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def straight_through_rounding() -> Any:
    def rounded(x: Tensor) -> Tensor:
        code = torch.round(x * 4) / 4
        return x + (code - x).detach() + torch.remainder(x, 1.0) + x.floor().detach() * x + torch.trunc(x).detach()

    return Inner(rounded), (floats(BATCH, WIDTH),), mean_square


@entry
def vector_quantized() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
            self.codes = nn.Embedding(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            z = self.inner(x)
            far = z.square().sum(-1, keepdim=True) - 2 * z @ self.codes.weight.T + self.codes.weight.square().sum(-1)
            q = self.codes(far.argmin(-1))
            made = self.outer(z + (q - z).detach())
            return F.mse_loss(made, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())

    return Net(), (floats(BATCH, SEQ, WIDTH),), None


# Programs of an unusual form.


@dataclass
class Made:
    """What a net returns."""

    scores: Tensor
    hidden: tuple[Tensor, ...]
    nothing: None = None


@entry
def returns_a_dataclass() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Made:
            hidden = torch.tanh(self.one(x))
            return Made(self.two(hidden), (hidden, x))

    return Net(), (floats(BATCH, WIDTH), classes()), lambda made, aim: F.cross_entropy(made.scores, aim)


@entry
def returns_a_dict_with_none() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Any]:
            scores = self.two(torch.tanh(self.one(x))) * scale
            loss = None if labels is None else F.cross_entropy(scores, labels)
            return {"loss": loss, "scores": scores, "attentions": None, "parts": [x, None]}

    return Net(), {"x": floats(BATCH, WIDTH), "labels": classes(), "scale": 0.5}, None


@entry
def counts_in_buffers() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 32)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(32))
            self.register_buffer("last", torch.zeros(BATCH, 32), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            made = self.inner(x)
            out = (made - self.mean) * (1 + 0.1 * self.last)
            with torch.no_grad():
                self.seen += 1
                self.mean.lerp_(made.mean(0), 0.1)
                self.last.copy_(made)
            return out

    return Net(), (floats(BATCH, WIDTH),), mean_square


@entry
def parameters_unused_and_frozen() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(torch.relu(self.frozen(x)))

    return Net(), (floats(BATCH, WIDTH),), mean_square


class Reversed(torch.autograd.Function):
    """A layer whose gradient is turned around, as in domain-adversarial training (arXiv:1505.07818)."""

    @staticmethod
    def forward(context: Any, x: Tensor, scale: float) -> Tensor:
        context.scale = scale
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (x,) = context.saved_tensors
        return -context.scale * gradients[0] + 0.01 * x, None


@entry
def gradient_of_ones_own() -> Any:
    return Inner(lambda x: Reversed.apply(x, 0.5)), (floats(BATCH, WIDTH),), mean_square


@entry
def gradient_penalty_by_hooks() -> Any:
    def hooked(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda g: g.clamp(-0.01, 0.01))
        return x.tanh()

    return Inner(hooked), (floats(BATCH, WIDTH),), mean_square


@entry
def checkpoints_of_both_kinds() -> Any:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])
            self.more = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
            for block in self.more:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    return Net(), (floats(BATCH, WIDTH),), mean_square


@entry
def mapped_over_ensembles() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(floats(4, WIDTH, 32) / 8), nn.Parameter(floats(4, 32, 8) / 6)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            def member(first: Tensor, second: Tensor) -> Tensor:
                return torch.relu(x @ first) @ second

            scores = torch.vmap(member)(self.first, self.second)
            return F.cross_entropy(scores.flatten(0, 1), labels.repeat(4))

    return Net(), (floats(BATCH, WIDTH), classes()), None


@entry
def parameters_by_functional_call() -> Any:
    class Net(nn.Module):
        """One inner step of gradient descent, differentiated (MAML, arXiv:1703.03400)."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            slow = dict(self.inner.named_parameters())
            loss = F.mse_loss(torch.func.functional_call(self.inner, slow, (x,)), y)
            slopes = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), slopes, strict=True)}
            return F.mse_loss(torch.func.functional_call(self.inner, fast, (x.flip(0),)), y.flip(0))

    return Net(), (floats(BATCH, WIDTH), floats(BATCH, 1)), None


@entry
def equilibrium_by_iteration() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.zeros_like(x)
            for _ in range(6):
                z = torch.tanh(0.5 * self.inner(z) + x)
            return z

    return Net(), (floats(BATCH, WIDTH),), mean_square


@entry
def noise_and_permutations() -> Any:
    def noisy(x: Tensor) -> Tensor:
        x = x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[-1], device=x.device)
        kept = torch.bernoulli(torch.full_like(x, 0.8))
        gumbel = F.gumbel_softmax(x, tau=0.5, hard=True)
        return (x * kept * gumbel).sum(-1)

    return Inner(noisy), (floats(BATCH, WIDTH),), mean_square


@entry
def shuffled_patches() -> Any:
    def shuffled(x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[1], device=x.device)
        return x[:, order[: x.shape[1] // 2]]

    return Inner(shuffled), (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def integers_of_all_kinds() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, WIDTH)

        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            hashed = (a * 31 + b.long() * 17) % 61 + (c.to(torch.int64) & 3)
            return self.table(hashed).mean(1) * (a // 2).float().mean(1, keepdim=True)

    inputs = tokens(BATCH, 6, below=50), tokens(BATCH, 6, below=50).to(torch.int32), uniform(BATCH, 6).gt(0.5)
    return Net(), inputs, mean_square


@entry
def halves_and_doubles() -> Any:
    return (
        Inner(lambda x: (x.double().exp().sum(-1).log() + x.half().float().sum(-1)).float()),
        (floats(BATCH, WIDTH),),
        mean_square,
    )


@entry
def complex_rotations() -> Any:
    def turned(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        angle = torch.polar(torch.ones(16, device=x.device), torch.arange(16.0, device=x.device))
        return torch.view_as_real(z * angle).flatten(-2)

    return Inner(turned), (floats(BATCH, SEQ, WIDTH),), mean_square


@entry
def meshgrids_and_windows() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 16)

        def forward(self, x: Tensor) -> Tensor:
            rows, columns = torch.meshgrid(
                torch.linspace(-1, 1, 8, device=x.device), torch.linspace(-1, 1, 8, device=x.device), indexing="ij"
            )
            grid = torch.stack([rows, columns]).expand(x.shape[0], -1, -1, -1)
            y = self.inner(torch.cat([x, grid], 1).permute(0, 2, 3, 1))
            windows = y.unfold(1, 4, 2).unfold(2, 4, 2)
            return windows.amax((-1, -2)) + torch.hann_window(16, device=x.device)

    return Net(), (floats(BATCH, 1, 8, 8),), mean_square


@entry
def stacks_and_splits() -> Any:
    def parts(x: Tensor) -> Tensor:
        a, b, c = x.split([8, 8, 16], -1)
        joined = torch.hstack([a, b, c]) + torch.cat([c, a, b], -1)
        tiles = torch.tile(a, (1, 4)) + b.repeat_interleave(4, 1) + torch.stack([a, b, a, b], -1).flatten(1)
        return joined + tiles + F.pad(c, (8, 8), value=1.0) + torch.block_diag(*c.unsqueeze(1)).sum()

    return Inner(parts), (floats(BATCH, WIDTH),), mean_square


@entry
def layers_of_scalars() -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0), Lambda(lambda x: x.sigmoid()))
    return model, (floats(BATCH, WIDTH), uniform(BATCH).round()), F.binary_cross_entropy
