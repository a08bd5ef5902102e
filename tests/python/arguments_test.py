# SPDX-License-Identifier: Apache-2.0
"""Arguments that are nothing of the kind, or that other libraries have: refused by the package's errors and by name, with advice
that doesn't change what is computed."""

import importlib.util
import unittest

import numpy as np
import ringattn
from ringattn import _errors
from ringattn.testing import assert_same_bits


def normal(*shape, dtype="float32"):
    return np.random.default_rng(1).standard_normal(shape, dtype="float32").astype(dtype)


def ints(*values):
    return np.array(values, "int32")


Q, K = normal(20, 4, 64), normal(20, 2, 64)
HALF = normal(20, 2, 64, dtype="float16")
X, WEIGHT = normal(20, 16), normal(16, 4)
SCAN = (normal(20, 2, 16), normal(20, 2), -abs(normal(2)), normal(20, 1, 8), normal(20, 1, 8))  # x, dt, A, B, C
SELECTIVE = (X, normal(20, 16), -abs(normal(16, 8)), normal(20, 8), normal(20, 8))
STEP = (normal(2, 4, 64), normal(2, 16, 2, 64), normal(2, 16, 2, 64), ints(5, 5))
MLA = (normal(20, 4, 24), normal(20, 64), normal(20, 8), normal(4, 16, 64), normal(4, 16, 64))
MLA_STEP = (normal(2, 4, 24), normal(2, 16, 72), ints(5, 5), *MLA[3:])


def changed(arguments, place, value):
    return (*arguments[:place], value, *arguments[place + 1 :])


class Refusals(unittest.TestCase):
    def refuses(self, cases, kind=ringattn.UsageError):
        for words, call in cases:
            with self.subTest(words):
                with self.assertRaises(kind) as caught:
                    call()
                self.assertIn(words, str(caught.exception))
                self.assertTrue(caught.exception.problem and caught.exception.why and caught.exception.suggestion)

    def test_what_is_no_array(self):
        conv, attention = ringattn.causal_conv1d, ringattn.attention
        cases = [
            ("q is NoneType", lambda: attention(None, K, K)),
            ("v is list", lambda: attention(Q, K, [[1.0]])),
            ("x is list", lambda: conv([[1.0]], WEIGHT)),
            ("weight is NoneType", lambda: conv(X, None)),
            ("conv_state is NoneType", lambda: ringattn.causal_conv1d_update(X, None, WEIGHT)),
            ("k is NoneType", lambda: ringattn.compress(None, K)),
            ("x is ndarray (ringattn.compress() gives", lambda: ringattn.decompress(K)),
            ("x is NoneType", lambda: ringattn.decompress(None)),
            ("u is list", lambda: ringattn.selective_scan([1.0], *SELECTIVE[1:])),
            ("B is NoneType", lambda: ringattn.selective_scan(*changed(SELECTIVE, 3, None))),
            ("z is list", lambda: ringattn.selective_scan(*SELECTIVE, z=[1.0])),
            ("u is list", lambda: ringattn.selective_update(normal(2, 16, 8), [1.0], *SELECTIVE[1:])),
            ("z is list", lambda: ringattn.selective_update(normal(20, 16, 8), *SELECTIVE, z=[1.0])),
            ("A is NoneType", lambda: ringattn.ssd(*changed(SCAN, 2, None))),
            ("state is NoneType", lambda: ringattn.ssd_update(None, *SCAN)),
            ("lengths is list", lambda: ringattn.decode(*STEP[:3], [5, 5])),
            ("latent is NoneType", lambda: ringattn.mla(*changed(MLA, 1, None))),
            ("rows is list", lambda: ringattn.batched_gemm([1.0], MLA[3])),
            ("weights is NoneType", lambda: ringattn.batched_gemm(MLA[1], None)),
            ("k_positions is list", lambda: attention(Q, K, K, k_positions=[1], k_lengths=9)),
            ("weight is list", lambda: ringattn.quantize_weight([[1.0]], "int8")),
            ("out of q is str", lambda: ringattn.rope(Q, out="q")),
            ("out of q is read-only", lambda: ringattn.rope(Q, out=np.frombuffer(Q.tobytes(), "float32").reshape(Q.shape))),
            ("RoPE of heads of 7", lambda: ringattn.rope(Q[..., :7])),
            ("array is list", lambda: ringattn.shard([1, 2], ringattn.zigzag([2], 1), 0)),
            ("shard 0 is int", lambda: ringattn.unshard([1, 2], ringattn.zigzag([2], 2))),
            ("shards are int", lambda: ringattn.unshard(1, ringattn.zigzag([2], 2))),
            ("cache is NoneType", lambda: ringattn.mla_decode(*changed(MLA_STEP, 1, None))),
        ]
        self.refuses(cases)

    def test_types_of_a_product(self):
        rows, weights = MLA[1], MLA[3]
        self.refuses([
            ("rows are float64 (numbers are", lambda: ringattn.batched_gemm(rows.astype("float64"), weights)),
            ("weights are fp16 [4, 16, 64] (the batched GEMM was made for fp32: rows, weights and out have one dtype). Convert "
             "the weights to fp32, or what they are multiplied by to fp16.",
             lambda: ringattn.batched_gemm(rows, weights.astype("float16"))),
        ])  # fmt: skip

    def test_axes(self):
        varlen, decode, mla = ringattn.varlen, ringattn.decode, ringattn.mla
        cases = [
            ("block_table has 1 axes", lambda: decode(*STEP, block_table=ints(0, 1))),
            ("k_cache has 3 axes", lambda: decode(*changed(STEP, 1, STEP[1][0]))),
            ("v_cache has 5 axes", lambda: decode(*changed(STEP, 2, STEP[1][None]))),
            ("cache has 2 axes", lambda: ringattn.mla_decode(*changed(MLA_STEP, 1, normal(16, 72)), rope_dim=8)),
            ("w_uk has 1 axes", lambda: ringattn.mla_decode(*changed(MLA_STEP, 3, normal(16)), rope_dim=8)),
            ("w_uv has 2 axes", lambda: mla(*changed(MLA, 4, normal(16, 64)))),
            ("q has 1 axes", lambda: mla(*changed(MLA, 0, normal(24)))),
            ("k_rope has 1 axes", lambda: mla(*changed(MLA, 2, normal(8)))),
            ("rows has 1 axes", lambda: ringattn.batched_gemm(normal(64), MLA[3])),
            ("weights has 2 axes", lambda: ringattn.batched_gemm(MLA[1], normal(16, 64))),
            ("k has 1 axes", lambda: varlen(Q, normal(20), K, [0, 20])),
            ("q has 4 axes", lambda: varlen(Q[None], K, K, [0, 20])),
            ("x has 1 axes", lambda: ringattn.causal_conv1d(normal(16), WEIGHT)),
            ("x has 3 axes", lambda: ringattn.causal_conv1d_update(X[None], normal(20, 3, 16), WEIGHT)),
            ("k has 1 axes", lambda: ringattn.compress(normal(64, dtype="float16"), K)),
            ("B has 1 axes", lambda: ringattn.selective_scan(*changed(SELECTIVE, 3, normal(8)))),
            ("initial_states has 2 axes", lambda: ringattn.selective_scan(*SELECTIVE, initial_states=normal(16, 8))),
            ("B has 1 axes", lambda: ringattn.selective_update(normal(20, 16, 8), *changed(SELECTIVE, 3, normal(8)))),
            ("B is fp32 [20, 0, 8]", lambda: ringattn.ssd(*changed(SCAN, 3, normal(20, 0, 8)))),
            ("dt is fp32 [20, 4, 1]", lambda: ringattn.ssd(*changed(SCAN, 1, normal(20, 4)))),
        ]
        self.refuses(cases)

    def test_settings(self):
        conv, attention, ssd = ringattn.causal_conv1d, ringattn.attention, ringattn.ssd
        cases = [
            *((f"cu_seqlens is {cu}", lambda cu=cu: conv(X, WEIGHT, cu_seqlens=cu))
              for cu in (7, "ab", [[0, 20]], [0, 10.7, 20], [0.0, 20.0], [0, None])),
            ("cu_seqlens is [1, 20] (it begins with 0", lambda: conv(X, WEIGHT, cu_seqlens=[1, 20])),
            ("lengths is [[0. 0.] [0. 0.] [0. 0.]] (", lambda: attention(Q, K, K, lengths=np.zeros((3, 2)))),  # on one line
            *((f"head_dim is {dim} (", lambda dim=dim: ringattn.rope_frequencies(dim)) for dim in ("x", 0, 2**40)),
            *((f"{name} is {shown} (", lambda named={name: dim}: ringattn.mla(*MLA, **named))
              for name in ("head_dim", "head_dim_v") for dim, shown in ((np.zeros(2), "[0. 0.]"), (1.5, "1.5"))),
            *((words, lambda keys=keys: ringattn.decode(*STEP, max_keys=keys))
              for words, keys in (("sequences of up to 0 keys", 0), ("max_keys is  (it should be", ""))),
            ("k is a masked array", lambda: attention(Q, np.ma.masked_array(K), K)),
            ("head_dim is 0 (a head has", lambda: ringattn.mla(MLA[0][:, :, :8], *MLA[1:3], head_dim=0)),
            ("q has 0 axes", lambda: ringattn.linear_attention(np.float32(1)[...], X, X, X)),
            ("q_offset is 1.5 (it should be a whole number)", lambda: attention(Q, K, K, q_offset=1.5)),
            ("q_offsets is 3", lambda: ringattn.varlen(Q, K, K, [0, 20], q_offsets=3)),
            ("lengths is (20,)", lambda: attention(Q, K, K, lengths=(20,))),
            ("world is 3", lambda: conv(X, WEIGHT, world=3)),
            ("world is 'self'", lambda: attention(Q, K, K, world="self")),
            ("layout 'nonsense' is not known", lambda: attention(Q, K, K, key_layout="nonsense")),
            ("layout 'nonsense' is not known", lambda: ringattn.varlen(Q, K, K, [0, 20], key_layout="nonsense")),
            ("the layout is one of lengths [20] over 2 ranks",
             lambda: ringattn.mla(*MLA, key_layout=ringattn.zigzag([20], 2))),
            ("layout is 'striped'", lambda: conv(X, WEIGHT, layout="striped")),
            ("layout is 'zigzag'", lambda: ssd(*SCAN, layout="zigzag")),
            ("the layout is one of lengths [40] over 1 ranks", lambda: conv(X, WEIGHT, cu_seqlens=[0, 20],
                                                                           layout=ringattn.super_segments([40], 1))),
            ("dt_limit is (0,)", lambda: ssd(*SCAN, dt_limit=(0,))),
            ("dt_limit is (None, 1)", lambda: ssd(*SCAN, dt_limit=(None, 1))),
            ("dt_limit is 3", lambda: ssd(*SCAN, dt_limit=3)),
            ("mask [3, 0] is not known", lambda: ringattn.testing.check_attention(Q, K, K, Q, mask=[3, 0])),
            ("Pass a tuple in place of a list.", lambda: attention(Q, K, K, mask=[3, 0])),
            ("an argument is ([3], 0)", lambda: attention(Q, K, K, mask=([3], 0))),
            ("an argument is ['absorbed']", lambda: ringattn.mla(*MLA, form=["absorbed"])),
            ("an argument is ['knorm']", lambda: ringattn.evict(K, K, ["knorm"])),
            ("an argument is [3, 0]", lambda: ringattn.evict(K, K, "knorm", mask=[3, 0])),
            ("an argument is ['int8', 'int8']", lambda: ringattn.compress(HALF, HALF, ["int8", "int8"])),
            ("method is 'int8\\x00fp8'", lambda: ringattn.compress(HALF, HALF, "int8\0fp8")),
            ("method is '\\udc80'", lambda: ringattn.evict(K, K, "\udc80")),
            ("ratio is a", lambda: ringattn.compress(HALF, HALF, ratio="a")),
            ("ratio is [0.5]", lambda: ringattn.compress(HALF, HALF, ratio=[0.5])),
            ("ratio = -1", lambda: ringattn.compress(HALF, HALF, ratio=-1)),
            ("a side of mask is 1.5", lambda: attention(Q, K, K, mask=(1.5, 0))),
            ("softmax_scale is 1e-300 (it is fp32, in which the nearest number is 0)",
             lambda: attention(Q, K, K, softmax_scale=1e-300)),
            ("softmax_scale is -1e-46", lambda: ringattn.mla(*MLA, softmax_scale=-1e-46)),
            ("softcap is 1e-300", lambda: attention(Q, K, K, softcap=1e-300)),
            ("softmax_scale is 1e+300", lambda: ringattn.decode(*STEP, softmax_scale=1e300)),
            ("cu_seqlens has 9223372036854775808", lambda: conv(X, WEIGHT, cu_seqlens=[0, 2**63])),
            ("sequence 0 of a causal conv1d has 4611686018427387904 tokens", lambda: conv(X, WEIGHT, cu_seqlens=[0, 2**62])),
            ("a side of mask has 9223372036854775808", lambda: attention(Q, K, K, mask=(2**63, 0))),
            ("method is None", lambda: ringattn.evict(K, K, None)),
            ("there is no method of eviction", lambda: ringattn.evict(K, K, "x" * 100_000)),
            ("ratio is a", lambda: ringattn.evict(K, K, "knorm", ratio="a")),
            ("method is None", lambda: ringattn.compress(HALF, HALF, None)),
            ("method is None", lambda: ringattn.compress(HALF, HALF, ("int8", None))),
            ("timeout is 5 s", lambda: attention(Q, K, K, timeout="5 s")),
            ("softcap is a (it should be a number)", lambda: attention(Q, K, K, softcap="a")),
            ("memory_budget is -1", lambda: attention(Q, K, K, memory_budget=-1)),
        ]  # fmt: skip
        self.refuses(cases)

    def test_a_kernel_decodes_where_it_is_named(self):
        def step(kernel=None):
            return ringattn.mla_decode(*MLA_STEP, rope_dim=8, kernel=kernel)[0]

        def share(kernel=None):
            return ringattn.mla_decode_partition(*MLA_STEP[:2], *MLA_STEP[3:], rope_dim=8, kernel=kernel)

        for _ in range(2):  # a second call finds what the first one has kept
            for kernel in ("cpu_attention", "auto"):
                assert_same_bits(step(kernel), step())
                self.assertEqual(share(kernel), share())
            for call in (step, share):
                self.refuses([("kernel is 7", lambda: call(7)), ("kernel is ['cpu_attention']", lambda: call(["cpu_attention"])),
                              ("no_such_kernel", lambda: call("no_such_kernel"))])  # fmt: skip
                # It runs on GPUs, if this build has it.
                self.refuses([("sm90_mla_split1k", lambda: call("sm90_mla_split1k"))], ringattn.Error)

    def test_what_contradicts_another_argument(self):
        mla, step = ringattn.mla, lambda **named: ringattn.mla_decode(*MLA_STEP, rope_dim=8, **named)
        cases = [
            ("head_dim is 999 (w_uk is [4, 16, 64]", lambda: mla(*MLA, head_dim=999)),
            ("head_dim_v is 7 (w_uv is [4, 16, 64]", lambda: mla(*MLA, head_dim_v=7)),
            ("head_dim is 15", lambda: step(head_dim=15)),
            ("head_dim_v is 0", lambda: step(head_dim_v=0)),
            ("cu_seqlens_q is given without q", lambda: ringattn.evict(K, K, "knorm", cu_seqlens_q=[0, 20])),
            *((f"{name} is given without an address", lambda given={name: value}: ringattn.store_world(**given))
              for name, value in (("rank", 0), ("ranks", 1), ("job", "a"))),
            ("rank is a", lambda: ringattn.store_world("127.0.0.1:1", "a", 2)),
            ("job is 7", lambda: ringattn.store_world("127.0.0.1:1", 0, 2, job=7)),
        ]  # fmt: skip
        self.refuses(cases)
        # What agrees is taken.
        assert_same_bits(mla(*MLA, head_dim=16, head_dim_v=16)[0], mla(*MLA)[0])
        assert_same_bits(ringattn.attention(Q, K, K, key_layout="zigzag")[0], ringattn.attention(Q, K, K)[0])

    def test_caches(self):
        q, cache, lengths = normal(2, 4, 64), normal(40, 16, 2, 64), ints(30, 5)
        decode, share, table = ringattn.decode, ringattn.decode_partition, ints(0, 1, 2, 3).reshape(2, 2)
        cases = []
        for op, rest in ((decode, (lengths,)), (share, ())):
            cases += [
                ("a token's key and value have the same index", lambda op=op,
                 rest=rest: op(q, cache[:2], cache[:3], *rest)),
                ("a token's key and value have the same index", lambda op=op,
                 rest=rest: op(q, cache, cache[:, :8], *rest)),
                ("a token's key and value have the same index",
                 lambda op=op, rest=rest: op(q, cache, cache[:, :, :1], *rest)),
                ("Pass the block_table of a cache of pages", lambda op=op,
                 rest=rest: op(q, cache[:1], cache[:1], *rest)),
                ("block_table is [1, 2] (it has a row for each of 2 sequences)",
                 lambda op=op, rest=rest: op(q, cache, cache, *rest, block_table=table[:1])),
            ]  # fmt: skip
        latent = ringattn.mla_decode, normal(2, 4, 24), normal(40, 16, 72)
        cases += [
            ("where the cache has pages, pass its block_table", lambda: decode(q, cache, cache, lengths)),
            ("where the cache has pages, pass its block_table",
             lambda: latent[0](*latent[1:], lengths, *MLA[3:], rope_dim=8)),
            ("Without a block_table each sequence",
             lambda: latent[0](latent[1], latent[2][:1], ints(5, 5), *MLA[3:], rope_dim=8)),
        ]
        self.refuses(cases)
        paged = decode(q, cache, cache, lengths, block_table=table)[0]
        assert_same_bits(paged[1], decode(q[1:], cache[2:3], cache[2:3], ints(5))[0][0])

    def test_a_closed_world(self):
        world = ringattn.threads_worlds(1)[0]
        ringattn.attention(Q, K, K, world=world)
        world.wait()
        world.close()
        world.close()
        cases = [("the world is closed", world.wait),
                 ("the world is closed", lambda: ringattn.attention(Q, K, K, world=world))]
        self.refuses(cases)

    def test_threads_and_seconds(self):
        ops = {
            "attention": lambda **named: ringattn.attention(Q, K, K, **named),
            "causal_conv1d": lambda **named: ringattn.causal_conv1d(X, WEIGHT, **named),
            "ssd": lambda **named: ringattn.ssd(*SCAN, **named),
            "decode": lambda **named: ringattn.decode(*STEP, **named),
            "mla": lambda **named: ringattn.mla(*MLA, **named),
            "mla_decode": lambda **named: ringattn.mla_decode(*MLA_STEP, rope_dim=8, **named),
        }
        for name, op in ops.items():
            op(threads=2)
            for threads in (-1, 50000, 1000000, 2**40):
                self.refuses([(f"{name}: threads", lambda: self.named(name, op, threads=threads))])
            for timeout in (float("nan"), -1.0, 0.0, 0, 1e7, float("inf")):
                self.refuses([(f"{name}: ", lambda: self.named(name, op, timeout=timeout))])
        k = normal(20, 2, 64, dtype="float16")
        self.refuses([("50000 threads are not possible", lambda: ringattn.compress(k, k, threads=50000)),
                      ("-1 threads are not possible", lambda: ringattn.batched_gemm(*MLA[1::2], threads=-1)),
                      ("-1 threads are not possible", lambda: ringattn.evict(k, k, "knorm", threads=-1)),
                      ("timeout is 0", lambda: ringattn.store_world("127.0.0.1:1", timeout=0)),
                      ("a time limit of nan seconds", lambda: ringattn.store_world("127.0.0.1:1", timeout=float("nan")))])

    def named(self, name, op, **setting):
        """The error of op, with what it is about in front."""
        try:
            op(**setting)
        except ringattn.UsageError as error:
            about = "threads" if "threads" in error.problem else "timeout" if "time" in error.problem else "?"
            raise ringattn.UsageError(f"{name}: {about}; {error.problem}", error.why, error.suggestion) from error

    def test_words_of_other_libraries(self):
        attention = ringattn.attention
        cases = [
            ("Did you mean mask=(left, right)?", lambda: attention(Q, K, K, window=128)),
            ("Did you mean mask=(sliding_window - 1, 0)?", lambda: attention(Q, K, K, sliding_window=128)),
            ("(the masks of ringattn's functions depend only on positions). For a block-sparse mask use the program, "
             "`ringattn run --block-mask` (docs/block-sparse.md)", lambda: attention(Q, K, K, block_mask=1)),
            ("ssd has no chunk_size (chunks are 64 tokens, always)", lambda: ringattn.ssd(*SCAN, chunk_size=128)),
            ("with cu_seqlens=torch.nn.functional.pad(", lambda: ringattn.ssd(*SCAN, seq_idx=1)),
        ]
        self.refuses(cases, ringattn.UnsupportedError)
        cases = [
            ("Did you mean softcap?", lambda: attention(Q, K, K, soft_cap=30.0)),
            ("See help(ringattn.attention)", lambda: attention(Q, K, K, anything=1)),
            ("batched_gemm has no timeout (it was given as 2.0)", lambda: ringattn.batched_gemm(*MLA[1::2], timeout=2.0)),
            ("compress has no axis (it was given as 2). See help(ringattn.compress)",
             lambda: ringattn.compress(HALF, HALF, axis=2)),
            ("Did you mean threads?", lambda: ringattn.decompress(ringattn.compress(HALF, HALF)[0], thread=2)),
        ]  # fmt: skip
        self.refuses(cases, ringattn.CallError)
        for name in ("attn_mask", "alibi_slopes", "window", "anything"):
            with self.assertRaises(ringattn.Error) as caught:
                attention(Q, K, K, **{name: 1})
            self.assertNotIn("no result depends on it", str(caught.exception))


class Forms(unittest.TestCase):
    """Axes that become one are compared, so that no row is taken for another one's."""

    def refuses(self, cases):
        for words, call in cases:
            with self.subTest(words), self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn(words, str(caught.exception))

    def test_batches_of_attention(self):
        q, k, attention = normal(2, 5, 4, 64), normal(2, 9, 2, 64), ringattn.attention
        other, apart = normal(9, 2, 2, 64), normal(1, 18, 2, 64)
        for _ in range(2):  # the second time as the first one
            attention(q, k, k)
            self.refuses([
                ("k is float32 [9, 2, 2, 64] (q is [2, …])", lambda: attention(q, other, other, mask="full")),
                ("k is float32 [1, 18, 2, 64] (q is [2, …])", lambda: attention(q, apart, apart, mask="full")),
                ("v is float32 [9, 2, 2, 64] (k is [2, 9, …])", lambda: attention(q, k, other)),
                ("v is float32 [1, 18, 2, 64] (k is [2, 9, …])", lambda: attention(q, k, apart)),
                ("out is float32 [5, 2, 4, 64] (q is [2, 5, …])", lambda: attention(q, k, k, out=normal(5, 2, 4, 64))),
            ])  # fmt: skip

    def test_rows_of_ssm(self):
        x, dt, a, b = normal(2, 3, 4, 16), normal(2, 3, 4), -abs(normal(4)), normal(2, 3, 1, 16)
        u, bs, a1 = normal(2, 3, 8), normal(2, 3, 16), -abs(normal(8, 16))
        ssd, selective, state = ringattn.ssd, ringattn.selective_scan, normal(6, 4, 16, 16)
        step = (normal(6, 4, 16), normal(6, 4), a, normal(6, 1, 16), normal(6, 1, 16))
        self.refuses([
            ("dt is float32 [3, 2, 4] (x is [2, 3, …])", lambda: ssd(x, normal(3, 2, 4), a, b, b)),
            ("B is float32 [3, 2, 1, 16] (x is [2, 3, …])", lambda: ssd(x, dt, a, normal(3, 2, 1, 16), b)),
            ("C is float32 [1, 6, 1, 16] (x is [2, 3, …])", lambda: ssd(x, dt, a, b, normal(1, 6, 1, 16))),
            ("z is float32 [3, 2, 4, 16] (x is [2, 3, …])", lambda: ssd(x, dt, a, b, b, z=normal(3, 2, 4, 16))),
            ("z is float32 [6, 4, 16] (x is [2, 3, …])", lambda: ssd(x, dt, a, b, b, z=normal(6, 4, 16))),
            ("delta is float32 [3, 2, 8] (u is [2, 3, …])", lambda: selective(u, normal(3, 2, 8), a1, bs, bs)),
            ("z is float32 [2, 3, 4, 16] (x is [6, …])", lambda: ringattn.ssd_update(state, *step, z=normal(2, 3, 4, 16))),
        ])  # fmt: skip

    def test_new_rows_of_a_step(self):
        q, cache, lengths = normal(3, 2, 4, 64), normal(3, 32, 2, 64), ints(3, 5, 7)
        new, turned = normal(3, 2, 2, 64), normal(2, 3, 2, 64)
        self.refuses([
            ("k_new is float32 [2, 3, 2, 64] (q is [3, 2, …]", lambda: ringattn.decode(
                q, cache, cache.copy(), lengths_before=lengths, k_new=turned, v_new=new)),
            ("v_new is float32 [2, 3, 2, 64] (q is [3, 2, …]", lambda: ringattn.decode(
                q, cache, cache.copy(), lengths_before=lengths, k_new=new, v_new=turned)),
            ("latent is float32 [2, 3, 64] (q is [3, 2, …]", lambda: ringattn.mla_decode(
                normal(3, 2, 4, 24), normal(3, 16, 72), w_uk=MLA[3], w_uv=MLA[4], lengths_before=lengths,
                latent=normal(2, 3, 64), k_rope=normal(3, 2, 8), rope_dim=8)),
        ])  # fmt: skip

    def test_what_a_step_writes_to_lies_apart(self):
        q, cache, new = normal(3, 4, 64), normal(3, 32, 2, 64), normal(3, 2, 64)
        flat = np.broadcast_to(cache[:1], cache.shape)
        flat.flags.writeable = True
        inside, lengths = cache.copy(), ints(3, 5, 7)
        words = cache.copy().reshape(-1)[:3].view("int32")
        words[:] = lengths

        def step(k=cache, v=None, k_new=new, v_new=new, lengths=lengths, update=False):
            v = cache.copy() if v is None else v
            return lambda: ringattn.decode(q, k, v, lengths_before=lengths, k_new=k_new, v_new=v_new, update_lengths=update)

        both = np.stack([cache, cache], 1)
        step(both[:, 0], both[:, 1])()  # interleaved, and apart
        self.refuses([
            ("k_cache overlaps v_cache", step(inside, inside)),
            ("k_cache overlaps k_new", step(inside, k_new=inside[:, 0])),
            ("k_cache has a stride of 0", step(flat)),
            ("lengths_before overlaps q", lambda: ringattn.decode(
                (b := np.zeros((3, 4, 64), "float32")), cache, cache, lengths_before=b.reshape(-1)[:3].view("int32"),
                update_lengths=True)),
        ])  # fmt: skip

    def test_a_prepared_job_checks_its_arrays(self):
        with ringattn.threads_worlds(1)[0] as world:
            ringattn.attention(Q, K, K, world=world)
            job = next(iter(world._objects.values()))
            out, lse = np.zeros_like(Q), np.zeros((20, 4), "float32")
            fixed = [array.copy() for array in (out, lse)]
            for array in fixed:
                array.setflags(write=False)
            self.refuses([
                ("out is read-only (this call writes to it)", lambda: job.run(Q, K, K, fixed[0], lse)),
                ("lse is read-only (this call writes to it)", lambda: job.run(Q, K, K, out, fixed[1])),
                ("out is NoneType", lambda: job.run(Q, K, K, None)),
                ("q is list", lambda: job.run([1.0], K, K, out)),
            ])  # fmt: skip
            self.assertFalse(fixed[0].any() or fixed[1].any())
            job.run(Q, K, K, out)
            self.assertTrue(out.any())

    def test_numbers_that_no_double_has(self):
        attention, many = ringattn.attention, 10**400
        self.refuses([
            *((f"{name} is 1000", lambda name=name: attention(Q, K, K, **{name: many}))
              for name in ("softmax_scale", "softcap", "timeout")),
            ("softmax_scale is <int>", lambda: attention(Q, K, K, softmax_scale=10**5000)),
            ("dt_limit is (0, 1000", lambda: ringattn.ssd(*SCAN, dt_limit=(0, many))),
            ("q_offset has <int>", lambda: attention(Q, K, K, q_offset=10**5000)),
            ("device is [1, 0]", lambda: ringattn.self_world([1, 0])),
            ("device is 5", lambda: ringattn.self_world(5)),
            *(("world is 2.0", lambda deal=deal: deal([5], 2.0))
              for deal in (ringattn.zigzag, ringattn.striped, ringattn.packed, ringattn.super_segments)),
            ("stripe is 2.5", lambda: ringattn.striped([5], 2, 2.5)),
        ])  # fmt: skip

    def test_floats_that_equal_settings_of_a_known_call(self):
        for name, value in (("mask", (2, 0)), ("threads", 1), ("q_offset", 0), ("memory_budget", 0)):
            ringattn.attention(Q, K, K, **{name: value})
            equal = tuple(map(float, value)) if name == "mask" else float(value)
            words = f"a side of mask is {equal[0]}" if name == "mask" else f"{name} is {equal}"
            self.refuses([(words, lambda name=name, equal=equal: ringattn.attention(Q, K, K, **{name: equal}))])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_negated_views_of_torch(self):
        import torch

        rows = torch.complex(torch.zeros(20, 4, 64), torch.ones(20, 4, 64)).conj().imag
        self.assertTrue(rows.is_neg())
        plain = rows.resolve_neg()
        for _ in range(2):
            ringattn.attention(plain, plain, plain)
            self.refuses([("k is a negated view", lambda: ringattn.attention(plain, rows, plain))])
        one, turned = ringattn.zigzag([20], 1), torch.ones(20, 4, dtype=torch.complex64).conj()
        self.refuses([("x is a conjugated view", lambda: ringattn.reshard(turned, one, "packed"))])

    @unittest.skipUnless(importlib.util.find_spec("torch"), "needs torch")
    def test_tensors_without_memory(self):
        import torch

        q, k_cache, v_cache, lengths = map(torch.from_numpy, STEP)
        rows, meta = q[:, :2], q[:, :2].to("meta")
        step = {"lengths_before": lengths, "v_new": rows}
        with self.assertRaisesRegex(ringattn.UnsupportedError, "q is on meta"):
            ringattn.rope(meta)
        self.refuses([("k_new is on meta (q is on cpu)", lambda: ringattn.decode(q, k_cache, v_cache, k_new=meta, **step)),
                      ("v is on meta (k is on cpu)", lambda: ringattn.evict(rows, meta, "knorm")),
                      ("value is on meta (query is on cpu)",
                       lambda: ringattn.scaled_dot_product_attention(rows, rows, meta))])  # fmt: skip
        begins = torch.tensor([0, 20]).to_sparse()
        self.refuses([("cu_seqlens is of layout torch.sparse_coo on cpu", lambda: ringattn.ssd(*SCAN, cu_seqlens=begins))])


class Words(unittest.TestCase):
    def test_arrays_are_of_the_kind_of_the_first(self):
        with self.assertRaises(ringattn.UsageError) as caught:
            ringattn.causal_conv1d(X, [[1.0]])
        self.assertNotIn("q is", str(caught.exception))

    def test_messages_speak_python(self):
        for c, python in (
            ("Rows follow CausalConv1d::layout().", "Rows follow the layout."),
            ("SsmSpec and SsmJob say what there is.", "Its arguments say what there is."),
            ("Use auto, or see ringattn's info.", "Use auto, or see `ringattn info`."),
            ("ringattn's info with measure writes one.", "`ringattn info --measure` writes one."),
            ("ringattn_options::layout is set", "layout is set"),
            ("those of Decode::owned().", "those of ringattn.decode_partition()."),
            ("y overlaps x", "out overlaps x"),
            ("axis 2 of y has a stride of 2", "axis 2 of out has a stride of 2"),
            ("AttentionSpec::sinks says", "sinks says"),
            ("a bug of ringattn", "a bug of ringattn"),
        ):
            self.assertEqual(_errors.in_python(c), python)
        for call in (lambda: ringattn.causal_conv1d(X, WEIGHT, cu_seqlens=[0, 7]),
                     lambda: ringattn.ssd(*SCAN, initial_states=normal(3, 2, 16, 8)),
                     lambda: ringattn.attention(Q, K, K, lengths=(7, 7))):  # fmt: skip
            with self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertNotRegex(str(caught.exception), r"::|ringattn_|ringattn's")


if __name__ == "__main__":
    unittest.main()
