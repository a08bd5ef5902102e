// SPDX-License-Identifier: Apache-2.0
#include "attention/job/replay.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/identities.hpp"
#include "attention/job/loaded_step.hpp"
#include "attention/job/staging.hpp"
#include "attention/ring/handshake.hpp"
#include "attention/ring/reshard.hpp"
#include "attention/tokens/cost.hpp"
#include "base/error.hpp"

namespace ringattn {

namespace {

// Rows of out and lse on this rank, in host memory.
struct Rows {
  std::vector<std::byte> out;
  std::vector<std::byte> lse;

  Rows(std::int64_t rows, const FoldSpec& spec)
      : out(static_cast<std::size_t>(rows * out_token_bytes(spec))),
        lse(static_cast<std::size_t>(rows * lse_token_bytes(spec))) {}

  // Copies `count` rows from `from` of another array to `to`.
  void take(const std::byte* other_out, const std::byte* other_lse, std::int64_t from, std::int64_t to,
            std::int64_t count, const FoldSpec& spec) {
    const auto copy = [&](std::vector<std::byte>& target, const std::byte* source, std::int64_t bytes) {
      std::memcpy(target.data() + to * bytes, source + from * bytes, static_cast<std::size_t>(count * bytes));
    };
    if (count == 0) return;
    copy(out, other_out, out_token_bytes(spec));
    copy(lse, other_lse, lse_token_bytes(spec));
  }
};

// Every `rows`-th row of a dense array, from row `first` on.
template <class View>
View every(View all, std::int64_t first, std::int64_t rows) {
  all.data = const_cast<std::byte*>(TensorView(all).at(first, 0));
  all.tokens /= rows;
  all.token_stride *= rows;
  return all;
}

// Sequences whose last rows are as many, decoded together.
class GrowingSteps {
 public:
  // `sequences`: of `whole`, whose last rows `input` has.
  GrowingSteps(const JobInput& input, std::int64_t rows, const JobInput& whole, std::span<const std::int64_t> sequences,
               const Options& options, Transport& world, const Meeting& meeting)
      : input_(input), rows_(rows), meeting_(meeting), decode_(job_of(options, world), world, options_of(options)) {
    handshake(meeting, {lists_identity(whole.job().lists.get())});
    meeting.together([&] {
      cache_.emplace(input, decode_, meeting, StepDone(), rows);
      load();
      if (whole.job().lists != nullptr) load_lists(whole.job(), sequences);
    });
  }

  // The sequences of the input whose rows this rank gets.
  SequenceRange owned() const { return decode_.owned(sequences()); }

  // Decodes all rows: [owned sequences · rows] of out and lse.
  Rows run() {
    const FoldSpec& spec = input_.job().spec;
    Backend& backend = decode_.backend();
    const std::int64_t mine = owned().count * rows_;
    const MutableTensorView all_out =
        dense_view(static_cast<void*>(out_.data()), spec.dtype, mine, spec.heads, spec.head_dim_v);
    DecodeInputs inputs;
    cache_->give(cache_->pools(), inputs);
    inputs.grow = true;
    if (spec.sinks) inputs.sinks = reinterpret_cast<const float*>(sinks_.data());
    cache_->place(inputs);
    for (std::int64_t row = 0; row < rows_; ++row) {
      inputs.q = every<TensorView>(q_view_, row, rows_);
      inputs.k_new = every<TensorView>(k_view_, row, rows_);
      inputs.v_new = every<TensorView>(v_view_, row, rows_);
      if (list_stride_ > 0) {
        const std::int64_t lists = sequences() * spec.lists.heads;
        inputs.lists = {reinterpret_cast<const std::int32_t*>(list_blocks_.data()) + row * lists * list_stride_,
                        reinterpret_cast<const std::int32_t*>(list_counts_.data()) + row * lists, list_stride_};
      }
      const RowView row_lse{reinterpret_cast<float*>(lse_.data()) + row * spec.heads, rows_ * spec.heads, 1};
      decode_.enqueue(inputs, {every(all_out, row, rows_), row_lse}, backend.stream());
    }
    decode_.wait();
    Rows results(mine, spec);
    Staging staging(backend, meeting_.patience());
    fetch(staging, out_, results.out);
    fetch(staging, lse_, results.lse);
    return results;
  }

 private:
  std::int64_t sequences() const { return static_cast<std::int64_t>(input_.job().batch.sequences.size()); }

  DecodeJob job_of(const Options& options, Transport& world) const {
    DecodeJob job;
    meeting_.together([&] {
      const DecodeSpec spec{input_.job().spec};
      const DecodeChoice choice = choose_kernel(spec, fitting_request(options.kernel, world));
      const auto backend = choice.row->make_backend({1, kNoDevice});
      job = decode_job(input_, world.size(), choice.row->make_kernel(spec, *backend)->key_tile());
      job.limits.rows = 1;  // of a step
    });
    return job;
  }
  // Nobody has looked at the tables of these steps: on a device, it does.
  static DecodeOptions options_of(const Options& options) {
    DecodeOptions decoding = decode_options(options);
    decoding.check_tables = true;
    return decoding;
  }

  // The rows' queries, keys and values, sequence by sequence, and room for the results.
  void load() {
    const FoldSpec& spec = input_.job().spec;
    Backend& backend = decode_.backend();
    std::vector<PackedRun> queries;
    std::vector<PackedRun> keys;
    const std::vector<std::int64_t> cu_k = input_.job().batch.cu_k();
    for (std::int64_t s = 0; s < sequences(); ++s) {
      queries.push_back({s * rows_, (s + 1) * rows_});
      keys.push_back({cu_k[static_cast<std::size_t>(s) + 1] - rows_, cu_k[static_cast<std::size_t>(s) + 1]});
    }
    Staging staging(backend, meeting_.patience());
    const auto fill = [&](SyntheticTensor tensor, const std::vector<PackedRun>& runs, int heads, int dim,
                          Buffer& memory) {
      const std::int64_t count = sequences() * rows_;
      memory = backend.allocate(static_cast<std::size_t>(count * heads * dim) * size_of(spec.dtype));
      const MutableTensorView view = dense_view(static_cast<void*>(memory.data()), spec.dtype, count, heads, dim);
      staging.load(runs, view,
                   [&](std::span<const PackedRun> piece, const MutableTensorView& host) {
                     input_.read(tensor, piece, host, decode_.options().threads);
                   },
                   {});
      return view;
    };
    q_view_ = fill(SyntheticTensor::kQ, queries, spec.heads, spec.head_dim, q_);
    k_view_ = fill(SyntheticTensor::kK, keys, spec.kv_heads, spec.head_dim, k_);
    v_view_ = fill(SyntheticTensor::kV, keys, spec.kv_heads, spec.head_dim_v, v_);
    const std::int64_t mine = owned().count * rows_;
    out_ = backend.allocate(static_cast<std::size_t>(mine * out_token_bytes(spec)));
    lse_ = backend.allocate(static_cast<std::size_t>(mine * lse_token_bytes(spec)));
    if (!spec.sinks) return;
    const auto bytes = static_cast<std::int64_t>(input_.sinks().size_bytes());
    sinks_ = backend.allocate(input_.sinks().size_bytes());
    backend.copy_rows(sinks_.data(), bytes, input_.sinks().data(), bytes, bytes, 1, backend.stream());
    backend.synchronize(backend.stream(), meeting_.patience().for_peer(), {});
  }

  // Those of the first step, then those of the second, and so on.
  void load_lists(const Job& whole, std::span<const std::int64_t> numbers) {
    std::vector<ListedStep> steps;
    for (std::int64_t row = 0; row < rows_; ++row) {
      for (const std::int64_t number : numbers) {
        const Sequence& of = whole.batch.sequences[static_cast<std::size_t>(number)];
        steps.push_back({static_cast<std::size_t>(number), of.q_offset + of.q_len - rows_ + row + 1});
      }
    }
    const DecodeListArrays lists = decode_lists(*whole.lists, whole.spec.mask, 1, steps, 1);
    list_stride_ = lists.stride;
    Backend& backend = decode_.backend();
    for (const auto& [to, from] : {std::pair{&list_blocks_, &lists.blocks}, {&list_counts_, &lists.counts}}) {
      const auto bytes = static_cast<std::int64_t>(from->size() * sizeof(std::int32_t));
      *to = backend.allocate(static_cast<std::size_t>(bytes));
      backend.copy_rows(to->data(), bytes, from->data(), bytes, bytes, 1, backend.stream());
    }
    backend.synchronize(backend.stream(), meeting_.patience().for_peer(), {});
  }

  void fetch(Staging& staging, const Buffer& from, std::vector<std::byte>& to) {
    if (decode_.backend().memory() == MemoryKind::kHost) {
      if (!to.empty()) std::memcpy(to.data(), from.data(), to.size());
    } else {
      staging.store(from.data(), to.data(), to.size());
    }
  }

  const JobInput& input_;
  const std::int64_t rows_;
  Meeting meeting_;
  Decode decode_;
  std::optional<LoadedCache> cache_;
  Buffer q_, k_, v_, sinks_, out_, lse_;
  std::int64_t list_stride_ = 0;  // 0: there are no lists
  Buffer list_blocks_, list_counts_;
  TensorView q_view_, k_view_, v_view_;
};

// The rows to be decoded, as a batch of their own: their places on its packed axis are the same on every rank.
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
  // Sequences by their number of rows.
  const std::map<std::int64_t, std::vector<std::int64_t>>& classes() const { return classes_; }

  // The rows' packed tokens in the job.
  std::vector<PackedRun> tokens(std::span<const TokenRun> runs) const {
    std::vector<PackedRun> tokens;
    for (const TokenRun& run : runs) {
      const std::int64_t first = cu_[static_cast<std::size_t>(run.sequence)] + skipped(run.sequence);
      tokens.push_back({first + run.begin, first + run.end});
    }
    return tokens;
  }

  // Where a job's layout has them: the rank's rows of `layout` that are among them are handed to `visit` as a run and
  // its first row in the layout.
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
  // Rows of a sequence before the last ones.
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
        meeting_(world, Patience(options.timeout_seconds)),
        last_(input_.job(), rows),
        even_(even_layout(last_.batch().q_lengths(), world.size())) {}

  // The prefill's rows, in the even layout.
  Rows prefilled(const Layout& layout, const RankResult& result) const {
    std::vector<std::pair<std::int64_t, std::int64_t>> places;  // first row in the result, and how many
    const Layout from = last_.layout(
        layout, world_.rank(), [&](const TokenRun& run, std::int64_t row) { places.emplace_back(row, run.tokens()); });
    Rows mine(from.tokens(world_.rank()), spec());
    std::int64_t row = 0;
    for (const auto& [at, count] : places) {
      mine.take(result.out.data(), result.lse.data(), at, row, count, spec());
      row += count;
    }
    return even(from, mine);
  }

  // The same rows decoded.
  Rows decoded(std::int64_t page_size) const {
    // Each sequence's rows by its number: those of a rank ascend by sequence.
    std::vector<std::vector<TokenRun>> runs(static_cast<std::size_t>(world_.size()));
    std::map<std::int64_t, Rows> of_sequence;
    for (const auto& [rows, sequences] : last_.classes()) {
      const JobInput part = input_.last_rows(sequences, rows).decoded(page_size);
      GrowingSteps steps(part, rows, input_, sequences, options_, world_, meeting_);
      const Rows results = steps.run();
      const auto count = static_cast<std::int64_t>(sequences.size());
      for (int rank = 0; rank < world_.size(); ++rank) {
        const SequenceRange owned = owned_sequences(count, rank, world_.size());
        for (std::int64_t i = owned.first; i < owned.end(); ++i) {
          const std::int64_t sequence = sequences[static_cast<std::size_t>(i)];
          runs[static_cast<std::size_t>(rank)].push_back({static_cast<std::int32_t>(sequence), 0, rows});
          if (rank != world_.rank()) continue;
          Rows& kept = of_sequence.emplace(sequence, Rows(rows, spec())).first->second;
          kept.take(results.out.data(), results.lse.data(), (i - owned.first) * rows, 0, rows, spec());
        }
      }
    }
    for (auto& of_rank : runs) {
      std::sort(of_rank.begin(), of_rank.end(),
                [](const TokenRun& a, const TokenRun& b) { return a.sequence < b.sequence; });
    }
    const Layout from(last_.batch().q_lengths(), std::move(runs));
    Rows mine(from.tokens(world_.rank()), spec());
    std::int64_t row = 0;
    for (const auto& [sequence, kept] : of_sequence) {
      const std::int64_t rows = last_.batch().sequences[static_cast<std::size_t>(sequence)].q_len;
      mine.take(kept.out.data(), kept.lse.data(), 0, row, rows, spec());
      row += rows;
    }
    return even(from, mine);
  }

  std::optional<Difference> compare(const Rows& left, const Rows& right) const {
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
    return earliest(meeting_, mine);
  }

  std::int64_t rows() const { return last_.batch().q_tokens(); }
  const Meeting& meeting() const { return meeting_; }

 private:
  const FoldSpec& spec() const { return input_.job().spec; }

  Rows even(const Layout& from, const Rows& mine) const {
    Rows rows(even_.tokens(world_.rank()), spec());
    const auto move = [&](const std::vector<std::byte>& source, std::vector<std::byte>& target, std::int64_t bytes) {
      reshard(world_.host(), from, even_, source.data(), target.data(), bytes, meeting_.patience().for_peer());
    };
    move(mine.out, rows.out, out_token_bytes(spec()));
    move(mine.lse, rows.lse, lse_token_bytes(spec()));
    return rows;
  }

  const JobInput& input_;
  const Options& options_;
  Transport& world_;
  Meeting meeting_;
  LastRows last_;
  Layout even_;
};

}  // namespace

void check_replayable(const Job& job) {
  if (job.spec.mask.right != 0) {
    fail(ErrorCode::kUsage, fmt::format("a job with mask {} is to be decoded row by row", describe(job.spec.mask)),
         "its rows see keys behind their own, which are not there yet when a row is decoded",
         {"Use ", setting("mask", "causal"), "."});
  }
  if (job.positions != nullptr) {
    fail(ErrorCode::kUsage, "a job with keys at positions of their own is to be decoded row by row",
         "queries stand between tokens that were taken out, or a window ends there, and a step's queries stand behind "
         "all of its cache",
         {"Keep the tokens behind the first query, as ", setting("method", "streaming"), " does for the last ones."});
  }
  for (std::size_t s = 0; s < job.batch.sequences.size(); ++s) {
    const Sequence& sequence = job.batch.sequences[s];
    const bool inside = sequence.q_offset >= 0 && sequence.q_offset + sequence.q_len <= sequence.k_len;
    if (inside || sequence.q_len == 0) continue;
    fail(ErrorCode::kUsage,
         fmt::format("sequence {} has queries at {} to {} and {} keys", s, sequence.q_offset,
                     sequence.q_offset + sequence.q_len - 1, sequence.k_len),
         "a row that is decoded stands at a key of its own", "Check the offsets of the queries.");
  }
}

void replay_rows(const JobInput& input, const Options& options, std::int64_t rows,
                 std::span<const std::int64_t> page_sizes, Transport& world, const StepDone& step_done,
                 const std::function<void(PreparedFileJob&, const RankResult&)>& prefilled,
                 const std::function<void(const ReplayResult&)>& done) {
  check_replayable(input.job());
  const Replayer replayer(input, options, rows, world);
  std::optional<Rows> expected;
  {
    PreparedFileJob prefill(input.attended(), world, options);
    const RankResult result = prefill.compute(step_done);
    prefilled(prefill, result);
    expected.emplace(replayer.prefilled(prefill.attention().layout().queries, result));
  }
  for (const std::int64_t page_size : page_sizes) {
    const Rows again = replayer.decoded(page_size);
    done({page_size, replayer.rows(), replayer.compare(*expected, again)});
  }
}

}  // namespace ringattn
