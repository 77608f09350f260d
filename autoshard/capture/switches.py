"""Capture switches: named ways of computing the same numbers that GSPMD partitions better.

A switch is a mode. It is on while a program is captured and again while the plan for it runs (`Program.switches` says
which), and it never edits the model: torch functions are replaced on their way in (`TorchFunctionMode`), and only for
tensors on an XLA device.

| switch | what it replaces | why (measured on the CPU, TPU and GPU partitioners) |
|---|---|---|
| `linear` | `F.linear`, transformers' `Conv1D`: a dot that keeps the input's dims, bias added after | a reshape would merge batch and sequence; a bias inside hides the partial sum from a reduce-scatter |
| `matmul` | `torch.matmul`, `@`, two-operand `torch.einsum`, `F.scaled_dot_product_attention` | torch merges batch and heads for `bmm` |
| `norm` | layer, RMS, group, instance and batch norm as means and `rsqrt`; weight norm as a norm | torch_xla makes `batch-norm-training` of them, which is gathered; it has no lowering of weight norm |
| `cross_entropy` | `F.cross_entropy`: class scores masked by comparing, on the unflattened logits | the loss flattens batch and sequence |
| `interpolate` | `F.interpolate`: nearest by whole factors as a broadcast, linear, cubic and area ones as products with their weights; 2-d grid sampling as gathers, affine grids as products | torch_xla has no lowering of the gradients |
| `embedding` | `F.embedding`, its gradient, and `F.embedding_bag` as embeddings that are summed | torch_xla flattens the indices; it cannot lower a bag |
| `groups` | convolutions of groups with several features each, transposed ones of groups, as a product per tap or a convolution per group | those of CPU and GPU gather what such a convolution reads, and end the process on gradients of transposed ones |
| `scan` | torch_xla's `scan` and `scan_layers`, unrolled | what a loop carries has one sharding, and nothing in its body can be annotated |
| `activation` | `F.elu`, `F.selu`, `F.celu` as `expm1` where negative | torch_xla's gradient of these reads the input as if it were the result, and is wrong |
| `index` | `x[mask] = value` as a choice | torch_xla would look for the true ones |
| `losses` | multi-margin, Gaussian and CTC losses, `torch.cdist` | torch_xla has no lowering of them, or of their gradients; one looks at values |
| `pools` | adaptive pools whose windows differ | torch_xla has no lowering |
| `checkpoint` | `torch.utils.checkpoint` of both kinds | torch's has no module for XLA devices and no barrier, which XLA needs to compute again |
| `checks` | distributions' look at their arguments is off by default | it reads values |
| `transformers` | mask code believes it is traced; `use_cache` is off | masks would be read; a cache adds ops to a training step |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from autoshard.capture import exact, interpolation, losses, ops, pools
from autoshard.capture.checkpoints import recomputed
from autoshard.capture.device import is_xla
from autoshard.capture.grouped import grouped_convolution, grouped_transposed
from autoshard.capture.loops import unrolled
from autoshard.capture.transformers_library import transformers_traced

DEFAULT: tuple[str, ...] = (
    "linear",
    "matmul",
    "norm",
    "cross_entropy",
    "embedding",
    "interpolate",
    "groups",
    "scan",
    "activation",
    "index",
    "losses",
    "pools",
    "checkpoint",
    "checks",
    "transformers",
)

Handler = Callable[..., Any]
_HANDLERS: dict[str, dict[Any, Handler]] = {name: {} for name in DEFAULT}
_UNTOUCHED = NotImplemented
"""What a handler returns when the call is none that it can do better."""


def replaces(switch: str, *functions: Any) -> Callable[[Handler], Handler]:
    """Register a handler for calls of `functions` under `switch`; it may return `_UNTOUCHED`."""

    def register(handler: Handler) -> Handler:
        _HANDLERS[switch].update(dict.fromkeys(functions, handler))
        return handler

    return register


@contextlib.contextmanager
def active(names: Sequence[str] = DEFAULT, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Have these switches on.

    Args:
        names: of switches, as in `DEFAULT`.
        model: the one that runs; the `transformers` switch turns off its `config.use_cache` meanwhile.

    Raises:
        ValueError: a name is no switch.
    """
    unknown = [name for name in names if name not in _HANDLERS]
    if unknown:
        raise ValueError(f"no capture switch is called {unknown[0]!r}; there are {', '.join(_HANDLERS)}")
    handlers = {function: handler for name in names for function, handler in _HANDLERS[name].items()}
    with contextlib.ExitStack() as stack:
        # Of nodes that are ready, autograd takes the one that was made last, and each thread counts for itself: were
        # gradients of gradients made on a thread of the device's, their order would depend on what ran there before.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if "transformers" in names:
            stack.enter_context(transformers_traced(model))
        if "checkpoint" in names:
            stack.enter_context(recomputed())
        if "checks" in names:
            stack.enter_context(_unchecked())
        if "scan" in names:
            stack.enter_context(unrolled())
        if "linear" in names:
            stack.enter_context(_conv1d())
        stack.enter_context(_Replace(handlers))
        yield


class _Replace(TorchFunctionMode):  # type: ignore[misc]
    """Sends calls to handlers; remembers which tensors are a flattened view of which."""

    def __init__(self, handlers: dict[Any, Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FLATTENS:
            return _remember_flattened(func, args, kwargs)
        if func is torch.Tensor.backward:  # what checkpoints compute again runs in here
            with self:
                return _backward(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self, body_of_functional():
                return func(*args, **kwargs)
        handler = self.handlers.get(func)
        if handler is not None and any(_on_xla(a) for a in (*args, *kwargs.values())):
            result = handler(*args, **kwargs)
            if result is not _UNTOUCHED:
                return result
        return func(*args, **kwargs)


def _backward(
    loss: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """`Tensor.backward`, which would ask the mode again."""
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Distributions do not look at the values of their parameters and samples, unless they were told to."""
    distribution = torch.distributions.Distribution
    default = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(default)


def _on_xla(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_xla(value)


@contextlib.contextmanager
def body_of_functional() -> Iterator[None]:
    """Let a Python function of torch.nn.functional run its body under a function mode, instead of asking it again."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    saved = {name: getattr(F, name) for name in names}
    try:
        for name in names:
            setattr(F, name, lambda *_: False)
        yield
    finally:
        for name, function in saved.items():
            setattr(F, name, function)


# Dots.


def _autocast() -> bool:
    return bool(torch.is_autocast_enabled("xla"))  # without torch_xla too, see `autocast.py`


def _same_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What autocast would do to the operands of a dot."""
    if _autocast():
        dtype = torch.get_autocast_dtype("xla")
        return [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    return list(tensors)


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@replaces("linear", F.linear)
def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if weight.dim() != 2 or input.dim() < 1:
        return _UNTOUCHED
    if input.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"linear of {weight.shape[1]} input features was given a tensor of shape {tuple(input.shape)}, "
            f"whose last dim is {input.shape[-1]}"
        )
    return _project(input, weight, bias, "oi")


def _project(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, weight_dims: str) -> torch.Tensor:
    free = _LETTERS[15 : 15 + input.dim() - 1]
    input, weight = _same_dtype(input, weight)
    out = ops.einsum(f"{free}i,{weight_dims}->{free}o", input, weight)
    return out if bias is None else out + bias.to(out.dtype)


@contextlib.contextmanager
def _conv1d() -> Iterator[None]:
    """transformers' Conv1D flattens its input before `addmm`: replace the class's forward meanwhile."""
    utilities = sys.modules.get("transformers.pytorch_utils")
    if utilities is None:
        yield
        return
    native = utilities.Conv1D.forward

    def forward(self: Any, x: torch.Tensor) -> Any:
        if not _on_xla(x) or x.shape[-1] != self.weight.shape[0]:
            return native(self, x)
        return _project(x, self.weight, self.bias, "io")

    utilities.Conv1D.forward = forward
    try:
        yield
    finally:
        utilities.Conv1D.forward = native


@replaces("matmul", torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
def _matmul(input: torch.Tensor, other: torch.Tensor) -> Any:
    a, b = input, other
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return _UNTOUCHED
    if a.dim() < 2 or b.dim() < 2 or max(a.dim(), b.dim()) < 3:
        return _UNTOUCHED
    if a.shape[-1] != b.shape[-2] or (a.dtype != b.dtype and not _autocast()):
        return _UNTOUCHED
    rank = max(a.dim(), b.dim()) - 2
    batch = _LETTERS[:rank]
    a, a_batch = _drop_broadcast(a, b, batch)
    b, b_batch = _drop_broadcast(b, input, batch)
    if any(input.shape[-3 - n] == 1 == other.shape[-3 - n] for n in range(min(input.dim(), other.dim()) - 2)):
        a, b, a_batch, b_batch = input, other, batch[rank - input.dim() + 2 :], batch[rank - other.dim() + 2 :]
    sizes: dict[str, int] = {}
    for letter, size in (*zip(a_batch, a.shape[:-2], strict=True), *zip(b_batch, b.shape[:-2], strict=True)):
        if sizes.setdefault(letter, size) != size:
            return _UNTOUCHED
    a, b = _same_dtype(a, b)
    return ops.einsum(f"{a_batch}mk,{b_batch}kn->{batch}mn".translate(_MATRIX), a, b)


_MATRIX = str.maketrans({"m": "M", "k": "K", "n": "N"})


def _drop_broadcast(x: torch.Tensor, other: torch.Tensor, batch: str) -> tuple[torch.Tensor, str]:
    """Drop the batch dims of size 1 that `other` has larger: the dot broadcasts over what one operand lacks."""
    kept = batch[len(batch) - (x.dim() - 2) :]
    for position in reversed(range(x.dim() - 2)):
        from_right = x.dim() - position
        if x.shape[position] == 1 and other.dim() >= from_right and other.shape[-from_right] != 1:
            x, kept = x.squeeze(position), kept[:position] + kept[position + 1 :]
    return x, kept


@replaces("matmul", torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation:
        return _UNTOUCHED
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != 2:
        return _UNTOUCHED
    if not arrow:
        out = "".join(sorted(i for i in set(left) - {","} if left.count(i) == 1))
    a, b = parts
    if any(len(set(part)) != len(part) for part in (a, b, out)) or len(a) != operands[0].dim():
        return _UNTOUCHED
    if len(b) != operands[1].dim() or any((i in a) + (i in b) + (i in out) < 2 for i in set(a + b + out)):
        return _UNTOUCHED
    sizes = dict(zip(a, operands[0].shape, strict=True))
    if any(sizes.get(i, size) != size for i, size in zip(b, operands[1].shape, strict=True)):
        return _UNTOUCHED
    x, y = _same_dtype(*operands)
    return ops.einsum(f"{a},{b}->{out}", x, y)


@replaces("matmul", F.scaled_dot_product_attention)
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.dim() < 3 or key.shape[:-3] != query.shape[:-3]:
        return _UNTOUCHED
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = _matmul(query * scale, key.transpose(-2, -1))
    if scores is _UNTOUCHED:
        return _UNTOUCHED
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return _matmul(weights.to(value.dtype), value)


# Norms.


def _standardized(x: torch.Tensor, dims: Sequence[int], eps: float) -> torch.Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision is normalized in float32, as torch's kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _scaled(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


@replaces("norm", F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    dims = list(range(-len(normalized_shape), 0))
    if tuple(input.shape[dims[0] :]) != tuple(normalized_shape):
        return _UNTOUCHED
    return _scaled(_standardized(_wide(input), dims, eps), weight, bias).to(input.dtype)


@replaces("norm", F.rms_norm, torch.rms_norm)
def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    x, dims = _wide(input), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    x = (x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)).to(input.dtype)
    return x if weight is None else x * weight


def _per_channel(t: torch.Tensor | None, rank: int) -> torch.Tensor | None:
    return None if t is None else t.view(-1, *[1] * (rank - 2))


@replaces("norm", F.group_norm, torch.group_norm)
def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if input.dim() < 2 or input.shape[1] % num_groups:
        return _UNTOUCHED
    x = _wide(input).reshape(input.shape[0], num_groups, input.shape[1] // num_groups, *input.shape[2:])
    x = _standardized(x, list(range(2, x.dim())), eps).reshape(input.shape)
    return _scaled(x, _per_channel(weight, input.dim()), _per_channel(bias, input.dim())).to(input.dtype)


@replaces("norm", F.instance_norm)
def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if input.dim() < 3:
        return _UNTOUCHED
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    x, dims = _wide(input), list(range(2, input.dim()))
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    variance = (centered * centered).mean(dims, keepdim=True)
    _average_statistics(running_mean, running_var, mean, variance, math.prod(input.shape[2:]), momentum)
    out = centered * torch.rsqrt(variance + eps)
    return _scaled(out, _per_channel(weight, input.dim()), _per_channel(bias, input.dim())).to(input.dtype)


@torch.no_grad()  # type: ignore[untyped-decorator]
def _average_statistics(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: int,
    momentum: float,
) -> None:
    """Move running statistics, `[C]`, towards those of a batch, `[N or 1, C, 1, ...]`, each of `count` numbers."""
    if running_mean is None or running_var is None:
        return
    unbiased = variance.detach() * (count / max(count - 1, 1))
    for running, now in ((running_mean, mean.detach()), (running_var, unbiased)):
        running.mul_(1 - momentum).add_(now.flatten(1).mean(0).to(running.dtype), alpha=momentum)


@replaces("norm", F.batch_norm)
def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    rank = input.dim()
    x, dims = _wide(input), [0, *range(2, rank)]
    if training:
        mean = x.mean(dims, keepdim=True)
        centered = x - mean
        variance = (centered * centered).mean(dims, keepdim=True)
        _average_statistics(running_mean, running_var, mean, variance, input.numel() // input.shape[1], momentum)
    elif running_mean is None or running_var is None:
        return _UNTOUCHED
    else:
        shape = (1, -1, *[1] * (rank - 2))
        centered, variance = x - running_mean.view(shape), running_var.view(shape)
    out = centered * torch.rsqrt(variance + eps)
    return _scaled(out, _per_channel(weight, rank), _per_channel(bias, rank)).to(input.dtype)


def _adaptive_largest(rank: int, input: torch.Tensor, output_size: Any, return_indices: bool = False) -> Any:
    return _UNTOUCHED if return_indices else pools.adaptive_largest(input, output_size, rank)


replaces("norm", torch._weight_norm)(exact.weight_norm)
replaces("activation", F.elu)(exact.elu)
replaces("activation", F.selu, torch.selu)(exact.selu)
replaces("activation", F.celu, torch.celu)(exact.celu)
replaces("activation", F.rrelu, torch.rrelu)(exact.rrelu)
replaces("index", torch.Tensor.__setitem__)(exact.masked_write)
replaces("losses", F.multi_margin_loss)(losses.multi_margin)
replaces("losses", F.gaussian_nll_loss)(losses.gaussian_nll)
replaces("losses", torch.cdist)(losses.cdist)
replaces("losses", torch.linalg.solve)(losses.solve)
replaces("losses", torch.logdet, torch.Tensor.logdet)(losses.logdet)
replaces("losses", torch.slogdet, torch.Tensor.slogdet, torch.linalg.slogdet)(losses.slogdet)
replaces("losses", F.ctc_loss)(losses.ctc)
for _rank, _mean in enumerate((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), 1):
    replaces("pools", _mean)(partial(pools.adaptive_average, rank=_rank))
for _rank, _largest in enumerate((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), 1):
    replaces("pools", _largest)(partial(_adaptive_largest, _rank))


# Loss and embedding.

_FLATTENS = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten})


def _remember_flattened(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a view; if it merges leading dims of an XLA tensor, the result knows what it was made of."""
    out, source = func(*args, **kwargs), args[0] if args else None
    if isinstance(source, torch.Tensor) and _on_xla(out) and out.dim() in (1, 2) and out.dim() < source.dim():
        kept = source.shape[-1:] if out.dim() == 2 else ()
        if out.shape[1:] == kept and out.shape[0] == math.prod(source.shape[: source.dim() - len(kept)]):
            out._autoshard_unflattened = source
    return out


def _unflattened(x: torch.Tensor) -> torch.Tensor:
    source: torch.Tensor = getattr(x, "_autoshard_unflattened", x)
    return source


@replaces("cross_entropy", F.cross_entropy)
def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if weight is not None or label_smoothing or size_average is not None or reduce is not None:
        return _UNTOUCHED
    if target.is_floating_point() or input.dim() != 2 or target.dim() != 1 or input.shape[0] != target.shape[0]:
        return _UNTOUCHED
    logits, labels = _unflattened(input), _unflattened(target)
    if logits.shape[:-1] != labels.shape:
        logits, labels = input, target
    scores = torch.log_softmax(_wide(logits), -1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    hit = classes == labels.unsqueeze(-1)
    counted = labels != ignore_index
    if 0 <= ignore_index < logits.shape[-1]:
        hit = hit & counted.unsqueeze(-1)
    loss = -torch.where(hit, scores, 0.0).sum(-1)
    if reduction == "none":
        return loss.reshape(target.shape)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / counted.sum()


@replaces("embedding", F.embedding)
def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse or input.dim() == 0 or not _on_xla(input):
        return _UNTOUCHED
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return ops.embedding(weight, input, padding_idx)


@replaces("embedding", F.embedding_bag)
def _embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        return _UNTOUCHED
    rows = _embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if rows is _UNTOUCHED or (input.dim() == 2) == (offsets is not None):
        return _UNTOUCHED
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == "max":
        return _largest_in_bags(rows, input, offsets, None if padding_idx is None else padding_idx % weight.shape[0])
    counted = torch.ones_like(input, dtype=rows.dtype)
    if padding_idx is not None:
        counted = (input != padding_idx % weight.shape[0]).to(rows.dtype)
        rows = rows * counted.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(1), counted.sum(1)
    else:
        bag = _bags(input, starts := offsets[:-1] if include_last_offset else offsets)
        total = rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows)
        count = rows.new_zeros(len(starts)).index_add(0, bag, counted)
    return total if mode == "sum" else total / count.clamp(min=1).unsqueeze(-1)


def _bags(input: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The bag of each element."""
    return (torch.arange(len(input), device=input.device).unsqueeze(1) >= starts).sum(1) - 1


def _largest_in_bags(rows: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor | None, padding: int | None) -> Any:
    """Per feature the largest of each bag's rows, 0 where there are none; equal rows share the gradient."""
    if offsets is not None:
        return _UNTOUCHED
    if padding is not None:
        rows = torch.where((input == padding).unsqueeze(-1), -math.inf, rows)
    largest = rows.amax(1)
    return largest if padding is None else torch.where(largest == -math.inf, 0.0, largest)


# Convolutions.


def _convolves(*functions: Any) -> None:
    for rank, function in enumerate(functions, 1):
        replaces("groups", function)(partial(_convolution, function, rank))


def _convolution(
    convolve: Any,
    rank: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if groups == 1 or weight.shape[1] == 1 or input.dim() != rank + 2 or isinstance(padding, str):
        return _UNTOUCHED
    if input.shape[1] != groups * weight.shape[1] or weight.shape[0] % groups:
        return _UNTOUCHED  # torch says what is wrong
    stride, padding, dilation = (
        list(value) * (rank // len(value)) if isinstance(value, tuple | list) else [value] * rank
        for value in (stride, padding, dilation)
    )
    input, weight = _same_dtype(input, weight)
    out = grouped_convolution(input, weight, stride, padding, dilation, groups, convolve)
    return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * rank)


_convolves(F.conv1d, F.conv2d, F.conv3d)


def _transposed(
    convolve: Any,
    rank: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if groups == 1 or input.dim() != rank + 2 or input.shape[1] != weight.shape[0] or weight.shape[0] % groups:
        return _UNTOUCHED
    stride, padding, output_padding, dilation = (
        list(value) * (rank // len(value)) if isinstance(value, tuple | list) else [value] * rank
        for value in (stride, padding, output_padding, dilation)
    )
    input, weight = _same_dtype(input, weight)
    out = grouped_transposed(input, weight, stride, padding, output_padding, dilation, groups, convolve)
    return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * rank)


for _rank, _function in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1):
    replaces("groups", _function)(partial(_transposed, _function, _rank))


# Interpolation.

_AVERAGES = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


@replaces("interpolate", F.interpolate)
def _interpolate(
    input: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    rank = input.dim() - 2
    sizes = _per_dim(size, rank)
    factors = _per_dim(scale_factor, rank)
    if mode == "area" and rank in (1, 2, 3) and sizes is not None and factors is not None:
        into = [
            new or math.floor(old * factor) for new, old, factor in zip(sizes, input.shape[2:], factors, strict=True)
        ]
        pooled = pools.adaptive_average(input, into, rank)
        return (_AVERAGES[rank - 1](input, into)) if pooled is _UNTOUCHED else pooled
    if antialias or rank < 1 or sizes is None or factors is None:
        return _UNTOUCHED
    extents = input.shape[2:]
    into = [new or math.floor(old * (factor or 1)) for new, old, factor in zip(sizes, extents, factors, strict=True)]
    exact = [None if recompute_scale_factor else factor for factor in factors]
    for dim, (new, old, factor) in enumerate(zip(into, extents, exact, strict=True), 2):
        if mode in ("nearest", "nearest-exact"):
            input = interpolation.nearest(input, dim, new, factor, mode == "nearest-exact")
        elif new != old:
            weights = interpolation.weights_of(mode, old, new, factor, bool(align_corners), input)
            if weights is None:
                return _UNTOUCHED
            input = _matmul(input.transpose(dim, -1), weights).transpose(dim, -1)
    return input


replaces("interpolate", F.affine_grid)(interpolation.affine_grid)


@replaces("interpolate", F.grid_sample)
def _grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    if mode not in modes or padding_mode not in paddings:
        return _UNTOUCHED  # torch says what is wrong
    return _grid_sampler(input, grid, modes.index(mode), paddings.index(padding_mode), bool(align_corners))


@replaces("interpolate", torch.grid_sampler)
def _grid_sampler(input: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, corners: bool) -> Any:
    if input.dim() != 4:
        return _UNTOUCHED
    from torch._decomp.decompositions import _grid_sampler_2d

    return _grid_sampler_2d(input, grid, mode, padding, corners)


def _per_dim(value: Any, rank: int) -> list[Any] | None:
    values = list(value) if isinstance(value, list | tuple) else [value] * rank
    return values if len(values) == rank else None
