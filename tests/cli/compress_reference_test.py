# SPDX-License-Identifier: Apache-2.0
"""Compressed files by the reference library: it reads them, and what it writes of them again is the same cache to the
program; and decompressing by the page's words, in NumPy, gives the tensors whose attention is the file's attention, bit for
bit. Of formats with a rank, whose products a kernel sums in an order of its own, nearly.

Usage: compress_reference_test.py RINGATTN, the path of the program. Exits 77 where the library is missing."""

import os
import subprocess
import sys
import tempfile

try:
    import ml_dtypes
    import numpy
    import safetensors
    import safetensors.numpy
except ImportError as error:
    print(f"skipped: needs Python with ml_dtypes, numpy and safetensors ({error})")
    sys.exit(77)

TOKENS, HEADS, KV_HEADS, DIM = 333, 4, 2, 64


def e4m3(codes):
    """The numbers of e4m3 codes, exactly."""
    sign = numpy.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> 3 & 15).astype(int)
    mantissa = (codes & 7).astype(float)
    small = mantissa * 2.0**-9
    return (sign * numpy.where(exponent == 0, small, (8 + mantissa) * 2.0 ** (exponent - 10.0))).astype(numpy.float32)


def nibbles(codes):
    return numpy.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype(numpy.float32)


def fused(codes, scales, zeros):
    """code * scale + zero with one rounding to fp32: fp64 holds sums of so few digits exactly enough."""
    return (codes.astype(numpy.float64) * scales + zeros).astype(numpy.float32)


def decompressed(name, tensors, text, type=numpy.float16):
    part = lambda suffix: tensors[f"{name}_{suffix}"]
    words = text.split()
    if words[0] == "fp8":
        scales = part("scales")
        if words[1] != "token_head":
            scales = scales.reshape(1, -1, 1)
            assert scales.size == {"tensor": 1, "head": KV_HEADS}[words[1]]
        return (e4m3(part("codes")) * scales).astype(numpy.float16)
    if words[0] == "int8":
        return (part("codes").astype(numpy.float32) * part("scales")).astype(numpy.float16)
    if words[0] == "int4_token":
        pairs = part("scales").astype(numpy.float64).reshape(TOKENS, KV_HEADS, DIM // 32, 2).repeat(32, axis=2)
        return fused(nibbles(part("codes")), pairs[..., 0], pairs[..., 1]).astype(type)
    if words[0] == "int4_channel":
        group = int(words[2])
        closed = TOKENS // group * group
        # The pairs of a group's tokens, in token order, are those of its channels.
        pairs = part("scales")[:closed].astype(numpy.float64)
        pairs = pairs.reshape(closed // group, group, KV_HEADS, DIM // group, 2).transpose(0, 2, 1, 3, 4)
        pairs = pairs.reshape(closed // group, 1, KV_HEADS, DIM, 2)
        codes = nibbles(part("codes")[:closed]).reshape(closed // group, group, KV_HEADS, DIM)
        rows = fused(codes, pairs[..., 0], pairs[..., 1]).reshape(closed, KV_HEADS, DIM).astype(numpy.float16)
        return numpy.concatenate([rows, part("tail")[0, : TOKENS - closed]])
    if words[0] == "vector":
        width = int(words[2])
        runs = DIM // width
        codes = part("codes").astype(int)
        heads = numpy.arange(KV_HEADS).reshape(1, -1, 1)
        return part("codebook")[heads, numpy.arange(runs), codes].reshape(TOKENS, KV_HEADS, DIM)
    if words[0] in ("low_rank", "hybrid"):
        products = numpy.einsum("thr,hrd->thd", part("factors").astype(float), part("basis").astype(float))
        rows = products.astype(numpy.float16).reshape(TOKENS, KV_HEADS, DIM)  # of groups of heads, a group's side by side
        if words[0] == "low_rank":
            return rows
        rows = (rows.astype(numpy.float32) + decompressed(name, tensors, "int4_token group 32", numpy.float32)).astype(type)
        for head, channels in enumerate(part("outlier_channels")):
            rows[:, head, channels] = part("outliers")[:, head]
        return rows
    raise AssertionError(text)


def deserialized(path):
    with open(path, "rb") as file:
        return safetensors.deserialize(file.read())


def write_back(source, target):
    """Everything that a file holds, read and written by the library, which knows e4m3 by the name of ml_dtypes' type."""
    with safetensors.safe_open(source, "np") as file:
        metadata = file.metadata()
    codes = {name for name, tensor in deserialized(source) if tensor["dtype"] == "F8_E4M3"}
    tensors = {name: x.view(ml_dtypes.float8_e4m3fn) if name in codes else x for name, x in load(source).items()}
    safetensors.numpy.save_file(tensors, target, metadata)


def load(path):
    """All tensors by the library; those of e4m3, which NumPy doesn't know, as bytes."""
    data = deserialized(path)
    types = {"F16": "float16", "F32": "float32", "U8": "uint8", "I8": "int8", "F8_E4M3": "uint8", "I32": "int32"}
    return {name: numpy.frombuffer(bytes(t["data"]), types[t["dtype"]]).reshape(t["shape"]) for name, t in data}


def attention(q, k, v, position, positions):
    """O of one query of one head in fp64, of the keys that stand at or in front of it."""
    seen = positions <= position
    if not seen.any():
        return numpy.zeros(v.shape[1])
    scores = k[seen].astype(float) @ q.astype(float) / numpy.sqrt(DIM)
    weights = numpy.exp(scores - scores.max())
    return weights @ v[seen].astype(float) / weights.sum()


def check_evicted(path, run, plain):
    """Files that have lost tokens: rows of k and v are those at k_positions, and O is that of the whole cache with the
    other tokens masked. Behind the eviction, tokens are stored as those of any other file."""
    cases = [("knorm", 2, 0.5), ("snapkv:window=16", 2, 0.75), ("streaming:first=3", 2, 0.9)]
    cases += [("expected:heads=all", 1, 0.5), ("snapkv:heads=all,window=8+int8", 1, 0.5)]
    for method, heads, ratio in cases:
        words = ["compress", "--method", method, "--ratio", str(ratio), "--input", path("qkv"), "--output", path("small")]
        run(*words, "--force")
        tensors = load(path("small"))
        kept = int(TOKENS * (1 - ratio))
        positions = tensors["k_positions"]
        assert positions.dtype == numpy.int32 and positions.shape == (kept, heads), (method, positions.shape)
        assert (numpy.diff(positions, axis=0) > 0).all() and positions.min() >= 0 and positions.max() < TOKENS
        assert list(tensors["k_lengths"]) == [TOKENS]
        wide = numpy.broadcast_to(positions, (kept, KV_HEADS))
        rows = {name: numpy.take_along_axis(plain[name], wide[:, :, None], axis=0) for name in "kv"}
        for name in "kv":
            if name in tensors:
                assert tensors[name].tobytes() == rows[name].tobytes(), (method, name)
            else:
                rows[name] = decompressed(name, tensors, "int8")
        if method.startswith("knorm"):
            norms = numpy.linalg.norm(plain["k"].astype(float), axis=2)
            for head in range(KV_HEADS):
                assert (numpy.sort(numpy.argsort(norms[:, head])[:kept]) == positions[:, head]).all()
        if method.startswith("streaming"):
            assert (positions[:, 0] == numpy.r_[0:3, TOKENS - kept + 3 : TOKENS]).all()
        run("run", "--input", path("small"), "--output", path("small.out"), "--force")
        out = safetensors.numpy.load_file(path("small.out"))["out"]
        for token in (0, 1, 17, 150, TOKENS - 2, TOKENS - 1):
            for head in range(HEADS):
                own = head * KV_HEADS // HEADS
                expected = attention(plain["q"][token, head], rows["k"][:, own], rows["v"][:, own], token, wide[:, own])
                assert numpy.abs(out[token, head] - expected).max() < 4e-3, (method, token, head)
        print("ok", method, ratio)


def main():
    tool = sys.argv[1]
    normal = numpy.random.default_rng(1).standard_normal
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    plain = {name: normal((TOKENS, count, DIM)).astype(numpy.float16) for name, count in heads.items()}
    plain["k"][:, :, 7] *= 20  # an outlier channel
    with tempfile.TemporaryDirectory() as folder:
        path = lambda name: os.path.join(folder, name)

        def run(*words):
            subprocess.run([tool, *words], check=True, stdout=subprocess.DEVNULL)

        safetensors.numpy.save_file(plain, path("qkv"))
        methods = [["fp8"], ["fp8", "--ratio", "0.5"], ["fp8 tensor"], ["int8"], ["int4"], ["int4", "--ratio", "0.69"], ["vq"]]
        for method in [*methods, ["lowrank"], [f"lowrank:heads={KV_HEADS}"], ["hybrid"]]:
            words = ["compress", "--method", *method, "--input", path("qkv"), "--output", path("small"), "--force"]
            ranked = method[0].startswith(("lowrank", "hybrid"))
            made = subprocess.run([tool, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if ranked and made.returncode == 4:
                print("skipped:", method, made.stderr)
                continue
            assert made.returncode == 0, made.stderr
            with safetensors.safe_open(path("small"), "np") as file:
                metadata = file.metadata()
                names = set(file.keys())
            tensors = load(path("small"))
            assert names == set(tensors), names
            assert (tensors["q"] == plain["q"]).all()
            back = {name: decompressed(name, tensors, metadata[f"{name}_format"]) for name in "kv"}
            safetensors.numpy.save_file({"q": plain["q"], **back}, path("back"))
            write_back(path("small"), path("again"))
            for name in "small", "back", "again":
                run("run", "--input", path(name), "--output", path(name + ".out"), "--force")
            small, expected, again = (safetensors.numpy.load_file(path(name + ".out")) for name in ("small", "back", "again"))
            for tensor in "out", "lse":
                assert again[tensor].tobytes() == small[tensor].tobytes(), (method, tensor)
                if ranked:
                    assert numpy.abs(small[tensor].astype(float) - expected[tensor]).max() < 4e-3, (method, tensor)
                else:
                    assert small[tensor].tobytes() == expected[tensor].tobytes(), (method, tensor)
            print("ok", method, metadata)
        check_evicted(path, run, plain)


if __name__ == "__main__":
    main()
