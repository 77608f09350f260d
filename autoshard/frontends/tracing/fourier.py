"""Complex numbers and Fourier transforms as products, which torch_xla lowers; it has no transform.

A transform is a product with the matrix of roots of unity: n multiplications per element where an FFT has about log n.
Long ones are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.errors import CaptureError
from autoshard.frontends.tracing import ops

MAX_FFT_SIZE = 4096
"""Longest transformed dim; the matrix of roots has its square of elements."""


def complex_of(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    """`torch.complex`."""
    real, imaginary = torch.broadcast_tensors(real, imaginary)
    return torch.view_as_complex(torch.stack([real, imaginary], -1))


def polar(length: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """`torch.polar`."""
    return complex_of(length * angle.cos(), length * angle.sin())


def fft_r2c(x: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    """`aten._fft_r2c`: of real numbers; `onesided` keeps half of the last dim's frequencies, and one."""
    *others, last = (d % x.dim() for d in dim)
    size = x.shape[last]
    scale = _scale([x.shape[d] for d in dim], normalization)
    kept = size // 2 + 1 if onesided else size
    cos, sin = _roots(size, size, kept, x)
    pair = _times(x, cos, last) * scale, _times(x, sin, last) * -scale
    for d in others:
        pair = _transformed(pair, d, forward=True)
    return complex_of(*pair)


def fft_c2c(x: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    """`aten._fft_c2c`."""
    scale = _scale([x.shape[d] for d in dim], normalization)
    pair = _parts(x)
    for d in dim:
        pair = _transformed(pair, d % x.dim(), forward)
    return complex_of(pair[0] * scale, pair[1] * scale)


def fft_c2r(x: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> torch.Tensor:
    """`aten._fft_c2r`: back to real numbers, from half of the last dim's frequencies, and one."""
    *others, last = (d % x.dim() for d in dim)
    scale = _scale([*(x.shape[d] for d in others), last_dim_size], normalization)
    kept = last_dim_size // 2 + 1
    pair = _parts(x.narrow(last, 0, kept))
    for d in others:
        pair = _transformed(pair, d, forward=False)
    cos, sin = _roots(last_dim_size, kept, last_dim_size, pair[0])
    at = torch.arange(kept, device=x.device)
    single = (at == 0) | (2 * at == last_dim_size)  # these have no mirrored partner
    weight = torch.where(single, scale, 2 * scale).to(cos.dtype).unsqueeze(-1)
    return _times(pair[0], cos * weight, last) - _times(pair[1], sin * weight, last)


def irfft(input: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> torch.Tensor:
    """`torch.fft.irfft`, differentiated as products: torch's gradient reads sizes of a tensor that it has freed."""
    return irfftn(input, None if n is None else (n,), (dim,), norm)


def irfftn(
    input: torch.Tensor, s: Sequence[int] | None = None, dim: Sequence[int] | None = None, norm: str | None = None
) -> torch.Tensor:
    """`torch.fft.irfftn`."""
    last = range(input.dim()) if s is None else range(input.dim() - len(s), input.dim())
    dims = [d % input.dim() for d in (last if dim is None else dim)]
    sizes = [input.shape[d] for d in dims[:-1]] + [2 * (input.shape[dims[-1]] - 1)] if s is None else list(s)
    sizes = [input.shape[d] if size == -1 else size for d, size in zip(dims, sizes, strict=True)]
    x = input if input.is_complex() else complex_of(input, torch.zeros_like(input))
    for d, size in zip(dims, [*sizes[:-1], sizes[-1] // 2 + 1], strict=True):
        if size < x.shape[d]:
            x = x.narrow(d, 0, size)
        elif size > x.shape[d]:
            shape = [size - x.shape[d] if at == d else extent for at, extent in enumerate(x.shape)]
            x = torch.cat([x, x.new_zeros(shape)], d)
    return fft_c2r(x, dims, {"backward": 2, "ortho": 1, "forward": 0}[norm or "backward"], sizes[-1])


def absolute(x: torch.Tensor) -> torch.Tensor:
    """`torch.abs` of complex numbers, of which torch_xla's has no gradient; that of zero is zero."""
    real, imaginary = _parts(x)
    square = real * real + imaginary * imaginary
    zero = square == 0
    return torch.where(zero, torch.zeros_like(square), torch.where(zero, torch.ones_like(square), square).sqrt())


def angle(input: torch.Tensor) -> torch.Tensor:
    """`torch.angle`."""
    real, imaginary = _parts(input) if input.is_complex() else (input, torch.zeros_like(input))
    return torch.atan2(imaginary, real)


def inverse_stft(  # noqa: PLR0913  (as torch.istft)
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """`torch.istft`, which looks at whether windows cover every sample; where none does, the result is not finite.

    Args:
        input: [..., frequencies, frames].
    """
    x, hop, width = input, hop_length or n_fft // 4, win_length or n_fft
    frames = x.transpose(-2, -1)
    real = x.real.dtype
    window = torch.ones(width, dtype=real, device=x.device) if window is None else window
    left = (n_fft - width) // 2
    window = torch.nn.functional.pad(window, (left, n_fft - width - left))
    norm = "ortho" if normalized else "backward"
    half = x.shape[-2] != n_fft if onesided is None else onesided
    if return_complex or not half:
        pieces = list(_parts(torch.fft.ifft(frames, n_fft, -1, norm)))[: 1 + return_complex]
    else:
        pieces = [irfft(frames, n_fft, -1, norm)]
    count = frames.shape[-2]
    whole = n_fft + hop * (count - 1)
    start = n_fft // 2 if center else 0
    end = whole - start if length is None else min(whole, start + length)

    def overlapped(piece: torch.Tensor) -> torch.Tensor:
        shape = [*piece.shape[:-2], whole]
        return torch.ops.aten.unfold_backward(piece, shape, len(shape) - 1, n_fft, hop)[..., start:end]

    covered = overlapped(window.square().expand(count, n_fft))
    found = [overlapped(piece * window) / covered for piece in pieces]
    if length is not None and length > end - start:
        found = [torch.nn.functional.pad(each, (0, length - (end - start))) for each in found]
    return complex_of(*found) if return_complex else found[0]


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.view_as_real(x.resolve_conj() if x.is_conj() else x)
    return both.select(-1, 0), both.select(-1, 1)


def _scale(sizes: Sequence[int], normalization: int) -> float:
    """Scale of a normalization mode: 0 none, 1 the root of the size, 2 the size."""
    count = math.prod(sizes)
    return {0: 1.0, 1: 1 / math.sqrt(count), 2: 1 / count}[normalization]


def _roots(size: int, rows: int, columns: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns]: cosines and sines of 2 pi jk / size."""
    if size > MAX_FFT_SIZE:
        raise CaptureError(
            f"a Fourier transform of {size} numbers is too long: torch_xla has none, and as a product with its matrix "
            f"it may have {MAX_FFT_SIZE}. Transform shorter pieces, or convolve instead"
        )
    j, k = (torch.arange(count, dtype=torch.int32, device=like.device) for count in (rows, columns))
    turns = j.unsqueeze(-1) * k  # exact in float32, in parts of `size`
    whole = (turns.to(torch.float32) * (1 / size)).floor().to(torch.int32)  # a TPU divides integers bit by bit
    angle = (turns - whole * size).to(like.dtype) * (2 * math.pi / size)
    return angle.cos(), angle.sin()


def _times(x: torch.Tensor, matrix: torch.Tensor, dim: int) -> torch.Tensor:

    letters = "abcdefghijklm"[: x.dim()]
    out = letters.replace(letters[dim], "z")
    return ops.einsum(f"{letters},{letters[dim]}z->{out}", x, matrix)


def _transformed(pair: tuple[torch.Tensor, torch.Tensor], dim: int, forward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A complex transform of one dim, unscaled."""
    real, imaginary = pair
    size = real.shape[dim]
    cos, sin = _roots(size, size, size, real)
    sin = -sin if forward else sin
    return (
        _times(real, cos, dim) - _times(imaginary, sin, dim),
        _times(real, sin, dim) + _times(imaginary, cos, dim),
    )


def fftfreq(n: int, d: float = 1.0, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """`torch.fft.fftfreq`, whose own kernel writes into slices."""
    at = torch.arange(n, dtype=dtype or torch.get_default_dtype(), device=device)
    return torch.where(at < (n + 1) // 2, at, at - n) * (1 / (n * d))
