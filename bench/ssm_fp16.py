#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where the error of fp16 scans comes from: random jobs of ssd and selective_scan on the CPU against fp64, beside a
same-precision reference (fp16 inputs, fp32 arithmetic token by token, y rounded to fp16 once).

    RINGATTN_LIBRARY=build/dev/lib/libringattn_c.so PYTHONPATH=python bench/ssm_fp16.py [--jobs 200]

The columns are the greatest of all jobs: the error in half ulps of fp16 at the exact y, which rounding alone takes; what
exceeds that half ulp, as a part of m, the sum of the absolute values of a row's terms; the error as a part of the bound of
bench/notes/ssm.md; as a part of y, where y is normal and its terms don't cancel; the share of values that are not the
nearest of fp16; the error as a part of a bound without subnormal numbers, and the jobs beyond that."""

import argparse

import numpy as np
import ringattn

CHUNK = 64  # tokens
MIN_LOG = 150  # of one token (src/kernels/ssm/ssm.hpp)


def half_ulp(y):
    """The spacing of fp16 at y: 11 bits of significand, and 2^-24 below 2^-14."""
    exponent = np.floor(np.log2(np.maximum(np.abs(y), 2.0**-14)))
    return 2.0 ** (exponent - 11)


def random_job(seed, selective):
    """Random shapes and ranges; each scale is log-uniform."""
    random = np.random.default_rng([seed, selective])

    def scale(least, most):
        return np.exp(random.uniform(np.log(least), np.log(most)))

    heads = 8 * int(random.integers(1, 5)) if selective else int(random.integers(1, 5))
    head_dim = 1 if selective else 8 * int(random.integers(1, 9))
    states = 8 * int(random.integers(1, 9))
    tokens = int(random.choice([1, 2, 63, 64, 65, 129, random.integers(1, 400)]))
    groups = 1 if selective or heads % 2 else int(random.choice([1, 2]))

    def rows(*shape, size=1.0):
        return (random.standard_normal((tokens, *shape)) * size).astype("float16")

    x_size, b_size, c_size = scale(0.01, 20), scale(0.05, 4), scale(0.05, 4)
    job = {"x": rows(heads, head_dim, size=x_size), "B": rows(groups, states, size=b_size),
           "C": rows(groups, states, size=c_size), "dt": rows(heads, size=scale(0.1, 2)),
           "A": -np.exp(random.uniform(-3, 3, (heads, states) if selective else heads)).astype("float32"),
           "D": random.standard_normal(heads).astype("float32") if random.integers(2) else None,
           "z": rows(heads, head_dim, size=scale(0.3, 4)) if random.integers(2) else None,
           "bias": random.uniform(-7, 0.5, heads).astype("float32"),
           "initial": (random.standard_normal((1, heads, head_dim, states)) * x_size).astype("float32")
           if random.integers(2) else None}  # fmt: skip
    return job


def by_definition(job, dtype, absolute=False):
    """y of a job in an arithmetic, token by token; absolute: the sums of the absolute values of the terms."""
    part = (lambda array: np.abs(array.astype(dtype))) if absolute else (lambda array: array.astype(dtype))
    heads, groups = job["x"].shape[1], job["B"].shape[1]
    x, b, c = part(job["x"]), part(job["B"]), part(job["C"])
    b, c = (np.repeat(rows, heads // groups, 1) for rows in (b, c))
    dt = np.log1p(np.exp(job["dt"].astype(dtype) + job["bias"].astype(dtype)))
    a = job["A"].astype(dtype).reshape(heads, -1)
    state = np.zeros((heads, x.shape[2], b.shape[2]), dtype) if job["initial"] is None else part(job["initial"][0])
    y = np.empty(x.shape, dtype)
    for t in range(len(x)):
        decay = np.exp(dt[t][:, None] * a)[:, None, :]
        state = decay * state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        y[t] = np.einsum("hpn,hn->hp", state, c[t])
        if job["D"] is not None:
            y[t] += part(job["D"])[:, None] * x[t]
        if job["z"] is not None:
            z = job["z"][t].astype(dtype)
            gate = z / (1 + np.exp(-z))
            y[t] *= np.abs(gate) if absolute else gate
    return y


def terms_bound(job, selective):
    """The allowed error of fp32, as a share of m: 2^-20 plus, for ssd, 2^-25 times the greatest sum of logarithms in a chunk."""
    if selective:
        return 2.0**-20
    dt = np.log1p(np.exp(job["dt"].astype("float64") + job["bias"]))
    logs = np.minimum(dt * -job["A"] * np.log2(np.e), MIN_LOG)
    return 2.0**-20 + 2.0**-25 * max(logs[begin : begin + CHUNK].sum(0).max() for begin in range(0, len(logs), CHUNK))


def by_ringattn(job, selective):
    if not selective:
        return ringattn.ssd(job["x"], job["dt"], job["A"], job["B"], job["C"], D=job["D"], z=job["z"], dt_bias=job["bias"],
                            dt_softplus=True, initial_states=job["initial"])  # fmt: skip
    z = None if job["z"] is None else job["z"][..., 0]
    initial = None if job["initial"] is None else job["initial"][:, :, 0]
    return ringattn.selective_scan(job["x"][..., 0], job["dt"], job["A"], job["B"], job["C"], D=job["D"], z=z,
                                   delta_bias=job["bias"], delta_softplus=True, initial_states=initial)[..., None]  # fmt: skip


class Worst:
    """The greatest values of one computation over all jobs."""

    def __init__(self):
        self.ulps = self.beyond = self.bound = self.relative = self.rough = 0.0
        self.values = self.other = self.jobs = 0

    def add(self, y, exact, terms, part):
        finite = np.isfinite(exact.astype("float16"))
        y, exact, terms = y.astype("float64")[finite], exact[finite], terms[finite]
        error, half = np.abs(y - exact), half_ulp(exact)
        self.ulps = max(self.ulps, (error / half).max(initial=0))
        self.beyond = max(self.beyond, ((error - half) / terms).max(initial=0, where=terms > 0))
        self.bound = max(self.bound, (error / (half + part * terms)).max(initial=0))
        alike = (np.abs(exact) >= 2.0**-14) & (np.abs(exact) > terms / 8)
        self.relative = max(self.relative, (error / np.abs(exact)).max(initial=0, where=alike))
        self.values += error.size
        self.other += int((y != exact.astype("float16")).sum())
        # Jobs that a bound without the spacing of subnormal numbers would refuse.
        rough = (error / (2.0**-11 * np.abs(exact) + 1e-4 * terms + 1e-30)).max(initial=0)
        self.rough = max(self.rough, rough)
        self.jobs += rough > 1

    def text(self, name):
        return (f"{name:32} {self.ulps:9.3f} {self.beyond:11.2e} {self.bound:9.3f} {self.relative:12.2e} "
                f"{self.other / max(1, self.values):11.2%} {self.rough:10.2f} {self.jobs:5}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200, help="of each op")
    jobs = parser.parse_args().jobs
    print(f"{'':32} {'half ulps':>9} {'beyond / m':>11} {'of bound':>9} {'relative':>12} {'not nearest':>11} {'rough':>10} "
          f"{'jobs':>5}")  # fmt: skip
    for selective in (False, True):
        ours, reference = Worst(), Worst()
        for seed in range(jobs):
            job = random_job(seed, selective)
            exact, terms = by_definition(job, "float64"), by_definition(job, "float64", absolute=True)
            part = terms_bound(job, selective)
            ours.add(by_ringattn(job, selective), exact, terms, part)
            with np.errstate(over="ignore"):
                reference.add(by_definition(job, "float32").astype("float16"), exact, terms, part)
        name = "selective_scan" if selective else "ssd"
        print(ours.text(f"{name}, {jobs} jobs"))
        print(reference.text("  same-precision reference"))


if __name__ == "__main__":
    main()
