# SPDX-License-Identifier: Apache-2.0
"""Tokens taken out of keys and values, from Python over NumPy arrays: which ones stay, and that attention over those that are
left is attention over them where they stood."""

import unittest

import numpy as np
import ringattn
from ringattn.testing import assert_same_bits

HEADS, KV_HEADS, DIM = 4, 2, 32


def normal(*shape, seed=1, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


def by_definition(q, k, v, places, first, left=None):
    """(out, lse) in fp64: query i stands at first + i, key t of a head at places[t, head]."""
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for i in range(len(q)):
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            at = places[:, kv % places.shape[1]]
            seen = (at <= first + i) & (at >= first + i - (left if left is not None else first + i))
            if not seen.any():
                continue
            scores = k[seen, kv].astype("float64") @ q[i, head].astype("float64") / np.sqrt(q.shape[2])
            lse[i, head] = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
            out[i, head] = np.exp(scores - lse[i, head]) @ v[seen, kv].astype("float64")
    return out, lse


class Choices(unittest.TestCase):
    def setUp(self):
        self.q, self.k, self.v = (normal(100, h, DIM, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))

    def test_the_smallest_keys(self):
        kept = ringattn.evict(self.k, self.v, "knorm", ratio=0.7)
        self.assertEqual((kept.k.shape, kept.k_lengths, kept.cu_seqlens), ((30, KV_HEADS, DIM), (100,), (0, 30)))
        norms = np.linalg.norm(self.k.astype("float64"), axis=2)
        for head in range(KV_HEADS):
            places = kept.k_positions[:, head]
            self.assertEqual(list(places), sorted(np.argsort(norms[:, head])[:30]))
            assert_same_bits(kept.k[:, head], self.k[places, head])
            assert_same_bits(kept.v[:, head], self.v[places, head])

    def test_the_first_and_the_last(self):
        kept = ringattn.evict(self.k, self.v, "streaming:first=2,heads=all", ratio=0.9)
        self.assertEqual(kept.k_positions.shape, (10, 1))
        self.assertEqual(list(kept.k_positions[:, 0]), [0, 1, *range(92, 100)])
        assert_same_bits(kept.v, self.v[kept.k_positions[:, 0]])

    def test_what_the_last_queries_attend_to(self):
        kept = ringattn.evict(self.k, self.v, "snapkv:window=8,pool=1", ratio=0.6, q=self.q)
        weights = np.zeros((100, KV_HEADS))
        for row in range(92, 100):
            for head in range(HEADS):
                scores = self.k[: row + 1, head // 2].astype("float64") @ self.q[row, head] / np.sqrt(DIM)
                weights[: row + 1, head // 2] += np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        weights[92:] = np.inf
        for head in range(KV_HEADS):
            self.assertEqual(list(kept.k_positions[:, head]), sorted(np.argsort(-weights[:, head], kind="stable")[:40]))
        # The last queries are all that is looked at.
        fewer = ringattn.evict(self.k, self.v, "snapkv:window=8,pool=1", ratio=0.6, q=self.q[-8:])
        assert_same_bits(fewer.k_positions, kept.k_positions)
        self.assertFalse(np.array_equal(kept.k_positions[:, 0], kept.k_positions[:, 1]))

    def test_batches_packs_and_threads_choose_alike(self):
        q, k, v = (normal(2, 70, h, DIM, seed=5 + i, dtype="float16") for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
        batch = ringattn.evict(k, v, "expected", ratio=0.5, q=q, threads=3)
        self.assertEqual((batch.k.shape, batch.k_positions.shape), ((2, 35, KV_HEADS, DIM), (2, 35, KV_HEADS)))
        self.assertIsNone(batch.cu_seqlens)
        flat = [rows.reshape(140, *rows.shape[2:]) for rows in (q, k, v)]
        packed = ringattn.evict(flat[1], flat[2], "expected", ratio=0.5, q=flat[0], cu_seqlens=[0, 70, 140], threads=1)
        self.assertEqual(packed.cu_seqlens, (0, 35, 70))
        assert_same_bits(packed.k_positions.reshape(batch.k_positions.shape), batch.k_positions)
        assert_same_bits(packed.v.reshape(batch.v.shape), batch.v)
        for s in range(2):
            alone = ringattn.evict(k[s], v[s], "expected", ratio=0.5, q=q[s])
            assert_same_bits(alone.k, batch.k[s])

    def test_what_is_wrong_is_refused(self):
        q, k, v = self.q, self.k, self.v
        spoilt, k16 = k.copy(), k.astype("float16")
        spoilt[77, 1, 3] = np.nan
        endless = q.copy()
        endless[99, 1, 2] = np.inf
        for kind, words, do in (
            (ringattn.UsageError, 'no method of eviction "h2o"', lambda: ringattn.evict(k, v, "h2o")),
            (ringattn.UsageError, "snapkv without queries", lambda: ringattn.evict(k, v)),
            (ringattn.UsageError, "ratio = 1 of the tokens", lambda: ringattn.evict(k, v, "knorm", ratio=1.0)),
            (ringattn.UsageError, "k[77, 1, 3]", lambda: ringattn.evict(spoilt, v, "knorm")),
            (ringattn.UsageError, "v[77, 1, 3]", lambda: ringattn.evict(k, spoilt, "knorm")),
            (ringattn.UsageError, "q[99, 1, 2] is inf", lambda: ringattn.evict(k, v, q=endless)),
            (ringattn.UsageError, "v is fp32 [99, 2, 32]", lambda: ringattn.evict(k, v[:99], "knorm")),
            (ringattn.UsageError, "q 4", lambda: ringattn.evict(k, v, q=q[None])),
            (ringattn.UsageError, "cu_seqlens deals packed rows",
             lambda: ringattn.evict(k[None], v[None], "knorm", cu_seqlens=[0, 100])),
            (ringattn.UnsupportedError, "v is compressed",
             lambda: ringattn.evict(k, ringattn.compress(k16, k16, "fp8")[1], "knorm")),
            (ringattn.CallError, "evict has no budget", lambda: ringattn.evict(k, v, budget=10)),
        ):  # fmt: skip
            with self.assertRaises(kind) as caught:
                do()
            self.assertIn(words, str(caught.exception))


class Attention(unittest.TestCase):
    """Over what is left."""

    def setUp(self):
        self.q, self.k, self.v = (normal(150, h, DIM, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
        self.kept = ringattn.evict(self.k, self.v, "knorm", ratio=0.5)
        self.placed = {"k_positions": self.kept.k_positions, "k_lengths": 150}

    def test_queries_behind_all_of_it(self):
        new = normal(5, HEADS, DIM, seed=7)
        out, lse = ringattn.attention(new, *self.kept[:2], k_positions=self.kept.k_positions, q_offset=150)
        plain, plain_lse = ringattn.attention(new, *self.kept[:2], mask="full")
        assert_same_bits(out, plain)
        assert_same_bits(lse, plain_lse)

    def test_queries_among_what_was_taken_out(self):
        for mask, left in (("causal", None), ((2, 0), 2)):
            out, lse = ringattn.attention(self.q, *self.kept[:2], mask=mask, **self.placed)
            expected, expected_lse = by_definition(self.q, *self.kept[:2], self.kept.k_positions, 0, left)
            np.testing.assert_allclose(out, expected, atol=1e-5)
            np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
            self.assertTrue(np.isneginf(lse).any() or left is None)
        # Without k_positions they would stand elsewhere.
        other, _ = ringattn.attention(self.q, *self.kept[:2], q_offset=0)
        self.assertFalse(np.allclose(other, ringattn.attention(self.q, *self.kept[:2], **self.placed)[0], atol=1e-2))

    def test_chunks_and_ranks_have_the_bits_of_the_whole(self):
        out, lse = ringattn.attention(self.q, *self.kept[:2], mask=(40, 0), **self.placed)
        part, _ = ringattn.attention(self.q[100:], *self.kept[:2], mask=(40, 0), **self.placed)
        assert_same_bits(part, out[100:])
        queries, keys = ringattn.zigzag([150], 3), ringattn.contiguous([75], 3)

        def rank(world):
            mine = [ringattn.shard(self.q, queries, world.rank)]
            mine += [ringattn.shard(rows, keys, world.rank) for rows in self.kept[:2]]
            return ringattn.attention(*mine, mask=(40, 0), layout=queries, key_layout=keys, world=world,
                                      **self.placed)  # fmt: skip

        shards = ringattn.run_ranks(3, rank)
        assert_same_bits(ringattn.unshard([rows for rows, _ in shards], queries), out)
        assert_same_bits(ringattn.unshard([rows for _, rows in shards], queries), lse)

    def test_packed_sequences(self):
        cu = [0, 60, 150]
        kept = ringattn.evict(self.k, self.v, "streaming:heads=all", ratio=0.5, cu_seqlens=cu)
        self.assertEqual(kept.cu_seqlens, (0, 30, 75))
        given = {"cu_seqlens_k": kept.cu_seqlens, "k_positions": kept.k_positions, "k_lengths": kept.k_lengths}
        out, lse = ringattn.varlen(self.q, kept.k, kept.v, cu, **given)
        for s, (rows, left) in enumerate(((slice(0, 60), slice(0, 30)), (slice(60, 150), slice(30, 75)))):
            alone, alone_lse = ringattn.attention(self.q[rows], kept.k[left], kept.v[left], k_positions=kept.k_positions[left],
                                                  k_lengths=kept.k_lengths[s])  # fmt: skip
            assert_same_bits(alone, out[rows])
            assert_same_bits(alone_lse, lse[rows])
        again, _ = ringattn.varlen(self.q, kept.k, kept.v, cu, q_offsets=[0, 0], **given)
        assert_same_bits(again, out)

    def test_new_tokens_join(self):
        q, k, v = (normal(10, h, DIM, seed=20 + h) for h in (HEADS, KV_HEADS, 2))
        more = np.repeat(np.arange(150, 160, dtype="int32")[:, None], KV_HEADS, 1)
        k, v, places = np.concatenate([self.kept.k, k]), np.concatenate([self.kept.v, v]), np.concatenate(
            [self.kept.k_positions, more]
        )
        out, lse = ringattn.attention(q, k, v, k_positions=places, k_lengths=160)
        expected, _ = by_definition(q, k, v, places, 150)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        # The same, decoded: each step's token joins the cache of those that are left.
        caches = [np.zeros((1, 96, KV_HEADS, DIM), "float32") for _ in range(2)]
        for cache, rows in zip(caches, (k, v)):
            cache[0, :75] = rows[:75]
        lengths = np.array([75], "int32")
        for step in range(10):
            row, row_lse = ringattn.decode(q[None, step], *caches, lengths_before=lengths, k_new=k[None, 75 + step],
                                           v_new=v[None, 75 + step], update_lengths=True)  # fmt: skip
            assert_same_bits(row[0], out[step])
            assert_same_bits(row_lse[0], lse[step])

    def test_what_is_left_may_be_compressed(self):
        q, k, v = (rows.astype("float16") for rows in (self.q, self.k, self.v))
        kept = ringattn.evict(k, v, "snapkv:window=16", ratio=0.5, q=q)
        small = ringattn.compress(kept.k, kept.v, "int8")
        given = {"k_positions": kept.k_positions, "k_lengths": 150}
        out, _ = ringattn.attention(q, *small, **given)
        expected, _ = ringattn.attention(q, *map(ringattn.decompress, small), **given)
        assert_same_bits(out, expected)

    def test_calls_with_other_positions_are_other_calls(self):
        first, _ = ringattn.attention(self.q, *self.kept[:2], **self.placed)
        places = self.kept.k_positions.copy()
        places[:, 0] = np.arange(75)
        moved, _ = ringattn.attention(self.q, *self.kept[:2], k_positions=places, k_lengths=150)
        self.assertFalse(np.array_equal(moved, first))
        assert_same_bits(ringattn.attention(self.q, *self.kept[:2], **self.placed)[0], first)

    def test_what_is_wrong_is_refused(self):
        k, v, places = self.kept[:3]
        counts = np.array([75], "int32")
        whole = int(places[-1, 0])
        token, head = np.argwhere(places >= whole)[0]  # the first that exceeds so short a sequence
        for kind, words, do in (
            (ringattn.UsageError, "k_lengths is not given", lambda: ringattn.attention(self.q, k, v, k_positions=places)),
            (ringattn.UsageError, "k_lengths is given", lambda: ringattn.attention(self.q, k, v, k_lengths=150)),
            (ringattn.UsageError, "k_lengths has 2 numbers",
             lambda: ringattn.attention(self.q, k, v, k_positions=places, k_lengths=[100, 50])),
            (ringattn.UsageError, "k_positions is int64",
             lambda: ringattn.attention(self.q, k, v, k_positions=places.astype("int64"), k_lengths=150)),
            (ringattn.UsageError, "k_positions is int32 [74, 2]",
             lambda: ringattn.attention(self.q, k, v, k_positions=places[1:], k_lengths=150)),
            (ringattn.UsageError, f"k_positions [{token}, {head}] is {places[token, head]}",
             lambda: ringattn.attention(self.q, k, v, k_positions=places, k_lengths=whole)),
            (ringattn.UsageError, "k_positions [1, 0]",
             lambda: ringattn.attention(self.q, k, v, k_positions=np.zeros_like(places), k_lengths=150)),
            (ringattn.CallError, "decode has no k_positions",
             lambda: ringattn.decode(self.q[:1], k[None], v[None], counts, k_positions=places)),
        ):  # fmt: skip
            with self.assertRaises(kind) as caught:
                do()
            self.assertIn(words, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
