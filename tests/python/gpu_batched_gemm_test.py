# SPDX-License-Identifier: Apache-2.0
"""batched_gemm() on a GPU: right, with the bits of the matrices in latent attention, and in graphs.

    RINGATTN_LIBRARY=build/release/lib/libringattn_c.so PYTHONPATH=python python3 tests/python/gpu_batched_gemm_test.py"""

import importlib.util
import sys
import unittest

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import torch

if not torch.cuda.is_available():
    print("skipped: needs a GPU")
    sys.exit(77)

import ringattn
from ringattn.testing import assert_same_bits


def normal(*shape, seed=1, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("cuda")


def layer(dtype):
    """q, latent, k_rope and kv_b_proj's weight of 16 heads."""
    return (normal(600, 16, 192, dtype=dtype), normal(600, 512, seed=2, dtype=dtype), normal(600, 64, seed=3, dtype=dtype),
            normal(16, 256, 512, seed=4, dtype=dtype) / 22)  # fmt: skip


class BatchedGemms(unittest.TestCase):
    def setUp(self):
        torch.set_grad_enabled(False)
        self.addCleanup(torch.set_grad_enabled, True)

    def test_rows_and_heads_and_strides_change_no_bit(self):
        for dtype in (torch.bfloat16, torch.float16):
            q, _, _, w = layer(dtype)
            nope, absorption = q[..., :128], w[:, :128].transpose(1, 2)
            made = ringattn.batched_gemm(nope, absorption)
            expected = torch.einsum("thd,hdc->thc", nope.double(), w[:, :128].double())
            torch.testing.assert_close(made.double(), expected, atol=1e-3, rtol=8e-3)
            assert_same_bits(ringattn.batched_gemm(nope[7:8], absorption), made[7:8])
            assert_same_bits(ringattn.batched_gemm(nope[:, 3:5], absorption[3:5]), made[:, 3:5])
            assert_same_bits(ringattn.batched_gemm(nope, absorption.contiguous()), made)
            assert_same_bits(ringattn.batched_gemm(nope.reshape(3, 200, 16, 128), absorption).reshape(made.shape), made)

    def test_mla_has_the_bits_of_the_callers_gemms(self):
        for dtype in (torch.bfloat16, torch.float16):
            q, latent, k_rope, w = layer(dtype)
            w_uk, w_uv = w[:, :128], w[:, 128:]
            inside = torch.cat([ringattn.batched_gemm(q[..., :128], w_uk.transpose(1, 2)), q[..., 128:]], -1)
            out, lse = ringattn.mla(q, latent, k_rope, w_uk, w_uv, form="absorbed")
            in_latent, got_lse = ringattn.mla(inside, latent, k_rope, form="absorbed", head_dim=128, head_dim_v=128)
            assert_same_bits(ringattn.batched_gemm(in_latent, w_uv), out)
            assert_same_bits(got_lse, lse)
            cache, counts = torch.cat([latent, k_rope], 1)[None], torch.tensor([600], dtype=torch.int32, device="cuda")
            step, _ = ringattn.mla_decode(q[599:], cache, counts, w_uk, w_uv)
            step_in_latent, _ = ringattn.mla_decode(inside[599:], cache, counts, head_dim=128, head_dim_v=128)
            assert_same_bits(ringattn.batched_gemm(step_in_latent, w_uv), step)

    def test_steps_are_decoded_by_the_kernel_that_is_named(self):
        if torch.cuda.get_device_capability()[0] != 9:
            self.skipTest("needs a GPU of the Hopper generation")
        q, latent, k_rope, w = layer(torch.bfloat16)
        keys = torch.cat([latent, k_rope], 1)
        for rows in (keys, keys.repeat(5, 1)):  # one group with either kernel; one of 4,096 keys, and three of 1,024
            counts = torch.tensor([len(rows)], dtype=torch.int32, device="cuda")
            step = q[599:], rows[None], counts, w[:, :128], w[:, 128:]
            usual, _ = ringattn.mla_decode(*step)
            assert_same_bits(ringattn.mla_decode(*step, kernel="sm90_mla")[0], usual)
            named, _ = ringattn.mla_decode(*step, kernel="sm90_mla_split1k")
            if len(rows) <= 1024:
                assert_same_bits(named, usual)
            torch.testing.assert_close(named, usual, atol=2e-2, rtol=0)
            shares = [ringattn.mla_decode_partition(*step[:2], *step[3:], kernel=kernel).kv_split_keys
                      for kernel in (None, "sm90_mla", "sm90_mla_split1k")]  # fmt: skip
            self.assertEqual(shares, [4096, 4096, 1024])

    def test_a_batched_gemm_is_replayed_over_new_rows(self):
        q, _, _, w = layer(torch.bfloat16)
        absorption = w[:, :128].transpose(1, 2)
        expected = ringattn.batched_gemm(q[90:99, :, :128], absorption)
        rows, out = q[:9, :, :128].clone(), torch.empty_like(expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ringattn.batched_gemm(rows, absorption, out=out)
        rows.copy_(q[90:99, :, :128])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out, expected)

    def test_compiled_it_has_the_same_bits(self):
        q, _, _, w = layer(torch.bfloat16)

        def there(nope, w_uk):
            return ringattn.batched_gemm(nope * 2, w_uk.transpose(1, 2)) + 1

        compiled = torch.compile(there, fullgraph=True)
        assert_same_bits(compiled(q[..., :128], w[:, :128]), there(q[..., :128], w[:, :128]))

    def test_float32_is_refused(self):
        with self.assertRaises(ringattn.UnsupportedError) as caught:
            ringattn.batched_gemm(normal(3, 64, dtype=torch.float32), normal(2, 64, 64, dtype=torch.float32))
        self.assertIn("fp32 (supported: bf16, fp16)", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
