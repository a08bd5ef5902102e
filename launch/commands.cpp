// SPDX-License-Identifier: Apache-2.0
#include "launch/commands.hpp"

#include <fmt/format.h>

#include "comm/launcher.hpp"
#include "launch/verify_shapes.hpp"

namespace ringattn {

namespace {

bool always(const Config&) { return true; }
bool never(const Config&) { return false; }

std::optional<int> asked_ranks(const Config& config) { return config.options.ranks; }

// Comparing shapes takes a world to split, also alone.
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
     "compute attention, a decoding step over a cache, or a scan",
     {"ringattn run --synthetic 7 --seq 16k",
      "mpirun -np 4 ringattn run --input qkv.safetensors --output out.safetensors --mask causal"},
     "Computes exact attention over the ranks of this world, one rank alone included. O and LSE have the same bits "
     "for\n"
     "any number of ranks, layout, block size, transport and number of threads. A file with a paged cache, or --op "
     "decode,\n"
     "is a decoding step: its rows have the bits that attention over the whole sequences gives them. One with Mamba's\n"
     "tensors, or --op ssd, selective_scan or convolution, is a scan or the convolution in front of one.",
     always,
     asked_ranks,
     run_main},
    {"verify",
     kVerify,
     "check a result: other shapes, an output file, fp64, a golden file, another system's, decoding",
     {"ringattn verify --synthetic 7 --seq 4k",
      "mpirun -np 3 ringattn verify --input qkv.safetensors --against oracle"},
     "Without --against, --record, --golden, --peer or --decode: runs the job in other shapes (numbers of ranks, "
     "layouts, "
     "block\n"
     "sizes; of a cache, pages) and compares bits. --layout, --block, --page-size and --ranks, where given, hold that\n"
     "side of the shapes fixed.",
     always,
     verify_ranks,
     verify_main},
    {"bench",
     kBench,
     "time the job, lengths and block sizes in lists",
     {"ringattn bench --seq 1k,2k --samples 3",
      "mpirun -np 8 ringattn bench --seq 256k,1m --heads 32 --kv-heads 8 --against folds --jsonl results.jsonl"},
     "Measures each point of the lists: warm-up, then at least 10 samples and 0.5 s; a sample is the time of the rank\n"
     "that was slowest in it. Shows median, p10 and p90, and the machine model's prediction beside them. Input is\n"
     "synthetic, with seed 1 if none is given, unless --input names a file. A --q-len of 1 to 16 without --op makes "
     "steps of\n"
     "decoding, which are timed over caches that no device's cache memory holds, on one GPU as a graph that is "
     "launched.",
     always,
     asked_ranks,
     bench_main},
    {"plan",
     kPlan,
     "say what a run would do: no MPI, no GPU, nothing computed",
     {"ringattn plan --world 8 --seq 1m", "ringattn plan --world 8-64*2 --seq 64k,2m --heads 32 --kv-heads 8"},
     "Plans the job for --world ranks: who owns what, blocks, bytes, balance, memory, and the time that a machine "
     "model\n"
     "predicts.",
     never,
     asked_ranks,
     plan_main},
    {"compress",
     kCompress,
     "make a cache file smaller, and say what it costs in accuracy and time",
     {"ringattn compress --method int4 --ratio 0.7 --input qkv.safetensors --output small.safetensors --report",
      "ringattn compress --method snapkv --ratio 0.75 --input qkv.safetensors --output small.safetensors --report"},
     "Stores keys and values, or latents, with fewer bits, or keeps some tokens alone, and writes a file that run,\n"
     "verify, bench and plan take. What they compute over it are the bits that they compute over the tensors\n"
     "which decompression gives, of the tokens that are left. --ratio is the share of bytes, or of tokens, that is\n"
     "removed, not the share that is left.",
     never,
     asked_ranks,
     compress_main},
    {"info",
     kInfo,
     "show the build, this machine, kernels, transports, environment",
     {"ringattn info", "mpirun -np 4 ringattn info --measure --machine machine.json"},
     "What a report about a problem should hold; with --measure also the machine model that block sizes and "
     "predictions\n"
     "rest on.",
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
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace ringattn
