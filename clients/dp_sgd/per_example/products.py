"""Products of matrices by the library that is fast on this machine.

torch multiplies on the CPU by MKL. On an AMD EPYC with AVX-512, oneDNN, which torch brings along
for convolutions, takes half the time for large products. Which of both takes a product is a
function of the machine and of the product's shape, so a result has the same bits on every engine of
one machine; between kinds of processors, MKL's differ anyway.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

# Products of (m, k) and (k, n) with m · k · n below this are left to torch. Within a step, where
# other work fills the caches, oneDNN gains nothing there (with k = 784 and n = 128: a loss at 32
# rows, even at 64, twice as fast from 128 on). It also has to write code for each new shape, which
# takes a third of a millisecond, and lots have many lengths.
FEWEST = 10_000_000

# torch multiplies batches of matrices of fewer products than this by a loop of its own, whose sums
# are in another order than those of a single product.
FEWEST_IN_BATCH = 400

_ALIGNMENT = 64  # bytes, as of freshly allocated memory

_Linear = Callable[[Tensor, Tensor, Tensor | None, str, list[float], str], Tensor]


def affine(x: Tensor, w: Tensor, b: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """Return x wᵀ + b for x (..., k), w (n, k) and b (n,); `out` is for matrices x."""
    fast = _fast(x, x.numel() * w.shape[0])
    if fast is not None:
        return _written(fast(x, w, b, "none", [], ""), out)
    if out is None:
        return functional.linear(x, w, b)
    return torch.mm(x, w.t(), out=out) if b is None else torch.addmm(b, x, w.t(), out=out)


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a · b for a (..., k) and b (k, n); `out` is for matrices a."""
    fast = _fast(a, a.numel() * b.shape[1])
    if fast is not None:
        return _written(fast(a, b.t(), None, "none", [], ""), out)
    return torch.matmul(a, b, out=out)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to `into` (m, n), for a (m, k) and b (k, n)."""
    fast = _fast(a, a.numel() * b.shape[1])
    if fast is None:
        into.addmm_(a, b)
    else:
        into.add_(fast(a, b.t(), None, "none", [], ""))


def products(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left_k · right_k of each k to out[k], for (b, m, k) and (b, k, n).

    This and the next two functions give each of a batch what `product`, `affine` and `add_product`
    give it alone, to the bit, but not for n = 1 or m · k · n < `FEWEST_IN_BATCH`.
    """
    if _in_one_call(out):
        out.copy_(torch.bmm(left, right))
    else:
        torch.bmm(left, right, out=out)


def shifted_products(shifts: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write shift_k + left_k · right_k to out[k], for (b, 1, n), (b, m, k) and (b, k, n)."""
    if _in_one_call(out):
        out.copy_(torch.baddbmm(shifts, left, right))
    else:
        torch.baddbmm(shifts, left, right, out=out)


def add_products(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left_k · right_k to into[k] (m, n), for (b, m, k) and (b, k, n)."""
    if _in_one_call(into):
        into.copy_(into.contiguous().baddbmm_(left, right))
    else:
        into.baddbmm_(left, right)


def is_special(like: Tensor, m: int, k: int, n: int) -> bool:
    """Tell whether a product of (m, k) and (k, n) is not left to torch's own choice."""
    return _fast(like, m * k * n) is not None


def _in_one_call(out: Tensor) -> bool:
    """Tell whether results (b, m, n) should be made elsewhere, without gaps, and copied to `out`.

    torch gives MKL a batch whose results have no gaps in one call, others one by one, which takes
    twice to five times as long for small matrices. The sums are the same where each result begins
    at a multiple of 64 bytes either way; elsewhere, MKL takes other paths.
    """
    if out.is_contiguous() or out.device.type != "cpu":
        return False
    size = out.shape[1:].numel()
    starts = out.data_ptr(), out.stride(0) * out.itemsize, size * out.itemsize
    return not any(start % _ALIGNMENT for start in starts)


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _fast(like: Tensor, multiplications: int) -> _Linear | None:
    """Return what multiplies such tensors by oneDNN; None where torch's own choice is as good."""
    if multiplications < FEWEST or like.dtype != torch.float32 or like.device.type != "cpu":
        return None
    return _one_dnn()


@cache
def _one_dnn() -> _Linear | None:
    """Return oneDNN's linear layer where it has an advantage over MKL, None elsewhere."""
    if not torch.backends.mkl.is_available() or not torch.backends.mkldnn.is_available():
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _is_amd():
        return None
    try:
        operation: _Linear = torch.ops.mkldnn._linear_pointwise.default
        x, w = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        agrees = torch.equal(operation(x, w, None, "none", [], ""), x @ w.t())
    except (AttributeError, RuntimeError, TypeError):  # not part of torch's public interface
        return None
    return operation if agrees else None


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()[:1000]
    except OSError:
        return False
