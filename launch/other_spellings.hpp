// SPDX-License-Identifier: Apache-2.0
// Flags of mpirun, torchrun, nccl-tests, llama-bench and Python calls that users may try with this program, and its own
// flags with the same meaning.
#pragma once

#include <string_view>

namespace ringattn {

struct OtherSpelling {
  std::string_view other;      // without the dashes
  std::string_view flag;       // this program's
  std::string_view note = {};  // a sentence that follows the flag
};

inline constexpr std::string_view kOneRankAGpu = "For one rank a GPU, use `mpirun -np N ringattn ...`.";

inline constexpr OtherSpelling kOtherSpellings[] = {
    {"np", "ranks", kOneRankAGpu},
    {"n", "ranks", kOneRankAGpu},
    {"nproc", "ranks", kOneRankAGpu},
    {"nproc-per-node", "ranks", kOneRankAGpu},
    {"nproc_per_node", "ranks", kOneRankAGpu},
    {"gpus", "ranks", kOneRankAGpu},
    {"ngpus", "ranks", kOneRankAGpu},
    {"num-gpus", "ranks", kOneRankAGpu},
    {"cp", "ranks", "Context parallelism is over all ranks."},
    {"world-size", "ranks", kOneRankAGpu},
    {"gpu", "backend", "CUDA_VISIBLE_DEVICES chooses the GPU."},
    {"device", "backend", "CUDA_VISIBLE_DEVICES chooses the GPU."},
    {"causal", "mask", "causal is the default."},
    {"is-causal", "mask", "causal is the default."},
    {"no-causal", "mask", "causal is the default."},
    {"window-size", "window"},
    {"sliding-window", "window", "A sliding window of W tokens is L = W-1."},
    {"window-left", "window", "L is the left side, R the right one."},
    {"seqlen", "seq"},
    {"seq-len", "seq"},
    {"seqlen-k", "seq"},
    {"ctx-size", "seq"},
    {"context", "seq"},
    {"seqlen-q", "q-len"},
    {"iters", "samples"},
    {"iterations", "samples"},
    {"repetitions", "samples"},
    {"repeat", "samples"},
    {"nheads", "heads"},
    {"num-heads", "heads"},
    {"nheads-k", "kv-heads"},
    {"num-kv-heads", "kv-heads"},
    {"headdim", "head-dim"},
    {"hdim", "head-dim"},
    {"batch-size", "batch"},
    {"bs", "batch"},
    {"scale", "softmax-scale"},
    {"sm-scale", "softmax-scale"},
    {"logits-soft-cap", "softcap"},
    {"seed", "synthetic"},
    {"file", "input"},
    {"out", "output"},
    {"o", "output"},
    {"model", "model-config"},
};

}  // namespace ringattn
