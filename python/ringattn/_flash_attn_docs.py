# SPDX-License-Identifier: Apache-2.0
"""Makes the docstrings of the functions of flash_attn and ring_flash_attn, which share their arguments, from the signatures."""

import inspect
import sys

_SHARDS = {
    "ring": "This rank has the contiguous shard of each sequence.",
    "zigzag_ring": "This rank has the chunks r and 2 · world − 1 − r of 2 · world of each sequence.",
    "llama3": "This rank has the contiguous shard of the packed stream.",
}
# Shapes of tensors, after [batch, tokens] or [tokens].
_TENSORS = {
    "q": "heads, head_dim]", "k": "kv_heads, head_dim]", "v": "kv_heads, head_dim]",
    "kv": "2, kv_heads, head_dim], k and v stacked", "qkv": "3, heads, head_dim], q, k and v stacked",
}  # fmt: skip
_ARGUMENTS = {
    "cu_seqlens": "[sequences + 1] cumulative lengths.",
    "cu_seqlens_q": "[sequences + 1] cumulative lengths of the queries.",
    "cu_seqlens_k": "[sequences + 1] cumulative lengths of the keys.",
    "max_seqlen": "tokens, at least those of the longest sequence; a smaller one is refused, where flash_attn would omit rows.",
    "max_seqlen_q": "as max_seqlen_k, of the queries.",
    "max_seqlen_k": "tokens, at least those of the longest sequence; a smaller one is refused, where flash_attn would omit rows.",
    "dropout_p": "0; dropout is refused.",
    "softmax_scale": "factor of the scores. None: 1 / sqrt(head_dim).",
    "causal": "a causal mask, aligned to the last key.",
    "window_size": "(left, right), tokens that a query sees; -1: no limit.",
    "softcap": "score = softcap * tanh(score / softcap). 0: off.",
    "alibi_slopes": "None; ALiBi is refused.",
    "deterministic": "no effect: every call and its gradients are deterministic.",
    "return_attn_probs": "returns (out, lse, None) in place of out.",
    "block_table": "None; packed keys have no pages.",
    "group": "a torch.distributed ProcessGroup, one dimension of a DeviceMesh, or a ringattn.World. None: the default group, or "
    "only this rank without one.",
}
_RING_ARGUMENTS = {
    "cu_seqlens": "[sequences + 1] cumulative lengths of this rank's rows: each sequence is split equally.",
    "max_seqlen": "ignored, because cu_seqlens has the lengths.",
}
_LLAMA3_ARGUMENTS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_k", "local_k_slice"), "of llama3_flash_attn_prepare_cu_seqlens(), from one call."
) | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "ignored, because cu_seqlens has the lengths.") | {
    "heads_k_stride": "no effect, because keys are exchanged in blocks; as in ring_flash_attn it divides the K/V heads."
}  # fmt: skip
# Required arguments in examples.
_EXAMPLES = {
    "cu_seqlens": "torch.tensor([0, 24, 64])", "cu_seqlens_q": "torch.tensor([0, 24, 64])",
    "cu_seqlens_k": "torch.tensor([0, 24, 64])", "max_seqlen": "40", "max_seqlen_q": "40", "max_seqlen_k": "40",
}  # fmt: skip
_PREPARED = {
    "cu_seqlens_q": "cu_q", "cu_seqlens_k": "cu_k", "max_seqlen_q": "longest_q", "max_seqlen_k": "longest_k",
    "local_k_slice": "keys", "heads_k_stride": "1",
}  # fmt: skip


def _example(name: str, module: str, required: list[str], packed: bool, llama3: bool) -> list[str]:
    form = "64" if packed else "1, 64"
    tensors = {"q": f"torch.ones({form}, 4, 32)", "kv": f"torch.ones({form}, 2, 4, 32)", "qkv": f"torch.ones({form}, 3, 4, 32)"}
    lines = [f"{argument} = {tensors[argument]}" for argument in required if argument in tensors]
    if "k" in required:
        lines.append("k = v = q")
    given = [(_PREPARED if llama3 else _EXAMPLES).get(argument, argument) for argument in required]
    if llama3:
        lines.append(f"prepare = ringattn.{module}.llama3_flash_attn_prepare_cu_seqlens")
        lines.append("cu_q, cu_k, longest_q, longest_k, keys = prepare(torch.tensor([0, 24, 64]), True, 0, 1)")
    lines.append(f"call = ringattn.{module}.{name}")
    lines.append(f"list(call({', '.join(given)}, causal=True).shape)")
    return [f">>> {line}" for line in lines] + [f"[{form}, 4, 32]"]


def docstring(function) -> str:
    """The docstring of a function. The function's own text, if there is one, becomes the second paragraph. A text that already
    has Args is returned as it is."""
    if sys.flags.optimize > 1:  # -OO drops the texts of functions
        return ""
    own = inspect.getdoc(function) or ""
    if "\nArgs:" in own:
        return own
    name = function.__name__
    shards, _, _ = name.partition("_flash_attn_")
    shards = "" if name.startswith("flash_attn") else shards
    module = "ring_flash_attn" if shards else "flash_attn"
    parameters = inspect.signature(function).parameters
    packed, llama3 = "varlen" in name, shards == "llama3"
    texts = _ARGUMENTS | (_LLAMA3_ARGUMENTS if llama3 else _RING_ARGUMENTS if shards else {})
    rows = "tokens, " if packed else "batch, tokens, "
    texts |= {tensor: f"[{rows}{rest}." for tensor, rest in _TENSORS.items()}
    if not shards:
        texts |= {tensor: texts[tensor].replace("tokens", "keys") for tensor in ("k", "v", "kv")}
    summary = f"{module}'s function: attention over {'packed sequences' if packed else 'a batch of sequences'}. "
    summary += f"{_SHARDS[shards]} Collective." if shards else "One rank."
    lse = "[heads, tokens]" if packed else "[batch, heads, tokens]"
    lines = [summary, *(["", own] if own else []), "", "Args:"]
    lines += [f"    {argument}: {texts[argument]}" for argument in parameters]
    lines += ["", "Returns:", f"    out, [{rows}heads, head_dim] of q's dtype; with return_attn_probs (out, lse, None), lse",
              f"    float32 {lse}. A row that sees no key has zeros in out and -inf in lse. Both have gradients."]  # fmt: skip
    lines += ["", "Raises:", "    CallError: a keyword is unknown, with its name here if there is one.",
              "    UsageError: shapes or lengths contradict each other, or those of other ranks.",
              "    UnsupportedError: dropout, ALiBi or pages are given, or no kernel computes the job."]  # fmt: skip
    lines += ["    PeerError: another rank failed, or sent no heartbeat for 60 seconds."] if shards else []
    lines += ["", "Formula:", f"    That of ringattn.{'varlen' if packed else 'attention'}()."]
    required = [argument for argument, parameter in parameters.items() if parameter.default is parameter.empty]
    lines += ["", "Example:", *(f"    {line}" for line in _example(name, module, required, packed, llama3))]
    return "\n".join(lines)
