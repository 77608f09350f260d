"""Capture switches: named rewrites of torch functions into equal ones that GSPMD partitions better.

A switch is a `TorchFunctionMode`, active during capture and again while the plan runs (`Program.switches`). It replaces
calls with tensors on an XLA device, and never edits the model.

| switch | what it replaces | why (measured on the CPU, TPU and GPU partitioners) |
|---|---|---|
| `linear` | `F.linear`, transformers' `Conv1D`: a dot that keeps the input's dims, bias added after | a reshape would merge batch and sequence; a bias inside hides the partial sum from a reduce-scatter |
| `matmul` | `torch.matmul`, `@`, two-operand `torch.einsum`, `F.scaled_dot_product_attention`, torch_xla's `flash_attention` and `splash_attention` | torch merges batch and heads for `bmm`; torch_xla's kernels cannot be traced without a TPU |
| `multihead` | `F.multi_head_attention_forward` (`nn.MultiheadAttention`), with batch and heads as dims of their own; no fast path | torch merges positions before the batch for the last product: a split batch is gathered there |
| `attention:KIND` | `F.scaled_dot_product_attention`, kept as one op (`attention/form.py`) where that kind of device, or platform (`tpu`, `gpu`), has a fused kernel for it; on where a program is captured for a TPU or GPU | written out it stores a score for each query and key |
| `experts` | transformers' mixtures of experts, kept as one op (`experts/form.py`) where they have its form; on where a program is captured for a TPU or GPU | written out, `batched_mm` gathers each token's weights; its other implementations loop over what they find |
| `norm` | layer, RMS, group, instance and batch norm as means and `rsqrt`; weight norm as a norm | torch_xla makes `batch-norm-training` of them, which is gathered; it has no lowering of weight norm |
| `cross_entropy` | `F.cross_entropy`: class scores masked by comparing, on the unflattened logits; conversions of flattened tensors before these are flattened | the loss flattens batch and sequence; on a TPU positions that make no whole tiles are copied for it |
| `interpolate` | `F.interpolate`: nearest by whole factors as a broadcast, linear, cubic and area ones as products with their weights; grid sampling as gathers, affine grids as products | torch_xla has no lowering of the gradients |
| `embedding` | `F.embedding`, its gradient, and `F.embedding_bag` as embeddings that are summed | torch_xla flattens the indices; it cannot lower a bag |
| `groups` | convolutions of groups with several features each, transposed ones of groups, as a product per tap or a convolution per group | those of CPU and GPU gather what such a convolution reads, and end the process on gradients of transposed ones |
| `scan` | torch_xla's `scan` and `scan_layers`, unrolled | what a loop carries has one sharding, and nothing in its body can be annotated |
| `activation` | `F.elu`, `F.selu`, `F.celu` as `expm1` where negative, `F.rrelu` as a choice | torch_xla's gradient of these reads the input as if it were the result, and is wrong |
| `index` | `x[mask] = value` as a choice, `masked_scatter` as a gather and a choice; `scatter_reduce` and `index_reduce` of means, or without what was there; `gather` at 32-bit indices; it and `scatter_add` by whole slices, where the index was expanded to these | torch_xla would look for the true ones, has no lowering of the reductions, and passes an index for each element; a TPU's compiler knows rows that are read by themselves by 32-bit counts |
| `truth` | `all` and `any` of numbers, as those of whether they are zero | torch_xla reduces numbers by a choice; no runtime adds that up over devices |
| `losses` | multi-margin, Gaussian and CTC losses, `torch.cdist` and `torch.pdist`, `torch.histc` between bounds, matrix exponentials, products of reflections, inverse Fourier transforms to real numbers, lengths and angles of complex numbers, factories that write into `out` | torch_xla has no lowering of them, or of their gradients; two look at values |
| `pools` | adaptive pools whose windows differ, maxima of dilated windows, averages with a ceiling | torch_xla has no lowering |
| `checkpoint` | `torch.utils.checkpoint` of both kinds | torch's has no module for XLA devices and no barrier, without which XLA keeps what it is to compute again |
| `remat:…` | the model's own checkpoints, by those of the blocks that it names (`remat.py`) | `plan(remat=…)` chooses what is recomputed |
| `micro_batches:K` | nothing: capture traces two micro-steps and the update | a step of K micro-batches |
| `clip_grad_norm:N` | nothing: capture clips gradients before the update | `torch.nn.utils.clip_grad_norm_` of a loop |
| `checks` | distributions' look at their arguments is off by default | it reads values |
| `transformers` | mask code believes it is traced; `use_cache` is off; experts are `batched_mm` | masks would be read; a cache adds ops to a training step; other experts read which tokens they have |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from autoshard.frontends.switches import attention, images, losses, multihead, pools  # noqa: F401  (they register their handlers)
from autoshard.frontends.switches.autocast import autocast_on
from autoshard.frontends.switches.checkpoints import recomputed
from autoshard.frontends.switches.dots import conv1d
from autoshard.frontends.switches.experts import experts_traced
from autoshard.frontends.switches.flex import flex_traced
from autoshard.frontends.switches.handlers import (
    ATTENTION,
    EXPERTS,
    HANDLERS,
    REMAT,
    SWITCHES,
    UNTOUCHED,
    Handler,
    on_xla,
    replaces,
)
from autoshard.frontends.switches.loops import unrolled
from autoshard.frontends.switches.remat import recomputing
from autoshard.frontends.switches.transformers_library import transformers_traced
from autoshard.frontends.tracing import algebra, exact, fourier, ops

DEFAULT: tuple[str, ...] = SWITCHES


@contextlib.contextmanager
def active(names: Sequence[str] = DEFAULT, model: torch.nn.Module | None = None) -> Iterator[None]:
    """Activate switches.

    Args:
        names: of switches, by default `DEFAULT`.
        model: the running model; the `transformers` switch turns off its `config.use_cache`.

    Raises:
        ValueError: an unknown switch.
    """
    named = dict(name.partition(":")[::2] for name in names)
    unknown = [name for name in named if name not in HANDLERS]
    if unknown:
        raise ValueError(f"no capture switch is called {unknown[0]!r}; there are {', '.join(HANDLERS)}")
    handlers = {function: handler for name in named for function, handler in HANDLERS[name].items()}
    with contextlib.ExitStack() as stack:
        if ATTENTION in named:
            stack.enter_context(attention.kernels_of(named[ATTENTION]))
            stack.enter_context(attention.of_transformers())
        # Of ready nodes, autograd runs the one created last, and each thread counts for itself: if gradients of
        # gradients were created on a device thread, their order would depend on what ran there before.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(autocast_on())
        if "transformers" in names:
            stack.enter_context(transformers_traced(model))
            stack.enter_context(experts_traced(as_one_op=EXPERTS in named))
        if "checkpoint" in names:
            stack.enter_context(recomputed())
        if REMAT in named:
            stack.enter_context(recomputing(model, named[REMAT]))
        if "checks" in names:
            stack.enter_context(_unchecked())
        if "matmul" in names:
            stack.enter_context(attention.of_torch_xla())
            stack.enter_context(flex_traced())
        if "scan" in names:
            stack.enter_context(unrolled())
        if "linear" in names:
            stack.enter_context(conv1d())
        if "multihead" in names:
            stack.enter_context(_written_out())
        stack.enter_context(_Replace(handlers))
        yield


class _Replace(TorchFunctionMode):  # type: ignore[misc]
    """Dispatches calls to handlers; remembers which tensors are flattened views, which masks and indices expanded."""

    def __init__(self, handlers: dict[Any, Handler]) -> None:
        super().__init__()
        self.handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FLATTENS:
            return _remember_flattened(func, args, kwargs)
        if func in (torch.Tensor.expand, torch.Tensor.expand_as):
            return _remember_expanded(func, args, kwargs)
        if func in _CONVERTS and F.cross_entropy in self.handlers:
            return _converted(func, args, kwargs)
        if func in (torch.Tensor.backward, torch.autograd.backward):  # checkpoints recompute in here
            with self:
                return _backward(*args, **kwargs)
        if func is torch.autograd.grad and _recomputes(*args[:2], **kwargs):
            with self:
                return _gradients(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head_attention(*args, **kwargs)
        handler = None if _differentiates() else self.handlers.get(func)
        if handler is not None and any(on_xla(a) for a in (*args, *kwargs.values())):
            call = handler if func in _FACTORIES else partial(_into, handler)
            result = call(*args, **kwargs)
            if result is not UNTOUCHED:
                return result
        return func(*args, **kwargs)

    def _multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        """Products and attention inside are dispatched to handlers, in torch's own code too."""
        func = F.multi_head_attention_forward
        with self:
            if func in self.handlers and on_xla(args[0] if args else kwargs["query"]):
                result = self.handlers[func](*args, **kwargs)
                if result is not UNTOUCHED:
                    return result
            with body_of_functional():
                return func(*args, **kwargs)


def _into(handler: Handler, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """A handler's result, copied into `out` where one tensor of its type is given."""
    result = handler(*args, **kwargs)
    if out is None or result is UNTOUCHED:
        return result
    alike = isinstance(result, torch.Tensor) and (result.shape, result.dtype) == (out.shape, out.dtype)
    return out.copy_(result) if alike else UNTOUCHED


def _recomputes(outputs: Any, inputs: Any, is_grads_batched: bool = False, **_: Any) -> bool:
    """Whether `torch.autograd.grad` may run checkpoints again: not where it fails, or under a transform."""
    differentiable = all(
        each.requires_grad and torch._C._functorch.unwrap_if_dead(each) is each  # as `torch.func.vjp` gives them
        for each in (*outputs, *inputs)
        if isinstance(each, torch.Tensor)
    )
    return differentiable and not is_grads_batched and not _transforms()


def _transforms() -> bool:
    """Whether a transform of `torch.func` runs."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _differentiates() -> bool:
    """Whether a transform of `torch.func` takes derivatives here: it needs torch's own functions."""
    if not _transforms():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() in _DERIVATIVES for level in levels)


_DERIVATIVES = torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp


def _backward(
    tensors: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None,
    grad_tensors: Any = None,
) -> None:  # fmt: skip
    """Either function from gradient edges: with tensors, torch 2.13 dispatches to the mode again, and leaves it."""
    edges, gradients = _begun(tensors, gradient if grad_tensors is None else grad_tensors)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
    asked = None if inputs is None else [_edge(each) for each in inputs]
    torch.autograd.backward(edges, gradients, retain_graph, create_graph, inputs=asked)


def _gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *, allow_unused: bool | None = None,
    materialize_grads: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """`torch.autograd.grad`, from and to gradient edges."""
    edges, gradients = _begun(outputs, grad_outputs)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    unused = materialize_grads if allow_unused is None else allow_unused
    found = torch.autograd.grad(edges, [_edge(each) for each in inputs], gradients, allow_unused=unused, **settings)
    if not materialize_grads:
        return found
    pairs = zip(found, inputs, strict=True)
    return tuple(torch.zeros_like(each, requires_grad=True) if made is None else made for made, each in pairs)


def _begun(tensors: Any, given: Any) -> tuple[list[Any], list[Any]]:
    """The gradient edges of tensors, and their gradients: ones of single numbers, where none is given."""
    losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients = list(given) if isinstance(given, list | tuple) else [given] * len(losses)
    for i, (loss, own) in enumerate(zip(losses, gradients, strict=True)):
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            ones = own is None and loss.numel() == 1
            gradients[i] = torch.ones_like(loss, memory_format=torch.preserve_format) if ones else own
    return [_edge(loss) for loss in losses], gradients


def _edge(tensor: Any) -> Any:
    differentiated = isinstance(tensor, torch.Tensor) and tensor.requires_grad
    return torch.autograd.graph.get_gradient_edge(tensor) if differentiated else tensor


@contextlib.contextmanager
def _unchecked() -> Iterator[None]:
    """Disable distributions' validation of arguments, which reads values, unless enabled explicitly."""
    distribution = torch.distributions.Distribution
    default = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(default)


@contextlib.contextmanager
def _written_out() -> Iterator[None]:
    """Without torch's fast path of encoders, which looks at a padding mask's values."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def body_of_functional() -> Iterator[None]:
    """Run the body of a torch.nn.functional function under a function mode, instead of dispatching again."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    saved = {name: getattr(F, name) for name in names}
    try:
        for name in names:
            setattr(F, name, lambda *_: False)
        yield
    finally:
        for name, function in saved.items():
            setattr(F, name, function)


# Norms.


def _standardized(x: torch.Tensor, dims: Sequence[int], eps: float) -> torch.Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision is normalized in float32, as in torch's kernels."""
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
        return UNTOUCHED
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
        return UNTOUCHED
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
        return UNTOUCHED
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
    """Update running statistics, `[C]`, by those of a batch, `[N or 1, C, 1, ...]`, each of `count` elements."""
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
        return UNTOUCHED
    else:
        shape = (1, -1, *[1] * (rank - 2))
        centered, variance = x - running_mean.view(shape), running_var.view(shape)
    out = centered * torch.rsqrt(variance + eps)
    return _scaled(out, _per_channel(weight, rank), _per_channel(bias, rank)).to(input.dtype)


def _adaptive_largest(rank: int, input: torch.Tensor, output_size: Any, return_indices: bool = False) -> Any:
    return UNTOUCHED if return_indices else pools.adaptive_largest(input, output_size, rank)


def _irfft2(input: torch.Tensor, s: Any = None, dim: Any = (-2, -1), norm: str | None = None) -> torch.Tensor:
    return fourier.irfftn(input, s, dim, norm)


replaces("norm", torch._weight_norm)(exact.weight_norm)
replaces("activation", F.elu)(exact.elu)
replaces("activation", F.selu, torch.selu)(exact.selu)
replaces("activation", F.celu, torch.celu)(exact.celu)
replaces("activation", F.rrelu, torch.rrelu)(exact.rrelu)
replaces("index", torch.Tensor.__setitem__)(exact.masked_write)
replaces("index", torch.gather, torch.Tensor.gather)(exact.gathered)
replaces("index", torch.scatter_add, torch.Tensor.scatter_add)(exact.scatter_added)
replaces("index", torch.Tensor.scatter_add_)(partial(exact.in_place, exact.scatter_added))
replaces("index", torch.masked_scatter, torch.Tensor.masked_scatter)(exact.masked_scatter)
replaces("index", torch.Tensor.masked_scatter_)(partial(exact.in_place, exact.masked_scatter))
replaces("index", torch.scatter_reduce, torch.Tensor.scatter_reduce)(exact.scatter_reduced)
replaces("index", torch.Tensor.scatter_reduce_)(partial(exact.in_place, exact.scatter_reduced))
replaces("index", torch.index_reduce, torch.Tensor.index_reduce)(exact.index_reduced)
replaces("index", torch.Tensor.index_reduce_)(partial(exact.in_place, exact.index_reduced))
for _truth in (torch.all, torch.any, torch.Tensor.all, torch.Tensor.any):
    replaces("truth", _truth)(partial(exact.of_truth, _truth))
replaces("losses", F.multi_margin_loss)(losses.multi_margin)
replaces("losses", F.gaussian_nll_loss)(losses.gaussian_nll)
replaces("losses", torch.cdist)(losses.cdist)
replaces("losses", F.pdist, torch.pdist)(losses.pdist)
replaces("losses", torch.linalg.solve)(losses.solve)
replaces("losses", torch.logdet, torch.Tensor.logdet)(losses.logdet)
replaces("losses", torch.slogdet, torch.Tensor.slogdet, torch.linalg.slogdet)(losses.slogdet)
replaces("losses", torch.matrix_exp, torch.linalg.matrix_exp, torch.Tensor.matrix_exp)(algebra.matrix_exp)
replaces("losses", torch.linalg.householder_product)(algebra.householder_product)
replaces("losses", F.ctc_loss)(losses.ctc)
replaces("losses", torch.histc, torch.Tensor.histc)(losses.histc)
replaces("losses", torch.istft, torch.Tensor.istft)(fourier.inverse_stft)
replaces("losses", torch.fft.irfft)(fourier.irfft)
replaces("losses", torch.fft.irfftn)(fourier.irfftn)
replaces("losses", torch.fft.irfft2)(_irfft2)
replaces("losses", torch.angle, torch.Tensor.angle)(fourier.angle)


@replaces("losses", torch.abs, torch.absolute, torch.Tensor.abs, torch.Tensor.absolute, torch.Tensor.__abs__)
def _absolute(input: torch.Tensor, **kwargs: Any) -> Any:
    return fourier.absolute(input) if input.is_complex() and not kwargs else UNTOUCHED


def _written_into(factory: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """A factory that writes into `out`, which functionalization does not know; as a copy."""
    if out is None:
        return UNTOUCHED
    made = factory(*args, **{"dtype": out.dtype, "device": out.device} | kwargs)
    return out.copy_(made) if made.shape == out.shape else UNTOUCHED


_FACTORIES = (torch.eye, torch.arange, torch.full, torch.zeros, torch.ones, torch.linspace, torch.logspace)
for _factory in _FACTORIES:
    replaces("losses", _factory)(partial(_written_into, _factory))
for _rank, _mean in enumerate((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), 1):
    replaces("pools", _mean)(partial(pools.adaptive_average, rank=_rank))
for _rank, _largest in enumerate((F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d), 1):
    replaces("pools", _largest)(partial(_adaptive_largest, _rank))
for _rank, _pool in enumerate((F.max_pool1d, F.max_pool2d, F.max_pool3d), 1):
    replaces("pools", _pool)(partial(pools.dilated_largest, _rank))
for _rank, _mean in enumerate((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), 1):
    replaces("pools", _mean)(partial(pools.average, _rank))


# Loss and embedding.

_FLATTENS = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.flatten, torch.flatten})


_CONVERTS = frozenset(
    {
        torch.Tensor.float,
        torch.Tensor.double,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        torch.Tensor.to,
        torch.Tensor.type,
    }
)


def _remember_flattened(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a view; if it merges leading dims of an XLA tensor, its result remembers the base."""
    out, source = func(*args, **kwargs), args[0] if args else None
    if isinstance(source, torch.Tensor) and on_xla(out) and out.dim() in (1, 2) and out.dim() < source.dim():
        kept = source.shape[-1:] if out.dim() == 2 else ()
        if out.shape[1:] == kept and out.shape[0] == math.prod(source.shape[: source.dim() - len(kept)]):
            out._autoshard_unflattened = source, source._version, out._version
    return out


def _remember_expanded(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an expansion; a mask of rows that is expanded along the last dim, and an index, remember themselves."""
    out, source = func(*args, **kwargs), args[0]
    of_rows = source.dim() == out.dim() and source.shape[-1:] == (1,)
    if on_xla(out) and (of_rows if out.dtype == torch.bool else out.dtype in (torch.int64, torch.int32)):
        setattr(out, exact.EXPANDED, source)
    return out


def _unflattened(x: torch.Tensor) -> torch.Tensor:
    """The base of a flattened tensor, while neither has been written to and no one reads its own gradient."""
    source, version, own = getattr(x, "_autoshard_unflattened", (x, x._version, x._version))
    watched = x.retains_grad or x._backward_hooks
    return source if (source._version, x._version) == (version, own) and not watched else x


def _converted(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a conversion, of a flattened tensor before it is flattened: the result remembers its base too."""
    rows = args[0]
    if (source := _unflattened(rows)) is rows or (wide := func(source, *args[1:], **kwargs)) is source:
        return func(*args, **kwargs)
    if not isinstance(wide, torch.Tensor):  # the name of a type
        return wide
    return _remember_flattened(torch.Tensor.reshape, (wide, rows.shape), {})


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
    if weight is not None or size_average is not None or reduce is not None:
        return UNTOUCHED
    if target.is_floating_point() or input.dim() != 2 or target.dim() != 1 or input.shape[0] != target.shape[0]:
        return UNTOUCHED
    logits, labels = _unflattened(input), _unflattened(target)
    if logits.shape[:-1] != labels.shape:
        logits, labels = input, target
    scores = torch.log_softmax(_wide(logits), -1)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    hit = classes == labels.unsqueeze(-1)
    counted = labels != ignore_index
    if 0 <= ignore_index < logits.shape[-1]:
        hit = hit & counted.unsqueeze(-1)
    own = torch.where(hit, scores, 0.0)
    if not label_smoothing and reduction != "none":  # one sum: XLA:GPU makes it beside the gradient
        return -own.sum() if reduction == "sum" else -own.sum() / counted.sum()
    loss = -own.sum(-1)
    if label_smoothing:
        even = torch.where(counted, -scores.sum(-1), 0.0)
        loss = (1.0 - label_smoothing) * loss + label_smoothing / logits.shape[-1] * even
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
    if sparse or input.dim() == 0 or not on_xla(input):
        return UNTOUCHED
    if max_norm is not None:
        _renormalise(weight, input, max_norm, norm_type)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    rows = ops.embedding(weight, input, padding_idx)
    if not scale_grad_by_freq:
        return rows
    flat = input.reshape(-1)
    ones = torch.ones_like(flat, dtype=torch.float32)  # bf16 counts to 256
    counts = torch.zeros(len(weight), dtype=torch.float32, device=rows.device).index_add(0, flat, ones)
    share = (1 / counts).index_select(0, flat).reshape(*input.shape, 1).to(rows.dtype)
    return rows.detach() + (rows - rows.detach()) * share


def _renormalise(weight: torch.Tensor, indices: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """Shorten the rows that are looked up in place, as `embedding_renorm_` does."""
    with torch.no_grad():
        flat = indices.reshape(-1)
        rows = weight.index_select(0, flat)
        norms = torch.linalg.vector_norm(rows, norm_type, 1, keepdim=True)
        weight[flat] = torch.where(norms > max_norm, rows * (max_norm / (norms + 1e-7)), rows)


@replaces("embedding", F.embedding_bag)
def _embedding_bag(*args: Any, **named: Any) -> Any:
    call = inspect.signature(F.embedding_bag).bind(*args, **named)
    call.apply_defaults()
    asked = SimpleNamespace(**call.arguments)
    input, weight, offsets, per_sample = asked.input, asked.weight, asked.offsets, asked.per_sample_weights
    if asked.mode not in ("sum", "mean", "max") or (per_sample is not None and asked.mode != "sum"):
        return UNTOUCHED
    padding = None if asked.padding_idx is None else asked.padding_idx % weight.shape[0]
    rows = _embedding(input, weight, padding, asked.max_norm, asked.norm_type, asked.scale_grad_by_freq, asked.sparse)
    if rows is UNTOUCHED or (input.dim() == 2) == (offsets is not None):
        return UNTOUCHED
    if per_sample is not None:
        rows = rows * per_sample.unsqueeze(-1)
    if asked.mode == "max":
        return _largest_in_bags(rows, input, offsets, padding)
    counted = torch.ones_like(input, dtype=rows.dtype)
    if padding is not None:
        counted = (input != padding).to(rows.dtype)
        rows = rows * counted.unsqueeze(-1)
    if offsets is None:
        total, count = rows.sum(1), counted.sum(1)
    else:
        bag = _bags(input, starts := offsets[:-1] if asked.include_last_offset else offsets)
        total = rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows)
        count = rows.new_zeros(len(starts)).index_add(0, bag, counted)
    return total if asked.mode == "sum" else total / count.clamp(min=1).unsqueeze(-1)


def _bags(input: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The bag of each index."""
    return (torch.arange(len(input), device=input.device).unsqueeze(1) >= starts).sum(1) - 1


def _largest_in_bags(rows: torch.Tensor, input: torch.Tensor, offsets: torch.Tensor | None, padding: int | None) -> Any:
    """Per feature the maximum of each bag's rows, 0 for empty bags; equal rows share the gradient."""
    if offsets is not None:
        return UNTOUCHED
    if padding is not None:
        rows = torch.where((input == padding).unsqueeze(-1), -math.inf, rows)
    largest = rows.amax(1)
    return largest if padding is None else torch.where(largest == -math.inf, 0.0, largest)
