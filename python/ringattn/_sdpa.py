# SPDX-License-Identifier: Apache-2.0
"""torch.nn.functional.scaled_dot_product_attention, with its arguments and defaults."""

from . import _attention
from ._arguments import check_axes, check_dropout, is_true
from ._errors import called_by, refuse, unsupported
from ._flash_attn_tools import shim
from ._tensors import check_array


# What attention() calls its arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "softmax_scale": "scale"}


@shim
def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention(), with its arguments and defaults. One rank.

    Args:
        query: [(batch,) heads, tokens, head_dim].
        key, value: [(batch,) heads, keys, head_dim or head_dim_v]. With enable_gqa they may have fewer heads, a divisor of
            query's heads.
        attn_mask: None; masks depend only on positions.
        dropout_p: 0.
        is_causal: query i sees the keys 0 to i, even if there are more keys than queries: as in PyTorch, the mask is aligned to
            the first key. (attention() aligns it to the last key.)
        scale: factor of the scores. None: 1 / sqrt(head_dim).
        enable_gqa: allows fewer heads of key and value.

    Returns:
        out, [(batch,) heads, tokens, head_dim_v] of query's dtype, with gradients as attention().

    Raises:
        CallError, UsageError: as attention().
        UnsupportedError: attn_mask or dropout is given; or as attention().

    Formula:
        That of attention() (arXiv:1706.03762).

    Example:
        >>> q = np.ones((1, 4, 10, 32), "float32")
        >>> ringattn.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        (1, 4, 10, 32)
    """
    if attn_mask is not None:
        unsupported("attn_mask is given", "ringattn's masks depend only on positions",
                    "Pass is_causal, or call ringattn.attention() with mask and ringattn.varlen() with cu_seqlens.")  # fmt: skip
    check_dropout(dropout_p)
    for name, array in (("query", query), ("key", key), ("value", value)):
        check_array(name, array, differentiable=True)
    axes = getattr(query, "ndim", 0)
    if axes not in (3, 4):
        refuse(f"query has {axes} axes", "it is [(batch,) heads, tokens, head_dim]", "Reshape it.")
    check_axes("key", key, (axes,), "as query is, [(batch,) heads, keys, head_dim]")
    check_axes("value", value, (axes,), "as query is, [(batch,) heads, keys, head_dim]")
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if heads != kv_heads and not is_true("enable_gqa", enable_gqa):
        refuse(f"query has {heads} heads and key {kv_heads}", "enable_gqa is False", "Pass enable_gqa=True.")
    causal = is_true("is_causal", is_causal)
    rows = (array.swapaxes(-3, -2) for array in (query, key, value))
    out, _ = called_by(_NAMES, _attention.attention, *rows, mask="causal" if causal else "full", softmax_scale=scale,
                       q_offset=0 if causal else None)  # fmt: skip
    return out.swapaxes(-3, -2)
