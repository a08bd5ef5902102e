# SPDX-License-Identifier: Apache-2.0
"""Linear attention in Python: the recurrence in float64, ranks, cuts, updates, RoPE, graphs and a layer of Ring and Ling."""

import tempfile
import unittest

import numpy as np
import ringattn
import safetensors.numpy
import torch


def arrays(tokens, heads=2, dim=16, dim_v=24, seed=1):
    random = np.random.default_rng(seed)
    q, k = (random.standard_normal((tokens, heads, dim), dtype="float32") for _ in range(2))
    v = random.standard_normal((tokens, heads, dim_v), dtype="float32")
    decays = {"head": (heads,), "token": (tokens, heads), "dim": (tokens, heads, dim)}
    return q, k, v, {kind: -np.abs(random.standard_normal(shape, dtype="float32")) / 8 for kind, shape in decays.items()}


def recurrence(q, k, v, log_decay, scale, state=None):
    """(out, state) in float64."""
    tokens, heads, dim = q.shape
    state = np.zeros((heads, v.shape[-1], dim)) if state is None else state.astype("float64")
    out = np.empty(v.shape)
    for t in range(tokens):
        g = log_decay if log_decay.ndim == 1 else log_decay[t]
        decay = np.exp(g.astype("float64")).reshape(heads, 1, -1)
        state = decay * state + v[t, :, :, None].astype("float64") * k[t, :, None, :]
        out[t] = scale * np.einsum("hvd,hd->hv", state, q[t].astype("float64"))
    return out, state


class LinearAttention(unittest.TestCase):
    def test_it_is_the_recurrence_for_every_decay(self):
        q, k, v, decays = arrays(200)
        start = np.random.default_rng(2).standard_normal((1, 2, 24, 16), dtype="float32")
        for log_decay in decays.values():
            out, states = ringattn.linear_attention(q, k, v, log_decay, initial_state=start, return_final_states=True)
            expected, final = recurrence(q, k, v, log_decay, 0.25, start[0])
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(states[0], final, rtol=1e-4, atol=1e-4)
            step = states.copy()
            row = ringattn.linear_attention_update(step, q[:1], k[:1], v[:1], log_decay if log_decay.ndim == 1 else log_decay[:1])
            expected, final = recurrence(q[:1], k[:1], v[:1], log_decay, 0.25, states[0])
            np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(step[0], final, rtol=1e-4, atol=1e-4)

    def test_it_has_the_same_bits_on_ranks_and_where_it_is_cut(self):
        tokens, cut = 65_536 + 100, 65_536
        q, k, v, decays = arrays(tokens, heads=1, dim=8, dim_v=8)
        log_decay = decays["token"] / 1e4
        out, states = ringattn.linear_attention(q, k, v, log_decay, return_final_states=True)
        layout = ringattn.super_segments([tokens], 2)

        def rank(world):
            own = [ringattn.shard(x, layout, world.rank) for x in (q, k, v, log_decay)]
            return ringattn.linear_attention(*own, layout=layout, world=world)

        parts = ringattn.run_ranks(2, rank)
        self.assertEqual(np.concatenate(parts).tobytes(), out.tobytes())
        first, middle = ringattn.linear_attention(q[:cut], k[:cut], v[:cut], log_decay[:cut], return_final_states=True)
        rest, final = ringattn.linear_attention(q[cut:], k[cut:], v[cut:], log_decay[cut:], initial_state=middle,
                                                return_final_states=True)  # fmt: skip
        self.assertEqual(first.tobytes() + rest.tobytes() + final.tobytes(), out.tobytes() + states.tobytes())

    def test_rope_is_that_of_rope(self):
        q, k, v, decays = (torch.from_numpy(x) if not isinstance(x, dict) else x for x in arrays(90))
        g = torch.from_numpy(decays["head"])
        rope = {"theta": 600000.0, "rotary_dim": 8}
        cu = torch.tensor([0, 30, 90])
        rotated = ringattn.rope(q, k, cu_seqlens=cu, **rope)
        expected = ringattn.linear_attention(*rotated, v, g, cu_seqlens=cu)
        fused = ringattn.linear_attention(q, k, v, g, cu_seqlens=cu, rope=rope)
        self.assertTrue(torch.equal(fused, expected))
        places = torch.cat([torch.arange(30), torch.arange(60)]).int()
        self.assertTrue(torch.equal(ringattn.linear_attention(q, k, v, g, cu_seqlens=cu, rope=rope, positions=places), fused))
        before, after = torch.zeros(2, 90, *v.shape[1:], q.shape[2])
        step = ringattn.linear_attention_update(before, *rotated, v, g)
        self.assertTrue(torch.equal(ringattn.linear_attention_update(after, q, k, v, g, rope=rope, positions=places), step))
        self.assertTrue(torch.equal(before, after))

    def test_a_graph_holds_it_and_gradients_are_refused(self):
        q, k, v, decays = (torch.from_numpy(x) if not isinstance(x, dict) else x for x in arrays(40))
        g = torch.from_numpy(decays["token"])

        def each(q, k, v, g):
            out, states = ringattn.linear_attention(q, k, v, g, rope={"theta": 1e4}, return_final_states=True)
            places = torch.tensor([40])
            return out, states, ringattn.linear_attention_update(states, q[:1], k[:1], v[:1], g[:1], rope={}, positions=places)

        torch.compiler.reset()
        compiled = torch.compile(each, fullgraph=True, backend="eager")
        for made, expected in zip(compiled(q, k, v, g), each(q, k, v, g), strict=True):
            self.assertTrue(torch.equal(made, expected))
        with self.assertRaisesRegex(ringattn.UnsupportedError, "k requires a gradient"):
            ringattn.linear_attention(q, k.clone().requires_grad_(), v, g)

    def test_what_does_not_fit_is_refused(self):
        q, k, v, decays = arrays(20)
        for words, call in (
            ("log_decay is float64", lambda: ringattn.linear_attention(q, k, v, decays["head"].astype("float64"))),
            (r"log_decay is \[20\]", lambda: ringattn.linear_attention(q, k, v, decays["token"][:, 0])),
            ("rope has 'base'", lambda: ringattn.linear_attention(q, k, v, decays["head"], rope={"base": 1e4})),
            ("without rope", lambda: ringattn.linear_attention(q, k, v, decays["head"], positions=np.arange(20))),
            ("has no positions", lambda: ringattn.linear_attention_update(np.zeros((20, 2, 24, 16), "float32"), q, k, v,
                                                                          decays["head"], rope={})),
            ("scale is 1e-60", lambda: ringattn.linear_attention(q, k, v, decays["head"], scale=1e-60)),
            ("it is called log_decay there", lambda: ringattn.linear_attention(q, k, v, g=decays["head"])),
            ("it is called state there", lambda: ringattn.linear_attention_update(v, q, k, v, decays["head"], initial_state=v)),
            (r"state_batch_indices\[1\] is 0", lambda: ringattn.linear_attention_update(
                np.zeros((20, 2, 24, 16), "float32"), q, k, v, decays["head"], state_batch_indices=np.zeros(20, "int32"))),
            ("Give state memory of its own", lambda: ringattn.linear_attention_update(
                whole := np.zeros((20, 2, 24, 16), "float32"), whole[:, :, 0], k, v, decays["head"])),
        ):  # fmt: skip
            with self.assertRaisesRegex(ringattn.Error, words):
                call()


def rms(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


class RingLayer(unittest.TestCase):
    """The linear attention of a layer of Ring or Ling, from its tensors: query_key_value, RMSNorm of q and k, RoPE, linear
    attention with ALiBi's slopes, group RMSNorm times sigmoid(g_proj x), dense."""

    def test_it_is_computed_from_the_tensors_of_a_file(self):
        hidden, heads, dim, groups, tokens, layer, layers = 48, 3, 16, 3, 150, 2, 8
        random = np.random.default_rng(5)
        shapes = {"query_key_value": (3 * heads * dim, hidden), "g_proj": (heads * dim, hidden), "dense": (hidden, heads * dim),
                  "query_layernorm": (dim,), "key_layernorm": (dim,), "g_norm": (heads * dim,)}  # fmt: skip
        prefix = f"model.layers.{layer}.attention."
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.safetensors"
            made = {}
            for name, shape in shapes.items():
                weight = (random.standard_normal(shape) / shape[-1] ** 0.5).astype("float32")
                made[f"{prefix}{name}.weight"] = weight if len(shape) > 1 else weight + 1
            safetensors.numpy.save_file(made, path)
            given = {name[len(prefix) : -len(".weight")]: x for name, x in safetensors.numpy.load_file(path).items()}
        x = random.standard_normal((tokens, hidden), dtype="float32")
        slopes = np.array([2.0**-4, 2.0**-8, 2.0**-2])  # ALiBi's of 3 heads
        decays = (-slopes * (1 - (layer - 1) / (layers - 1) + 1e-5)).astype("float32")
        rope = {"theta": 600000.0, "rotary_dim": dim // 2}

        def layer_of(attend, project, kind):
            qkv = project(x.astype(kind), given["query_key_value"]).reshape(tokens, 3 * heads, dim)
            q, k, v = np.split(qkv, 3, axis=1)
            q, k = rms(q, given["query_layernorm"]), rms(k, given["key_layernorm"])
            out = attend(*(np.ascontiguousarray(rows.astype(kind)) for rows in (q, k, v)))
            normed = rms(out.reshape(tokens, groups, -1), 1.0).reshape(tokens, -1) * given["g_norm"]
            gate = 1 / (1 + np.exp(-project(x.astype(kind), given["g_proj"])))
            return project((normed * gate).astype(kind), given["dense"])

        made = layer_of(lambda q, k, v: ringattn.linear_attention(q, k, v, decays, rope=rope), ringattn.linear, "float32")

        def exactly(q, k, v):
            frequencies = 600000.0 ** (-np.arange(dim // 4) / (dim // 4))
            angles = np.arange(tokens)[:, None, None] * frequencies

            def turn(rows):
                a, b = rows[..., : dim // 4], rows[..., dim // 4 : dim // 2]
                turned = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
                return np.concatenate([*turned, rows[..., dim // 2 :]], axis=-1)

            return recurrence(turn(q), turn(k), v, decays, dim**-0.5)[0]

        expected = layer_of(exactly, lambda rows, weight: rows @ weight.T.astype("float64"), "float64")
        np.testing.assert_allclose(made, expected, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    unittest.main()
