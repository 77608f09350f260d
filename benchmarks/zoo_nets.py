"""Nets for sequences, graphs, tables and ads that are no transformers' type, for `coverage.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.nets import DLRM, MoE, WithLoss, mlp
from benchmarks.zoo_entry import BATCH, WIDTH, classes, entry, floats, mean_square, tokens, uniform


@entry
def perceptron() -> Any:
    return mlp([WIDTH, 4 * WIDTH, 4 * WIDTH, 10]), (floats(BATCH, WIDTH), classes()), F.cross_entropy


@entry
def dilated_causal_conv() -> Any:
    class Layer(nn.Module):
        def __init__(self, before: int, after: int, dilation: int) -> None:
            super().__init__()
            self.pad = 2 * dilation
            self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(before, after, 3, dilation=dilation))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(F.pad(x, (self.pad, 0))))

    model = nn.Sequential(Layer(8, 32, 1), Layer(32, 32, 2), Layer(32, 32, 4), nn.Conv1d(32, 8, 1))
    return model, (floats(BATCH, 8, 32), floats(BATCH, 8, 32)), F.mse_loss


@entry
def wave_net() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 32)
            self.gates = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=2**i) for i in range(3))
            self.outs = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(3))
            self.head = nn.Conv1d(32, 32, 1)

        def forward(self, sound: Tensor) -> Tensor:
            x = self.embed(sound).transpose(1, 2)
            skips = torch.zeros_like(x)
            for gate, out in zip(self.gates, self.outs, strict=True):
                a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
                made = out(torch.tanh(a) * torch.sigmoid(b))
                x, skips = x + made, skips + made
            return self.head(torch.relu(skips))

    sound = tokens(BATCH, 32, below=32, least=0)
    return Net(), (sound, tokens(BATCH, 32, below=32, least=0)), F.cross_entropy


@entry
def dlrm() -> Any:
    model = WithLoss(DLRM(13, [64, 128, 40, 1000], 16, [64], [64, 32]))
    clicked = (uniform(BATCH) > 0.5).float()
    return model, (floats(BATCH, 13), tokens(BATCH, 4, 3, below=40, least=0), clicked), lambda out: out


@entry
def dlrm_mean_bags() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = nn.EmbeddingBag(128, WIDTH, mode="mean")
            self.weighted = nn.EmbeddingBag(128, WIDTH, mode="sum")
            self.head = nn.Linear(2 * WIDTH, 1)

        def forward(self, values: Tensor, weights: Tensor) -> Tensor:
            return self.head(torch.cat([self.mean(values), self.weighted(values, per_sample_weights=weights)], 1))

    return Net(), (tokens(BATCH, 5, below=128), uniform(BATCH, 5)), mean_square


@entry
def two_towers() -> Any:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(200, WIDTH), nn.Embedding(300, WIDTH)
            self.user, self.item = mlp([WIDTH, 128, 32]), mlp([2 * WIDTH, 128, 32])
            self.temperature = nn.Parameter(torch.tensor(0.1))

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            u = F.normalize(self.user(self.users(users)), dim=-1)
            v = F.normalize(self.item(self.items(items).flatten(1)), dim=-1)
            scores = u @ v.T / self.temperature
            return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))

    return Towers(), (tokens(BATCH, below=200), tokens(BATCH, 2, below=300)), None


@entry
def deep_fm() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.factors = nn.Embedding(256, 1), nn.Embedding(256, 16)
            self.deep = mlp([10 * 16, 64, 1])

        def forward(self, fields: Tensor, clicked: Tensor) -> Tensor:
            v = self.factors(fields)
            crossed = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
            logit = self.first(fields).sum((1, 2)) + crossed + self.deep(v.flatten(1)).squeeze(1)
            return F.binary_cross_entropy_with_logits(logit, clicked)

    return Net(), (tokens(BATCH, 10, below=256), (uniform(BATCH) > 0.5).float()), None


@entry
def matrix_factorization() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(512, 32), nn.Embedding(512, 32)
            self.bias = nn.Embedding(512, 1)

        def forward(self, pairs: Tensor) -> Tensor:
            u, i = pairs.unbind(1)
            return (self.users(u) * self.items(i)).sum(1) + self.bias(i).squeeze(1)

    return Net(), (tokens(64, 2, below=512), uniform(64)), F.mse_loss


NODES, EDGES = 32, 96


@entry
def gcn_dense() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            degree = adjacency.abs().sum(-1, keepdim=True).clamp(min=1)
            x = torch.relu(adjacency @ self.first(x) / degree)
            return (adjacency @ self.second(x)) / degree

    return Net(), (floats(NODES, WIDTH), uniform(NODES, NODES), tokens(NODES, below=8, least=0)), F.cross_entropy


@entry
def gcn_scatter() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)

        def spread(self, x: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            total = torch.zeros_like(x).index_add(0, target, x[source])
            degree = torch.zeros(x.shape[0], device=x.device).scatter_add(
                0, target, torch.ones_like(target, dtype=x.dtype)
            )
            return total / degree.clamp(min=1).unsqueeze(1)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = torch.relu(self.spread(self.first(x), edges))
            return self.spread(self.second(x), edges)

    edges = tokens(2, EDGES, below=NODES, least=0)
    return Net(), (floats(NODES, WIDTH), edges, tokens(NODES, below=8, least=0)), F.cross_entropy


@entry
def gat_dense() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH, bias=False)
            self.left, self.right = nn.Linear(16, 1), nn.Linear(16, 1)
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            h = self.project(x).view(-1, 4, 16).transpose(0, 1)
            scores = F.leaky_relu(self.left(h) + self.right(h).transpose(1, 2), 0.2)
            weights = torch.softmax(scores.masked_fill(adjacency < 0.5, -1e9), -1)
            return self.head(F.elu((weights @ h).transpose(0, 1).reshape(-1, WIDTH)))

    return Net(), (floats(NODES, WIDTH), uniform(NODES, NODES), tokens(NODES, below=8, least=0)), F.cross_entropy


@entry
def gat_scatter() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)
            self.head = nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            h = self.project(x)
            scores = F.leaky_relu(self.score(torch.cat([h[source], h[target]], 1)).squeeze(1))
            most = torch.full((x.shape[0],), -1e9, device=x.device).scatter_reduce(0, target, scores, "amax")
            weights = (scores - most.detach()[target]).exp()
            total = torch.zeros_like(most).index_add(0, target, weights)
            mixed = torch.zeros_like(h).index_add(0, target, h[source] * (weights / total[target]).unsqueeze(1))
            return self.head(F.elu(mixed))

    edges = tokens(2, EDGES, below=NODES, least=0)
    return Net(), (floats(NODES, WIDTH), edges, tokens(NODES, below=8, least=0)), F.cross_entropy


class Recurrent(nn.Module):
    """Embeddings, a recurrent net, logits."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(96, 32), inner, nn.Linear(width, 96)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.embed(text))[0]).flatten(0, 1), labels.flatten())


@entry
def lstm() -> Any:
    inner = nn.LSTM(32, WIDTH, num_layers=2, batch_first=True)
    return Recurrent(inner, WIDTH), (tokens(BATCH, 12), tokens(BATCH, 12)), None


@entry
def gru_two_ways() -> Any:
    inner = nn.GRU(32, 32, batch_first=True, bidirectional=True)
    return Recurrent(inner, 64), (tokens(BATCH, 12), tokens(BATCH, 12)), None


@entry
def lstm_cells() -> Any:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(32, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor]:
            state, outs = None, []
            for step in range(x.shape[1]):
                state = self.cell(x[:, step], state)
                outs.append(state[0])
            return (torch.stack(outs, 1),)

    return Recurrent(Loop(), WIDTH), (tokens(BATCH, 6), tokens(BATCH, 6)), None


@entry
def linear_attention() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 96)

        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(text)
            q, k, v = (t.unflatten(-1, (4, 16)) for t in self.qkv(x).chunk(3, -1))
            q, k = F.elu(q) + 1, F.elu(k) + 1
            sums = torch.einsum("bshd,bshe->bshde", k, v).cumsum(1)
            scale = torch.einsum("bshd,bshd->bsh", q, k.cumsum(1)).unsqueeze(-1)
            made = torch.einsum("bshd,bshde->bshe", q, sums) / (scale + 1e-3)
            return F.cross_entropy(self.head(x + made.flatten(2)).flatten(0, 1), labels.flatten())

    return Net(), (tokens(BATCH, 16), tokens(BATCH, 16)), None


@entry
def large_vocabulary() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(8190, 32), mlp([32, 64, 32]), nn.Linear(32, 8190)

        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.inner(self.embed(text)))
            return F.cross_entropy(logits.view(-1, 8190), labels.view(-1), label_smoothing=0.1)

    return Net(), (tokens(BATCH, 16, below=8190), tokens(BATCH, 16, below=8190)), None


@entry
def triplets() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = mlp([WIDTH, 128, 32])

        def forward(self, a: Tensor, p: Tensor, n: Tensor) -> Tensor:
            return F.triplet_margin_loss(self.encoder(a), self.encoder(p), self.encoder(n), margin=1.0)

    return Net(), (floats(BATCH, WIDTH), uniform(BATCH, WIDTH), floats(2 * BATCH, WIDTH)[BATCH:].clone()), None


@entry
def torch_transformer() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(96, WIDTH)
            self.inner = nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True)
            self.head = nn.Linear(WIDTH, 96)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
            made = self.inner(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
            return self.head(made).transpose(1, 2)

    return Net(), (tokens(BATCH, 12), tokens(BATCH, 10), tokens(BATCH, 10)), F.cross_entropy


@entry
def encoder_layers() -> Any:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 128, dropout=0.0, activation="gelu", batch_first=False, norm_first=True
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (floats(16, BATCH, WIDTH),), mean_square


@entry
def neural_ode() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = 0.25
            for _ in range(4):
                a = self.field(x)
                b = self.field(x + h / 2 * a)
                c = self.field(x + h / 2 * b)
                x = x + h / 6 * (a + 2 * b + 2 * c + self.field(x + h * c))
            return x

    return Net(), (floats(32, 16), floats(32, 16)), F.mse_loss


@entry
def hyper_network() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker = mlp([8, 64, 16 * 16 + 16])

        def forward(self, x: Tensor, task: Tensor) -> Tensor:
            weight, bias = self.maker(task).split([256, 16], -1)
            return torch.baddbmm(bias.unsqueeze(1), x, weight.view(-1, 16, 16))

    return Net(), (floats(BATCH, 4, 16), floats(BATCH, 8)), mean_square


@entry
def policy_gradient() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.policy, self.value = (
                mlp([16, WIDTH], last=nn.ReLU),
                nn.Linear(WIDTH, 6),
                nn.Linear(WIDTH, 1),
            )

        def forward(self, x: Tensor, action: Tensor, old: Tensor, reward: Tensor) -> Tensor:
            h = self.trunk(x)
            chances = F.log_softmax(self.policy(h), -1)
            value = self.value(h).squeeze(-1)
            advantage = (reward - value).detach()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
            ratio = (chances.gather(1, action.unsqueeze(1)).squeeze(1) + old.abs()).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            entropy = -(chances.exp() * chances).sum(-1).mean()
            return -gain + 0.5 * F.smooth_l1_loss(value, reward) - 0.01 * entropy

    return Net(), (floats(32, 16), tokens(32, below=6, least=0), uniform(32), floats(32)), None


@entry
def conditional_random_field() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.emit = nn.Embedding(96, 32), nn.Linear(32, 6)
            self.moves = nn.Parameter(torch.zeros(6, 6))

        def forward(self, text: Tensor, tags: Tensor) -> Tensor:
            scores = self.emit(self.embed(text))
            alpha = scores[:, 0]
            for step in range(1, scores.shape[1]):
                alpha = torch.logsumexp(alpha.unsqueeze(2) + self.moves, 1) + scores[:, step]
            gold = scores.gather(2, tags.unsqueeze(2)).sum((1, 2)) + self.moves[tags[:, :-1], tags[:, 1:]].sum(1)
            return (torch.logsumexp(alpha, 1) - gold).mean()

    return Net(), (tokens(BATCH, 8), tokens(BATCH, 8, below=6, least=0)), None


@entry
def straight_through_quantized() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
            self.codes = nn.Embedding(32, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            nearest = torch.cdist(h, self.codes.weight).argmin(-1)
            code = self.codes(nearest)
            self_loss = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
            h = h + (code - h).detach()
            weight = self.second.weight
            step = weight.abs().max().detach() / 7
            weight = weight + ((weight / step).round().clamp(-8, 7) * step - weight).detach()
            return F.linear(h, weight, self.second.bias).square().mean() + self_loss

    return Net(), (floats(32, WIDTH),), None


@entry
def mixture_of_softmaxes() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.prior = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 3)
            self.latent, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 96)

        def forward(self, text: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(text)
            parts = torch.softmax(self.head(torch.tanh(self.latent(x)).unflatten(-1, (3, WIDTH))), -1)
            mixed = (torch.softmax(self.prior(x), -1).unsqueeze(-1) * parts).sum(-2)
            return F.nll_loss(mixed.clamp(min=1e-8).log().flatten(0, 1), labels.flatten())

    return Net(), (tokens(BATCH, 12), tokens(BATCH, 12)), None


@entry
def state_space_by_convolution() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.out = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
            self.decay, self.gain = nn.Parameter(uniform(WIDTH, 4)), nn.Parameter(floats(WIDTH, 4))

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            times = torch.arange(length, device=x.device)
            kernel = (self.gain.unsqueeze(-1) * torch.exp(-self.decay.unsqueeze(-1) * times)).sum(1)
            h = F.pad(self.enter(x).transpose(1, 2), (length - 1, 0))
            made = F.conv1d(h, kernel.flip(-1).unsqueeze(1), groups=WIDTH)
            return self.out(F.gelu(made.transpose(1, 2)))

    return Net(), (floats(BATCH, 16, 16), floats(BATCH, 16, 16)), F.mse_loss


@entry
def experts_by_capacity() -> Any:
    return MoE(96, 1, WIDTH, 128, 4, 4), (tokens(BATCH, 16), tokens(BATCH, 16)), lambda loss: loss
