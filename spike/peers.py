# SPDX-License-Identifier: Apache-2.0
# Peers on the same card: PyTorch SDPA's FlashAttention-2 and cuDNN backends, and a bf16 matrix product. One JSON line a
# figure. Usage: peers.py [causal|full|dims|all]
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_ms(f, repeats):
    for _ in range(3):
        f()
    # Everything is enqueued first: the host's work hides behind the device's.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        f()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    return statistics.median(times)


def attention(backend, name, batch, n, heads, kv_heads, dim, causal):
    q = torch.randn(batch, n, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.randn(batch, n, kv_heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    try:
        with sdpa_kernel(backend):
            ms = median_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads),
                           5 if n >= 65536 else 15)
    except RuntimeError as error:
        print(json.dumps({"what": "speed", "kernel": name, "error": str(error)[:80]}))
        return
    flops = 4 * batch * n * n * dim * heads * (0.5 if causal else 1)
    print(json.dumps({"what": "speed", "kernel": name, "mask": "causal" if causal else "full", "batch": batch, "seq": n, "heads": heads,
                      "kv_heads": kv_heads, "head_dim": dim, "ms": round(ms, 4), "tflops": round(flops / ms * 1e-9, 1)}), flush=True)


which = sys.argv[1] if len(sys.argv) > 1 else "all"
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
ms = median_ms(lambda: a @ b, 15)
print(json.dumps({"what": "gemm", "n": 8192, "ms": round(ms, 4), "tflops": round(2 * 8192**3 / ms * 1e-9, 1)}))
for backend, name in ((SDPBackend.FLASH_ATTENTION, "PyTorch FA2"), (SDPBackend.CUDNN_ATTENTION, "cuDNN")):
    for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072):
        attention(backend, name, max(1, 16384 // n), n, 32, 8, 128, True)
    attention(backend, name, 2, 8192, 32, 8, 128, False)
    attention(backend, name, 1, 16384, 32, 8, 128, False)
    if which in ("dims", "all"):
        for n in (4096, 8192, 16384, 32768):
            attention(backend, name, max(1, 16384 // n), n, 32, 32, 64, True)
            attention(backend, name, max(1, 16384 // n), n, 8, 8, 256, True)
