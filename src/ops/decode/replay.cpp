// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/ring/reshard.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/decode/growing_decode.hpp"
#include "ops/decode/rank_cache.hpp"

namespace ringattn {

namespace {

// The rows to be decoded, as a batch of their own. Their indices on its packed axis are the same on every rank.
class LastRows {
 public:
  LastRows(const Job& job, std::int64_t rows) : job_(job), cu_(job.batch.cu_q()) {
    std::vector<Sequence> last;
    for (std::size_t s = 0; s < job.batch.sequences.size(); ++s) {
      const Sequence& sequence = job.batch.sequences[s];
      const std::int64_t count = std::min(rows, sequence.q_len);
      last.push_back({count, count, 0});
      if (count > 0) classes_[count].push_back(static_cast<std::int64_t>(s));
    }
    batch_ = Batch(std::move(last));
  }

  const Batch& batch() const { return batch_; }
  // The sequences by their number of rows.
  const std::map<std::int64_t, std::vector<std::int64_t>>& classes() const { return classes_; }

  // The packed tokens of the rows in the job.
  std::vector<PackedRun> tokens(std::span<const TokenRun> runs) const {
    std::vector<PackedRun> tokens;
    for (const TokenRun& run : runs) {
      const std::int64_t first = cu_[static_cast<std::size_t>(run.sequence)] + skipped(run.sequence);
      tokens.push_back({first + run.begin, first + run.end});
    }
    return tokens;
  }

  // The layout of these rows that follows from the job's layout. Passes this rank's rows among them to `visit`: a run,
  // and its first row in the job's layout.
  Layout layout(const Layout& whole, int self,
                const std::function<void(const TokenRun& run, std::int64_t row)>& visit) const {
    std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(whole.world()));
    for (int rank = 0; rank < whole.world(); ++rank) {
      std::int64_t row = 0;
      for (const TokenRun& run : whole.runs(rank)) {
        const std::int64_t skip = skipped(run.sequence);
        const std::int64_t begin = std::max(run.begin, skip);
        if (begin < run.end) {
          const TokenRun last{run.sequence, begin - skip, run.end - skip};
          runs[static_cast<std::size_t>(rank)].push_back(last);
          if (rank == self) visit(last, row + begin - run.begin);
        }
        row += run.tokens();
      }
    }
    return {batch_.q_lengths(), std::move(runs)};
  }

 private:
  // Number of rows of a sequence before the last ones.
  std::int64_t skipped(std::int32_t sequence) const {
    const auto s = static_cast<std::size_t>(sequence);
    return job_.batch.sequences[s].q_len - batch_.sequences[s].q_len;
  }

  const Job& job_;
  const std::vector<std::int64_t> cu_;
  Batch batch_;
  std::map<std::int64_t, std::vector<std::int64_t>> classes_;
};

class Replayer {
 public:
  Replayer(const JobInput& input, const Options& options, std::int64_t rows, Transport& world)
      : input_(input),
        options_(options),
        world_(world),
        collective_(world, Timeouts(options.timeout_seconds)),
        last_(input_.job(), rows),
        even_(even_layout(last_.batch().q_lengths(), world.size())) {}

  // The prefill's results of these rows, in the even layout.
  HostRows prefilled(const Layout& layout, const RankResult& result) const {
    std::vector<std::pair<std::int64_t, std::int64_t>> places;  // first row in the result, and number of rows
    const Layout from = last_.layout(
        layout, world_.rank(), [&](const TokenRun& run, std::int64_t row) { places.emplace_back(row, run.tokens()); });
    HostRows mine(from.tokens(world_.rank()), spec());
    std::int64_t row = 0;
    for (const auto& [at, count] : places) {
      mine.take(result.out.data(), result.lse.data(), at, row, count, spec());
      row += count;
    }
    return even(from, mine);
  }

  // The same rows, decoded.
  HostRows decoded(std::int64_t page_size) const {
    // The rows of each sequence by its index, because the rows of a rank ascend by sequence.
    std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world_.size()));
    std::map<std::int64_t, HostRows> of_sequence;
    for (const auto& [rows, sequences] : last_.classes()) {
      const JobInput part = input_.last_rows(sequences, rows).decoded(page_size);
      GrowingDecode steps(part, rows, input_, sequences, options_, world_, collective_);
      const HostRows results = steps.run();
      const auto count = static_cast<std::int64_t>(sequences.size());
      for (int rank = 0; rank < world_.size(); ++rank) {
        const SequenceRange owned = owned_sequences(count, rank, world_.size());
        for (std::int64_t i = owned.first; i < owned.end(); ++i) {
          const std::int64_t sequence = sequences[static_cast<std::size_t>(i)];
          runs[static_cast<std::size_t>(rank)].push_back({static_cast<std::int32_t>(sequence), 0, rows});
          if (rank != world_.rank()) continue;
          HostRows& kept = of_sequence.emplace(sequence, HostRows(rows, spec())).first->second;
          kept.take(results.out.data(), results.lse.data(), (i - owned.first) * rows, 0, rows, spec());
        }
      }
    }
    for (auto& of_rank : runs) {
      std::sort(of_rank.begin(), of_rank.end(),
                [](const TokenRun& a, const TokenRun& b) { return a.sequence < b.sequence; });
    }
    const Layout from(last_.batch().q_lengths(), std::move(runs));
    HostRows mine(from.tokens(world_.rank()), spec());
    std::int64_t row = 0;
    for (const auto& [sequence, kept] : of_sequence) {
      const std::int64_t rows = last_.batch().sequences[static_cast<std::size_t>(sequence)].q_len;
      mine.take(kept.out.data(), kept.lse.data(), 0, row, rows, spec());
      row += rows;
    }
    return even(from, mine);
  }

  std::optional<Difference> compare(const HostRows& left, const HostRows& right) const {
    const std::int64_t rows = even_.tokens(world_.rank());
    const std::vector<PackedRun> tokens = last_.tokens(even_.runs(world_.rank()));
    const auto view = [&](const std::vector<std::byte>& bytes, Dtype dtype, int dim) {
      return dense_view(static_cast<const void*>(bytes.data()), dtype, rows, spec().heads, dim);
    };
    std::optional<Difference> mine = first_difference(false, view(left.out, spec().dtype, spec().head_dim_v),
                                                      view(right.out, spec().dtype, spec().head_dim_v), tokens);
    if (!mine) {
      mine = first_difference(true, view(left.lse, Dtype::kF32, 1), view(right.lse, Dtype::kF32, 1), tokens);
    }
    return earliest(collective_, mine);
  }

  std::int64_t rows() const { return last_.batch().q_tokens(); }
  const Collective& collective() const { return collective_; }

 private:
  const AttentionSpec& spec() const { return input_.job().spec; }

  HostRows even(const Layout& from, const HostRows& mine) const {
    HostRows rows(even_.tokens(world_.rank()), spec());
    const auto move = [&](const std::vector<std::byte>& source, std::vector<std::byte>& target, std::int64_t bytes) {
      reshard(world_.host(), from, even_, source.data(), target.data(), bytes, collective_.timeouts().for_peer());
    };
    move(mine.out, rows.out, out_token_bytes(spec()));
    move(mine.lse, rows.lse, lse_token_bytes(spec()));
    return rows;
  }

  const JobInput& input_;
  const Options& options_;
  Transport& world_;
  Collective collective_;
  LastRows last_;
  Layout even_;
};

}  // namespace

void check_replayable(const JobInput& input) {
  const Job& job = input.job();
  if (input.mla() != nullptr && input.form().form == MlaForm::kExpanded) {
    fail(ErrorCode::kUsage,
         fmt::format("a job of the expanded form ({}) is to be decoded row by row", input.form().reason),
         "decode steps use the absorbed form, and rows of the expanded form have other bits",
         {"Use ", setting("form", "absorbed"), "."});
  }
  if (job.spec.mask.right != 0) {
    fail(ErrorCode::kUsage, fmt::format("a job with mask {} is to be decoded row by row", describe(job.spec.mask)),
         "its rows see keys after their own, which are not there yet when a row is decoded",
         {"Use ", setting("mask", "causal"), "."});
  }
  const auto outside = [](const Sequence& sequence) {
    return sequence.q_len > 0 && (sequence.q_offset < 0 || sequence.q_offset + sequence.q_len > sequence.k_len);
  };
  const auto& lost = input.query_without_key();
  if (lost &&
      (job.positions != nullptr || std::any_of(job.batch.sequences.begin(), job.batch.sequences.end(), outside))) {
    fail(ErrorCode::kUsage,
         fmt::format("the query at {} of sequence {} is to be decoded, and its own token was evicted", lost->position,
                     lost->sequence),
         "a row that is decoded adds its key and value to the cache",
         {"Keep the tokens of all queries, as ", setting("method", "snapkv"), " and ", setting("method", "streaming"),
          " do for a sequence's last ones, or use ", setting("against", "oracle"), "."});
  }
  if (job.positions != nullptr) {
    fail(ErrorCode::kUsage, "a job with keys at positions of their own is to be decoded row by row",
         job.spec.mask.left >= 0 ? "a window may end between evicted tokens, and a step's cache has no gaps"
                                 : "tokens after the queries were evicted, and a step's queries come after all of "
                                   "its cache",
         {"Use ", setting("against", "oracle"), ", which takes such jobs."});
  }
  for (std::size_t s = 0; s < job.batch.sequences.size(); ++s) {
    const Sequence& sequence = job.batch.sequences[s];
    if (!outside(sequence)) continue;
    fail(ErrorCode::kUsage,
         fmt::format("sequence {} has queries at {} to {} and {} keys", s, sequence.q_offset,
                     sequence.q_offset + sequence.q_len - 1, sequence.k_len),
         "a decoded row needs the key at its own position", "Check the offsets of the queries.");
  }
}

void check_replay_kernel(const KernelEntry& prefill, const DecodeSpec& spec, const KernelRequest& request,
                         KernelScope scope) {
  const std::string_view steps = choose_kernel(spec, request, scope).row->name;
  if (steps == prefill.name) return;
  bool decodes_alone = true;
  std::string_view both;  // a kernel that does both
  for (const AttentionRow& attention : kernel_table<AttentionSpec>()) {
    decodes_alone = decodes_alone && attention.name != steps;
    if (scope == KernelScope::kThisMachine && !attention.unavailable().empty()) continue;
    if (!both.empty() || !attention.missing(spec.attention).empty()) continue;
    const auto decodes = [&](const KernelRow<DecodeSpec>& row) {
      return row.name == attention.name && row.missing(spec).empty();
    };
    if (std::ranges::any_of(kernel_table<DecodeSpec>(), decodes)) both = attention.name;
  }
  fail(ErrorCode::kUnsupported,
       fmt::format("steps of kernel {} are to have the bits of a prefill by {}", steps, prefill.name),
       decodes_alone ? fmt::format("{} only decodes: no kernel computes the rows of a prefill with its bits", steps)
                     : std::string("kernels of different names have different bits"),
       both.empty() ? MessageTemplate{"See ", command("info"), " for what kernels do."}
                    : MessageTemplate{"Use ", setting("kernel", both), ", which does both."});
}

void replay_rows(const JobInput& input, const Options& options, std::int64_t rows,
                 std::span<const std::int64_t> page_sizes, Transport& world, const ProgressCallback& on_progress,
                 const std::function<void(PreparedJob&, const RankResult&)>& prefilled,
                 const std::function<void(const ReplayResult&)>& done) {
  check_replayable(input);
  const Replayer replayer(input, options, rows, world);
  std::optional<HostRows> expected;
  {
    PreparedJob prefill(input.attended(), world, options);
    Collective(world, Timeouts(options.timeout_seconds)).run_collectively([&] {
      check_replay_kernel(prefill.kernel(), decode_spec(input), compatible_request(options.kernel, world));
    });
    const RankResult result = prefill.compute(on_progress);
    prefilled(prefill, result);
    expected.emplace(replayer.prefilled(prefill.ring().layout.queries, result));
  }
  for (const std::int64_t page_size : page_sizes) {
    const HostRows again = replayer.decoded(page_size);
    done({page_size, replayer.rows(), replayer.compare(*expected, again)});
  }
}

}  // namespace ringattn
