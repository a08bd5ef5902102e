# SPDX-License-Identifier: Apache-2.0
"""Compressed keys and values: attention and decoding over them have the bits of those over what decompression gives."""

import functools
import importlib.util
import unittest

import numpy as np
import ringattn
from ringattn.testing import assert_same_bits

HEADS, KV, DIM = 4, 2, 64
FORMATS = ("fp8 token_head", "fp8 head", "fp8 tensor", "int8", "int4_token group 32", "int4_channel group 32",
           "vector width 4", "low_rank rank 16", "low_rank rank 24 heads 2", "hybrid rank 8 group 32 outliers 4")  # fmt: skip


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype("float16")


@functools.cache
def can(format):
    """Formats with a rank need a build with Eigen."""
    if "rank" not in format:
        return True
    try:
        ringattn.compress(normal(80, KV, DIM), normal(80, KV, DIM), format)
    except ringattn.UnsupportedError as error:
        if "Eigen" not in str(error):
            raise
        return False
    return True


class Attention(unittest.TestCase):
    lengths = (150, 7, 203)
    cu = np.concatenate([[0], np.cumsum(lengths)])

    def rows(self):
        tokens = int(self.cu[-1])
        return normal(tokens, HEADS, DIM), normal(tokens, KV, DIM, seed=2), normal(tokens, KV, DIM, seed=3)

    def test_every_format_is_what_its_decompression_gives(self):
        q, k, v = self.rows()
        tried = 0
        for format in filter(can, FORMATS):
            small = ringattn.compress(k, v, format, cu_seqlens=self.cu)
            plain = [ringattn.decompress(x) for x in small]
            for x, y in zip((k, v), plain):
                error = np.linalg.norm(y.astype("float64") - x) / np.linalg.norm(x.astype("float64"))
                self.assertLess(error, 0.95 if "low" in format else 0.6, format)
                self.assertGreater(error, 0.0)
            self.assertLess(small[0].nbytes, k.nbytes + 2**17)
            out, lse = ringattn.varlen(q, *small, self.cu)
            expected, expected_lse = ringattn.varlen(q, *plain, self.cu)
            assert_same_bits(out, expected, format)
            assert_same_bits(lse, expected_lse, format)
            mixed, _ = ringattn.varlen(q, small[0], v, self.cu)
            assert_same_bits(mixed, ringattn.varlen(q, plain[0], v, self.cu)[0], format)

            layout = ringattn.striped(self.lengths, 3, stripe=64)

            def rank(world, small=small):
                mine = [ringattn.shard(x, layout, world.rank) for x in (q, *small)]
                return ringattn.varlen(*mine, self.cu, world=world, layout=layout)

            shards = ringattn.run_ranks(3, rank)
            assert_same_bits(ringattn.unshard([rows for rows, _ in shards], layout), expected, format)
            tried += 1
        self.assertGreaterEqual(tried, 7)

    def test_batches_are_their_sequences(self):
        q, k, v = normal(2, 90, HEADS, DIM), normal(2, 90, KV, DIM, seed=2), normal(2, 90, KV, DIM, seed=3)
        small = ringattn.compress(k, v, "int4")
        self.assertEqual(small[0].format, "int4_channel group 32")
        self.assertEqual(small[1].format, "int4_token group 32")
        out, lse = ringattn.attention(q, *small)
        for i in range(2):
            alone = ringattn.compress(k[i], v[i], "int4")
            expected, expected_lse = ringattn.attention(q[i], *alone)
            assert_same_bits(out[i], expected)
            assert_same_bits(lse[i], expected_lse)

    def test_methods_and_ratios(self):
        _, k, v = self.rows()
        formats = [x.format for x in ringattn.compress(k, v, "fp8", ratio=0.5)]
        self.assertEqual(formats, ["fp8 head", "fp8 head"])
        if can("low_rank rank 8"):
            formats = [x.format for x in ringattn.compress(k, v, "lowrank:heads=2", ratio=0.5)]
            self.assertEqual(formats, ["low_rank rank 64 heads 2"] * 2)
        pair = ringattn.compress(k, v, ("int8", "int4_token group 32"))
        self.assertEqual([x.format for x in pair], ["int8", "int4_token group 32"])
        for words, given in (("removes 0.5 of them at most", {"method": "fp8", "ratio": 0.9}), ("int5", {"method": "int5"}),
                             ("a ratio", {"method": "int8 ", "ratio": 0.5})):  # fmt: skip
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.compress(k, v, **given)
            self.assertIn(words, str(caught.exception))

    def test_two_compressions_of_one_tensor_have_the_same_bytes(self):
        _, k, v = self.rows()
        for format in filter(can, FORMATS):
            one, two = (ringattn.compress(k, v, format, cu_seqlens=self.cu, seed=3, threads=n)[0] for n in (1, 2))
            for a, b in zip(one.parts, two.parts, strict=True):
                assert_same_bits(a, b, format)

    def test_bfloat16(self):
        if importlib.util.find_spec("ml_dtypes") is None:
            self.skipTest("needs ml_dtypes")
        import ml_dtypes

        q, k, v = (x.astype(ml_dtypes.bfloat16) for x in self.rows())
        small = ringattn.compress(k, v, "int4", cu_seqlens=self.cu)
        plain = [ringattn.decompress(x) for x in small]
        self.assertEqual(plain[0].dtype, k.dtype)
        out, expected = (ringattn.varlen(q, *x, self.cu)[0] for x in (small, plain))
        assert_same_bits(out.view("int16"), expected.view("int16"))


class Decoding(unittest.TestCase):
    """Steps from empty caches on: rows are compressed as they come."""

    formats = ("fp8 token_head", "int8", "int4_token group 32", "int4_channel group 32")
    steps = 70

    def check(self, format, pages, page_size, table):
        k, v = normal(2, self.steps, KV, DIM, seed=2), normal(2, self.steps, KV, DIM, seed=3)
        q = normal(2, self.steps, HEADS, DIM)
        caches = [ringattn.Compressed.cache(format, (pages, page_size, KV, DIM), k, sequences=2) for _ in "kv"]
        lengths = np.zeros(2, "int32")
        for t in range(self.steps):
            out, lse = ringattn.decode(q[:, t], *caches, lengths_before=lengths, block_table=table, k_new=k[:, t],
                                       v_new=v[:, t], update_lengths=True)  # fmt: skip
            if t not in (0, 31, 32, 63, 64, self.steps - 1):
                continue
            # A group of tokens is compressed when it is full: then the cache is the compressed prefix.
            prefix = ringattn.compress(k[:, : t + 1], v[:, : t + 1], format)
            plain = [ringattn.decompress(x) for x in prefix]
            expected, expected_lse = ringattn.attention(q[:, t : t + 1], *plain)
            assert_same_bits(out, expected[:, 0], f"{format}, step {t}")
            assert_same_bits(lse, expected_lse[:, 0], f"{format}, step {t}")
        self.assertEqual(list(lengths), [self.steps] * 2)

    def test_dense_caches_grow(self):
        for format in self.formats:
            self.check(format, 2, 80, None)

    def test_pages_grow(self):
        table = np.array([[4, 1, 7, 0, 9], [2, 8, 3, 6, 5]], "int32")
        for format in self.formats:
            self.check(format, 10, 16, table)

    def test_a_compressed_batch_is_a_dense_cache(self):
        k, v, q = normal(2, 100, KV, DIM, seed=2), normal(2, 100, KV, DIM, seed=3), normal(2, HEADS, DIM)
        small = ringattn.compress(k, v, "int4")
        plain = [ringattn.decompress(x) for x in small]
        lengths = np.array([100, 41], "int32")
        out, _ = ringattn.decode(q, small[0], plain[1], np.array([100, 100], "int32"))
        assert_same_bits(out, ringattn.decode(q, *plain, np.array([100, 100], "int32"))[0])
        with self.assertRaises(ringattn.UnsupportedError):
            ringattn.decode(q, ringattn.compress(k, v, "vq")[0], ringattn.compress(k, v, "lowrank")[1], lengths)


class Refusals(unittest.TestCase):
    def test_broken_parts_are_named_with_their_place(self):
        k, v = normal(90, KV, DIM), normal(90, KV, DIM, seed=2)
        for format, part, at, value, words in (
            ("fp8 token_head", "scales", (12, 1, 0), np.nan, "k_scales[12, 1, 0] is nan"),
            ("int8", "codes", (3, 0, 7), -128, "k_codes[3, 0, 7] is -128"),
            ("int4_token group 32", "scales", (80, 1, 2), -1.0, "k_scales[80, 1, 2] is -1"),
            ("fp8 head", "scales", (1,), np.inf, "k_scales[1] is inf"),
            ("vector width 2", "codebook", (1, 3, 200, 1), np.nan, "k_codebook[1, 3, 200, 1] is nan"),
        ):
            small, _ = ringattn.compress(k, v, format)
            (small.streams | small.tables)[part][at] = value
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.decompress(small, name="k")
            self.assertIn(words, str(caught.exception))

    def test_pages_of_any_sequence(self):
        rows, _ = ringattn.compress(normal(80, KV, DIM), normal(80, KV, DIM), "int8")
        pages = ringattn.Compressed.cache("int8", (5, 16, KV, DIM), normal(1, KV, DIM), sequences=3)
        for name, stream in rows.streams.items():
            pages.streams[name][:] = stream.reshape(pages.streams[name].shape)
        whole = ringattn.decompress(pages)
        self.assertEqual(whole.tobytes(), ringattn.decompress(rows).tobytes())
        of_sequences = ringattn.Compressed.cache("int4_channel group 32", (5, 16, KV, DIM), normal(1, KV, DIM), sequences=3)
        with self.assertRaisesRegex(ringattn.UnsupportedError, "x has 80 tokens in pages .*a table for each sequence"):
            ringattn.decompress(of_sequences)

    def test_outliers_of_channels_that_there_are_not(self):
        format = "hybrid rank 8 group 32 outliers 4"
        if not can(format):
            self.skipTest("needs a build with Eigen")
        q, k, v = normal(90, HEADS, DIM), normal(90, KV, DIM), normal(90, KV, DIM, seed=2)
        small, _ = ringattn.compress(k, v, format)
        self.assertGreater(small.energy_kept, 0.1)
        self.assertLess(small.energy_kept, 1.0)
        small.tables["outlier_channels"][1, 3] = 64
        for call in (lambda: ringattn.decompress(small, name="k"), lambda: ringattn.attention(q, small, v)):
            with self.assertRaises(ringattn.UsageError) as caught:
                call()
            self.assertIn("k_outlier_channels[1, 3] is 64", str(caught.exception))

    def test_what_is_taken_as_it_is_alone(self):
        small = ringattn.compress(normal(90, KV, DIM), normal(90, KV, DIM), "int8")[0]
        q, latent, k_rope = normal(90, HEADS, DIM + 8), normal(90, DIM), normal(90, 8)
        matrices = normal(HEADS, DIM, DIM).astype("float32"), normal(HEADS, DIM, DIM).astype("float32")
        lengths = np.array([5], "int32")
        for words, call in (
            ("latent of mla is compressed", lambda: ringattn.mla(q, small, k_rope, *matrices)),
            ("k_rope of mla is compressed", lambda: ringattn.mla(q, latent, small, *matrices)),
            ("cache of mla_decode is compressed", lambda: ringattn.mla_decode(q[:1], small, lengths, *matrices, rope_dim=8)),
            ("q of attention is compressed", lambda: ringattn.attention(small, latent, latent)),
            ("out of varlen is compressed", lambda: ringattn.varlen(q, q, q, [0, 90], out=small)),
        ):
            with self.assertRaises(ringattn.UnsupportedError) as caught:
                call()
            self.assertIn(words, str(caught.exception))

    def test_numbers_that_are_not_finite(self):
        k, v = normal(90, KV, DIM), normal(90, KV, DIM, seed=2)
        v[77, 1, 5] = np.inf
        for method in ("fp8", "int4", "vq"):
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.compress(k, v, method)
            self.assertIn("v[77, 1, 5] is inf", str(caught.exception))

    def test_parts_of_other_shapes_and_types(self):
        q, k, v = normal(90, HEADS, DIM), normal(90, KV, DIM), normal(90, KV, DIM, seed=2)
        small, _ = ringattn.compress(k, v, "fp8")
        for change, words in (
            ({"codes": small.streams["codes"][:80]}, "k_codes is [80, 2, 64] (it should be [90, 2, 64])"),
            ({"codes": small.streams["codes"].view("int8")}, "k_codes holds int8 (it should hold uint8)"),
            ({"scales": small.streams["scales"][:, :, 0]}, "k_scales has 2 axes"),
        ):
            broken = small.with_streams(small.streams | change, small.shape)
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.attention(q, broken, v)
            self.assertIn(words, str(caught.exception))
        listed = small.with_streams(small.streams | {"scales": small.streams["scales"].tolist()}, small.shape)
        with self.assertRaises(ringattn.UsageError) as caught:
            ringattn.decompress(listed)
        self.assertIn("x_scales is list", str(caught.exception))
        with self.assertRaises(ringattn.UsageError) as caught:
            ringattn.compress(k.astype("float32"), v.astype("float32"), "fp8")
        self.assertIn("k is float32 (compressed rows become float16 or bfloat16 again)", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
