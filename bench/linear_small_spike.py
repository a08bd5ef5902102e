# SPDX-License-Identifier: Apache-2.0
"""Linear layers of few rows on one H200 (notes/linear.md): linear_small_spike.so in graphs, in turn with cuBLAS.

linear_small_spike.py LIBRARY prints lines of JSON."""

import ctypes
import json
import statistics
import sys

import torch

lib = ctypes.CDLL(sys.argv[1])
P = lambda t: ctypes.c_void_p(t.data_ptr() if t is not None else 0)
FORMS = {"64x3": 0, "128x2": 1, "128x1": 2, "64x2": 3}
scratch = torch.empty(16 * 32768 * 64, device="cuda")
counters = torch.zeros(65536, device="cuda", dtype=torch.int32)
def emit(**l): print(json.dumps(l), flush=True)
def run(form, x, w, y, split=2048):
    m, k = x.shape
    s = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert lib.spike_small(form, P(x), P(w), P(y), m, w.shape[0], k, split, P(scratch), P(counters), s)
for m, n, k in ((1, 4096, 5376), (13, 12288, 5376), (64, 4000, 1344), (33, 4096, 14336)):
    x = torch.randn(m, k, device="cuda").bfloat16(); w = torch.randn(n, k, device="cuda").bfloat16()
    pad = (m + 15) // 16 * 16
    xp = torch.zeros(pad, k, device="cuda", dtype=torch.bfloat16); xp[:m] = x
    want = torch.empty(pad, n, device="cuda", dtype=torch.bfloat16)
    lib.spike_mma(0, 0, P(xp), P(w), None, P(want), pad, n, k, 2048)
    for name, form in FORMS.items():
        y = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        run(form, x, w, y); torch.cuda.synchronize()
        same = torch.equal(y.view(torch.int16), want[:m].view(torch.int16))
        emit(what="small bits", form=name, m=m, n=n, k=k, split=2048, equal=bool(same))
jobs = {"cuBLAS": lambda x, w, y: torch.mm(x, w.T, out=y)}
for name, form in FORMS.items():
    jobs[name] = lambda x, w, y, f=form: run(f, x, w, y)
jobs["128x2, split 1024"] = lambda x, w, y: run(1, x, w, y, 1024)
jobs["64x3, split 1024"] = lambda x, w, y: run(0, x, w, y, 1024)
jobs["128x2, split 4096"] = lambda x, w, y: run(1, x, w, y, 4096)
for n, k in ((12288, 5376), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192)):
    for m in (1, 8, 16, 64):
        copies = max(3, -(-(320 << 20) // (2 * n * k)))
        sets = [(torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16(),
                 torch.empty(m, n, device="cuda", dtype=torch.bfloat16)) for _ in range(copies)]
        launches = copies * max(1, 24 // copies)
        graphs = {}
        for name, job in jobs.items():
            for s in sets: job(*s)
            torch.cuda.synchronize()
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for i in range(launches): job(*sets[i % copies])
            graphs[name] = g
        times = {name: [] for name in jobs}
        for r in range(12):
            for name, g in graphs.items():
                b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                b.record(); g.replay(); e.record(); e.synchronize()
                if r: times[name].append(b.elapsed_time(e) / launches * 1e3)
        base = statistics.median(times["cuBLAS"])
        for name, t in times.items():
            us = statistics.median(t)
            emit(what="small", form=name, m=m, n=n, k=k, us=round(us, 2), us_min=round(min(t), 2),
                 gbytes_per_s=round(2e-3 * n * k / us, 0), of_cublas_time=round(us / base, 3), copies=copies)
        del sets, graphs
        torch.cuda.empty_cache()
