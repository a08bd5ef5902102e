# SPDX-License-Identifier: Apache-2.0
"""PyTorch at the jobs of `ringattn bench --quick`, which starts this script: `python3 -c SCRIPT cuda|cpu THREADS`.

Reads a job a line, the member "job" of a benchmark line with "samples", and answers with a line: its times, or "error". The
first line is about PyTorch itself. PyTorch is called as a model calls it, and chooses its kernels. A decode step reads caches
larger than the GPU's L2, in a CUDA graph, as ringattn's does. bench/peers has more peers, and forces their kernels."""

import json
import math
import os
import sys
import time

MIN_SAMPLES, MIN_SECONDS = 10, 0.5
FAR_BEYOND_CACHE = 512 << 20  # bytes read between two uses of a KV cache
MIN_STEPS = 4  # of a graph


def reason(error):
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def quantile(ordered, part):
    """Linear between the two nearest."""
    at = part * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Peer:
    def __init__(self, torch, device):
        self.torch, self.device = torch, device
        self.sdpa = torch.nn.functional.scaled_dot_product_attention

    def rows(self, job, *shape):
        dtype = {"bf16": self.torch.bfloat16, "fp16": self.torch.float16, "fp32": self.torch.float32}[job["dtype"]]
        return self.torch.randn(*shape, device=self.device, dtype=self.torch.float32 if self.device == "cpu" else dtype).to(dtype)

    def inputs(self, job, queries):
        """q, k, v: [batch, heads, tokens, dim], which lie as [batch, tokens, heads, dim], as projections leave them."""
        shapes = ((queries, "heads", "head_dim"), (job["seq"], "kv_heads", "head_dim"), (job["seq"], "kv_heads", "head_dim_v"))
        return [self.rows(job, job["batch"], tokens, job[heads], job[dim]).transpose(1, 2) for tokens, heads, dim in shapes]

    def attend(self, job, q, k, v, causal):
        return self.sdpa(q, k, v, is_causal=causal, enable_gqa=job["heads"] != job["kv_heads"])

    def attention(self, job):
        inputs = self.inputs(job, job["seq"])
        return lambda: self.attend(job, *inputs, job["mask"] == "causal"), 1

    def attention_backward(self, job):
        inputs = [rows.requires_grad_() for rows in self.inputs(job, job["seq"])]
        with self.torch.enable_grad():
            out = self.attend(job, *inputs, job["mask"] == "causal")
        dout = self.rows(job, job["batch"], job["seq"], job["heads"], job["head_dim_v"]).transpose(1, 2)
        return lambda: self.torch.autograd.grad(out, inputs, dout, retain_graph=True), 1

    def decode(self, job):
        """One query a sequence, which sees all keys."""
        if self.device == "cpu":
            inputs = self.inputs(job, 1)
            return lambda: self.attend(job, *inputs, False), 1
        cache_bytes = 2 * job["batch"] * job["seq"] * job["kv_heads"] * (job["head_dim"] + job["head_dim_v"])
        caches = [self.inputs(job, 1) for _ in range(math.ceil(FAR_BEYOND_CACHE / cache_bytes))]
        steps = caches * math.ceil(MIN_STEPS / len(caches))
        warm = self.torch.cuda.Stream()
        warm.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(warm):
            self.attend(job, *caches[0], False)
        self.torch.cuda.current_stream().wait_stream(warm)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for inputs in steps:
                self.attend(job, *inputs, False)
        return graph.replay, len(steps)

    def linear(self, job):
        x = self.rows(job, job["tokens"], job["in_features"])
        weight = self.rows(job, job["out_features"], job["in_features"])
        return lambda: self.torch.nn.functional.linear(x, weight), 1

    def measure(self, work, samples):
        """Milliseconds of each repeat. On a GPU all are enqueued before the first is waited for."""
        torch = self.torch

        def on_cpu(count):
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                work()
                times.append((time.perf_counter() - begin) * 1e3)
            return times

        def on_gpu(count):
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
            for begin, end in events:
                begin.record()
                work()
                end.record()
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in events]

        timed = on_cpu if self.device == "cpu" else on_gpu
        estimate = timed(1)[0]  # loads and plans
        if estimate < 1e3:
            estimate = timed(1)[0]
        return timed(samples or max(MIN_SAMPLES, min(1000, math.ceil(MIN_SECONDS * 1e3 / max(estimate, 1e-3)))))

    def answer(self, job):
        op = job.get("op", "attention")
        work, steps = {name: getattr(self, name) for name in ("attention", "attention_backward", "decode", "linear")}[op](job)
        times = sorted(milliseconds / steps for milliseconds in self.measure(work, job["samples"]))
        ms = {"median": quantile(times, 0.5), "p10": quantile(times, 0.1), "p90": quantile(times, 0.9)}
        return {"tool": "pytorch linear" if op == "linear" else "pytorch sdpa", "samples": len(times), "ms": ms}


def import_torch(device, threads):
    """torch, and the line about it."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        return None, {"error": f"python3 can't import torch: {reason(error)}"}
    if device == "cuda" and not torch.cuda.is_available():
        return None, {"error": f"PyTorch {torch.__version__} sees no GPU"}
    if device == "cpu":
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    return torch, {"version": torch.__version__}


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(line):
        print(json.dumps(line), file=answers, flush=True)

    device = sys.argv[1]
    torch, about = import_torch(device, int(sys.argv[2]))
    say(about)
    if torch is None:
        return
    peer = Peer(torch, device)
    for line in sys.stdin:
        try:
            say(peer.answer(json.loads(line)))
        except Exception as error:  # of any kind: the table has a row without this figure
            say({"error": reason(error)})
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
