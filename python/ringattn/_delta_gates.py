# SPDX-License-Identifier: Apache-2.0
"""The inputs log_decay and beta of gated_delta() from a layer's projections, as Qwen3-Next, Kimi Linear and Ling 3 compute
them.

    log_decay, beta = ringattn.gated_delta_gates(a, b, A_log, dt_bias)"""

import math

import numpy as np

from ._arguments import as_number
from ._errors import refuse
from ._loaded_torch import loaded_torch
from ._tensors import check_array, is_torch, type_name


def _float32(array):
    return array.float() if is_torch(array) else np.asarray(array, np.float32)


def _sigmoid(x):
    if is_torch(x):
        return x.sigmoid()
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is right
        return 1 / (1 + np.exp(-x))


def _softplus(x):
    """log(1 + e^x), which is x for large x."""
    if is_torch(x):
        return loaded_torch().nn.functional.softplus(x)
    return np.logaddexp(np.float32(0), x)


def _check(a, b, A_log, dt_bias) -> None:
    given = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    for name, array in given.items():
        if not hasattr(array, "dtype") or is_torch(array) != is_torch(a):
            refuse(f"{name} is a {type(array).__name__}", "all four are NumPy arrays or all are tensors", "Convert it.")
        if is_torch(array):
            check_array(name, array, differentiable=True)
            if array.device != a.device:
                refuse(f"{name} is on {array.device}", f"a is on {a.device}", "Move it there.")
        if type_name(array.dtype) not in ("float32", "float16", "bfloat16"):
            refuse(f"{name} is {type_name(array.dtype)}", "it is float32, float16 or bfloat16", "Convert it.")
    if a.ndim not in (b.ndim, b.ndim + 1) or tuple(a.shape[: b.ndim]) != tuple(b.shape) or b.ndim < 2:
        refuse(f"a is {list(a.shape)} and b is {list(b.shape)}",
               "b is [(batch,) tokens, heads], and a is of that shape (GDN) or has an axis of key_dim more (KDA)",
               "Reshape them; heads of Qwen3-Next's in_proj_ba lie by key head.")  # fmt: skip
    heads, dims = b.shape[-1], math.prod(a.shape[b.ndim - 1 :])
    for name, array, count in (("A_log", A_log, heads), ("dt_bias", dt_bias, dims)):
        if math.prod(array.shape) != count:
            refuse(f"{name} is {list(array.shape)}", f"a is {list(a.shape)}, so it has {count} elements", "Check the layer.")


def gated_delta_gates(a, b, A_log, dt_bias, *, lower_bound: float | None = None):
    """Computes log_decay and beta of gated_delta() from a layer's projections.

    Args:
        a: [(batch,) tokens, heads] (GDN) or [(batch,) tokens, heads, key_dim] (KDA). All arguments are NumPy arrays or tensors,
            float32, float16 or bfloat16.
        b: [(batch,) tokens, heads].
        A_log: one element per head, in any shape.
        dt_bias: one element per head, or per head and key dim, in any shape.
        lower_bound: lower bound of log_decay, below 0, usually -5: KDA's safe gate. None: the first formula.

    Returns:
        (log_decay, beta), float32, of the shapes of a and b. Tensors have gradients, and torch.compile can trace the
        computation.

    Raises:
        UsageError: shapes or dtypes do not match.

    Formula:
        log_decay = -exp(A_log) * softplus(a + dt_bias)
        log_decay = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))    with lower_bound
        beta = sigmoid(b)

    Example:
        >>> zeros = np.zeros((1, 1), "float32")
        >>> log_decay, beta = ringattn.gated_delta_gates(zeros, zeros, zeros[0], zeros[0])
        >>> log_decay.tolist(), beta.tolist()
        ([[-0.6931471824645996]], [[0.5]])
    """
    _check(a, b, A_log, dt_bias)
    exp = loaded_torch().exp if is_torch(a) else np.exp
    by_head = (b.shape[-1],) if a.ndim == b.ndim else (b.shape[-1], 1)
    rate = exp(_float32(A_log)).reshape(by_head)
    shifted = _float32(a) + _float32(dt_bias).reshape(a.shape[b.ndim - 1 :])
    if lower_bound is None:
        return -rate * _softplus(shifted), _sigmoid(_float32(b))
    bound = as_number(lower_bound, "lower_bound")
    if not -math.inf < bound < 0:
        refuse(f"lower_bound is {lower_bound}", "a log-decay is below 0", "Pass the model's kda_lower_bound, such as -5.")
    return bound * _sigmoid(rate * shifted), _sigmoid(_float32(b))
