# SPDX-License-Identifier: Apache-2.0
"""What would read or write memory that is not the caller's, if it were not refused: lists of other lengths than the sequences,
and arrays that can't be written to."""

import pathlib
import tempfile
import unittest

import numpy as np
import ringattn


def normal(*shape, dtype="float32"):
    return np.random.default_rng(1).standard_normal(shape, dtype="float32").astype(dtype)


class Sequences(unittest.TestCase):
    def refuses(self, words, call, *arguments, **named):
        with self.assertRaises(ringattn.UsageError) as caught:
            call(*arguments, **named)
        self.assertIn(words, str(caught.exception))

    def test_queries_and_keys_are_of_as_many_sequences(self):
        heads = (normal(2, 16, 64), normal(2, 16, 64))
        for count in (2, 5, 100, 3000):
            cu_q, wrong = range(count + 1), f"there are {count} sequences of queries and 1 of keys (each has both)"
            q, k = normal(count, 2, 64), normal(100, 2, 64)
            self.refuses(wrong, ringattn.evict, k, k, "snapkv", q=q, cu_seqlens=[0, 100], cu_seqlens_q=cu_q)
            self.refuses(wrong, ringattn.varlen, q, k, k, cu_q, [0, 100])
            self.refuses(wrong, ringattn.mla, normal(count, 2, 24), normal(100, 64), normal(100, 8), *heads, cu_seqlens_q=cu_q,
                         cu_seqlens_k=[0, 100])  # fmt: skip
        self.refuses("there are 1 sequences of queries and 2 of keys", ringattn.mla, normal(5, 2, 24), normal(100, 64),
                     normal(100, 8), *heads, cu_seqlens_k=[0, 50, 100])  # fmt: skip

    def test_lists_have_a_number_for_each_sequence(self):
        q, places = normal(6, 2, 64), np.arange(6, dtype="int32")[:, None]
        cu = [0, 2, 4, 6]
        for given in ([0], [0, 0], [0, 0, 0, 0]):
            wrong = f"has {len(given)} numbers (there are 3 sequences)"
            self.refuses(f"q_offsets {wrong}", ringattn.varlen, q, q, q, cu, q_offsets=given)
            self.refuses(f"k_lengths {wrong}", ringattn.varlen, q, q, q, cu, k_positions=places, k_lengths=given)
        rows = normal(2, 3, 2, 64)
        self.refuses("k_lengths has 1 numbers", ringattn.attention, rows, rows, rows, k_lengths=[3],
                     k_positions=places.reshape(2, 3, 1))  # fmt: skip


class ReadOnly(unittest.TestCase):
    """Arrays of NumPy that can't be written to: of a file that was opened to be read, of bytes. Tensors of PyTorch don't say."""

    def refuses(self, name, call):
        with self.assertRaises(ringattn.UsageError) as caught:
            call()
        self.assertEqual(str(caught.exception), f"{name} is read-only (this call writes to it). Pass an array of your own.")

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.file = pathlib.Path(folder.name, "cache.bin")
        normal(2, 16, 2, 64).tofile(self.file)

    def mapped(self, *shape, dtype="float32"):
        return np.memmap(self.file, dtype, "r", shape=shape)

    def test_caches_and_lengths(self):
        q, new, own = normal(2, 4, 64), normal(2, 2, 64), normal(2, 16, 2, 64)
        cache = np.asarray(self.mapped(2, 16, 2, 64))
        lengths = np.array([5, 5], "int32")
        frozen = np.frombuffer(lengths.tobytes(), "int32")
        self.refuses("k_cache", lambda: ringattn.decode(q, cache, own, lengths, k_new=new, v_new=new))
        self.refuses("v_cache", lambda: ringattn.decode(q, own, cache, lengths, k_new=new, v_new=new))
        self.refuses("lengths", lambda: ringattn.decode(q, own, own, frozen, k_new=new, v_new=new, grow=True))
        out = ringattn.decode(q, cache, cache, frozen)[0]  # which are only read
        ringattn.testing.assert_same_bits(out, ringattn.decode(q, cache.copy(), cache.copy(), lengths)[0])
        self.refuses("k_cache", lambda: ringattn.decode(q, cache, cache.copy(), frozen, k_new=new, v_new=new))

        latents, matrices = self.mapped(2, 16, 72), (normal(4, 16, 64), normal(4, 16, 64))
        named = {"rope_dim": 8, "latent": normal(2, 64), "k_rope": normal(2, 8)}
        q = normal(2, 4, 24)
        self.refuses("cache", lambda: ringattn.mla_decode(q, latents, lengths, *matrices, **named))
        self.refuses("lengths", lambda: ringattn.mla_decode(q, latents.copy(), frozen, *matrices, grow=True, **named))
        ringattn.mla_decode(q, latents, frozen, *matrices, rope_dim=8)

    def test_compressed_caches(self):
        q, new = normal(2, 4, 64, dtype="float16"), normal(2, 2, 64, dtype="float16")
        k, v = (ringattn.Compressed.cache("int8", (2, 16, 2, 64), q) for _ in "kv")
        v.streams["codes"].flags.writeable = False
        lengths = np.array([0, 0], "int32")
        self.refuses("v_cache", lambda: ringattn.decode(q, k, v, lengths, k_new=new, v_new=new, grow=True))
        self.assertEqual(lengths.tolist(), [0, 0])

    def test_what_decompress_writes_to(self):
        rows = normal(20, 2, 64, dtype="float16")
        small, _ = ringattn.compress(rows, rows, "int8")
        self.refuses("out", lambda: ringattn.decompress(small, out=self.mapped(20, 2, 64, dtype="float16")))
        batch, _ = ringattn.compress(*[normal(3, 5, 2, 64, dtype="float16")] * 2, "int8")
        out = np.empty((5, 3, 2, 64), "float16").transpose(1, 0, 2, 3)  # a copy of it would be written to
        with self.assertRaises(ringattn.UsageError) as caught:
            ringattn.decompress(batch, out=out)
        self.assertIn("batches that can't be rows of one axis", str(caught.exception))
        q, cache, lengths = normal(3, 5, 2, 64), normal(3, 16, 2, 64), np.array([9, 9, 9], "int32")
        out = np.empty((5, 3, 2, 64), "float32").transpose(1, 0, 2, 3)
        with self.assertRaises(ringattn.UsageError):
            ringattn.decode(q, cache, cache, lengths, out=out)
        for wrong in (rows, np.empty((20, 64, 2), "float16"), np.empty((20, 2, 64), "float32")):
            with self.assertRaises(ringattn.UsageError):
                ringattn.decompress(batch if wrong is rows else small, out=wrong)


if __name__ == "__main__":
    unittest.main()
