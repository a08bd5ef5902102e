// SPDX-License-Identifier: Apache-2.0
#include "launch/commands.hpp"

#include <fmt/format.h>

#include "comm/launcher.hpp"
#include "launch/collect_env.hpp"
#include "launch/launcher/launcher.hpp"

namespace ringattn {

namespace {

bool always(const Config&) { return true; }
bool never(const Config&) { return false; }

std::optional<int> asked_ranks(const Config& config) { return config.options.ranks; }

// Comparing shapes needs a world that can be split, even if the program was started as one process.
std::optional<int> verify_ranks(const Config& config) {
  const JobOptions& options = config.options;
  const bool shapes = options.against.empty() && options.record.empty() && options.golden.empty() &&
                      options.peer.empty() && !options.decode;
  if (options.ranks || !shapes || launched_as_rank() || options.transport == "self") return options.ranks;
  return kLargestLocalWorld;
}

constexpr CommandRow kTable[] = {
    {"run",
     kRun,
     "compute attention, a decode step over a KV cache, or a state-space model",
     {"ringattn run --synthetic 7 --seq 16k",
      "mpirun -np 4 ringattn run --input qkv.safetensors --output out.safetensors --mask causal"},
     "Computes exact attention over all ranks of the job. out and lse are bitwise identical for any number of ranks, "
     "layout, block size, transport and number of threads. The tensors of --input, or --op, choose the op.",
     always,
     asked_ranks,
     run_main},
    {"verify",
     kVerify,
     "check a result: other shapes, an output file, fp64, a golden file, another system's output, decode",
     {"ringattn verify --synthetic 7 --seq 4k",
      "mpirun -np 3 ringattn verify --input qkv.safetensors --against oracle"},
     "Without --against, --record, --golden, --peer or --decode: runs the job with other numbers of ranks, layouts, "
     "block "
     "sizes and page sizes, and compares bits. --layout, --block, --page-size and --ranks, where given, stay fixed.",
     always,
     verify_ranks,
     verify_main},
    {"bench",
     kBench,
     "time the job for lists of lengths and block sizes",
     {"ringattn bench --seq 1k,2k --samples 3",
      "mpirun -np 8 ringattn bench --seq 256k,1m --heads 32 --kv-heads 8 --against compute --jsonl results.jsonl"},
     "Measures each point of the lists: a warm-up, then at least 10 samples and 0.5 s. A sample is the time of the "
     "slowest "
     "rank. Shows median, p10 and p90, the time estimated from the machine model, and the exposed communication: the "
     "share "
     "of the time in which the slowest rank waits for K/V blocks. Input is synthetic, with seed 1, unless --input is "
     "given. "
     "--q-len 1 to 16 without --op times decode steps: over caches larger than the GPU's L2, as a CUDA graph on one "
     "GPU.",
     always,
     asked_ranks,
     bench_main},
    {"plan",
     kPlan,
     "show what a run would do, without MPI, GPU or computation",
     {"ringattn plan --world 8 --seq 1m", "ringattn plan --world 8-64*2 --seq 64k,2m --heads 32 --kv-heads 8"},
     "Plans the job for --world ranks: layout, blocks, bytes, balance, memory, and the time estimated from the "
     "machine "
     "model. Exposed comm is the part of it in which ranks wait for K/V blocks.",
     never,
     asked_ranks,
     plan_main},
    {"compress",
     kCompress,
     "compress a KV cache file; report its cost in accuracy and time",
     {"ringattn compress --method int4 --ratio 0.7 --input qkv.safetensors --output small.safetensors --report",
      "ringattn compress --method snapkv --ratio 0.75 --input qkv.safetensors --output small.safetensors --report"},
     "Quantizes keys and values (or latents), or evicts tokens, and writes a file that run, verify, bench and plan "
     "take. "
     "Results are bitwise identical to the same job over the decompressed tensors of the kept tokens. --ratio is the "
     "share "
     "that is removed.",
     never,
     asked_ranks,
     file_op_main},
    {"quantize",
     kQuantize,
     "quantize a model's linear layers to int8 or int4, in the format of compressed-tensors",
     {"ringattn quantize --format int8 --input model.safetensors --output model-int8",
      "ringattn quantize --format int4 --search mse --input model/ --output model-int4"},
     "Rounds weights to nearest, with a scale for each row (int8) or each group of 128 (int4), and writes a folder "
     "with "
     "model.safetensors and config.json that vLLM, transformers and run read. Embeddings, routers and "
     "--ignore stay as they are. Shows bytes and the relative error of each layer.",
     never,
     asked_ranks,
     file_op_main},
    {"info",
     kInfo,
     "show the build, this machine, kernels, transports and environment",
     {"ringattn info", "mpirun -np 4 ringattn info --measure --machine machine.json"},
     "-v adds tiles, registers and shared memory of each kernel, and all variables. --measure also measures the "
     "machine model, from which block sizes and time estimates come. For a bug report see `ringattn collect-env`.",
     [](const Config& config) { return config.options.measure; },
     asked_ranks,
     info_main},
};

}  // namespace

std::span<const CommandRow> command_table() { return kTable; }

std::string command_names(unsigned bits) {
  std::vector<std::string_view> names;
  for (const CommandRow& command : kTable) {
    if ((bits & command.bit) != 0) names.push_back(command.name);
  }
  if ((bits & kLaunch) != 0) names.push_back(kLaunchCommand);
  if ((bits & kCollectEnv) != 0) names.push_back(kCollectEnvCommand);
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace ringattn
