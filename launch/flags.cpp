// SPDX-License-Identifier: Apache-2.0
#include "launch/flags.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/threads.hpp"
#include "comm/patience.hpp"
#include "launch/values.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMostRanks = 1 << 20;

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
template <auto kMember, int kMostValue>
void set_count(JobOptions& options, std::string_view text) {
  options.*kMember = static_cast<int>(parse_integer(text, 1, kMostValue));
}
template <auto kMember>
void set_when(JobOptions& options, std::string_view text) {
  constexpr std::string_view kChoices[] = {"auto", "on", "off"};
  options.*kMember = static_cast<When>(parse_choice(text, kChoices));
}

// A number that fp32 can hold without becoming 0.
double parse_fp32(std::string_view text, double least, double most) {
  const double value = parse_real(text, least, most);
  if (value != 0.0 && std::abs(value) < 1e-30) throw BadValue{"0, or a number of at least 1e-30"};
  return value;
}

void set_tensors(JobOptions& options, std::string_view text) {
  const std::span<const TensorRole> roles = tensor_roles();
  std::vector<std::string_view> choices;
  for (const TensorRole& role : roles) choices.push_back(role.name);
  InputNames names;
  std::vector<bool> given(roles.size(), false);
  for (;;) {
    const std::size_t comma = text.find(',');
    const std::string_view entry = text.substr(0, comma);
    const std::size_t equals = entry.find('=');
    if (equals == std::string_view::npos) throw BadValue{"pairs such as q=layers.3.q,k=layers.3.k"};
    const std::size_t tensor = parse_choice(entry.substr(0, equals), choices);
    if (given[tensor]) throw BadValue{fmt::format("each tensor once; {} stands there twice", choices[tensor])};
    given[tensor] = true;
    names.*roles[tensor].member = parse_text(entry.substr(equals + 1), "pairs such as q=layers.3.q,k=layers.3.k");
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
  }
  options.tensors = names;
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
    options.dt_least = side(text.substr(0, comma));
    options.dt_most = side(text.substr(comma + 1));
  } catch (const BadValue&) {
    throw BadValue{"two numbers LEAST,MOST, each inf or -inf for no limit"};
  }
}

constexpr FlagRow kTable[] = {
    // Input
    {"input", 0, kJobs, FlagGroup::kInput, FlagKind::kText, "FILE", "",
     "safetensors file, or its *.index.json, with tensors q, k, v and, if wanted, cu_seqlens_q, cu_seqlens_k, "
     "q_offset, sinks; or with q and a paged cache: k_pages, v_pages, block_table, lengths_k; or with q and latents (mla): "
     "latent, k_rope, w_uk, w_uv, for which latent_fp8, latent_pages and kv_b_proj may stand, without w_uk where q is "
     "multiplied by it, and without w_uv where O is wanted before that; or those of a scan (ssd): x, "
     "dt, A, B, C and, if wanted, D, z, dt_bias, initial_states, cu_seqlens; u, delta and delta_bias instead of x, dt and "
     "dt_bias make it a selective_scan, conv1d_weight and conv1d_bias put a convolution in front, state instead of "
     "initial_states makes it a step of decoding; x and conv1d_weight without dt are a convolution alone",
     set_path<&JobOptions::input>, "in.safetensors"},
    {"input", 0, kCompress, FlagGroup::kInput, FlagKind::kText, "FILE", "",
     "safetensors file, or its *.index.json, with keys and values k, v, or a paged cache: k_pages, v_pages, block_table, "
     "lengths_k; or with latents (mla): latent and k_rope, or latent_pages; and with what a job over them has besides, such "
     "as q, of which --report compares O, and w_uk and w_uv or kv_b_proj",
     set_path<&JobOptions::input>, "in.safetensors"},
    {"tensors", 0, kJobs | kCompress, FlagGroup::kInput, FlagKind::kText, "q=NAME,k=NAME,v=NAME", "",
     "other names of the input's tensors, e.g. q=layers.3.q; the optional ones too", set_tensors, "q=layers.3.q,k=layers.3.k"},
    {"synthetic", 0, kJobs | kCompress, FlagGroup::kInput, FlagKind::kNumber, "SEED", "",
     "instead of a file: input as a function of (seed, tensor, token, head, dim), the same on every machine",
     [](JobOptions& options, std::string_view text) { options.synthetic = parse_seed(text); }, "7"},
    {"order", 0, kJobs | kCompress, FlagGroup::kInput, FlagKind::kText, "thd|htd|bthd|bhtd", "",
     "axis order of q, k, v and out [thd for three axes, bthd for four]; a scan's rows lie token by token",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"thd", "htd", "bthd", "bhtd"};
       options.order = static_cast<AxisOrder>(parse_choice(text, kChoices));
     }, "thd"},
    {"page-order", 0, kJobs | kCompress, FlagGroup::kInput, FlagKind::kText, "thd|htd", "",
     "axis order of a page in k_pages and v_pages; htd is head-major [as the file's metadata page_order says, or the only "
     "one that its shapes allow]",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"thd", "htd"};
       options.page_order = parse_choice(text, kChoices) == 0 ? AxisOrder::kThd : AxisOrder::kHtd;
     }, "htd"},

    // Shape
    {"op", 0, kJobs, FlagGroup::kShape, FlagKind::kText, "attention|decode|mla|ssd|selective_scan|convolution", "attention",
     "what computes synthetic input; a file's tensors say it. decode: a few rows at the end of each of many cached "
     "sequences, with the same bits; mla: keys and values expanded from latents; "
     "ssd, selective_scan: the scans of Mamba-2 and Mamba-1; convolution: the one in front of them, alone",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"attention", "decode", "mla", "ssd", "selective_scan", "convolution"};
       options.op = static_cast<Op>(parse_choice(text, kChoices));
     }},
    {"seq", 0, kRun | kVerify | kCompress, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "16k", "tokens of each sequence",
     [](JobOptions& options, std::string_view text) {
       options.seq = {parse_size_value(text, "tokens", 0, kMaxTokens)};
     }},
    {"seq", 0, kPlan | kBench, FlagGroup::kShape, FlagKind::kText, "LIST", "16k",
     "tokens of each sequence; a list such as 8k,64k or 8k-2m*2 gives one row each",
     [](JobOptions& options, std::string_view text) { options.seq = parse_size_list(text, "tokens", 0, kMaxTokens); }},
    {"q-len", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "",
     "queries of each sequence, those of its last tokens [all of them; 1 where a cache is decoded, by --op decode or "
     "--op mla --page-size, which takes up to 16; bench takes so few for steps of --op decode where no --op is given; --op mla does, in the absorbed form, unless a flag "
     "such as --layout asks for rows around the ring]; of scans 1: a step of decoding, one token of each sequence behind a state",
     [](JobOptions& options, std::string_view text) {
       options.q_len = parse_size_value(text, "tokens", 0, kMaxTokens);
     }, "1"},
    {"page-size", 0, kJobs, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "0",
     "tokens of a page of the cache that --op decode or --op mla decodes: 16, 32, 64, 128 or 256, dealt at random by the "
     "seed; 0: no pages",
     set_tokens<&JobOptions::page_size, 0>},
    {"prefix", 0, kJobs, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "",
     "keys that all sequences of --op decode begin with, in the same pages; sm90_fold reads whole tiles of them (of 128 "
     "keys for most head dims) once for all, where the cache is plain and no lists are followed [none]",
     set_tokens<&JobOptions::prefix, 0>, "8k"},
    {"batch", 0, kRun | kVerify | kPlan | kCompress, FlagGroup::kShape, FlagKind::kNumber, "B", "1", "sequences",
     [](JobOptions& options, std::string_view text) { options.batch = parse_integer(text, 1, 1 << 24); }},
    {"batch", 0, kBench, FlagGroup::kShape, FlagKind::kText, "LIST", "1",
     "sequences; a list such as 1,32 gives points for each",
     [](JobOptions& options, std::string_view text) {
       options.batches = parse_size_list(text, "sequences", 1, 1 << 24);
     }},
    {"total-tokens", 0, kBench, FlagGroup::kShape, FlagKind::kSize, "TOKENS", "",
     "batches of short sequences: as many as make so many tokens, at least one; instead of --batch",
     set_tokens<&JobOptions::total_tokens, 1>, "64k"},
    {"heads", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kNumber, "H", "8", "query heads; 16 for --op mla; of scans: heads or, of a selective_scan or convolution, channels [there 256]",
     set_count<&JobOptions::heads, 1 << 16>},
    {"kv-heads", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kNumber, "HK", "2",
     "K/V heads; they divide the query heads (--op mla has none)", set_count<&JobOptions::kv_heads, 1 << 16>},
    {"head-dim", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kNumber, "D", "128", "dimension of q and k, for --op mla without the rotary part, of x for --op ssd [there 64]; `ringattn info` says what "
     "kernels take",
     set_count<&JobOptions::head_dim, 1 << 16>},
    {"head-dim-v", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kNumber, "DV", "",
     "dimension of v and out [head-dim]", set_count<&JobOptions::head_dim_v, 1 << 16>, "128"},
    {"rope-dim", 0, kJobs, FlagGroup::kShape, FlagKind::kNumber, "DR", "64",
     "of --op mla: dimension of the rotary part of q and k", set_count<&JobOptions::rope_dim, 1 << 16>},
    {"latent-dim", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kNumber, "DL", "512",
     "of --op mla: dimension of the latents that keys and values are expanded from; beside a file, of rows in pages, where "
     "neither w_uk nor w_uv says it", set_count<&JobOptions::latent_dim, 1 << 16>},
    {"state-dim", 0, kJobs, FlagGroup::kShape, FlagKind::kNumber, "N", "128",
     "of scans: states of each number of x; 16 for --op selective_scan", set_count<&JobOptions::state_dim, 1 << 16>},
    {"groups", 0, kJobs, FlagGroup::kShape, FlagKind::kNumber, "G", "1",
     "of scans: rows of B and C that a token has; they divide the heads", set_count<&JobOptions::groups, 1 << 16>},
    {"conv-width", 0, kJobs, FlagGroup::kShape, FlagKind::kNumber, "W", "0",
     "of scans: width of the causal convolution in front of them, 2 to 4, with a bias and silu; it is over x, B and C, or "
     "over x alone for --op selective_scan; 0: none; 4 for --op convolution",
     [](JobOptions& options, std::string_view text) { options.conv_width = static_cast<int>(parse_integer(text, 0, 4)); }, "4"},
    {"model-config", 0, kJobs, FlagGroup::kShape, FlagKind::kText, "FILE", "",
     "config.json of a Hugging Face model: heads, dims, mask, window, scale and soft-cap of a layer's attention, or heads, "
     "dims, groups, convolution and dt-limit of its scan, where no flag says them; beside a file of tensors all but the "
     "shape, which is compared. A model_type or a key that is not known is refused", set_path<&JobOptions::model_config>, "config.json"},
    {"layer", 0, kJobs, FlagGroup::kShape, FlagKind::kNumber, "N", "",
     "layer of --model-config, from 0 on; needed where layers differ in kind, window or dims",
     [](JobOptions& options, std::string_view text) { options.layer = parse_integer(text, 0, 1 << 16); }, "0"},
    {"dtype", 0, kJobs | kCompress, FlagGroup::kShape, FlagKind::kText, "bf16|fp16|fp32", "bf16",
     "type of q, k, v and out",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"bf16", "fp16", "fp32"};
       options.dtype = *parse_dtype(kChoices[parse_choice(text, kChoices)]);
     }},
    {"cache-format", 0, kJobs, FlagGroup::kShape, FlagKind::kText, "NAME", "",
     "keys and values are stored by this method of `ringattn compress`: fp8, int8, int4, lowrank, vq or hybrid, or in "
     "a format by its words (\"fp8 tensor\"); latents in rows of 8 bits by fp8; bf16 or another dtype, that of q: as they are. A file says its own [as they are]", set_name<&JobOptions::cache_format>, "fp8"},

    // Numerics
    {"mask", 0, kJobs | kCompress, FlagGroup::kNumerics, FlagKind::kText, "full|causal", "causal",
     "causal: row i stands at key position i + offset and sees no later key",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"full", "causal"};
       options.mask = static_cast<MaskKind>(parse_choice(text, kChoices));
     }},
    {"query-offset", 0, kJobs | kCompress, FlagGroup::kNumerics, FlagKind::kNumber, "N", "",
     "position of the first query among the keys; overrides q_offset [k_len - q_len of each sequence]",
     [](JobOptions& options, std::string_view text) {
       options.query_offset = parse_integer(text, -kMaxTokens, kMaxTokens);
     }, "0"},
    {"window", 0, kJobs | kCompress, FlagGroup::kNumerics, FlagKind::kText, "L,R", "-1,-1",
     "the row at p sees keys p-L ... p+R inclusive, -1 = unlimited; causal sets R = 0; a sliding_window W of Hugging "
     "Face is L = W-1",
     set_window, "4095,0"},
    {"block-mask", 0, kJobs, FlagGroup::kNumerics, FlagKind::kText, "FILE|PATTERN", "",
     "key blocks that each block of queries sees beside the mask: window:W, global:G, vertical:K,K..., "
     "slash:D,D..., strided:S, random:N[,SEED], bigbird:W,G,N[,SEED] or topk:K, joined by +; block:N sets their size "
     "[128], heads:all|kv|each who has lists; or a safetensors file with block_mask, or block_indptr and "
     "block_indices",
     [](JobOptions& options, std::string_view text) {
       options.block_mask = parse_text(text, "a pattern such as window:4k+global:128, or the name of a file");
     }, "window:4k+global:128"},
    {"form", 0, kJobs, FlagGroup::kNumerics, FlagKind::kText, "expanded|absorbed|auto", "auto",
     "of mla: what is folded, keys and values of every head, or the latents themselves. Each form has bits of its own; "
     "auto takes the one that costs less for the shape, and says which",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"expanded", "absorbed", "auto"};
       const std::size_t choice = parse_choice(text, kChoices);
       options.form.reset();
       if (choice < 2) options.form = static_cast<LatentForm>(choice);
     }},
    {"dt-softplus", 0, kJobs, FlagGroup::kNumerics, FlagKind::kText, "auto|on|off", "auto",
     "of scans: dt becomes log(1 + exp(dt)), behind its bias; auto: where there is a bias",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"auto", "on", "off"};
       const std::size_t choice = parse_choice(text, kChoices);
       options.dt_softplus = choice == 0 ? std::nullopt : std::optional(choice == 1);
     }},
    {"dt-limit", 0, kJobs, FlagGroup::kNumerics, FlagKind::kText, "LEAST,MOST", "",
     "of scans: what dt is kept within, behind bias and softplus; inf is no limit [none]", set_dt_limit, "0,inf"},
    {"softmax-scale", 0, kJobs | kCompress, FlagGroup::kNumerics, FlagKind::kNumber, "X", "",
     "scores are multiplied by it [1/sqrt(head-dim), rope-dim included; nothing where q of a file is in the latent, without "
     "w_uk: then it has to be given, or --model-config]",
     [](JobOptions& options, std::string_view text) { options.softmax_scale = parse_fp32(text, -1e30, 1e30); }, "0.125"},
    {"softcap", 0, kJobs | kCompress, FlagGroup::kNumerics, FlagKind::kNumber, "X", "0",
     "score becomes X * tanh(score / X), after scaling; 0 is off",
     [](JobOptions& options, std::string_view text) { options.softcap = parse_fp32(text, 0.0, 1e30); }},

    // Compression
    {"method", 0, kCompress, FlagGroup::kCompression, FlagKind::kText, "NAME", "",
     "fp8, int8, int4, lowrank, vq or hybrid, or a format by its words (\"fp8 tensor\"): how keys and values are stored, "
     "and fp8 how latents are; or streaming, "
     "knorm, snapkv or expected: which tokens are kept, with options such as "
     "snapkv:window=32,first=4,last=32,pool=5,heads=all; or both, as snapkv+fp8", set_name<&JobOptions::method>, "int4"},
    {"ratio", 0, kCompress, FlagGroup::kCompression, FlagKind::kNumber, "X", "",
     "share of the bytes of keys and values that is removed, at least: 0.5 leaves half. The method's format that removes "
     "least beyond it is taken [its usual one]. Where tokens are taken out, the share of these [0.5]",
     [](JobOptions& options, std::string_view text) { options.ratio = parse_real(text, 0.0, 1.0); }, "0.7"},
    {"report", 0, kCompress, FlagGroup::kCompression, FlagKind::kSwitch, "", "off",
     "compare O of --rows rows over both caches, in fp64, and say what codes cost in bytes and time",
     set_switch<&JobOptions::compression_report>},

    // Parallelism
    {"world", 0, kPlan, FlagGroup::kParallelism, FlagKind::kText, "LIST", "1",
     "ranks to plan for; a list such as 8,64 or 2-1k*2 gives one row each",
     [](JobOptions& options, std::string_view text) { options.world = parse_size_list(text, "ranks", 1, kMostRanks); }},
    {"machine", 0, kJobs | kInfo, FlagGroup::kParallelism, FlagKind::kText, "FILE", "",
     "machine model (JSON or TOML) that block sizes and predictions rest on; `info --measure` writes it",
     set_path<&JobOptions::machine>, "machine.json"},
    {"backend", 0, kJobs | kInfo, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "auto, or the backend that must be used: `ringattn info` shows each kernel's", set_name<&JobOptions::backend>},
    {"kernel", 0, kJobs | kInfo, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "auto, or a kernel that must be used; `ringattn info` lists them", set_name<&JobOptions::kernel>},
    {"transport", 0, kJobs | kInfo, FlagGroup::kParallelism, FlagKind::kText, "NAME", "auto",
     "auto, or a transport that must be used; `ringattn info` lists them", set_name<&JobOptions::transport>},
    {"ranks", 0, kRun | kVerify | kInfo | kBench, FlagGroup::kParallelism, FlagKind::kNumber, "N", "",
     "makes N ranks in this process; under mpirun, or with RINGATTN_STORE, the ranks are processes", set_count<&JobOptions::ranks, 512>, "4"},
    {"layout", 0, kJobs, FlagGroup::kParallelism, FlagKind::kText, "striped|zigzag|contiguous", "",
     "how tokens are dealt to ranks [striped, or contiguous for a sliding window]",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"striped", "zigzag", "contiguous"};
       constexpr LayoutKind kKinds[] = {LayoutKind::kStriped, LayoutKind::kZigzag, LayoutKind::kContiguous};
       options.layout = kKinds[parse_choice(text, kChoices)];
     }, "striped"},
    {"stripe", 0, kJobs, FlagGroup::kParallelism, FlagKind::kSize, "TOKENS", "",
     "tokens that stay together on a rank [from the kernel's tiles]", set_tokens<&JobOptions::stripe, 1>, "128"},
    {"block", 0, kRun | kVerify | kPlan, FlagGroup::kParallelism, FlagKind::kSize, "TOKENS", "",
     "tokens of a block of keys [from the machine model and --memory]", set_tokens<&JobOptions::block, 1>, "4k"},
    {"block", 0, kBench, FlagGroup::kParallelism, FlagKind::kText, "LIST", "",
     "tokens of a block of keys; a list gives one point each [from the machine model and --memory]",
     [](JobOptions& options, std::string_view text) { options.blocks = parse_size_list(text, "tokens", 1, kMaxTokens); }, "4k"},
    {"memory", 0, kJobs, FlagGroup::kParallelism, FlagKind::kSize, "BYTES", "",
     "what the job may use of a rank's memory, inputs and outputs included; MPI's own buffers come on top [no limit]",
     [](JobOptions& options, std::string_view text) { options.memory = parse_size_value(text, "bytes", 1, kMost); }, "8g"},
    {"overlap", 0, kJobs, FlagGroup::kParallelism, FlagKind::kText, "on|off", "on",
     "the next block travels while this one is folded", set_switch<&JobOptions::overlap>},
    {"threads", 0, kAllCommands, FlagGroup::kParallelism, FlagKind::kNumber, "N", "all",
     "threads of a rank on the CPU; all: the processors, divided among the ranks that share them",
     [](JobOptions& options, std::string_view text) {
       try {
         options.threads = text == "all" ? 0 : static_cast<int>(parse_integer(text, 1, kMostThreads));
       } catch (BadValue& bad) {
         throw BadValue{"all, or " + bad.accepted};
       }
     }},

    // Output
    {"output", 0, kRun, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "safetensors file for out (in --order) and lse (natural logarithm, [heads, tokens] or [batch, heads, tokens]), or y of "
     "a scan [nothing is written]", set_path<&JobOptions::output>, "out.safetensors"},
    {"output", 0, kCompress, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "safetensors file for the compressed keys and values, and what else the input holds for a job",
     set_path<&JobOptions::output>, "small.safetensors"},
    {"final-states", 0, kRun, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "of scans: the state behind each sequence too, with a digest and, in --output, as final_states; of a convolution its last tokens, as final_conv_state",
     set_switch<&JobOptions::final_states>},
    {"force", 0, kAllCommands, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "replace files that exist", set_switch<&JobOptions::force>},
    {"json", 0, kAllCommands, FlagGroup::kOutput, FlagKind::kText, "FILE|-", "",
     "report, also on failure; with - it goes to stdout and the table to stderr", set_path<&JobOptions::json>, "report.json"},
    {"jsonl", 0, kBench, FlagGroup::kOutput, FlagKind::kText, "FILE|-", "",
     "one line of JSON a point, as soon as it is measured; with - they go to stdout and the table to stderr",
     set_path<&JobOptions::jsonl>, "points.jsonl"},
    {"trace", 0, kRun, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "timeline of every rank's blocks, for Perfetto or chrome://tracing", set_path<&JobOptions::trace>, "trace.json"},
    {"progress", 0, kRun | kVerify | kBench, FlagGroup::kOutput, FlagKind::kText, "auto|on|off", "auto",
     "auto: one line on a terminal, else a line every 10 s; on: a line for every block",
     set_when<&JobOptions::progress>},
    {"color", 0, kAllCommands, FlagGroup::kOutput, FlagKind::kText, "auto|always|never", "auto",
     "auto: on a terminal, unless NO_COLOR is set",
     [](JobOptions& options, std::string_view text) {
       constexpr std::string_view kChoices[] = {"auto", "always", "never"};
       options.color = static_cast<When>(parse_choice(text, kChoices));
     }},
    {"quiet", 'q', kAllCommands, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "the result's line alone, without context", set_switch<&JobOptions::quiet>},
    {"verbose", 'v', kAllCommands, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "more context: every rank, every block", set_switch<&JobOptions::verbose>},
    {"config", 0, kAllCommands, FlagGroup::kOutput, FlagKind::kText, "FILE", "",
     "TOML table of flags; flags beat the environment, the environment beats the file",
     set_path<&JobOptions::config>, "job.toml"},
    {"print-config", 0, kAllCommands, FlagGroup::kOutput, FlagKind::kSwitch, "", "off",
     "print the effective configuration, with the source of each value, and stop",
     set_switch<&JobOptions::print_config>},
    {"dry-run", 0, kRun | kVerify | kBench, FlagGroup::kOutput, FlagKind::kSwitch, "", "off", "validate, plan, and stop",
     set_switch<&JobOptions::dry_run>},

    // Failure
    {"timeout", 0, kRun | kVerify | kInfo | kBench, FlagGroup::kFailure, FlagKind::kNumber, "SECONDS", "60",
     "without a sign of life from a rank, after which it is silent and the job ends with code 6; a rank that works is "
     "waited for",
     [](JobOptions& options, std::string_view text) { options.timeout = parse_real(text, Patience::kLeast, Patience::kMost); }},
    {"checksum", 0, kJobs, FlagGroup::kFailure, FlagKind::kSwitch, "", "off",
     "verify each part of a block after its travels", set_switch<&JobOptions::checksum>},

    // Verification
    {"against", 0, kVerify, FlagGroup::kVerification, FlagKind::kText, "FILE|oracle", "",
     "compare bits with an output file of `run`, or sampled rows with fp64", set_path<&JobOptions::against>, "oracle"},
    {"against", 0, kBench, FlagGroup::kMeasurement, FlagKind::kText, "folds|sgemm|FILE", "",
     "folds: each point without transfers too, sample by sample in turn; sgemm: beside the rate of the BLAS of this "
     "machine (CPU); FILE: beside the lines of bench or of bench/peers that have the same job and number of ranks",
     set_path<&JobOptions::against>, "folds"},
    {"peer", 0, kVerify, FlagGroup::kVerification, FlagKind::kText, "FILE", "",
     "compare rows of another system's out, and lse if it has one, with fp64, and those of this job beside them: as many as "
     "take about a second, which are all rows of small jobs, or as --rows says",
     set_path<&JobOptions::peer>, "peer.safetensors"},
    {"decode", 0, kVerify, FlagGroup::kVerification, FlagKind::kSwitch, "", "off",
     "decode the last rows of each sequence one by one, from a cache that grows by appends, and compare bits with the "
     "prefill's", set_switch<&JobOptions::decode>},
    {"rows", 0, kCompress, FlagGroup::kCompression, FlagKind::kNumber, "N", "64",
     "rows, each of one token and head, that --report compares, the first and the last among them",
     [](JobOptions& options, std::string_view text) { options.rows = parse_integer(text, 1, 1 << 20); }},
    {"rows", 0, kVerify, FlagGroup::kVerification, FlagKind::kNumber, "N", "64",
     "rows, each of one token and head, that --against oracle samples, the first and the last among them, and --peer too "
     "where this is given; rows of each sequence that --decode takes",
     [](JobOptions& options, std::string_view text) { options.rows = parse_integer(text, 1, 1 << 20); }},
    {"record", 0, kVerify, FlagGroup::kVerification, FlagKind::kText, "FILE", "",
     "write a golden file: digests, kernel, build, job", set_path<&JobOptions::record>, "golden.json"},
    {"golden", 0, kVerify, FlagGroup::kVerification, FlagKind::kText, "FILE", "",
     "check digests against a golden file; one of another kernel, SIMD target or build is refused with code 4", set_path<&JobOptions::golden>, "golden.json"},

    // Measurement
    {"samples", 0, kBench, FlagGroup::kMeasurement, FlagKind::kNumber, "N", "",
     "repeats of each point behind the warm-up [10, or as many as take 0.5 s]",
     [](JobOptions& options, std::string_view text) { options.samples = parse_integer(text, 1, 1000000); }, "10"},
    {"compute-only", 0, kBench, FlagGroup::kMeasurement, FlagKind::kSwitch, "", "off",
     "the same folds without transfers, every block in place: what the ranks compute on their own",
     set_switch<&JobOptions::compute_only>},
    {"baseline", 0, kBench, FlagGroup::kMeasurement, FlagKind::kText, "FILE", "",
     "lines of an earlier --jsonl; code 1 when a point is slower than there", set_path<&JobOptions::baseline>, "points.jsonl"},
    {"fail-above", 0, kBench, FlagGroup::kMeasurement, FlagKind::kText, "PERCENT", "5%",
     "how much slower than the baseline a point may be",
     [](JobOptions& options, std::string_view text) {
       if (text.ends_with('%')) text.remove_suffix(1);
       try {
         options.fail_above = parse_real(text, 0.0, 1e6) / 100.0;
       } catch (BadValue& bad) {
         throw BadValue{"percent such as 5%"};
       }
     }},
    {"measure", 0, kInfo, FlagGroup::kMeasurement, FlagKind::kSwitch, "", "off",
     "measure compute rate, link rate and latency; written to --machine FILE (.json or .toml), or printed",
     set_switch<&JobOptions::measure>},
};

}  // namespace

std::span<const FlagRow> flag_table() { return kTable; }

std::vector<const FlagRow*> flags_of(unsigned command) {
  std::vector<const FlagRow*> rows;
  for (const FlagRow& row : kTable) {
    if ((row.commands & command) != 0) rows.push_back(&row);
  }
  return rows;
}

std::string environment_twin(std::string_view flag) {
  std::string name = "RINGATTN_";
  for (const char c : flag) name += c == '-' ? '_' : static_cast<char>(c >= 'a' && c <= 'z' ? c - 'a' + 'A' : c);
  return name;
}

}  // namespace ringattn
