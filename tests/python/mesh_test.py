# SPDX-License-Identifier: Apache-2.0
"""Dimensions of a DeviceMesh as rings, and models whose weights FSDP2 shards over the same ranks: a training step, and the recipe
of a long prefill. Ranks are forked, because importing PyTorch takes longer than what they do."""

import contextlib
import importlib.util
import io
import os
import pathlib
import runpy
import signal
import socket
import sys
import tempfile
import traceback
import unittest
from unittest import mock

if importlib.util.find_spec("torch") is None:
    print("skipped: needs torch")
    sys.exit(77)

import ringattn
import ringattn.ring_flash_attn as names
import ringattn.torch_ops  # noqa: F401, once for all ranks
import torch
import torch.distributed as distributed
from ringattn.testing import assert_same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "examples"


def rows(tokens: int) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return [torch.randn((1, tokens, heads, 32), generator=seeded) for heads in (4, 2, 2)]


def refusal(call, *arguments) -> str:
    try:
        call(*arguments)
    except ringattn.UsageError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def rings_of_a_mesh() -> None:
    """On 4 ranks: two rings of two."""
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    world = ringattn.torch_world(mesh["cp"])
    assert (world.rank, world.size) == (mesh.get_local_rank("cp"), 2)
    assert ringattn.torch_world(mesh["cp"]) is world
    assert ringattn.torch_world(mesh.get_group("cp")) is world
    assert ringattn.torch_world(mesh["dp"]) is not world

    said = refusal(ringattn.torch_world, mesh)
    assert said == ("group is a DeviceMesh of 2 dimensions, dp, cp (a ring has the ranks of one). Pass one dimension of it, such "
                    "as mesh['cp']."), said  # fmt: skip
    q, k, v = rows(100)
    layout = ringattn.zigzag([100], 2)
    mine = [ringattn.shard(x[0], layout, world.rank)[None] for x in (q, k, v)]
    assert "DeviceMesh of 2 dimensions" in refusal(names.zigzag_ring_flash_attn_func, *mine, 0.0, None, True, (-1, -1), None,
                                                   False, False, mesh)  # fmt: skip
    assert "Make one, such as ringattn.torch_world(group)" in refusal(
        lambda: ringattn.attention(*mine, layout="zigzag", world=mesh["cp"])
    )

    alone = ringattn.attention(q, k, v)[0]
    out = names.zigzag_ring_flash_attn_func(*mine, causal=True, group=mesh["cp"])
    assert_same_bits(out[0], ringattn.shard(alone[0], layout, world.rank))
    train_sharded(mesh, world)


def train_sharded(mesh, world) -> None:
    """Two sequences, one for each ring. FSDP2 replicates weights over "dp" and shards them over "cp" (HSDP), and its gradients
    are means over all ranks."""
    example = runpy.run_path(str(EXAMPLES / "train_llama.py"))
    tokens = 90
    sequences = [example["make_text"](tokens + 1, seed) for seed in (0, 1)]

    def loss_of(model, text, world, layout, rank):
        rope = example["rope_angles"](torch.from_numpy(ringattn.positions(layout, rank)))
        given, targets = (ringattn.shard(part, layout, rank) for part in (text[:-1], text[1:]))
        logits = model(given, rope, world, layout)
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / (2 * tokens)

    torch.manual_seed(1)
    plain = example["Llama"]()
    torch.manual_seed(1)
    model = example["Llama"]()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    layout = ringattn.zigzag([tokens], world.size)
    loss = loss_of(model, sequences[mesh.get_local_rank("dp")], world, layout, world.rank)
    (4 * loss).backward()  # a sum over the ranks is their mean of this
    distributed.all_reduce(loss.detach())

    whole = ringattn.zigzag([tokens], 1)
    expected = sum(loss_of(plain, text, None, whole, 0) for text in sequences)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for (name, sharded), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert sharded.to_local().numel() < wanted.numel(), name
        torch.testing.assert_close(sharded.grad.full_tensor(), wanted.grad, rtol=1e-3, atol=1e-6, msg=name)


def prefill() -> None:
    arguments = "--check --tokens 301 --layers 2 --width 64 --heads 2 --kv-heads 1 --hidden 96"
    with mock.patch("sys.argv", ["prefill_fsdp.py", *arguments.split()]):
        runpy.run_path(str(EXAMPLES / "prefill_fsdp.py"), run_name="__main__")


class Ranks(unittest.TestCase):
    def forked(self, ranks: int, work) -> str:
        """What the ranks print, which have the environment that torchrun gives them."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            processes, failed = {}, []
            for rank in range(ranks):
                said = pathlib.Path(folder, str(rank))
                process = os.fork()
                if process == 0:
                    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
                    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                    self.play(work, said)
                processes[process] = rank
            while processes:
                process, status = os.wait()
                rank = processes.pop(process)
                if status != 0:
                    failed.append(rank)
                    for other in processes:  # they would wait for it
                        os.kill(other, signal.SIGKILL)
            texts = [file.read_text() for file in sorted(pathlib.Path(folder).iterdir())]
        self.assertEqual(failed, [], "".join(texts))
        return "".join(texts)

    @staticmethod
    def play(work, said: pathlib.Path):
        """Ends this process."""
        status, text = 1, io.StringIO()
        try:
            with contextlib.redirect_stdout(text):
                torch.set_num_threads(1)
                work()
            status = 0
        except BaseException:  # noqa: BLE001, printed by the parent
            traceback.print_exc(file=text)
        finally:
            said.write_text(text.getvalue())
            os._exit(status)

    def test_a_dimension_of_a_mesh_is_a_ring(self):
        self.forked(4, rings_of_a_mesh)

    def test_the_recipe_of_a_long_prefill(self):
        said = self.forked(2, prefill)
        self.assertRegex(said, r"301 tokens in .* on 2 CPU ranks; rank 0 has \d+ of \d+ weights and the keys of 151 tokens")
        self.assertIn("the logits have the bits of one rank", said)


if __name__ == "__main__":
    unittest.main()
