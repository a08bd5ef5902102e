# SPDX-License-Identifier: Apache-2.0
"""ring_flash_attn's adapter for transformers: a model on several ranks gives what its sequences alone do, and a rank that was
told no sequences computes nothing."""

import importlib.util
import sys
import unittest

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    print("skipped: needs torch and transformers")
    sys.exit(77)

import ringattn
import ringattn.ring_flash_attn as names
import ringattn.transformers
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

SHAPE = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 99, "pad_token_id": 0}  # fmt: skip
CU = torch.tensor([0, 30, 50, 50], dtype=torch.int32)


def models():
    torch.manual_seed(1)
    yield transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    yield transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, sliding_window=20)).eval()


class Adapter(unittest.TestCase):
    def setUp(self):
        torch.set_grad_enabled(False)
        self.addCleanup(torch.set_grad_enabled, True)
        for table in (AttentionInterface, AttentionMaskInterface):
            self.addCleanup(table.register, "flash_attention_2", table()["flash_attention_2"])
        self.addCleanup(ringattn.transformers.register)
        self.ids = torch.randint(1, 99, (1, 50), generator=torch.Generator().manual_seed(1))

    def refused(self, words, call, *given, **named):
        with self.assertRaises(ringattn.UsageError) as caught:
            call(*given, **named)
        self.assertIn(words, str(caught.exception))

    def test_ranks_give_what_the_sequences_alone_do(self):
        layout = ringattn.packed([30, 20], 2)
        for model in models():
            alone = torch.cat([model(self.ids[:, :30]).logits[0], model(self.ids[:, 30:]).logits[0]])
            # Without flash_attn transformers asks for its package where the name is set otherwise.
            for name in ("flash_attention_2", "ringattn"):
                model.config._attn_implementation = name

                def rank(world, model=model):
                    names.substitute_hf_flash_attn(world, heads_k_stride=1)
                    names.update_ring_flash_attn_params(torch.tensor([0, 50]), world)
                    names.update_ring_flash_attn_params(CU, world)
                    positions = torch.from_numpy(ringattn.positions(layout, world.rank))[None]
                    ids = self.ids.chunk(2, dim=1)[world.rank]
                    with torch.no_grad():
                        return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]

                logits = torch.cat(ringattn.run_ranks(2, rank))
                # Products of other numbers of rows are rounded otherwise.
                torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)
            model.config._attn_implementation = "sdpa"

    def test_ranks_train_a_model(self):
        layout = ringattn.packed([30, 20], 2)
        for model in models():
            parameters = list(model.train().parameters())

            def gradients(logits, parameters=parameters):
                return torch.autograd.grad(logits.square().sum(), parameters)

            def rank(world, model=model, gradients=gradients):
                names.substitute_hf_flash_attn(world, heads_k_stride=1)
                names.update_ring_flash_attn_params(CU, world)
                positions = torch.from_numpy(ringattn.positions(layout, world.rank))[None]
                ids = self.ids.chunk(2, dim=1)[world.rank]
                return gradients(model(input_ids=ids, position_ids=positions, use_cache=False).logits)

            with torch.enable_grad():
                alone = gradients(torch.cat([model(self.ids[:, :30]).logits[0], model(self.ids[:, 30:]).logits[0]]))
                model.config._attn_implementation = "ringattn"
                shards = ringattn.run_ranks(2, rank)
            for first, second, wanted in zip(*shards, alone):
                torch.testing.assert_close(first + second, wanted, atol=2e-4, rtol=1e-3)
            model.config._attn_implementation = "sdpa"

    def test_a_model_without_sequences_is_refused(self):
        model = next(models())
        world = ringattn.self_world()
        names.substitute_hf_flash_attn(world, 2)
        for name in ("flash_attention_2", "ringattn"):
            model.config._attn_implementation = name
            self.refused("no sequences are known", model, self.ids)
            with ringattn.transformers.batch(ringattn.packed([50], 1)):
                inside = model(self.ids, use_cache=False).logits
            names.update_ring_flash_attn_params([0, 50], world)
            torch.testing.assert_close(model(self.ids, use_cache=False).logits, inside, atol=0, rtol=0)
            names.substitute_hf_flash_attn(world, 2)

    def test_a_dimension_of_a_mesh_is_a_group(self):
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        self.addCleanup(distributed.destroy_process_group)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
        names.substitute_hf_flash_attn(mesh["cp"], heads_k_stride=1)
        names.update_ring_flash_attn_params(CU, mesh["cp"])
        names.update_ring_flash_attn_params(CU, mesh.get_group("cp"))
        self.refused("group is a DeviceMesh of 2 dimensions, dp, cp", names.update_ring_flash_attn_params, CU, mesh)

    def test_what_can_t_be_is_refused(self):
        world, other = ringattn.threads_worlds(2)
        for stride in (0, -1):
            self.refused(f"heads_k_stride is {stride}", names.substitute_hf_flash_attn, world, stride)
        model = next(models())
        model.config._attn_implementation = "ringattn"
        names.substitute_hf_flash_attn(ringattn.self_world(), 3)
        names.update_ring_flash_attn_params([0, 50], ringattn.self_world())
        self.refused("heads_k_stride is 3 (it divides the 2 heads of keys and values)", model, self.ids,
                     use_cache=False)
        names.substitute_hf_flash_attn(None, 1)
        self.refused("Call torch.distributed.init_process_group() first", names.update_ring_flash_attn_params, CU, None)
        self.refused("heads_k_stride is None", names.substitute_hf_flash_attn, world, None)
        names.substitute_hf_flash_attn(world, 1)
        self.refused("process_group is another one", names.update_ring_flash_attn_params, CU, other)
        self.refused("process_group is another one", names.update_ring_flash_attn_params, CU, None)
        self.refused("51 tokens don't divide among 2 ranks", names.update_ring_flash_attn_params, [0, 51], world)
        self.refused("cu_seqlens is [3, 50]", names.update_ring_flash_attn_params, [3, 50], world)


if __name__ == "__main__":
    unittest.main()
