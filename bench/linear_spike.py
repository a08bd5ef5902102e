# SPDX-License-Identifier: Apache-2.0
"""Spike of linear layers on one H200 (notes/linear.md): runs linear_spike.so in turn with cuBLAS through PyTorch.

linear_spike.py LIBRARY [bits|speed ...] prints lines of JSON.
"""

import ctypes
import json
import statistics
import sys

import torch

lib = ctypes.CDLL(sys.argv[1])
PARTS = sys.argv[2:] or ["bits", "speed"]
VARIANTS = {
    "128x256": 0, "128x192": 1, "128x192 registers": 2, "128x192 registers, 5 stages": 3, "128x256 L2": 4,
    "128x256 L2 red": 5, "128x128 registers": 6,
}


def pointer(t):
    return ctypes.c_void_p(t.data_ptr() if t is not None else 0)


def emit(**line):
    print(json.dumps(line), flush=True)


def data(kind, rows, k, dtype, seed):
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, k, device="cuda", generator=g)
    if kind == "wide":
        x *= 2.0 ** torch.randint(-12, 13, (rows, k), device="cuda", generator=g).float()
    elif kind == "cancelling":
        x[:, 1::2] = -x[:, ::2] if seed % 2 else x[:, ::2]
        x += torch.randn(rows, k, device="cuda", generator=g) * 2.0**-9
    elif kind == "positive":
        x = x.abs() + 1
    elif kind == "subnormal":
        x *= 2.0**-132 if dtype == torch.bfloat16 and seed % 2 else 2.0**-20 if dtype == torch.float16 else 1.0
    elif kind == "huge":
        x *= 2.0**62 if dtype == torch.bfloat16 else 2.0**12
    return x.to(dtype)


def bits():
    m, n, k = 256, 768, 4096
    stream_sync = torch.cuda.synchronize
    for dtype, code in ((torch.bfloat16, 0), (torch.float16, 1)):
        tiles = (8, 16, 32, 64, 128, 192, 256) if code == 0 else (8, 64, 128, 192, 256)
        for kind in ("plain", "wide", "cancelling", "positive", "subnormal", "huge"):
            a, b = data(kind, m, k, dtype, 1), data(kind, n, k, dtype, 2)
            want = torch.full((m, n), float("nan"), device="cuda")
            lib.spike_mma(code, 0, pointer(a), pointer(b), pointer(want), None, m, n, k, 0)
            control = torch.full((m, n), float("nan"), device="cuda")
            lib.spike_mma(code, 1, pointer(a), pointer(b), pointer(control), None, m, n, k, 0)
            equal = compared = 0
            different = []
            for tile in tiles:
                for block in (32, 64, 128):
                    for swapped in (0, 1):
                        if swapped and m % tile:
                            continue
                        got = torch.full((m, n), float("nan"), device="cuda")
                        assert lib.spike_bits(code, tile, block, swapped, pointer(a), pointer(b), pointer(got), m, n, k)
                        stream_sync()
                        compared += 1
                        same = torch.equal(got.view(torch.int32), want.view(torch.int32))
                        equal += same
                        if not same:
                            different.append([tile, block, swapped])
            exact = a.double() @ b.double().T
            error = float((want.double() - exact).norm() / exact.norm())
            emit(what="bits", dtype=str(dtype)[6:], data=kind, m=m, n=n, k=k, tiles=tiles, k_blocks=[32, 64, 128],
                 compared=compared, equal=equal, different=different, finite=int(torch.isfinite(want).sum()),
                 nonzero=int((want != 0).sum()),
                 control_differs=int((control.view(torch.int32) != want.view(torch.int32)).sum()),
                 relative_error=error if error == error else None)
    m, n, k = 128, 512, 16384
    for kind in ("random", "all 127", "127 and -127 in turn", "-127 times 127"):
        g = torch.Generator("cuda").manual_seed(3)
        a = torch.randint(-127, 128, (m, k), device="cuda", generator=g, dtype=torch.int8)
        b = torch.randint(-127, 128, (n, k), device="cuda", generator=g, dtype=torch.int8)
        if kind != "random":
            a.fill_(127)
            b.fill_(-127 if kind.startswith("-") else 127)
        if kind.startswith("127 and"):
            b[:, ::2] = -127
            b[:, -1] = 5
        want = (a.double() @ b.double().T).long()
        for tile, block in ((8, 128), (64, 128), (128, 128), (256, 128), (256, 64)):
            for swapped in (0, 1):
                if swapped and m % tile:
                    continue
                got = torch.full((m, n), -1, device="cuda", dtype=torch.int32)
                assert lib.spike_bits(2, tile, block, swapped, pointer(a), pointer(b), pointer(got), m, n, k)
                stream_sync()
                emit(what="int8", data=kind, tile=tile, k_block=block, swapped=swapped, k=k,
                     equal=bool(torch.equal(got.long(), want)), largest=int(want.abs().max()))


def speed():
    scratch = torch.empty(132 * 256 * 128, device="cuda")

    def run(variant, a, b, c, split=2048, group=8):
        m, k = a.shape
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        lib.spike_gemm(variant, pointer(a), pointer(b), pointer(c), m, b.shape[0], k, split, group,
                       pointer(scratch), stream)

    # Bits: all forms with closed sums equal mma.sync with the same splits.
    for m, n, k in ((1000, 4096, 5376), (512, 4096, 14336), (264, 4000, 1344)):
        a, b = data("plain", m, k, torch.bfloat16, 5), data("plain", n, k, torch.bfloat16, 6)
        padded = (m + 15) // 16 * 16
        a16 = torch.zeros(padded, k, device="cuda", dtype=torch.bfloat16)
        a16[:m] = a
        for split in (2048, 4096):
            want = torch.empty(padded, n, device="cuda", dtype=torch.bfloat16)
            lib.spike_mma(0, 0, pointer(a16), pointer(b), None, pointer(want), padded, n, k, split)
            for name, variant in VARIANTS.items():
                if variant < 2:
                    continue
                got = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                run(variant, a, b, got, split)
                torch.cuda.synchronize()
                emit(what="split bits", variant=name, m=m, n=n, k=k, split=split,
                     equal=bool(torch.equal(got.view(torch.int16), want[:m].view(torch.int16))))
        exact = a.double() @ b.double().T
        got = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        for name, variant in (("128x256", 0), ("128x192", 1)):
            run(variant, a, b, got)
            torch.cuda.synchronize()
            emit(what="error", variant=name, m=m, n=n, k=k, relative=float((got.double() - exact).norm() / exact.norm()))

    jobs = {"cuBLAS": lambda a, b, c: torch.mm(a, b.T, out=c)}
    for name, variant in VARIANTS.items():
        jobs[name] = lambda a, b, c, v=variant: run(v, a, b, c)
    jobs["128x192 registers, split 4096"] = lambda a, b, c: run(2, a, b, c, 4096)
    jobs["128x256 L2, split 4096"] = lambda a, b, c: run(4, a, b, c, 4096)
    jobs["128x192 registers, group 4"] = lambda a, b, c: run(2, a, b, c, 2048, 4)
    jobs["128x192 registers, group 16"] = lambda a, b, c: run(2, a, b, c, 2048, 16)
    jobs["128x256 L2, group 4"] = lambda a, b, c: run(4, a, b, c, 2048, 4)
    layers = ((4096, 4096), (4096, 14336), (12288, 5376))
    shapes = [(8192, 8192, 8192)] + [(m, n, k) for n, k in layers for m in (1024, 2048, 4096, 8192)]
    for m, n, k in shapes:
        copies = max(2, -(-(256 << 20) // (2 * (m * k + n * k + m * n))))
        sets = [(torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16(),
                 torch.empty(m, n, device="cuda", dtype=torch.bfloat16)) for _ in range(copies)]
        launches = max(2, round(3e-3 / (2 * m * n * k / 7e14)))
        times = {name: [] for name in jobs}
        for round_number in range(13):
            for name, job in jobs.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                job(*sets[0])
                begin.record()
                for i in range(launches):
                    job(*sets[(i + 1) % copies])
                end.record()
                end.synchronize()
                if round_number:
                    times[name].append(begin.elapsed_time(end) / launches)
        base = statistics.median(times["cuBLAS"])
        for name, found in times.items():
            ms = statistics.median(found)
            emit(what="speed", variant=name, m=m, n=n, k=k, ms=round(ms, 5), ms_min=round(min(found), 5),
                 tflops=round(2e-9 * m * n * k / ms, 1), of_cublas=round(base / ms, 4), launches=launches, copies=copies)
        del sets
        torch.cuda.empty_cache()


if "bits" in PARTS:
    bits()
if "speed" in PARTS:
    speed()
