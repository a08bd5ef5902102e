# SPDX-License-Identifier: Apache-2.0
"""launch/torch_peer.py, the peer of `ringattn bench --quick`: it computes the jobs that it is asked for, and says why not."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

import torch

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "torch_peer.py"
SHAPE = {"tokens": 24, "seq": 12, "batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "head_dim_v": 8, "dtype": "fp32",
         "mask": "causal", "samples": 3}  # fmt: skip


def load():
    spec = importlib.util.spec_from_file_location("torch_peer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TorchPeer(unittest.TestCase):
    def setUp(self):
        self.peer = load().Peer(torch, "cpu")

    def test_jobs_are_those_asked_for(self):
        for mask in ("causal", "full"):
            with torch.no_grad():
                work, steps = self.peer.attention(SHAPE | {"mask": mask})
                out = work()
            self.assertEqual((out.shape, steps), ((2, 4, 12, 8), 1))
        self.assertEqual(self.peer.decode(SHAPE)[0]().shape, (2, 4, 1, 8))
        gradients = self.peer.attention_backward(SHAPE)[0]()
        self.assertEqual([rows.shape for rows in gradients], [(2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)])
        layer = {"op": "linear", "tokens": 6, "in_features": 8, "out_features": 5, "dtype": "bf16", "samples": 2}
        self.assertEqual(self.peer.linear(layer)[0]().shape, (6, 5))
        self.assertEqual(self.peer.answer(layer)["tool"], "pytorch linear")

    def test_a_causal_mask_hides_keys(self):
        with mock.patch.object(self.peer, "sdpa") as sdpa:
            self.peer.attention(SHAPE)[0]()
            self.peer.decode(SHAPE)[0]()
        self.assertEqual([call.kwargs for call in sdpa.call_args_list],
                         [{"is_causal": True, "enable_gqa": True}, {"is_causal": False, "enable_gqa": True}])  # fmt: skip

    def test_answers_have_samples_and_quantiles(self):
        answer = self.peer.answer(SHAPE)
        self.assertEqual((answer["tool"], answer["samples"]), ("pytorch sdpa", 3))
        ms = answer["ms"]
        self.assertTrue(0 < ms["p10"] <= ms["median"] <= ms["p90"], ms)
        self.assertGreaterEqual(self.peer.answer(SHAPE | {"samples": 0})["samples"], 10)

    def test_as_the_program_starts_it(self):
        jobs = [json.dumps(SHAPE), json.dumps(SHAPE | {"op": "rope"}), "nonsense"]
        done = subprocess.run([sys.executable, "-c", SCRIPT.read_text(), "cpu", "1"], input="\n".join(jobs) + "\n",
                              capture_output=True, text=True, check=True)  # fmt: skip
        about, *answers = map(json.loads, done.stdout.splitlines())
        self.assertEqual(about, {"version": torch.__version__})
        self.assertEqual([set(answer) for answer in answers], [{"tool", "samples", "ms"}, {"error"}, {"error"}])


if __name__ == "__main__":
    unittest.main()
