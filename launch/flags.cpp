// SPDX-License-Identifier: Apache-2.0
#include "launch/flags.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/threads.hpp"
#include "comm/timeouts.hpp"
#include "kernels/common/simd_target.hpp"
#include "launch/op_flags.hpp"
#include "ops/common/values.hpp"
#include "ops/op_table.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxRanks = 1 << 20;
constexpr bool kAllOps = true;
constexpr bool kSomeOps = false;

template <auto kMember>
void set_path(JobOptions& options, std::string_view text) {
  options.*kMember = parse_text(text, "the name of a file");
}
template <auto kMember>
void set_name(JobOptions& options, std::string_view text) {
  options.*kMember = parse_text(text, "a name");
}
template <auto kMember>
void set_switch(JobOptions& options, std::string_view text) {
  options.*kMember = parse_switch(text);
}
template <auto kMember, std::int64_t kLeast>
void set_tokens(JobOptions& options, std::string_view text) {
  options.*kMember = parse_size_value(text, "tokens", kLeast, kMaxTokens);
}
template <auto kMember, int kMaxValue>
void set_count(JobOptions& options, std::string_view text) {
  options.*kMember = static_cast<int>(parse_integer(text, 1, kMaxValue));
}
template <auto kMember>
void set_when(JobOptions& options, std::string_view text) {
  constexpr std::string_view kChoices[] = {"auto", "on", "off"};
  options.*kMember = static_cast<When>(parse_choice(text, kChoices));
}

// A number that fp32 can hold without becoming 0.
double parse_fp32(std::string_view text, double min_value, double max_value) {
  const double value = parse_real(text, min_value, max_value);
  if (value != 0.0 && std::abs(value) < 1e-30) throw BadValue{"0, or a number of at least 1e-30"};
  return value;
}

void set_tensors(JobOptions& options, std::string_view text) {
  const std::span<const TensorRole> roles = tensor_roles();
  std::vector<std::string_view> choices;
  for (const TensorRole& role : roles) choices.push_back(role.name);
  for (const OpEntry* op : op_table()) {  // tensors that only one op has
    for (const OpTensor& tensor : op->tensors) {
      if (std::ranges::find(choices, tensor.name) == choices.end()) choices.push_back(tensor.name);
    }
  }
  InputNames names;
  std::vector<bool> given(choices.size(), false);
  for (;;) {
    const std::size_t comma = text.find(',');
    const std::string_view entry = text.substr(0, comma);
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) throw BadValue{"pairs such as q=layers.3.q,k=layers.3.k"};
    const std::size_t tensor = parse_choice(entry.substr(0, equals), choices);
    if (given[tensor]) throw BadValue{fmt::format("each tensor once; {} is given twice", choices[tensor])};
    given[tensor] = true;
    std::string name = parse_text(entry.substr(equals + 1), "pairs such as q=layers.3.q,k=layers.3.k");
    if (tensor < roles.size()) {
      names.*roles[tensor].member = std::move(name);
    } else {
      names.others.emplace(choices[tensor], std::move(name));
    }
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  options.tensors = names;
}

void set_ignore(JobOptions& options, std::string_view text) {
  options.ignore.clear();
  for (;;) {
    const std::size_t comma = text.find(',');
    options.ignore.push_back(parse_text(text.substr(0, comma), "names such as lm_head,mlp.down_proj"));
    if (comma == std::string_view::npos) return;
    text.remove_prefix(comma + 1);
  }
}

void set_window(JobOptions& options, std::string_view text) {
  const std::size_t comma = text.find(',');
  if (comma == std::string_view::npos) throw BadValue{"two numbers of tokens L,R, each -1 for unlimited"};
  const auto side = [](std::string_view part) {
    return part == "-1" ? -1 : parse_size_value(part, "tokens (-1 for unlimited)", 0, kMaxTokens);
  };
  options.window_left = side(text.substr(0, comma));
  options.window_right = side(text.substr(comma + 1));
}

void set_dt_limit(JobOptions& options, std::string_view text) {
  const auto side = [](std::string_view part) {
    constexpr float kNone = std::numeric_limits<float>::infinity();
    if (part == "inf") return kNone;
    if (part == "-inf") return -kNone;
    return static_cast<float>(parse_fp32(part, -1e30, 1e30));
  };
  const std::size_t comma = text.find(',');
  try {
    if (comma == std::string_view::npos) throw BadValue{};
    options.dt_min = side(text.substr(0, comma));
    options.dt_max = side(text.substr(comma + 1));
  } catch (const BadValue&) {
    throw BadValue{"two numbers MIN,MAX, each inf or -inf for no limit"};
  }
}

void set_bench_against(JobOptions& options, std::string_view text) {
  if (text == "folds") throw BadValue{"compute (the new name of folds), sgemm, or the name of a file"};
  set_path<&JobOptions::against>(options, text);
}

constexpr FlagRow kTable[] = {
    // Input
    {"input", 0, kJobs, kAllOps, FlagGroup::kInput, FlagKind::kText, "FILE", "",
     "safetensors file, or its *.index.json; `ringattn run --op NAME --help` lists each op's tensors",
     set_path<&JobOptions::input>, "in.safetensors"},
    {"input", 0, kCompress, kAllOps, FlagGroup::kInput, FlagKind::kText, "FILE", "",
     "safetensors file, or its *.index.json, with k and v, a paged KV cache, or MLA latents; other tensors are kept",
     set_path<&JobOptions::input>, "in.safetensors"},
    {"input", 0, kQuantize, kAllOps, FlagGroup::kInput, FlagKind::kText, "FILE|DIR", "",
     "safetensors file of a model, its *.index.json, or the folder with them", set_path<&JobOptions::input>, "model.safetensors"},
    {"tensors", 0, kJobs | kCompress, kAllOps, FlagGroup::kInput, FlagKind::kText, "q=NAME,k=NAME,v=NAME", "",
     "other names for the input's tensors, e.g. q=layers.3.q; optional tensors too", set_tensors, "q=layers.3.q,k=layers.3.k"},
    {"synthetic", 0, kJobs | kCompress, kAllOps, FlagGroup::kInput, FlagKind::kNumber, "SEED", "",
     "generate the input from (seed, tensor, token, head, dim) instead of reading a file; the same on every machine",
     [](JobOptions& options, std::string_view text) { options.synthetic = parse_seed(text); }, "7"},
    {"order", 0, kJobs | kCompress, kAllOps, FlagGroup::kInput, FlagKind::kText, "thd|htd|bthd|bhtd", "",
     "axis order of q, k, v and out [thd for three axes, bthd for four]",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"thd", "htd", "bthd", "bhtd"};
       options.order = static_cast<AxisOrder>(parse_choice(text, kChoices));
     }, "thd"},
    {"page-order", 0, kJobs | kCompress, kSomeOps, FlagGroup::kInput, FlagKind::kText, "thd|htd", "",
     "axis order of a page in k_pages and v_pages; htd is head-major [from the file's metadata or shapes]",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"thd", "htd"};
       options.page_order = parse_choice(text, kChoices) == 0 ? AxisOrder::kThd : AxisOrder::kHtd;
     }, "htd"},

    // Shape
    {"backward", 0, kJobs, kAllOps, FlagGroup::kShape, FlagKind::kSwitch, "", "off",
     "compute the gradients of --op's result instead; attention has them", set_switch<&JobOptions::backward>},
    {"op", 0, kJobs, kAllOps, FlagGroup::kShape, FlagKind::kText, "", "",
     "op for synthetic input; with a file its tensors decide, and an op that is named must be theirs",
     [](JobOptions& options, std::string_view text) {
       options.op = parse_op(text);
     }},
    {"seq", 0, kRun | kVerify | kCompress, kAllOps, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "16k", "tokens of each sequence",
     [](JobOptions& options, std::string_view text) {
       options.seq = {parse_size_value(text, "tokens", 0, kMaxTokens)};
     }},
    {"seq", 0, kPlan | kBench, kAllOps, FlagGroup::kShape, FlagKind::kText, "LIST", "16k",
     "tokens of each sequence; a list such as 8k,64k or 8k-2m*2 gives one row each",
     [](JobOptions& options, std::string_view text) { options.seq = parse_size_list(text, "tokens", 0, kMaxTokens); }},
    {"q-len", 0, kJobs | kCompress, kSomeOps, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "",
     "queries per sequence, at its end [all; 1 for a decode step over a cache]; 1 makes an SSM decode step",
     [](JobOptions& options, std::string_view text) {
       options.q_len = parse_size_value(text, "tokens", 0, kMaxTokens);
     }, "1"},
    {"page-size", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "0",
     "tokens of a page of the KV cache: 16, 32, 64, 128 or 256; 0: a dense cache",
     set_tokens<&JobOptions::page_size, 0>, {}, false, "0"},
    {"prefix", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "",
     "keys of a prefix that all sequences share, stored once (prefix caching) [none]",
     set_tokens<&JobOptions::prefix, 0>, "8k", false, "0"},
    {"batch", 0, kRun | kVerify | kPlan | kCompress, kAllOps, FlagGroup::kShape, FlagKind::kNumber, "B", "1", "sequences",
     [](JobOptions& options, std::string_view text) { options.batch = parse_integer(text, 1, 1 << 24); }},
    {"batch", 0, kBench, kAllOps, FlagGroup::kShape, FlagKind::kText, "LIST", "1",
     "sequences; a list such as 1,32 gives one point each",
     [](JobOptions& options, std::string_view text) {
       options.batches = parse_size_list(text, "sequences", 1, 1 << 24);
     }},
    {"total-tokens", 0, kBench, kAllOps, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "",
     "instead of --batch: as many sequences as make this many tokens, at least one",
     set_tokens<&JobOptions::total_tokens, 1>, "64k"},
    {"heads", 0, kJobs | kCompress, kAllOps, FlagGroup::kShape, FlagKind::kNumber, "H", "8", "query heads (16 for mla); heads of an SSM; channels of selective_scan and conv1d (256)",
     set_count<&JobOptions::heads, 1 << 16>},
    {"kv-heads", 0, kJobs | kCompress, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "HK", "2",
     "K/V heads; they divide the query heads (GQA)", set_count<&JobOptions::kv_heads, 1 << 16>},
    {"head-dim", 0, kJobs | kCompress, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "D", "128", "dimension of q and k, for mla without the rotary part; of x for ssd (64)",
     set_count<&JobOptions::head_dim, 1 << 16>},
    {"head-dim-v", 0, kJobs | kCompress, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "DV", "",
     "dimension of v and out [head-dim]", set_count<&JobOptions::head_dim_v, 1 << 16>, "128"},
    {"rope-dim", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "DR", "64",
     "dimension of the rotary part of q and k", set_count<&JobOptions::rope_dim, 1 << 16>},
    {"latent-dim", 0, kJobs | kCompress, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "DL", "",
     "dimension of the latents [512]; with a file only if neither w_uk nor w_uv gives it", set_count<&JobOptions::latent_dim, 1 << 16>, "512", true},
    {"state-dim", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "N", "128",
     "dimension of the SSM state; 16 for selective_scan", set_count<&JobOptions::state_dim, 1 << 16>},
    {"groups", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "G", "1",
     "groups of B and C; they divide the heads", set_count<&JobOptions::groups, 1 << 16>},
    {"conv-width", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kNumber, "W", "0",
     "width of a causal convolution with bias and SiLU before the SSM, 2 to 4; 0: none; 4 for conv1d",
     [](JobOptions& options, std::string_view text) { options.conv_width = static_cast<int>(parse_integer(text, 0, 4)); }, "4"},
    {"model-config", 0, kJobs, kAllOps, FlagGroup::kShape, FlagKind::kText, "FILE", "",
     "config.json of a Hugging Face model; sets what no flag sets: heads, dims, mask, window, scale, soft cap, SSM shape", set_path<&JobOptions::model_config>, "config.json", true},
    {"layer", 0, kJobs, kAllOps, FlagGroup::kShape, FlagKind::kNumber, "N", "",
     "layer of --model-config, from 0; required where layers differ",
     [](JobOptions& options, std::string_view text) { options.layer = parse_integer(text, 0, 1 << 16); }, "0", true},
    {"dtype", 0, kJobs | kCompress, kAllOps, FlagGroup::kShape, FlagKind::kText, "bf16|fp16|fp32", "bf16",
     "type of q, k, v and out",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"bf16", "fp16", "fp32"};
       options.dtype = *parse_dtype(kChoices[parse_choice(text, kChoices)]);
     }},
    {"cache-format", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kText, "NAME", "",
     "how keys and values are stored: fp8, int8, int4, lowrank, vq, hybrid or a full format string; latents: fp8 [dtype]", set_name<&JobOptions::cache_format>, "fp8"},

    {"sinks", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kSwitch, "", "off",
     "attention sinks: a learned logit for each query head", set_switch<&JobOptions::sinks>},
    {"dlse", 0, kJobs, kSomeOps, FlagGroup::kShape, FlagKind::kSwitch, "", "off",
     "gradient of LSE in addition to that of out", set_switch<&JobOptions::dlse>},

    // Numerics
    {"mask", 0, kJobs | kCompress, kSomeOps, FlagGroup::kNumerics, FlagKind::kText, "full|causal", "causal",
     "causal: the query at position p sees no key after p",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"full", "causal"};
       options.mask = static_cast<MaskKind>(parse_choice(text, kChoices));
     }},
    {"query-offset", 0, kJobs | kCompress, kSomeOps, FlagGroup::kNumerics, FlagKind::kNumber, "N", "",
     "position of the first query among the keys; overrides q_offset [k_len - q_len of each sequence]",
     [](JobOptions& options, std::string_view text) {
       options.query_offset = parse_integer(text, -kMaxTokens, kMaxTokens);
     }, "0"},
    {"window", 0, kJobs | kCompress, kSomeOps, FlagGroup::kNumerics, FlagKind::kText, "L,R", "-1,-1",
     "sliding window: position p sees keys p-L ... p+R, -1 is unlimited; Hugging Face's sliding_window W is L = W-1",
     set_window, "4095,0"},
    {"block-mask", 0, kJobs, kSomeOps, FlagGroup::kNumerics, FlagKind::kText, "FILE|PATTERN", "",
     "block-sparse mask: safetensors file, or patterns joined by +: window:W, global:G, vertical:K, slash:D, strided:S, random:N, bigbird:W,G,N, topk:K, block:N, heads:all|kv|each",
     [](JobOptions& options, std::string_view text) {
       options.block_mask = parse_text(text, "a pattern such as window:4k+global:128, or the name of a file");
     }, "window:4k+global:128"},
    {"form", 0, kJobs, kSomeOps, FlagGroup::kNumerics, FlagKind::kText, "expanded|absorbed|auto", "auto",
     "attend to expanded keys and values, or to the latents (weight absorption); each form has its own bits; auto: the faster one",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"expanded", "absorbed", "auto"};
       const std::size_t choice = parse_choice(text, kChoices);
       options.form.reset();
       if (choice < 2) options.form = static_cast<MlaForm>(choice);
     }},
    {"dt-softplus", 0, kJobs, kSomeOps, FlagGroup::kNumerics, FlagKind::kText, "auto|on|off", "auto",
     "apply softplus to dt after its bias; auto: if there is a bias",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"auto", "on", "off"};
       const std::size_t choice = parse_choice(text, kChoices);
       options.dt_softplus = choice == 0 ? std::nullopt : std::optional(choice == 1);
     }},
    {"dt-limit", 0, kJobs, kSomeOps, FlagGroup::kNumerics, FlagKind::kText, "MIN,MAX", "",
     "clamp dt after bias and softplus; inf means no limit [none]", set_dt_limit, "0,inf"},
    {"softmax-scale", 0, kJobs | kCompress, kSomeOps, FlagGroup::kNumerics, FlagKind::kNumber, "X", "",
     "scores are multiplied by it [1/sqrt(head-dim + rope-dim); required for absorbed queries without --model-config]",
     [](JobOptions& options, std::string_view text) { options.softmax_scale = parse_fp32(text, -1e30, 1e30); }, "0.125"},
    {"softcap", 0, kJobs | kCompress, kSomeOps, FlagGroup::kNumerics, FlagKind::kNumber, "X", "0",
     "score becomes X * tanh(score / X), after scaling; 0 is off",
     [](JobOptions& options, std::string_view text) { options.softcap = parse_fp32(text, 0.0, 1e30); }},

    // Compression
    {"method", 0, kCompress, kAllOps, FlagGroup::kCompression, FlagKind::kText, "NAME", "",
     "storage (fp8, int8, int4, lowrank, vq, hybrid or a format string), eviction (streaming, knorm, snapkv, expected), or both: snapkv+fp8", set_name<&JobOptions::method>, "int4"},
    {"ratio", 0, kCompress, kAllOps, FlagGroup::kCompression, FlagKind::kNumber, "X", "",
     "share of bytes to remove, at least [the method's usual]; with eviction, the share of tokens [0.5]",
     [](JobOptions& options, std::string_view text) { options.ratio = parse_real(text, 0.0, 1.0); }, "0.7"},
    {"report", 0, kCompress, kAllOps, FlagGroup::kCompression, FlagKind::kSwitch, "", "off",
     "compare --rows rows of the output over both caches, in fp64; show bytes and time",
     set_switch<&JobOptions::compression_report>},

    // Quantization
    {"format", 0, kQuantize, kAllOps, FlagGroup::kQuantization, FlagKind::kText, "int8|int4", "",
     "int8: a scale for each row, for W8A8; int4: a scale for each group of 128, for W4A16",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"int8", "int4"};
       options.weight_format = kChoices[parse_choice(text, kChoices)];
     }, "int8"},
    {"search", 0, kQuantize, kAllOps, FlagGroup::kQuantization, FlagKind::kText, "none|mse", "none",
     "mse: of 41 scales, 1 to 0.6 of the usual one, the one with the least squared error",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"none", "mse"};
       options.search_mse = parse_choice(text, kChoices) == 1;
     }},
    {"ignore", 0, kQuantize, kAllOps, FlagGroup::kQuantization, FlagKind::kText, "NAMES", "lm_head",
     "layers that stay as they are, whole names or their ends from a dot on, or re:EXPRESSION: lm_head,mlp.down_proj", set_ignore},

    // Parallelism
    {"world", 0, kPlan, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "LIST", "1",
     "ranks to plan for; a list such as 8,64 or 2-1k*2 gives one row each",
     [](JobOptions& options, std::string_view text) { options.world = parse_size_list(text, "ranks", 1, kMaxRanks); }},
    {"machine", 0, kJobs | kInfo, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "FILE", "",
     "machine model (JSON or TOML) for block sizes and time estimates; `info --measure` writes it",
     set_path<&JobOptions::machine>, "machine.json"},
    {"backend", 0, kJobs | kInfo, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "auto, or a required backend; `ringattn info` lists them", set_name<&JobOptions::backend>},
    {"kernel", 0, kJobs | kInfo, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "auto, or a required kernel; `ringattn info` lists them", set_name<&JobOptions::kernel>},
    {"transport", 0, kJobs | kInfo, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "auto, or a required transport; `ringattn info` lists them", set_name<&JobOptions::transport>},
    {"ranks", 0, kRun | kVerify | kInfo | kBench, kAllOps, FlagGroup::kParallelism, FlagKind::kNumber, "N", "",
     "run N ranks as threads of this process; under mpirun or RINGATTN_STORE, ranks are processes", set_count<&JobOptions::ranks, 512>, "4"},
    {"layout", 0, kJobs, kSomeOps, FlagGroup::kParallelism, FlagKind::kText, "striped|zigzag|contiguous", "",
     "how tokens are sharded across ranks [striped; contiguous for a sliding window]",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"striped", "zigzag", "contiguous"};
       constexpr LayoutKind kKinds[] = {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous};
       options.layout = kKinds[parse_choice(text, kChoices)];
     }, "striped"},
    {"stripe", 0, kJobs, kSomeOps, FlagGroup::kParallelism, FlagKind::kSize, "TOKENS", "",
     "consecutive tokens on one rank [from the kernel's tiles]", set_tokens<&JobOptions::stripe, 1>, "128"},
    {"block", 0, kRun | kVerify | kPlan, kSomeOps, FlagGroup::kParallelism, FlagKind::kSize, "TOKENS", "",
     "tokens of a K/V block [from the machine model and --memory]", set_tokens<&JobOptions::block, 1>, "4k"},
    {"block", 0, kBench, kSomeOps, FlagGroup::kParallelism, FlagKind::kText, "LIST", "",
     "tokens of a K/V block; a list gives one point each [from the machine model and --memory]",
     [](JobOptions& options, std::string_view text) { options.blocks = parse_size_list(text, "tokens", 1, kMaxTokens); }, "4k"},
    {"memory", 0, kJobs, kAllOps, FlagGroup::kParallelism, FlagKind::kSize, "BYTES", "",
     "memory limit of a rank, inputs and outputs included, MPI's buffers not [no limit]",
     [](JobOptions& options, std::string_view text) { options.memory = parse_size_value(text, "bytes", 1, kMost); }, "8g"},
    {"overlap", 0, kJobs, kSomeOps, FlagGroup::kParallelism, FlagKind::kText, "on|off", "on",
     "send the next K/V block during the computation on this one", set_switch<&JobOptions::overlap>},
    {"simd-target", 0, kAllCommands, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "SIMD target of CPU kernels: auto (the best here), or one that all hosts have, e.g. avx2; `ringattn info` lists them",
     [](JobOptions& options, std::string_view text) {
       const std::vector<std::string_view> names(simd_target_names().begin(), simd_target_names().end());
       options.simd_target = names[parse_choice(text, names)];
     }, "avx2"},
    {"threads", 0, kAllCommands, kAllOps, FlagGroup::kParallelism, FlagKind::kNumber, "N", "all",
     "CPU threads of a rank; all: the processors, divided among the ranks that share them",
     [](JobOptions& options, std::string_view text) {
       try {
         options.threads = text == "all" ? 0 : static_cast<int>(parse_integer(text, 1, kMaxThreads));
       } catch (BadValue& bad) {
         throw BadValue{"all, or " + bad.accepted};
       }
     }},

    {"numa-binding", 0, kRun | kVerify | kInfo | kBench, kAllOps, FlagGroup::kParallelism, FlagKind::kText, "node|none", "node",
     "node: bind CPU ranks that share a host to its NUMA nodes, unless their launcher has bound them",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"node", "none"};
       options.bind_to_numa_node = parse_choice(text, kChoices) == 0;
     }},

    // Output
    {"output", 0, kRun, kAllOps, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "safetensors file for out and lse (natural logarithm), or y of an SSM [not written]", set_path<&JobOptions::output>, "out.safetensors"},
    {"output", 0, kQuantize, kAllOps, FlagGroup::kOutput, FlagKind::kText, "DIR", "",
     "folder for model.safetensors, config.json and the model's other files", set_path<&JobOptions::output>, "model-int8"},
    {"output", 0, kCompress, kAllOps, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "safetensors file for the compressed keys and values and the other input tensors",
     set_path<&JobOptions::output>, "small.safetensors"},
    {"output", 0, kBench, kAllOps, FlagGroup::kOutput, FlagKind::kText, "table|md|csv|jsonl", "table",
     "points on stdout as a Markdown table, as CSV (RFC 4180), or as the lines of --jsonl; all else then goes to stderr",
     [](JobOptions& options, std::string_view text) {
       options.bench_output = static_cast<BenchOutput>(parse_choice(text, kBenchOutputs));
     }, "csv", false, {}, nullptr, "bench-output"},
    {"final-states", 0, kRun, kSomeOps, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "also compute the final state of each sequence: a digest, and final_states or final_conv_state in --output",
     set_switch<&JobOptions::final_states>},
    {"force", 0, kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "replace existing files", set_switch<&JobOptions::force>},
    {"json", 0, kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kText, "FILE|-", "",
     "report, also on failure; with - it goes to stdout and the table to stderr", set_path<&JobOptions::json>, "report.json"},
    {"jsonl", 0, kBench, kAllOps, FlagGroup::kOutput, FlagKind::kText, "FILE|-", "",
     "one JSON line for each point as it is measured; with - to stdout, and the table to stderr",
     set_path<&JobOptions::jsonl>, "points.jsonl"},
    {"trace", 0, kRun, kSomeOps, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "timeline of every rank's blocks, for Perfetto or chrome://tracing", set_path<&JobOptions::trace>, "trace.json"},
    {"progress", 0, kRun | kVerify | kBench, kAllOps, FlagGroup::kOutput, FlagKind::kText, "auto|on|off", "auto",
     "auto: one line on a terminal, else a line every 10 s; on: a line for every block",
     set_when<&JobOptions::progress>},
    {"color", 0, kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kText, "auto|always|never", "auto",
     "auto: on a terminal, unless NO_COLOR is set",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"auto", "always", "never"};
       options.color = static_cast<When>(parse_choice(text, kChoices));
     }},
    {"quiet", 'q', kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "print only the result line", set_switch<&JobOptions::quiet>},
    {"verbose", 'v', kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "more context: every rank, every block", set_switch<&JobOptions::verbose>},
    {"config", 0, kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "TOML table of flags; flags beat the environment, the environment beats the file",
     set_path<&JobOptions::config>, "job.toml"},
    {"print-config", 0, kAllCommands, kAllOps, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "print the effective configuration, with the source of each value, and stop",
     set_switch<&JobOptions::print_config>},
    {"dry-run", 0, kRun | kVerify | kBench, kAllOps, FlagGroup::kOutput, FlagKind::kSwitch, "", "off", "validate, plan, and stop",
     set_switch<&JobOptions::dry_run>},

    // Failure
    {"timeout", 0, kRun | kVerify | kInfo | kBench, kAllOps, FlagGroup::kFailure, FlagKind::kNumber, "SECONDS", "60",
     "time without a heartbeat after which a rank has failed and the job ends with code 6",
     [](JobOptions& options, std::string_view text) { options.timeout = parse_real(text, Timeouts::kMin, Timeouts::kMax); }},
    {"checksum", 0, kJobs, kSomeOps, FlagGroup::kFailure, FlagKind::kSwitch, "", "off",
     "verify each K/V message after it arrives", set_switch<&JobOptions::checksum>},

    // Verification
    {"against", 0, kVerify, kAllOps, FlagGroup::kVerification, FlagKind::kText, "FILE|oracle", "",
     "compare bits with an output file of `run`, or sampled rows with fp64", set_path<&JobOptions::against>, "oracle"},
    {"against", 0, kBench, kAllOps, FlagGroup::kMeasurement, FlagKind::kText, "compute|sgemm|FILE", "",
     "compute: each point also without communication; sgemm: next to this machine's BLAS rate; FILE: next to measured lines of the same job",
     set_bench_against, "compute", false, {}, nullptr, "bench-against"},
    {"peer", 0, kVerify, kAllOps, FlagGroup::kVerification, FlagKind::kText, "FILE", "",
     "compare another system's out (and lse) with fp64, next to this job's; --rows rows, or as many as take a second",
     set_path<&JobOptions::peer>, "peer.safetensors"},
    {"decode", 0, kVerify, kSomeOps, FlagGroup::kVerification, FlagKind::kSwitch, "", "off",
     "decode the last rows of each sequence one by one from a growing cache, and compare bits with prefill", set_switch<&JobOptions::decode>},
    {"rows", 0, kCompress, kAllOps, FlagGroup::kCompression, FlagKind::kNumber, "N", "64",
     "rows (one token and head each) that --report compares, the first and the last included",
     [](JobOptions& options, std::string_view text) { options.rows = parse_integer(text, 1, 1 << 20); }},
    {"rows", 0, kVerify, kAllOps, FlagGroup::kVerification, FlagKind::kNumber, "N", "64",
     "rows (one token and head each) that --against oracle, --peer or --decode checks, the first and the last included",
     [](JobOptions& options, std::string_view text) { options.rows = parse_integer(text, 1, 1 << 20); }},
    {"record", 0, kVerify, kAllOps, FlagGroup::kVerification, FlagKind::kText, "FILE", "",
     "write a golden file: digests, kernel, build, job", set_path<&JobOptions::record>, "golden.json"},
    {"golden", 0, kVerify, kAllOps, FlagGroup::kVerification, FlagKind::kText, "FILE", "",
     "compare digests with a golden file; one from another kernel, SIMD target or build is refused with code 4", set_path<&JobOptions::golden>, "golden.json"},

    // Measurement
    {"quick", 0, kBench, kAllOps, FlagGroup::kMeasurement, FlagKind::kSwitch, "", "off",
     "in a minute: attention, decode, gradients and a linear layer in sizes that this machine has the time for, and "
     "PyTorch at the same jobs if python3 can import torch", set_switch<&JobOptions::quick>},
    {"samples", 0, kBench, kAllOps, FlagGroup::kMeasurement, FlagKind::kNumber, "N", "",
     "repeats of each point after the warm-up [10, or as many as take 0.5 s]",
     [](JobOptions& options, std::string_view text) { options.samples = parse_integer(text, 1, 1000000); }, "10"},
    {"compute-only", 0, kBench, kSomeOps, FlagGroup::kMeasurement, FlagKind::kSwitch, "", "off",
     "compute without communication, with every block in place",
     set_switch<&JobOptions::compute_only>},
    {"with-forward", 0, kBench, kSomeOps, FlagGroup::kMeasurement, FlagKind::kSwitch, "", "off",
     "time forward and backward together, and count the FLOPs of both",
     set_switch<&JobOptions::with_forward>},
    {"baseline", 0, kBench, kAllOps, FlagGroup::kMeasurement, FlagKind::kText, "FILE", "",
     "lines of an earlier --jsonl; code 1 if a point is slower", set_path<&JobOptions::baseline>, "points.jsonl"},
    {"fail-above", 0, kBench, kAllOps, FlagGroup::kMeasurement, FlagKind::kText, "PERCENT", "5%",
     "how much slower than the baseline a point may be",
     [](JobOptions& options, std::string_view text) {
       if (text.ends_with('%')) text.remove_suffix(1);
       try {
         options.fail_above = parse_real(text, 0.0, 1e6) / 100.0;
       } catch (BadValue& bad) {
         throw BadValue{"percent such as 5%"};
       }
     }},
    {"measure", 0, kInfo, kAllOps, FlagGroup::kMeasurement, FlagKind::kSwitch, "", "off",
     "measure compute rate, link rate and latency; write them to --machine FILE, or print them",
     set_switch<&JobOptions::measure>},
};

}  // namespace

void FlagRow::apply(JobOptions& options, std::string_view text) const {
  if (own == nullptr) return set(options, text);
  own->check(text);
  options.own.insert_or_assign(std::string(name), std::string(text));
}

bool FlagRow::lists(std::string_view text) const {
  for (std::string_view rest = value; !rest.empty();) {
    const std::size_t bar = rest.find('|');
    const std::string_view word = rest.substr(0, bar);
    const bool metavariable = word.find_first_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ") != std::string_view::npos;  // FILE
    if (!metavariable && word == text) return true;
    rest.remove_prefix(bar == std::string_view::npos ? rest.size() : bar + 1);
  }
  return false;
}

std::span<const FlagRow> flag_table() {
  static const std::vector<FlagRow> table = [] {
    std::vector<FlagRow> rows(std::begin(kTable), std::end(kTable));
    static std::string names;
    for (const OpEntry* op : op_table()) names += fmt::format("{}{}", names.empty() ? "" : "|", op->name);
    FlagRow& choice = *std::ranges::find(rows, "op", &FlagRow::name);
    choice.value = names;
    choice.fallback = op_table().front()->name;
    for (const OpEntry* op : op_table()) {
      for (const SettingRow& own : op->own_settings) {
        if (std::ranges::find(rows, own.name, &FlagRow::name) != rows.end()) continue;  // another op's, too
        rows.push_back({.name = own.name,
                        .letter = 0,
                        .commands = kJobs,
                        .of_all_ops = false,
                        .group = FlagGroup::kNumerics,
                        .kind = own.kind,
                        .value = own.value,
                        .fallback = own.fallback,
                        .help = own.help,
                        .set = nullptr,
                        .own = &own});
      }
    }
    return rows;
  }();
  return table;
}

std::vector<const FlagRow*> flags_of(unsigned command) {
  std::vector<const FlagRow*> rows;
  for (const FlagRow& row : flag_table()) {
    if ((row.commands & command) != 0) rows.push_back(&row);
  }
  return rows;
}

std::string environment_variable(std::string_view key) {
  std::string name = "RINGATTN_";
  for (const char c : key) name += c == '-' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

}  // namespace ringattn
