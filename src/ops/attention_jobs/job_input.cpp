// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/job_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "attention/tokens/decode_rows.hpp"
#include "base/error.hpp"
#include "io/tensor_checks.hpp"
#include "kernels/attention/attention_spec.hpp"
#include "kernels/decode/decode.hpp"
#include "ops/attention_jobs/block_mask_request.hpp"
#include "ops/attention_jobs/synthetic_storage.hpp"
#include "ops/ssm/ssm_tensors.hpp"

namespace ringattn {

namespace {

// Maximum number of elements of a tensor, so that its number of bytes doesn't overflow.
constexpr double kMaxElements = 0x1p60;

bool is_matrix(SyntheticTensor tensor) {
  return tensor == SyntheticTensor::kWeightKeys || tensor == SyntheticTensor::kWeightValues;
}

// Checks a synthetic input for a decode step.
void check_decode(const SyntheticInput& input, std::int64_t q_len) {
  const bool latents = input.op == Op::kMla;
  if (q_len < 1 || q_len > kMaxDecodeRows) {
    fail(ErrorCode::kUsage,
         {setting("q_len", q_len), " with ", latents ? setting("page_size", input.page_size) : setting("op", "decode")},
         fmt::format("a step has 1 to {} rows of a sequence", kMaxDecodeRows),
         latents ? MessageTemplate("Leave out the pages of the cache.")
                 : MessageTemplate{"Use ", setting("op", "attention"), " for more: rows have the same bits there."});
  }
  if (input.page_size != 0 && !is_page_size(input.page_size)) {
    fail(ErrorCode::kUsage, {setting("page_size", input.page_size)},
         fmt::format("pages of {} tokens are possible", kPageSizes),
         "Choose one of them, or 0 for a cache without pages.");
  }
  if (input.prefix > 0 && input.page_size == 0) {
    fail(ErrorCode::kUsage, {setting("prefix", input.prefix), " without ", setting("page_size")},
         "sequences share pages, and a dense cache has none", {"Use ", setting("page_size", 64), "."});
  }
  if (input.prefix > 0 && input.prefix > input.tokens - q_len) {
    fail(ErrorCode::kUsage,
         {setting("prefix", input.prefix), " with ", setting("seq", input.tokens), " and ", setting("q_len", q_len)},
         "the keys of a sequence's queries are its own", "Use a shorter prefix, or more tokens.");
  }
  if (input.tokens > std::numeric_limits<std::int32_t>::max()) {
    fail(ErrorCode::kUsage, {setting("seq", input.tokens), " in a cache"}, "its lengths lie below 2^31",
         "Use fewer tokens.");
  }
}

}  // namespace

std::string describe(const JobInput& input) {
  if (input.mla() == nullptr) return describe(input.job());
  return fmt::format("{}, {}, {}", op_name(Op::kMla), form_name(input.form().form), describe(*input.mla()));
}

JobInput::JobInput(const InputRequest& request, const Numerics& numerics, const TopKDevice& target,
                   std::shared_ptr<JobShare> share)
    : share_(share_or_new(std::move(share))) {
  std::visit([this](const auto& input) { take_shape(input); }, request);
  take_numerics(numerics, target);
}

JobInput JobInput::synthetic(Job job, std::uint64_t seed) {
  JobInput input;
  input.job_ = std::move(job);
  input.seed_ = seed;
  const AttentionSpec& spec = input.job_.spec;
  input.out_grid_ = {AxisOrder::kThd, 1, input.job_.batch.q_tokens(), spec.heads, spec.head_dim_v};
  if (spec.sinks) input.made_sinks_ = synthetic_sinks(seed, spec.heads);
  return input;
}

void JobInput::take_shape(const SyntheticInput& input) {
  seed_ = input.seed;
  AttentionSpec& spec = job_.spec;
  spec.dtype = input.dtype;
  spec.heads = input.heads;
  spec.kv_heads = input.kv_heads;
  spec.head_dim = input.head_dim;
  spec.head_dim_v = input.head_dim_v.value_or(input.head_dim);
  spec.sinks = input.sinks;
  if (input.sinks && input.seed) made_sinks_ = synthetic_sinks(*input.seed, input.heads);
  decodes_ = input.op == Op::kDecode;
  if (input.op == Op::kMla) {
    take_latents({.dtype = spec.dtype,
                  .heads = spec.heads,
                  .head_dim = spec.head_dim,
                  .rope_dim = input.rope_dim,
                  .head_dim_v = spec.head_dim_v,
                  .latent_dim = input.latent_dim});
  }
  if (input.batch < 0 || input.tokens < 0) {
    fail(ErrorCode::kUsage, {setting("seq", input.tokens), " with ", setting("batch", input.batch)},
         "neither is negative", "Check the shape of the input.");
  }
  if (spec.kv_heads > 0 && spec.heads % spec.kv_heads != 0) {
    fail(ErrorCode::kUsage, fmt::format("K has {} heads, Q has {}", spec.kv_heads, spec.heads),
         fmt::format("{} is not a multiple of {}", spec.heads, spec.kv_heads),
         {"Check ", setting("heads"), " and ", setting("kv_heads"), "."});
  }
  const double elements = static_cast<double>(input.tokens) * static_cast<double>(input.batch) * spec.heads *
                          std::max(spec.head_dim, spec.head_dim_v);
  if (elements > kMaxElements) {
    fail(ErrorCode::kUsage,
         {setting("seq", input.tokens), " with ", setting("batch", input.batch),
          fmt::format(" and {} heads", spec.heads)},
         "a tensor would have more than 2^60 elements", "Use fewer tokens, sequences or heads.");
  }
  const bool cached = decodes_ || (latent_ && input.page_size != 0);
  const std::int64_t q_len = input.q_len.value_or(cached ? 1 : input.tokens);
  if (cached) check_decode(input, q_len);
  if (q_len < 0 || q_len > input.tokens) {
    fail(ErrorCode::kUsage, {setting("q_len", q_len), " with ", setting("seq", input.tokens)},
         "queries are those of a sequence's last tokens", "Use no more queries than tokens.");
  }
  if (input.page_size != 0 && !cached) {
    fail(ErrorCode::kUsage, {setting("page_size", input.page_size), " with ", setting("op", op_name(input.op))},
         "only a cache has pages", {"Leave it out, or use ", setting("op", "decode"), "."});
  }
  if (input.prefix != 0 && !decodes_) {
    fail(ErrorCode::kUsage, {setting("prefix", input.prefix), " with ", setting("op", op_name(input.op))},
         "sequences of a cache share pages", {"Leave it out, or use ", setting("op", "decode"), "."});
  }
  prefix_ = input.prefix;
  if (latent_) {
    fp8_latents_ = is_fp8_latent_format(input.cache_format, latent_->spec);
  } else {
    job_.format = synthetic_format(input.cache_format, spec);
  }
  if (!job_.format.is_plain() && prefix_ > 0) {
    fail(ErrorCode::kUsage, {setting("cache_format", input.cache_format), " with ", setting("prefix", prefix_)},
         "each sequence of a seed is compressed by itself", "Leave out one of them.");
  }
  queries_end_keys_ = q_len < input.tokens;
  job_.batch = uniform_batch(input.batch, q_len, input.tokens);
  check_batch(job_.batch);
  if (input.page_size != 0) {
    dealt_ =
        std::make_shared<const PageTable>(deal_pages(job_.batch, input.page_size, input.seed.value_or(0), prefix_));
  }
  const AxisOrder order = input.order.value_or(input.batch == 1 ? AxisOrder::kThd : AxisOrder::kBthd);
  const bool batched = order == AxisOrder::kBthd || order == AxisOrder::kBhtd;
  out_grid_ = {order, batched ? input.batch : 1, batched ? q_len : q_len * input.batch, spec.heads, spec.head_dim_v};
}

void JobInput::take_shape(const FileInput& input) {
  if (const auto opened = open_tensor_file(input, *share_); holds_ssm(opened->file, input.names)) {
    fail(ErrorCode::kUsage, fmt::format("{} holds an SSM, not attention", input.path),
         "it has x and dt, or u and delta, and no q", "Open it as an SsmInput.");
  }
  file_ = open_input_file(input, *share_);
  const InputTensors& found = file_->tensors;
  constexpr std::int64_t kMost = 1 << 16;
  const std::int64_t largest =
      std::max({found.q_grid.heads, found.q_grid.dim, found.k_grid.heads, found.v_grid.heads, found.v_grid.dim});
  if (largest > kMost) {
    fail(ErrorCode::kFile, fmt::format("{} has {} heads or dims", found.q.text(), largest),
         fmt::format("at most {} are possible", kMost), {setting("order"), " says which axis is which."});
  }
  out_grid_ = found.out_grid();
  job_.batch.sequences = found.sequences;
  decodes_ = found.pages && !file_->latents && are_decode_steps(found.sequences);
  AttentionSpec& spec = job_.spec;
  spec.dtype = found.dtype;
  spec.heads = static_cast<int>(found.q_grid.heads);
  spec.kv_heads = static_cast<int>(found.k_grid.heads);
  spec.head_dim = static_cast<int>(found.q_grid.dim);
  spec.head_dim_v = static_cast<int>(found.v_grid.dim);
  if (file_->latents) {
    const MlaTensors& latents = *file_->latents;
    take_latents({.dtype = spec.dtype,
                  .heads = spec.heads,
                  .head_dim = latents.q_in_latent ? latents.latent_dim : latents.head_dim,
                  .rope_dim = latents.rope_dim,
                  .head_dim_v = latents.head_dim_v,
                  .latent_dim = latents.latent_dim,
                  .q_in_latent = latents.q_in_latent,
                  .out_in_latent = latents.out_in_latent});
  }
  if (file_->compressed) job_.format = file_->compressed->format();
  spec.sinks = !found.sinks.empty();
}

void JobInput::take_numerics(const Numerics& numerics, const TopKDevice& target) {
  AttentionSpec& spec = job_.spec;
  spec.mask = numerics.mask;
  spec.softmax_scale = numerics.softmax_scale ? static_cast<float>(*numerics.softmax_scale)
                       : latent_              ? mla_softmax_scale()
                                              : default_softmax_scale(spec.head_dim);
  spec.softcap = static_cast<float>(numerics.softcap);
  if (numerics.query_offset) {
    job_.batch.sequences = job_.batch.sequences.with_offset(*numerics.query_offset);
  }
  check_mask(spec.mask);
  if (file_ && file_->tensors.positions) {
    if (!numerics.block_mask.empty()) {
      fail(ErrorCode::kUsage, {setting("block_mask"), " with keys at positions of their own"},
           "blocks of keys are counted from the first token of a sequence, and some were evicted",
           "Leave it out; windows are possible.");
    }
    query_without_key_ = first_without_key(job_.batch, *file_->tensors.positions);
    set_positions(job_, file_->tensors.positions);
    // The rows of a decode step are the last ones of their cache. The equivalent job in rows is aligned in the same
    // way.
    if (job_.positions == nullptr) job_.batch.sequences = aligned_to_end(job_.batch.sequences, spec.mask);
    if (decodes_ && (job_.positions != nullptr || !queries_end_keys(job_.batch.sequences))) {
      decodes_ = false;
      not_decoded_reason_ = "queries are not the last tokens of what is left of their sequences";
    }
  }
  check_job(job_);
  if (seed_ && !job_.format.is_plain()) made_ = std::make_shared<const SyntheticCompressed>(job_, *seed_, share_);
  if (latent_) take_form(numerics.form);
  if (numerics.block_mask.empty()) return;
  if (latent_) {
    fail(ErrorCode::kUsage, {setting("block_mask"), " with latents"}, "MLA takes no block mask",
         "Leave it out; windows are possible.");
  }
  const std::string seed = seed_ ? fmt::format("{}, {} keys that all share", *seed_, prefix_) : "";
  RequestedBlockMask block_mask = requested_block_mask(
      {numerics.block_mask, file_, seed, numerics.memory_budget}, job_,
      [&](const AttentionSpec& listed, int count) { return top_k_blocks(*this, listed, count, target); }, *share_);
  set_block_mask(job_, std::move(block_mask.block_mask));
  block_mask_file_ = std::move(block_mask.file);
  block_mask_tensors_ = std::move(block_mask.used);
  check_job(job_);
}

void JobInput::read(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows,
                    int threads) const {
  if (const CompressedSource* const source = stored(tensor)) {
    return source->read(runs_of_whole(tensor, runs), rows, threads);
  }
  if (seed_ && fp8_latents_ && tensor == SyntheticTensor::kLatent) {
    return make_stored_latents(*seed_, latent_->spec, made_tokens(tensor, runs), rows, threads);
  }
  if (seed_) return fill_synthetic(*seed_, tensor, made_tokens(tensor, runs), rows, threads);
  if (file_ == nullptr) {
    fail(ErrorCode::kUsage, "the job has no input", "only its shape is given", "Name a seed, or a file.");
  }
  const InputTensors& found = file_->tensors;
  const bool keys = tensor != SyntheticTensor::kQ && !is_matrix(tensor);
  const std::vector<PackedRun> tokens = keys ? file_keys(runs) : runs_of_whole(tensor, runs);
  if (file_->latents && tensor != SyntheticTensor::kQ) return read_latents(*file_->latents, tensor, tokens, rows);
  const std::pair<const TensorSource&, const RowGrid&> sources[] = {
      {found.q, found.q_grid}, {found.k, found.k_grid}, {found.v, found.v_grid}};
  const auto& [source, grid] = sources[static_cast<std::size_t>(tensor)];
  read_rows(source, grid, tokens, rows);
}

// Packed keys as tokens on the file's own axis.
std::vector<PackedRun> JobInput::file_keys(std::span<const PackedRun> runs) const {
  std::vector<PackedRun> tokens = runs_of_whole(SyntheticTensor::kK, runs);
  if (file_->tensors.pages) tokens = pool_runs(*file_->tensors.pages, whole().cu_k(), tokens);
  return tokens;
}

std::vector<PackedRun> JobInput::runs_of_whole(SyntheticTensor tensor, std::span<const PackedRun> runs) const {
  if (!part_ || is_matrix(tensor)) return {runs.begin(), runs.end()};
  const bool q = tensor == SyntheticTensor::kQ;
  const std::vector<std::int64_t> cu = q ? job_.batch.cu_q() : job_.batch.cu_k();
  const std::vector<std::int64_t>& origins = q ? part_->q : part_->k;
  std::vector<PackedRun> tokens;
  for (const PackedRun& run : runs) {
    auto sequence = static_cast<std::size_t>(std::upper_bound(cu.begin(), cu.end(), run.begin) - cu.begin() - 1);
    for (std::int64_t begin = run.begin; begin < run.end; ++sequence) {
      const std::int64_t end = std::min(run.end, cu[sequence + 1]);
      const std::int64_t shift = origins[sequence] - cu[sequence];
      if (end > begin) tokens.push_back({begin + shift, end + shift});
      begin = end;
    }
  }
  return tokens;
}

std::vector<PackedRun> JobInput::made_tokens(SyntheticTensor tensor, std::span<const PackedRun> runs) const {
  const std::vector<PackedRun> packed = runs_of_whole(tensor, runs);
  if (tensor != SyntheticTensor::kQ && prefix_ == 0) return packed;
  if (tensor == SyntheticTensor::kQ && !queries_end_keys_) return packed;
  const Sequence& each = whole().sequences[0];  // synthetic sequences are equal
  std::vector<PackedRun> tokens;
  if (tensor != SyntheticTensor::kQ) {
    for (const PackedRun& run : packed) {
      for (std::int64_t begin = run.begin; begin < run.end;) {
        const std::int64_t first = begin / each.k_len * each.k_len;  // of the sequence
        const bool shared = begin - first < prefix_;
        const std::int64_t end = std::min(run.end, first + (shared ? prefix_ : each.k_len));
        tokens.push_back(shared ? PackedRun{begin - first, end - first} : PackedRun{begin, end});
        begin = end;
      }
    }
    return tokens;
  }
  for (const PackedRun& run : packed) {
    for (std::int64_t begin = run.begin; begin < run.end;) {
      const std::int64_t sequence = begin / each.q_len;
      const std::int64_t end = std::min(run.end, (sequence + 1) * each.q_len);
      const std::int64_t shift = sequence * each.k_len + each.k_len - each.q_len - sequence * each.q_len;
      tokens.push_back({begin + shift, end + shift});
      begin = end;
    }
  }
  return tokens;
}

// The tensor in the file, however the job uses it.
const CompressedSource* JobInput::stored(SyntheticTensor tensor) const {
  if (!made_ && (!file_ || !file_->compressed)) return nullptr;
  const CompressedTensors& tensors = made_ ? made_->tensors() : *file_->compressed;
  if (tensor == SyntheticTensor::kK) return tensors.k ? &*tensors.k : nullptr;
  return tensor == SyntheticTensor::kV && tensors.v ? &*tensors.v : nullptr;
}

const CompressedSource* JobInput::compressed(SyntheticTensor tensor) const {
  return job_.format.is_plain() ? nullptr : stored(tensor);
}

JobInput JobInput::decoded(std::int64_t page_size) const {
  JobInput step = *this;
  step.job_.format = {};  // its cache is filled with uncompressed elements
  step.decodes_ = true;
  step.repaged_ = true;
  step.dealt_.reset();
  if (page_size > 0) {
    step.dealt_ =
        std::make_shared<const PageTable>(deal_pages(job_.batch, page_size, seed_.value_or(0), part_ ? 0 : prefix_));
  }
  return step;
}

JobInput JobInput::attended(std::string why) const {
  JobInput job = *this;
  if (!why.empty()) job.not_decoded_reason_ = std::move(why);
  if (makes_cache()) job.dealt_.reset();
  job.decodes_ = false;
  return job;
}

JobInput JobInput::last_rows(std::span<const std::int64_t> sequences, std::int64_t rows) const {
  JobInput last = *this;
  last.job_.format = {};  // quantization groups are those of the whole sequences
  last.repaged_ = true;
  last.dealt_.reset();
  const std::vector<std::int64_t> cu_q = job_.batch.cu_q();
  const std::vector<std::int64_t> cu_k = job_.batch.cu_k();
  Part part;
  part.whole = whole();
  std::vector<Sequence> kept;
  for (const std::int64_t number : sequences) {
    const auto s = static_cast<std::size_t>(number);
    const Sequence& sequence = job_.batch.sequences[s];
    const std::int64_t keys = sequence.q_offset + sequence.q_len;
    kept.push_back({rows, keys, keys - rows});
    part.q.push_back((part_ ? part_->q[s] : cu_q[s]) + sequence.q_len - rows);
    part.k.push_back(part_ ? part_->k[s] : cu_k[s]);
  }
  last.job_.batch = Batch(std::move(kept));
  if (last.latent_) last.latent_->batch = last.job_.batch;
  last.part_ = std::make_shared<const Part>(std::move(part));
  const RowGrid& grid = out_grid_;
  last.out_grid_ = {AxisOrder::kThd, 1, last.job_.batch.q_tokens(), grid.heads, grid.dim};
  return last;
}

void JobInput::read_pages(SyntheticTensor tensor, std::span<const std::int32_t> pages,
                          std::span<std::byte> target) const {
  const InputTensors& found = file_->tensors;
  const TensorSource& source = tensor == SyntheticTensor::kK ? found.k : found.v;
  const std::size_t page_bytes = target.size() / std::max<std::size_t>(1, pages.size());
  for (std::size_t first = 0, last = 0; first < pages.size(); first = last) {
    while (last < pages.size() && pages[last] - pages[first] == static_cast<std::int32_t>(last - first)) ++last;
    source.shard->read(*source.info, pages[first] * static_cast<std::int64_t>(page_bytes),
                       target.subspan(first * page_bytes, (last - first) * page_bytes));
  }
  source.shard->check_unchanged();
}

std::span<const float> JobInput::sinks() const { return file_ ? file_->tensors.sinks : made_sinks_; }

std::vector<FileFingerprint> JobInput::fingerprints() const {
  std::vector<TensorSource> used;
  if (file_) used = file_->tensors.used;
  used.insert(used.end(), block_mask_tensors_.begin(), block_mask_tensors_.end());
  return ringattn::fingerprints(used);
}

UnreadTensors JobInput::unread() const {
  if (!file_) return {};
  std::vector<TensorSource> used = file_->tensors.used;
  if (block_mask_file_ && block_mask_file_->path() == file_->file().path()) {
    used.insert(used.end(), block_mask_tensors_.begin(), block_mask_tensors_.end());
  }
  return unread_tensors(file_->file(), used, file_->request().names);
}

std::string JobInput::source() const {
  return seed_ ? fmt::format("synthetic input, seed {}", *seed_) : file_ ? file_->request().path : "no input";
}

}  // namespace ringattn
