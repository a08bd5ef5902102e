// SPDX-License-Identifier: Apache-2.0
#include "io/known_names.hpp"

#include <fmt/format.h>

namespace ringattn {

namespace {

constexpr unsigned bit(JobKind job) { return static_cast<unsigned>(job); }

constexpr unsigned kRows = bit(JobKind::kAttention) | bit(JobKind::kMla);
constexpr unsigned kPages = bit(JobKind::kDecode) | bit(JobKind::kMlaDecode);
constexpr unsigned kLatents = bit(JobKind::kMla) | bit(JobKind::kMlaDecode);
constexpr unsigned kAttention = kRows | kPages;
constexpr unsigned kSsd = bit(JobKind::kSsd);
constexpr unsigned kSelective = bit(JobKind::kSelectiveScan);
constexpr unsigned kAlone = bit(JobKind::kConv1d);
constexpr unsigned kScans = kSsd | kSelective;
constexpr unsigned kStateSpace = kScans | kAlone;
constexpr unsigned kAll = kAttention | kStateSpace;

constexpr std::string_view kMask = "masks are causal, windows or block-sparse, and sequences are told by their lengths";
constexpr std::string_view kMaskAdvice = "Write cu_seqlens_q instead of padding, or leave it out";
constexpr std::string_view kBias = "no bias is added to scores";
constexpr std::string_view kLeaveOut = "Leave it out";
constexpr std::string_view kScale = "q, k and v are computed as they are stored, without scales";
constexpr std::string_view kScaleAdvice = "Dequantize to bf16, fp16 or fp32, or let `compress` quantize the cache";
constexpr std::string_view kRotary = "attention does not rotate q and k";
constexpr std::string_view kRotaryAdvice = "Rotate them with op `rope`, and leave it out";
constexpr std::string_view kPositions = "sequences are told by cu_seqlens_q, and positions of queries by q_offset";
constexpr std::string_view kPositionsAdvice = "Write cu_seqlens_q or q_offset, or leave it out";
constexpr std::string_view kLengths = "lengths of packed sequences are cumulative";
constexpr std::string_view kLengthsAdvice = "Write cu_seqlens_q and cu_seqlens_k, or lengths_k with k_pages";
constexpr std::string_view kSsmLengthsSuggestion = "Write cu_seqlens instead";
constexpr std::string_view kTokenIds = "sequences are told by their ends";
constexpr std::string_view kTokenIdsAdvice = "Write cu_seqlens_q and cu_seqlens_k instead";
constexpr std::string_view kPaddedLengths = "packed sequences follow each other without padding";
constexpr std::string_view kPaddedAdvice = "Pack the tokens without padding, and write cu_seqlens_q and cu_seqlens_k";
constexpr std::string_view kBefore = "it may count the keys without those of the queries";
constexpr std::string_view kBeforeAdvice = "Write lengths_k, the keys of each sequence with those of its queries";
constexpr std::string_view kUnpaged = "k and v in rows have no pages and no padding";
constexpr std::string_view kUnpagedAdvice = "Write cu_seqlens_q and cu_seqlens_k, or k_pages and v_pages";
constexpr std::string_view kUnpagedLatents = "latents in rows have no pages and no padding";
constexpr std::string_view kUnpagedLatentsSuggestion = "Write cu_seqlens_q and cu_seqlens_k, or latent_pages";
constexpr std::string_view kRaggedPages = "pages are listed in a rectangular block_table";
constexpr std::string_view kRaggedAdvice = "Write block_table and lengths_k";
constexpr std::string_view kCache = "a KV cache is read as pages that already hold the new tokens";
constexpr std::string_view kCacheAdvice = "Write k_pages, v_pages, block_table and lengths_k";
constexpr std::string_view kSetting = "settings are not read from tensors";
constexpr std::string_view kSettingAdvice =
    "Give it as the setting softmax_scale, softcap, window or mask, and leave it out";
constexpr std::string_view kChosen = "attention to single chosen tokens is not computed";
constexpr std::string_view kStates =
    "states of a step of one token are `state`, those before whole sequences `initial_states`";
constexpr std::string_view kStatesAdvice = "Say which it is";
constexpr std::string_view kPool = "states stand in the order of the sequences";
constexpr std::string_view kPoolAdvice = "Gather the states into that order, and leave it out";
constexpr std::string_view kSsmTensorKeys = "the sequences of an SSM have no keys";
constexpr std::string_view kConv1dOnlyWhy = "without dt it is only a convolution, which takes no tensors of an SSM";
constexpr std::string_view kAloneSuggestion = "Add dt, or leave it out";
constexpr std::string_view kSsdBias = "the bias of an SSM with x and dt is `dt_bias`";
constexpr std::string_view kSelectiveBias = "the bias of an SSM with u and delta is `delta_bias`";
constexpr std::string_view kOtherBiasAdvice = "Rename it";

// The libraries are flash_attn 2 and 3, PyTorch, flashinfer, FlashMLA, Transformer Engine, vLLM, transformers,
// mamba_ssm and causal_conv1d.
constexpr KnownName kNames[] = {
    // Caches come before lengths and tables, because in a file with a cache those belong to the cache.
    {"key_cache", kAttention, "", kCache, kCacheAdvice},
    {"value_cache", kAttention, "", kCache, kCacheAdvice},
    {"k_cache", kAttention, "", kCache, kCacheAdvice},
    {"v_cache", kAttention, "", kCache, kCacheAdvice},
    {"kv_cache", kAttention, "", kCache, kCacheAdvice},
    {"k_new", kAttention, "", kCache, kCacheAdvice},
    {"v_new", kAttention, "", kCache, kCacheAdvice},
    // Lengths of packed sequences.
    {"cu_seqlens", kAttention, "cu_seqlens_q"},
    {"cu_seqlens_qkv", kAttention, "cu_seqlens_q"},
    {"cu_seq_lens_q", kAttention, "cu_seqlens_q"},
    {"qo_indptr", kAttention, "cu_seqlens_q"},
    {"query_start_loc", kAttention, "cu_seqlens_q"},
    {"cu_seqlens_kv", kAttention, "cu_seqlens_k"},
    {"cu_seq_lens_k", kAttention, "cu_seqlens_k"},
    {"kv_indptr", kRows, "cu_seqlens_k"},
    {"cu_seqlens_q", kStateSpace, "cu_seqlens"},
    {"cu_seq_lens_q", kStateSpace, "cu_seqlens"},
    {"query_start_loc", kStateSpace, "cu_seqlens"},
    {"cu_seqlens_k", kStateSpace, "", kSsmTensorKeys, kSsmLengthsSuggestion, "cu_seqlens_q"},
    {"cu_seqlens_kv", kStateSpace, "", kSsmTensorKeys, kSsmLengthsSuggestion, "cu_seqlens_q"},
    {"cu_seq_lens_k", kStateSpace, "", kSsmTensorKeys, kSsmLengthsSuggestion, "cu_seq_lens_q"},
    {"cu_seqlens_k_new", kAttention, "", kCache, kCacheAdvice},
    {"cu_seqlens_q_padded", kAttention, "", kPaddedLengths, kPaddedAdvice},
    {"cu_seqlens_kv_padded", kAttention, "", kPaddedLengths, kPaddedAdvice},
    {"seqused_q", kAttention, "", kPaddedLengths, kPaddedAdvice},
    {"seqlens", kAttention, "", kLengths, kLengthsAdvice},
    {"seqlens", kStateSpace, "", kLengths, kSsmLengthsSuggestion},
    {"seq_idx", kAttention, "", kTokenIds, kTokenIdsAdvice},
    {"segment_ids", kAttention, "", kTokenIds, kTokenIdsAdvice},
    {"document_ids", kAttention, "", kTokenIds, kTokenIdsAdvice},
    {"seq_idx", kStateSpace, "", kTokenIds, kSsmLengthsSuggestion},
    {"segment_ids", kStateSpace, "", kTokenIds, kSsmLengthsSuggestion},
    {"document_ids", kStateSpace, "", kTokenIds, kSsmLengthsSuggestion},
    // Paged caches.
    {"seqused_k", kPages, "lengths_k"},
    {"seq_lens", kPages, "lengths_k"},
    {"kv_len_arr", kPages, "lengths_k"},
    {"page_table", kPages, "block_table"},
    {"block_tables", kPages, "block_table"},
    {"lengths_k", bit(JobKind::kAttention), "", kUnpaged, kUnpagedAdvice},
    {"seqused_k", bit(JobKind::kAttention), "", kUnpaged, kUnpagedAdvice},
    {"seq_lens", bit(JobKind::kAttention), "", kUnpaged, kUnpagedAdvice},
    {"block_table", bit(JobKind::kAttention), "", kUnpaged, kUnpagedAdvice},
    {"block_tables", bit(JobKind::kAttention), "", kUnpaged, kUnpagedAdvice},
    {"page_table", bit(JobKind::kAttention), "", kUnpaged, kUnpagedAdvice},
    {"lengths_k", bit(JobKind::kMla), "", kUnpagedLatents, kUnpagedLatentsSuggestion},
    {"seqused_k", bit(JobKind::kMla), "", kUnpagedLatents, kUnpagedLatentsSuggestion},
    {"seq_lens", bit(JobKind::kMla), "", kUnpagedLatents, kUnpagedLatentsSuggestion},
    {"block_table", bit(JobKind::kMla), "", kUnpagedLatents, kUnpagedLatentsSuggestion},
    {"block_tables", bit(JobKind::kMla), "", kUnpagedLatents, kUnpagedLatentsSuggestion},
    {"page_table", bit(JobKind::kMla), "", kUnpagedLatents, kUnpagedLatentsSuggestion},
    {"cache_seqlens", kAttention, "", kBefore, kBeforeAdvice},
    {"context_lens", kAttention, "", kBefore, kBeforeAdvice},
    {"indptr", kAttention, "", "it may be the cumulative lengths of queries or of keys, or the table of pages",
     "Write it as cu_seqlens_q or cu_seqlens_k, or as block_table and lengths_k"},
    {"kv_indptr", kPages, "", kRaggedPages, kRaggedAdvice},
    {"kv_indices", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"kv_page_indptr", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"kv_page_indices", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"kv_last_page_len", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"paged_kv_indptr", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"paged_kv_indices", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"paged_kv_last_page_len", kAttention, "", kRaggedPages, kRaggedAdvice},
    {"cache_batch_idx", kAttention, "", "sequences stand in the order of the queries",
     "Write block_table in that order, and leave it out"},
    {"leftpad_k", kAttention, "", "sequences begin with their first key", "Pack the keys without padding"},
    {"cache_leftpad", kAttention, "", "sequences begin with their first key", "Pack the keys without padding"},
    // A logit for each head that is added only to the softmax denominator.
    {"sink", kAttention, "sinks"},
    {"s_aux", kAttention, "sinks"},
    {"attn_sink", kAttention, "sinks"},
    {"attn_sinks", kAttention, "sinks"},
    {"attention_sink", kAttention, "sinks"},
    {"attention_sinks", kAttention, "sinks"},
    {"learnable_sink", kAttention, "sinks"},
    {"self_attn.sinks", kAttention, "sinks"},
    // Masks, biases and other inputs of scores.
    {"mask", kAttention, "", kMask, kMaskAdvice},
    {"attention_mask", kAttention, "", kMask, kMaskAdvice},
    {"attn_mask", kAttention, "", kMask, kMaskAdvice},
    {"causal_mask", kAttention, "", kMask, kMaskAdvice},
    {"custom_mask", kAttention, "", kMask, kMaskAdvice},
    {"packed_custom_mask", kAttention, "", kMask, kMaskAdvice},
    {"key_padding_mask", kAttention, "", kMask, kMaskAdvice},
    {"padding_mask", kAttention, "", kMask, kMaskAdvice},
    {"head_mask", kAttention, "", "no weight of a head is masked", "Multiply the result by it"},
    {"alibi", kAttention, "", kBias, kLeaveOut},
    {"slopes", kAttention, "", kBias, kLeaveOut},
    {"bias", kAttention, "", kBias, kLeaveOut},
    {"alibi_slopes", kAttention, "", kBias, kLeaveOut},
    {"attn_bias", kAttention, "", kBias, kLeaveOut},
    {"attention_bias", kAttention, "", kBias, kLeaveOut},
    {"position_bias", kAttention, "", kBias, kLeaveOut},
    {"rel_pos_bias", kAttention, "", kBias, kLeaveOut},
    {"qv", kAttention, "", "scores are only q times k", "Give MLA's queries as q, with latents instead of k and v"},
    {"indices", kLatents, "", kChosen, kLeaveOut},
    {"topk_indices", kAttention, "", kChosen, kLeaveOut},
    {"topk_length", kAttention, "", kChosen, kLeaveOut},
    {"cos", kAttention, "", kRotary, kRotaryAdvice},
    {"sin", kAttention, "", kRotary, kRotaryAdvice},
    {"rotary_cos", kAttention, "", kRotary, kRotaryAdvice},
    {"rotary_sin", kAttention, "", kRotary, kRotaryAdvice},
    {"cos_sin_cache", kAttention, "", kRotary, kRotaryAdvice},
    {"seqlens_rotary", kAttention, "", kRotary, kRotaryAdvice},
    {"position_ids", kAttention, "", kPositions, kPositionsAdvice},
    {"cache_position", kAttention, "", kPositions, kPositionsAdvice},
    {"position_ids", kStateSpace, "", "sequences are told by their ends", "Write cu_seqlens, or leave it out"},
    {"scale", kAttention, "", kSetting, kSettingAdvice},
    {"scaling", kAttention, "", kSetting, kSettingAdvice},
    {"softmax_scale", kAttention, "", kSetting, kSettingAdvice},
    {"sm_scale", kAttention, "", kSetting, kSettingAdvice},
    {"softcap", kAttention, "", kSetting, kSettingAdvice},
    {"soft_cap", kAttention, "", kSetting, kSettingAdvice},
    {"logits_soft_cap", kAttention, "", kSetting, kSettingAdvice},
    {"causal", kAttention, "", kSetting, kSettingAdvice},
    {"window", kAttention, "", kSetting, kSettingAdvice},
    {"window_size", kAttention, "", kSetting, kSettingAdvice},
    // Scales of quantized tensors.
    {"q_descale", kAttention, "", kScale, kScaleAdvice},
    {"k_descale", kAttention, "", kScale, kScaleAdvice},
    {"v_descale", kAttention, "", kScale, kScaleAdvice},
    {"q_scale", kAttention, "", kScale, kScaleAdvice},
    {"k_scale", kAttention, "", kScale, kScaleAdvice},
    {"v_scale", kAttention, "", kScale, kScaleAdvice},
    {"kv_scale", kAttention, "", kScale, kScaleAdvice},
    // State space models.
    {"initial_state", kScans, "initial_states"},
    {"conv1d.weight", kStateSpace, "conv1d_weight"},
    {"conv1d.bias", kStateSpace, "conv1d_bias"},
    {"weight", kAlone, "conv1d_weight"},
    {"bias", kAlone, "conv1d_bias"},
    {"initial_states", kAlone, "conv_state"},
    {"initial_state", kAlone, "conv_state"},
    {"ssm_state", kStateSpace, "", kStates, kStatesAdvice},
    {"ssm_states", kStateSpace, "", kStates, kStatesAdvice},
    {"conv_states", kStateSpace, "", "the tokens before a convolution are `conv_state`", "Rename it"},
    {"has_initial_state", kStateSpace, "", "a sequence without an earlier state has one of zeros",
     "Write zeros into those states, and leave it out"},
    {"has_initial_states", kStateSpace, "", "a sequence without an earlier state has one of zeros",
     "Write zeros into those states, and leave it out"},
    {"cache_indices", kStateSpace, "", kPool, kPoolAdvice},
    {"conv_state_indices", kStateSpace, "", kPool, kPoolAdvice},
    {"state_batch_indices", kScans, "", kPool, kPoolAdvice},
    {"cache_seqlens", kStateSpace, "", "conv_state holds the last tokens, the oldest first",
     "Write them in that order, and leave it out"},
    {"attention_mask", kStateSpace, "", "padding is not masked", "Pack the sequences, and write cu_seqlens"},
    {"gate", kScans, "", "the gate of an SSM's output is `z`, and this may be another", "Rename it if it is z"},
    {"dt_softplus", kScans, "", kSetting, "Give it as the setting dt_softplus, and leave it out"},
    {"dt_limit", kScans, "", kSetting, "Give it as the setting dt_limit, and leave it out"},
    {"time_step_limit", kScans, "", kSetting, "Give it as the setting dt_limit, and leave it out"},
    {"dt_bias", kSelective, "", kSelectiveBias, kOtherBiasAdvice, "dt"},
    {"delta_bias", kSsd, "", kSsdBias, kOtherBiasAdvice, "delta"},
    {"dt_proj.bias", kSelective, "", kSelectiveBias, kOtherBiasAdvice, "delta_bias"},
    {"dt_proj.bias", kSsd, "", kSsdBias, kOtherBiasAdvice, "dt_bias"},
    {"A", kAlone, "", kConv1dOnlyWhy, kAloneSuggestion},
    {"A_log", kAlone, "", kConv1dOnlyWhy, kAloneSuggestion},
    {"dt_bias", kAlone, "", kConv1dOnlyWhy, kAloneSuggestion},
    {"delta_bias", kAlone, "", kConv1dOnlyWhy, kAloneSuggestion},
    {"delta", kAlone, "", kConv1dOnlyWhy, kAloneSuggestion},
};

// Jobs by the names of their functions.
struct JobName {
  JobKind job;
  std::string_view name;
};
constexpr JobName kJobs[] = {
    {JobKind::kAttention, "attention"},  {JobKind::kDecode, "decode"}, {JobKind::kMla, "mla"},
    {JobKind::kMlaDecode, "mla_decode"}, {JobKind::kSsd, "ssd"},       {JobKind::kSelectiveScan, "selective_scan"},
    {JobKind::kConv1d, "causal_conv1d"},
};

constexpr bool fits_json(std::string_view text) { return text.find_first_of("\"\\") == std::string_view::npos; }

constexpr bool all_fit_json() {
  for (const KnownName& known : kNames) {
    for (const std::string_view text : {known.name, known.role, known.why, known.suggestion}) {
      if (!fits_json(text)) return false;
    }
  }
  return true;
}
static_assert(all_fit_json(), "the table's texts stand in JSON as they are");

}  // namespace

std::span<const KnownName> known_names() { return kNames; }

std::string known_names_json() {
  std::string json = "[";
  for (const KnownName& known : kNames) {
    json += fmt::format(R"({}{{"name":"{}",)", json.size() > 1 ? "," : "", known.name);
    json += known.role.empty() ? fmt::format(R"("refused":"{}","suggestion":"{}.")", known.why, known.suggestion)
                               : fmt::format(R"("role":"{}")", known.role);
    if (!known.unless.empty()) json += fmt::format(R"(,"unless":"{}")", known.unless);
    std::string ops;
    for (const JobName& job : kJobs) {
      if (known.is_for(job.job)) ops += fmt::format(R"({}"{}")", ops.empty() ? "" : ",", job.name);
    }
    json += fmt::format(R"(,"ops":[{}]}})", ops);
  }
  return json + "]";
}

}  // namespace ringattn
