# SPDX-License-Identifier: Apache-2.0
"""Greedy generation with a random Llama in batches of several sizes and in continuous batching with several orders of arrival,
with transformers' own attention (PyTorch's SDPA) and with ringattn.transformers.make_batch_invariant(). Counts the sequences
whose tokens or logits are not those that they have in a batch of 1, and prints the speed.

python docs/examples/batch_invariant.py             # on a GPU 1.1 billion parameters in bf16, on a CPU a small model in fp32
python docs/examples/batch_invariant.py --tiny      # a few seconds on a CPU
"""

import argparse
import copy
import dataclasses
import time

import ringattn.transformers
import torch
import transformers

SIZES = {  # hidden, intermediate, layers, heads, K/V heads, vocabulary
    "gpu": (2048, 8192, 16, 32, 8, 32_000),
    "cpu": (256, 688, 4, 4, 2, 1000),
    "tiny": (64, 173, 2, 4, 2, 99),
}


def make_model(size: str, device: str) -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[size]
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, pad_token_id=0, eos_token_id=None,
        initializer_range=0.05, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return transformers.LlamaForCausalLM(config).eval().to(device, dtype)


def padded_batches(model, prompts: list[list[int]], batch: int, tokens: int):
    """(new tokens, their logits [tokens, vocabulary]) of each prompt, in batches with padding on the left."""
    found = []
    for begin in range(0, len(prompts), batch):
        rows = prompts[begin : begin + batch]
        most = max(map(len, rows))
        ids = torch.tensor([[0] * (most - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (most - len(row)) + [1] * len(row) for row in rows], device=model.device)
        result = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, output_logits=True,
                                return_dict_in_generate=True)  # fmt: skip
        logits = torch.stack(result.logits, 1)
        found += zip(result.sequences[:, most:].tolist(), logits)
    return found


def continuous(model, prompts: list[list[int]], order: list[int], tokens: int) -> list[list[int]]:
    """New tokens of each prompt; they arrive in this order."""
    settings = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = {"num_blocks": 4 * len(prompts), "max_batch_tokens": 256, "max_requests_per_batch": max(len(prompts) // 2, 1),
              "use_cuda_graph": False, "auto_switch_to_flash": False}  # fmt: skip
    has = {field.name for field in dataclasses.fields(transformers.ContinuousBatchingConfig)}  # of this version
    batching = transformers.ContinuousBatchingConfig(**{name: wanted[name] for name in wanted if name in has})
    results = model.generate_batch([prompts[at] for at in order], settings, batching)
    arrived = [result.generated_tokens for result in results.values()]
    return [arrived[order.index(at)] for at in range(len(prompts))]


def timed(device: str, work):
    """(work's result, seconds)."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def compare(name: str, model, prompts, batches: list[int], orders: list[list[int]], tokens: int) -> int:
    """Prints the results of a model, and returns how many sequences differ from those of a batch of 1."""
    device, generated = model.device.type, tokens * len(prompts)
    padded_batches(model, prompts[:2], 2, 2)
    alone, seconds = timed(device, lambda: padded_batches(model, prompts, 1, tokens))
    print(f"{name}, batch 1: {generated / seconds:.0f} tokens/s")
    differ = 0
    for batch in batches:
        found, seconds = timed(device, lambda batch=batch: padded_batches(model, prompts, batch, tokens))
        other_tokens = sum(a[0] != b[0] for a, b in zip(found, alone))
        other_logits = sum(not torch.equal(a[1], b[1]) for a, b in zip(found, alone))
        differ += other_logits
        print(f"{name}, batch {batch}: {generated / seconds:.0f} tokens/s, {other_logits} of {len(prompts)} sequences have other "
              f"logits and {other_tokens} other tokens")  # fmt: skip
    for number, order in enumerate(orders, 1):
        found, seconds = timed(device, lambda order=order: continuous(model, prompts, order, tokens))
        other_tokens = sum(a != b[0] for a, b in zip(found, alone))
        differ += other_tokens
        print(f"{name}, continuous batching, order {number}: {generated / seconds:.0f} tokens/s, {other_tokens} of {len(prompts)} "
              "sequences have other tokens")  # fmt: skip
    print(f"{name}: {differ} of {len(prompts) * (len(batches) + len(orders))} sequences differ from those of a batch of 1")
    return differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model, few prompts and tokens")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each prompt")
    parser.add_argument("--peers", nargs="+", default=["sdpa"], help="attn_implementation of the models beside ours, "
                        "such as eager, sdpa, flash_attention_2")  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.get_logger("ContinuousBatchingLogger").setLevel("ERROR")
    if given.tiny:
        given.prompts, given.tokens = 6, 4
    plain = make_model("tiny" if given.tiny else "gpu" if given.device == "cuda" else "cpu", given.device)
    lengths = [1 + 37 * at % 101 for at in range(given.prompts)]
    prompts = [torch.randint(1, plain.config.vocab_size, (length,)).tolist() for length in lengths]
    batches = [3] if given.tiny else [4, given.prompts]
    orders = [[*range(given.prompts)], [*reversed(range(given.prompts))]][given.tiny :]
    with torch.no_grad():
        invariant = ringattn.transformers.make_batch_invariant(copy.deepcopy(plain))
        for peer in given.peers:
            plain.set_attn_implementation(peer)
            compare(peer, plain, prompts, batches, orders, given.tokens)
        with ringattn.transformers.continuous_batching(invariant):
            return int(compare("ringattn", invariant, prompts, batches, orders, given.tokens) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
