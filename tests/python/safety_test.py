# SPDX-License-Identifier: Apache-2.0
"""What would read or write memory that is not the caller's, if it were not refused: lists of other lengths than the sequences,
and arrays that can't be written to."""

import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
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
        self.refuses("k_cache", lambda: ringattn.decode(q, cache, own, lengths=lengths, k_new=new, v_new=new))
        self.refuses("v_cache", lambda: ringattn.decode(q, own, cache, lengths=lengths, k_new=new, v_new=new))
        growing = {"lengths_before": frozen, "update_lengths": True}
        self.refuses("lengths_before", lambda: ringattn.decode(q, own, own, k_new=new, v_new=new, **growing))
        out = ringattn.decode(q, cache, cache, frozen)[0]  # which are only read
        ringattn.testing.assert_same_bits(out, ringattn.decode(q, cache.copy(), cache.copy(), lengths)[0])
        self.refuses("k_cache", lambda: ringattn.decode(q, cache, cache.copy(), lengths=frozen, k_new=new, v_new=new))

        latents, matrices = self.mapped(2, 16, 72), (normal(4, 16, 64), normal(4, 16, 64))
        named = {"rope_dim": 8, "latent": normal(2, 64), "k_rope": normal(2, 8), "w_uk": matrices[0], "w_uv": matrices[1]}
        q = normal(2, 4, 24)
        self.refuses("cache", lambda: ringattn.mla_decode(q, latents, lengths=lengths, **named))
        self.refuses("lengths_before", lambda: ringattn.mla_decode(q, latents.copy(), **growing, **named))
        ringattn.mla_decode(q, latents, frozen, *matrices, rope_dim=8)

    def test_compressed_caches(self):
        q, new = normal(2, 4, 64, dtype="float16"), normal(2, 2, 64, dtype="float16")
        k, v = (ringattn.Compressed.cache("int8", (2, 16, 2, 64), q) for _ in "kv")
        v.streams["codes"].flags.writeable = False
        lengths = np.array([0, 0], "int32")
        self.refuses("v_cache", lambda: ringattn.decode(q, k, v, lengths_before=lengths, k_new=new, v_new=new))
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


class Overlaps(unittest.TestCase):
    """Results that lie where what they are made of does."""

    def refuses(self, words, call):
        with self.assertRaises(ringattn.UsageError) as caught:
            call()
        self.assertIn(words, str(caught.exception))

    def test_rows_are_not_written_over_others(self):
        x, weight = normal(20, 32), normal(16, 4)
        for rows, out in ((x[:, :16], x[:, :16]), (x[:, :16], x[:, 8:24]), (x[:-1, :16], x[1:, :16])):
            self.refuses("out overlaps x", lambda rows=rows, out=out: ringattn.causal_conv1d(rows, weight, out=out))
        expected = ringattn.causal_conv1d(x[:, :16].copy(), weight)
        ringattn.testing.assert_same_bits(ringattn.causal_conv1d(x[:, :16], weight, out=x[:, 16:]), expected)
        state = normal(20, 3, 16)
        self.refuses("out overlaps x", lambda: ringattn.causal_conv1d_update(x[:, :16], state, weight, out=x[:, :16]))
        q, k = normal(20, 4, 64), normal(20, 2, 64)
        self.refuses("out overlaps q", lambda: ringattn.attention(q, k, k, out=q))
        cache, lengths = normal(20, 16, 2, 64), np.full(20, 5, "int32")
        self.refuses("out overlaps q", lambda: ringattn.decode(q, cache, cache, lengths, out=q))
        parts = (normal(20, 2, 16), normal(20, 2), -abs(normal(2)), normal(20, 1, 8), normal(20, 1, 8))
        heads, matrices = normal(20, 2, 16), normal(2, 16, 16)
        self.refuses("out overlaps rows", lambda: ringattn.batched_gemm(heads, matrices, out=heads))
        inside = matrices[:, :1].swapaxes(0, 1)
        self.refuses("out overlaps weights", lambda: ringattn.batched_gemm(heads[:1], matrices, out=inside))
        z = normal(20, 2, 16)
        self.refuses("out overlaps x", lambda: ringattn.ssd(*parts, out=parts[0]))
        self.refuses("out overlaps z", lambda: ringattn.ssd(*parts, z=z, out=z))


class Caches(unittest.TestCase):
    def test_a_length_that_grows_is_not_negative(self):
        q, new, cache = normal(2, 4, 64), normal(2, 2, 64), np.zeros((2, 16, 2, 64), "float32")
        for table in (None, np.array([[0], [1]], "int32")):
            lengths = np.array([0, -1], "int32")
            with self.assertRaises(ringattn.UsageError) as caught:
                ringattn.decode(q, cache, cache.copy(), lengths_before=lengths, block_table=table, k_new=new, v_new=new)
            self.assertIn("sequence 1 has -1 keys (a length is not negative)", str(caught.exception))
            self.assertEqual((lengths.tolist(), cache.any()), ([0, -1], False))

    def test_a_row_of_a_table_may_have_a_stride_of_0(self):
        q, cache, table = normal(1, 4, 64), normal(6, 16, 2, 64), np.array([3, 0, 5, 2], "int32")
        lengths = np.array([50], "int32")
        row = np.lib.stride_tricks.as_strided(table, (1, 4), (0, 4))
        expected = ringattn.decode(q, cache, cache, lengths, block_table=row.copy())[0]
        for given in (row, table[None], np.broadcast_to(table, (1, 4))):
            ringattn.testing.assert_same_bits(ringattn.decode(q, cache, cache, lengths, block_table=given)[0], expected)
        latents, matrices = normal(6, 16, 72), (normal(4, 16, 64), normal(4, 16, 64))
        out = ringattn.mla_decode(normal(1, 4, 24), latents, lengths, *matrices, block_table=row, rope_dim=8)[0]
        copied = ringattn.mla_decode(normal(1, 4, 24), latents, lengths, *matrices, block_table=row.copy(), rope_dim=8)[0]
        ringattn.testing.assert_same_bits(out, copied)

    def test_eviction_speaks_of_itself(self):
        k = normal(20, 2, 64)
        k[3, 1, 5] = np.nan
        with self.assertRaises(ringattn.UsageError) as caught:
            ringattn.evict(k, k, "knorm")
        self.assertIn("k[3, 1, 5] is nan (rows that are compressed, or of which some are chosen, hold only finite numbers",
                      str(caught.exception))  # fmt: skip


@unittest.skipUnless(hasattr(os, "fork"), "needs fork")
class Forks(unittest.TestCase):
    def test_a_forked_process_is_refused_at_once(self):
        """In a process of its own, whose threads are those of the library."""
        program = textwrap.dedent('''
            import os
            import numpy, ringattn
            x, weight = numpy.ones((200, 16), "float32"), numpy.ones((16, 4), "float32")
            FIRST
            child = os.fork()
            if child == 0:
                try:
                    ringattn.causal_conv1d(x, weight, timeout=2.0)
                    os._exit(3)
                except ringattn.UnsupportedError as error:
                    os._exit(4 if "forked from one that had used ringattn" in str(error) else 5)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            ringattn.causal_conv1d(x, weight)
        ''')
        for first, code in (("ringattn.causal_conv1d(x, weight)", 4), ("", 3)):
            done = subprocess.run([sys.executable, "-W", "ignore", "-c", program.replace("FIRST", first)],
                                  capture_output=True, text=True, timeout=100)  # fmt: skip
            self.assertEqual((done.returncode, done.stdout), (0, f"{code}\n"), done.stderr)


if __name__ == "__main__":
    unittest.main()
