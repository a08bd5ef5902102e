// SPDX-License-Identifier: Apache-2.0
// The job of any RowOp.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "attention/ring/reshard.hpp"
#include "attention/tokens/layout.hpp"
#include "base/build.hpp"
#include "base/dtype.hpp"
#include "base/failpoint.hpp"
#include "base/host.hpp"
#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "io/safetensors_writer.hpp"
#include "ops/attention_jobs/output.hpp"
#include "ops/common/compatibility.hpp"
#include "ops/common/digest.hpp"
#include "ops/common/output_tensor.hpp"
#include "ops/jobs/golden.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/jobs/row_op.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kTokensAtOnce = 64;  // tokens that are read at a time and converted to fp32

// The kernel entry of all ops that have no kernels of their own.
const KernelEntry& row_kernel() {
  static constexpr KernelEntry entry{kCpuPlatform, "cpu_rows", "ops that compute each row by itself",
                                     [](const Backend&) { return 0.0; }};
  return entry;
}

// Bytes of a rank: inputs in fp32 (all tokens of a whole tensor) and results. A kernel has its own copies of both in
// their dtypes.
std::size_t memory_of(const RowOp& op, std::int64_t own_tokens, int world, const RowOp::Kernel& kernel,
                      Backend& backend) {
  const std::int64_t results = own_tokens * op.heads() * op.dim();
  std::int64_t inputs = 0;
  for (const RowTensor& tensor : op.input().tensors()) {
    inputs += op.input().tokens_read(tensor, {0, own_tokens}).tokens() * tensor.heads * tensor.dim;
  }
  const auto bytes = [](std::int64_t numbers, std::size_t each) { return static_cast<std::size_t>(numbers) * each; };
  const std::size_t rows = bytes(inputs, sizeof(float)) + bytes(results, size_of(op.out_dtype()));
  if (kernel.entry == &row_kernel()) return rows;
  return rows + op.kernel_bytes(kernel, backend, world) + bytes(inputs, size_of(op.input().dtype())) +
         bytes(results, size_of(op.out_dtype()));
}

void check_memory(std::size_t needed, std::size_t budget) {
  if (budget == 0 || needed <= budget) return;
  fail(ErrorCode::kMemory, {setting("memory", static_cast<std::int64_t>(budget)), " is too little"},
       fmt::format("a rank needs {} for its rows", format_bytes(static_cast<double>(needed))),
       "Give more memory, or use more ranks.");
}

// The rows of one rank.
class LoadedRows final : public RowReader {
 public:
  LoadedRows(const RowOp& op, std::span<const PackedRun> own, int threads, const ProgressCallback& on_progress) {
    const RowInput& input = op.input();
    own_ = own.empty() ? PackedRun{} : PackedRun{own.front().begin, own.back().end};
    ends_ = input.lengths();
    for (std::size_t i = 1; i < ends_.size(); ++i) ends_[i] += ends_[i - 1];
    for (const RowTensor& tensor : input.tensors()) {
      Tensor& loaded = tensors_.emplace_back();
      loaded.run = input.tokens_read(tensor, own_);
      loaded.heads = tensor.heads;
      loaded.dim = tensor.dim;
      const std::int64_t row = tensor.heads * tensor.dim;
      loaded.values.resize(static_cast<std::size_t>(loaded.run.tokens() * row));
      std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(loaded.run.tokens(), kTokensAtOnce) * row) *
                                   size_of(input.dtype()));
      for (std::int64_t token = loaded.run.begin; token < loaded.run.end; token += kTokensAtOnce) {
        const PackedRun piece{token, std::min(loaded.run.end, token + kTokensAtOnce)};
        input.read(
            tensors_.size() - 1, {&piece, 1},
            dense_view(static_cast<void*>(bytes.data()), input.dtype(), piece.tokens(), tensor.heads, tensor.dim),
            threads);
        float* const to = loaded.values.data() + (token - loaded.run.begin) * row;
        for (std::int64_t i = 0; i < piece.tokens() * row; ++i) {
          to[i] = load_element(bytes.data() + static_cast<std::size_t>(i) * size_of(input.dtype()), input.dtype());
        }
        if (on_progress) on_progress("row of input", {piece.end - loaded.run.begin, loaded.run.tokens()});
      }
      // Rows that several ranks have count once: on their token's rank or, without tokens, on rank 0.
      PackedRun counted = own_;
      if (tensor.tokens > 0) counted = own_.begin == 0 && own_.end > 0 ? loaded.run : PackedRun{};
      if (counted.tokens() == 0) continue;
      const float* const from = loaded.values.data() + (counted.begin - loaded.run.begin) * row;
      non_finite_ += count_non_finite(
          dense_view(static_cast<const void*>(from), Dtype::kF32, counted.tokens(), tensor.heads, tensor.dim));
    }
  }

  std::span<const float> row(std::size_t tensor, std::int64_t token, std::int64_t head) const override {
    const Tensor& from = tensors_[tensor];
    return {from.values.data() + ((token - from.run.begin) * from.heads + head) * from.dim,
            static_cast<std::size_t>(from.dim)};
  }
  PackedRun sequence(std::int64_t token) const override {
    const auto after = std::ranges::upper_bound(ends_, token);
    return {after == ends_.begin() ? 0 : *(after - 1), *after};
  }
  PackedRun own() const { return own_; }
  std::int64_t non_finite() const { return non_finite_; }

 private:
  struct Tensor {
    PackedRun run;
    std::int64_t heads = 0;
    std::int64_t dim = 0;
    std::vector<float> values;
  };
  PackedRun own_;
  std::vector<std::int64_t> ends_;
  std::vector<Tensor> tensors_;
  std::int64_t non_finite_ = 0;
};

// Computes the rank's rows. Returns the time in seconds.
double compute_rows(const RowOp& op, const LoadedRows& rows, int threads, Transport& world, std::span<float> out) {
  using Clock = std::chrono::steady_clock;
  constexpr double kSecondsAtOnce = 0.05;  // between heartbeats
  const auto begin = Clock::now();
  const std::int64_t heads = op.heads();
  const auto dim = static_cast<std::size_t>(op.dim());
  const PackedRun own = rows.own();
  const std::int64_t all = own.tokens() * heads;
  std::int64_t piece = threads;
  for (std::int64_t first = 0; first < all;) {
    const auto piece_begin = Clock::now();
    const std::int64_t last = std::min(all, first + piece);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (std::int64_t row = first; row < last; ++row) {
      op.compute(rows, own.begin + row / heads, row % heads, out.subspan(static_cast<std::size_t>(row) * dim, dim));
    }
    world.progress();
    const double seconds = std::chrono::duration<double>(Clock::now() - piece_begin).count();
    if (seconds < kSecondsAtOnce / 2) piece *= 2;
    if (seconds > kSecondsAtOnce * 2) piece = std::max<std::int64_t>(threads, piece / 2);
    first = last;
  }
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The value, or ∞ if the dtype can't represent it.
double in_range(double value, Dtype dtype) {
  const double most = dtype == Dtype::kF16 ? 65504.0 : static_cast<double>(std::numeric_limits<float>::max());
  if (std::isfinite(value) && std::abs(value) > most)
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  return value;
}

class RowPlan final : public OpPlan {
 public:
  RowPlan(const RowOp& op, const PlanRequest& request)
      : op_(op),
        request_(request),
        kernel_(op.choose(request.options.kernel, request.scope)),
        backend_(kernel_.entry->make_backend({planned_threads(request.options), kNoDevice})) {}

  const KernelEntry& kernel() const override { return *kernel_.entry; }
  const Backend& backend() const override { return *backend_; }
  std::vector<std::string> lines() const override {
    std::vector<std::string> lines{fmt::format("kernel: {}", kernel_.reason)};
    if (estimates_time()) lines.push_back(fmt::format("machine: {}", request_.options.machine.name));
    return lines;
  }
  bool estimates_time() const override { return op_.seconds(request_, kernel_, *backend_, 1).has_value(); }
  std::vector<Cell> columns() const override {
    std::vector<Cell> columns{
        {"world", "", ""}, {"tokens", "", ""}, {"tokens/rank", "(max)", ""}, {"mem/rank", "(MiB, max)", ""}};
    if (estimates_time()) columns.push_back({"time", "(ms)", ""});
    return columns;
  }
  std::string_view unit() const override { return "tokens"; }
  std::int64_t units() const override { return op_.input().tokens(); }
  PlanRow row(int world, Route, bool details, JsonWriter& json) override {
    op_.check_world(world);
    const Layout layout = even_layout(op_.input().lengths(), world);
    std::int64_t most = 0;
    for (int rank = 0; rank < world; ++rank) most = std::max(most, layout.tokens(rank));
    const std::size_t memory = memory_of(op_, most, world, kernel_, *backend_);
    check_memory(memory, request_.options.memory_budget);
    const std::optional<double> seconds = op_.seconds(request_, kernel_, *backend_, world);
    json.begin_object().member("world", world).member("tokens", units());
    json.member("layout", layout_name(LayoutKind::kContiguous)).member("bytes_moved", 0);
    json.member("memory_per_rank", memory).key("estimated_ms");
    if (seconds) {
      json.value(*seconds * 1e3);
    } else {
      json.null();
    }
    json.member("flops", op_.flops());
    json.key("ranks").begin_array();
    for (int rank = 0; rank < world; ++rank) {
      json.begin_object().member("tokens", layout.tokens(rank)).end_object();
    }
    json.end_array().end_object();
    PlanRow row;
    row.cells = {fmt::format("{}", world), fmt::format("{}", units()), fmt::format("{}", most),
                 mebibytes_text(static_cast<double>(memory))};
    if (seconds) row.cells.push_back(fmt::format("{:.3f}", *seconds * 1e3));
    if (!details) return row;
    const int shown = request_.verbose ? world : std::min(world, kShownRanks);
    for (int rank = 0; rank < shown; ++rank) {
      row.lines.push_back(fmt::format("rank {} owns {} tokens: {}", rank, layout.tokens(rank),
                                      runs_text(layout.runs(rank), request_.verbose)));
    }
    row.ranks_left_out = world - shown;
    return row;
  }

 private:
  const RowOp& op_;
  PlanRequest request_;
  RowOp::Kernel kernel_;
  std::unique_ptr<Backend> backend_;
};

class RowOpJob final : public OpJob {
 public:
  explicit RowOpJob(std::unique_ptr<const RowOp> op) : op_(std::move(op)) {}

  std::string_view op() const override { return op_->name(); }
  std::string describe() const override {
    return fmt::format("{}, {}", describe_shape(), counted(static_cast<std::uint64_t>(input().tokens()), "token"));
  }
  std::string describe_shape() const override { return fmt::format("{}, {}", op_->name(), op_->describe()); }
  std::string source() const override { return input().source(); }
  UnreadTensors unread() const override { return input().unread(); }
  std::vector<FileFingerprint> fingerprints() const override { return input().fingerprints(); }
  double flops() const override { return op_->flops(); }
  std::int64_t result_rows() const override { return input().tokens() * op_->heads(); }

  InputShape shape() const override {
    InputShape shape{{"op", std::string(op_->name())},
                     {"dtype", std::string(dtype_name(input().dtype()))},
                     {"batch", fmt::format("{}", input().lengths().size())}};
    const std::vector<std::int64_t>& lengths = input().lengths();
    if (std::ranges::all_of(lengths, [&](std::int64_t length) { return length == lengths.front(); })) {
      shape["seq"] = fmt::format("{}", lengths.front());
    }
    for (const auto& [name, value] : op_->members()) {
      std::string flag = name;
      std::ranges::replace(flag, '_', '-');
      std::visit([&](const auto& held) { shape[flag] = fmt::format("{}", held); }, value);
    }
    return shape;
  }
  void write_job(JsonWriter& json) const override {
    json.begin_object().member("dtype", dtype_name(input().dtype()));
    for (const auto& [name, value] : op_->members()) {
      std::visit([&](const auto& held) { json.member(name, held); }, value);
    }
    json.member("sequences", static_cast<std::int64_t>(input().lengths().size())).member("tokens", input().tokens());
    json.end_object();
  }

  void check_model(const ModelComparison& compare) const override { op_->check_model(compare); }

  std::unique_ptr<OpPlan> plan_worlds(const PlanRequest& request) const override {
    return std::make_unique<RowPlan>(*op_, request);
  }

  void prepare(Transport& world, const Options& options) override {
    world_ = &world;
    timeout_seconds_ = options.timeout_seconds;
    const Collective collective(world, Timeouts(options.timeout_seconds));
    collective.run_collectively([&] {
      op_->check_world(world.size());
      choice_ = op_->choose(compatible_request(options.kernel, world), KernelScope::kThisMachine);
      threads_ = options.threads > 0 ? options.threads : usable_processors().count;
      layout_.emplace(even_layout(input().lengths(), world.size()));
    });
    collective.run_collectively([&] {  // in a phase of its own, because a kernel over ranks communicates in it
      kernel_ = op_->make_kernel(choice_, world, options, *layout_);
      if (kernel_ == nullptr) backend_ = choice_.entry->make_backend({threads_, kNoDevice});
      check_compatible(*choice_.entry, backend(), world);
      check_memory(memory(), options.memory_budget);
    });
  }
  Backend& backend() override { return kernel_ != nullptr ? kernel_->backend() : *backend_; }
  const KernelEntry& kernel() override { return *choice_.entry; }
  const std::string& kernel_reason() override { return choice_.reason; }
  int threads() override { return threads_; }
  PlanFigures plan(const Collective& collective) override {
    PlanFigures figures;
    figures.blocks = collective.size();
    figures.layout = layout_name(LayoutKind::kContiguous);
    for (const std::size_t bytes : collective.gather_values(memory())) {
      figures.memory_per_rank = std::max(figures.memory_per_rank, bytes);
    }
    return figures;
  }
  void write_plan(JsonWriter&) override {}
  std::vector<std::string> plan_lines(const PlanFigures& plan) override {
    return {fmt::format("layout: {}; {} planned for a rank", plan.layout,
                        format_bytes(static_cast<double>(plan.memory_per_rank)))};
  }
  std::vector<std::string> plan_details() override { return {}; }

  void release() override {
    rows_.reset();
    out_.clear();
    kernel_.reset();
    layout_.reset();
    backend_.reset();
  }

  RankFigures run(const ProgressCallback& on_progress) override {
    load(on_progress);
    const RankFigures mine = compute();
    fetch();
    return mine;
  }
  std::vector<ResultDigest> digests(const Collective& collective) override {
    std::vector<ResultDigest> digests;
    for (const RowResult& result : op_->results()) {
      digests.push_back({result.name, result.name, digest(collective, view(result), runs(), input().tokens())});
    }
    return digests;
  }
  void write(const OutputRequest& output) override {
    const Collective collective(*world_, Timeouts(timeout_seconds_));
    FileMetadata metadata = output_metadata(kernel(), identity_of(kernel(), backend(), input().dtype()));
    for (const ResultDigest& each : digests(collective)) metadata.emplace_back("digest." + each.key, each.hex);
    metadata.emplace_back("op", std::string(op_->name()));
    metadata.insert(metadata.end(), output.metadata.begin(), output.metadata.end());
    std::vector<OutputTensor> tensors;
    for (const RowResult& result : op_->results()) {
      tensors.push_back({result.name, file_dtype(op_->out_dtype()), shape_in_file(result)});
    }
    write_collectively(collective, tensors, metadata, output.path, output.replace, [&](SafetensorsWriter& writer) {
      for (const RowResult& result : op_->results()) writer.write_rows(result.name, grid(result), runs(), view(result));
      failpoint("writing");
    });
  }

  bool measures_exposed_comm() const override { return false; }
  std::vector<Cell> columns(const Totals& totals) const override {
    const double rate = totals.seconds > 0.0 ? static_cast<double>(input().tokens()) / totals.seconds : 0.0;
    std::vector<Cell> cells{{"tokens", "", fmt::format("{}", input().tokens())},
                            {"seqs", "", fmt::format("{}", input().lengths().size())}};
    for (const auto& [name, value] : op_->members()) {
      std::visit([&](const auto& held) { cells.push_back({name, "", fmt::format("{}", held)}); }, value);
    }
    cells.push_back({"dtype", "", std::string(dtype_name(input().dtype()))});
    cells.push_back({"time", "(ms)", fmt::format("{:.3f}", totals.seconds * 1e3)});
    cells.push_back({"Mtokens/s", "", fmt::format("{:.3f}", rate * 1e-6)});
    cells.push_back({"mem/rank", "(MiB)", fmt::format("{:.1f}", static_cast<double>(totals.memory_peak) / 0x1p20)});
    for (const ResultDigest& each : *totals.digests) cells.push_back({"digest of " + each.title, "", each.hex});
    return cells;
  }
  std::string non_finite_text(const NonFinite& total) const override {
    return counted(static_cast<std::uint64_t>(total.total()), "value") + " of the rows";
  }
  void write_non_finite(JsonWriter& json, const NonFinite& total) const override {
    json.begin_object().member("rows", total.q).end_object();
  }

  Check check_oracle(const Collective& collective, std::int64_t count) override;
  void open_earlier(const std::string& path) override {
    earlier_file_ = std::make_unique<const SafetensorsFile>(path);
    earlier_.clear();
    for (const RowResult& result : op_->results()) {
      earlier_.push_back(output_tensor(*earlier_file_, path, result.name));
      check_output_tensor(path, earlier_.back(), shape_in_file(result), file_dtype(op_->out_dtype()));
    }
  }
  std::vector<FileFingerprint> earlier_fingerprints() const override { return ringattn::fingerprints(earlier_); }
  Check check_earlier(const Collective& collective) override {
    Check check;
    const std::vector<RowResult> results = op_->results();
    for (std::size_t i = 0; i < results.size(); ++i) {
      const RowResult& result = results[i];
      std::optional<Difference> mine;
      collective.run_collectively(
          [&] { mine = difference_from_file(earlier_[i], grid(result), false, view(result), runs()); });
      if (const auto difference = earliest(collective, mine)) {
        check.passes = false;
        const std::string of = results.size() > 1 ? " of " + result.name : std::string();
        check.lines.push_back("first difference" + of + ": " + difference_text(*difference, *layout_, result.name));
      }
    }
    return check;
  }
  Golden golden() override {
    std::string lengths;
    if (input().lengths().size() <= 8) {
      for (const std::int64_t length : input().lengths()) lengths += fmt::format(" {}", length);
    }
    Golden golden =
        golden_of(fmt::format("{}; {};{}", input().is_synthetic() ? input().source() : "a file", describe(), lengths),
                  kernel().name, identity_of(kernel(), backend(), input().dtype()));
    golden.digests["lse"] = kNoDigest;  // there is only one tensor
    return golden;
  }

  BenchJob bench_job(std::string source) const override {
    const std::int64_t batch = std::ssize(input().lengths());
    BenchJob job{std::string(op_->name()), BenchKind::kStream, input().tokens(), input().tokens() / batch, batch,
                 op_->members(),           std::move(source)};
    job.members.emplace_back("dtype", std::string(dtype_name(input().dtype())));
    return job;
  }
  Measured measure(const MeasureRequest& request, const Collective& collective) override {
    load(request.on_progress);
    RankFigures last = compute();
    const Samples samples =
        take_samples(collective, {request.samples, request.on_progress}, last.seconds, 1, [&](std::size_t) {
          last = compute();
          return RunTimes{last.seconds};
        }).front();
    fetch();
    double bytes =
        static_cast<double>(op_->other_bytes()) + static_cast<double>(input().tokens() * op_->heads() * op_->dim()) *
                                                      static_cast<double>(size_of(op_->out_dtype()));
    for (const RowTensor& tensor : input().tensors()) {
      const std::int64_t rows = input().tokens_read(tensor, {0, input().tokens()}).tokens();
      bytes += static_cast<double>(rows * tensor.heads * tensor.dim) * static_cast<double>(size_of(input().dtype()));
    }
    return {{{false, samples, bytes}}, last, digest(collective, view(), runs(), input().tokens())};
  }

  VariantTable list_variants(const VariantRequest& request, const Options& options) override {
    variants_ = request.ranks;
    variant_options_ = options;
    release();
    return {{{"ranks", "", ""}}, std::ssize(variants_), {}};
  }
  void run_variants(Transport& world, const VariantDone& done) override;

  std::vector<std::string_view> lanes() const override { return {"compute"}; }
  std::vector<TraceEvent> timeline() const override { return {}; }

 private:
  const RowInput& input() const { return op_->input(); }
  std::vector<std::int64_t> shape_in_file(const RowResult& result) const {
    return input().out_shape(result.heads, op_->dim());
  }
  RowGrid grid(const RowResult& result) const { return input().out_grid(result.heads, op_->dim()); }
  std::size_t memory() { return memory_of(*op_, layout_->tokens(world_->rank()), world_->size(), choice_, backend()); }
  std::vector<PackedRun> runs() const { return packed_runs(layout_->runs(world_->rank()), layout_->cu()); }
  // Whether rows are features, without an axis of heads.
  bool is_flat() const { return input().tensors().front().flat; }
  std::string difference_text(const Difference& difference, const Layout& layout, std::string_view tensor) const {
    return is_flat() ? describe_feature(difference, layout.cu(), tensor)
                     : ringattn::describe(difference, layout.cu(), tensor);
  }
  TensorView view() const {
    return dense_view(static_cast<const void*>(out_.data()), op_->out_dtype(), layout_->tokens(world_->rank()),
                      op_->heads(), op_->dim());
  }
  TensorView view(const RowResult& result) const {
    TensorView heads = view();
    heads.data = heads.at(0, result.first_head);
    heads.heads = result.heads;
    return heads;
  }
  // Collective, so that no rank starts a kernel over ranks while another one fails to load.
  void load(const ProgressCallback& on_progress) {
    Collective(*world_, Timeouts(timeout_seconds_)).run_collectively([&] {
      rows_.emplace(*op_, runs(), threads_, on_progress);
      const std::int64_t elements = rows_->own().tokens() * op_->heads() * op_->dim();
      // Filled with NaN, so that rows that are not written are visible.
      out_.assign(static_cast<std::size_t>(elements) * size_of(op_->out_dtype()), std::byte{0xff});
      if (kernel_ != nullptr) kernel_->load(input(), *layout_, world_->rank(), threads_);
    });
  }
  RankFigures compute() {
    RankFigures mine;
    if (kernel_ != nullptr) {
      mine.seconds = kernel_->run();
    } else {
      const std::span rows(reinterpret_cast<float*>(out_.data()), out_.size() / sizeof(float));
      mine.seconds = compute_rows(*op_, *rows_, threads_, *world_, rows);
    }
    mine.tokens = rows_->own().tokens();
    mine.flops = op_->flops() * static_cast<double>(mine.tokens) / static_cast<double>(input().tokens());
    mine.memory_planned = memory();
    mine.non_finite.q = rows_->non_finite() + (kernel_ != nullptr ? kernel_->non_finite() : 0);
    return mine;
  }

  void fetch() {
    if (kernel_ != nullptr) kernel_->fetch(out_);
  }

  std::unique_ptr<const RowOp> op_;
  Transport* world_ = nullptr;
  double timeout_seconds_ = 0.0;
  RowOp::Kernel choice_;
  int threads_ = 0;
  std::unique_ptr<RowKernel> kernel_;  // null: rows are computed one by one, on backend_
  std::unique_ptr<Backend> backend_;
  std::optional<Layout> layout_;
  std::optional<LoadedRows> rows_;
  std::vector<std::byte> out_;  // of this rank's tokens
  std::unique_ptr<const SafetensorsFile> earlier_file_;
  std::vector<TensorSource> earlier_;  // the results in an earlier file
  std::vector<int> variants_;
  Options variant_options_;
};

Check RowOpJob::check_oracle(const Collective& collective, std::int64_t count) {
  struct Mine {
    double error = 0.0;  // the greatest, as a fraction of the allowed error
    std::int64_t token = 0;
    std::int64_t head = 0;
    std::int64_t feature = 0;    // dim of the head
    std::int64_t misplaced = 0;  // NaN or infinite where fp64 has another value
  };
  const std::int64_t all = result_rows();
  const std::int64_t rows = std::min(count, all);
  const std::int64_t heads = op_->heads();
  const auto dim = static_cast<std::size_t>(op_->dim());
  Mine mine;
  collective.run_collectively([&] {
    std::vector<double> exact(dim), allowed(dim);
    for (std::int64_t i = 0; i < rows; ++i) {
      // Includes the first and the last row.
      const std::int64_t row = rows == 1 ? 0 : i * (all - 1) / (rows - 1);
      const std::int64_t token = row / heads;
      const PackedRun own = rows_->own();
      if (token < own.begin || token >= own.end) continue;
      op_->compute_exactly(*rows_, token, row % heads, exact, allowed);
      const auto at = static_cast<std::size_t>((token - own.begin) * heads + row % heads) * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        const std::size_t bytes = size_of(op_->out_dtype());
        const double value = load_element(out_.data() + (at + d) * bytes, op_->out_dtype());
        const double wanted = in_range(exact[d], op_->out_dtype());
        if (!std::isfinite(value) || !std::isfinite(wanted)) {
          const bool same = std::isnan(value) ? std::isnan(wanted) : value == wanted;
          if (!same) ++mine.misplaced;
          continue;
        }
        const double error = std::abs(value - wanted);
        const double part = error == 0.0 ? 0.0 : error / allowed[d];
        if (part > mine.error || std::isnan(part)) {
          mine = {std::isnan(part) ? std::numeric_limits<double>::infinity() : part, token, row % heads,
                  static_cast<std::int64_t>(d), mine.misplaced};
        }
      }
    }
  });
  Mine worst;
  std::int64_t misplaced = 0;
  for (const Mine& theirs : collective.gather_values(mine)) {
    if (theirs.error > worst.error) worst = theirs;
    misplaced += theirs.misplaced;
  }
  Check check;
  check.passes = worst.error <= 1.0 && misplaced == 0;
  check.rows = rows;
  check.context.push_back(fmt::format("{} against the fp64 oracle", counted(static_cast<std::uint64_t>(rows), "row")));
  const std::vector<RowResult> results = op_->results();
  const RowResult& result =
      *std::ranges::find_if(results, [&](const RowResult& each) { return worst.head < each.first_head + each.heads; });
  worst.head -= result.first_head;
  const std::string_view axis = is_flat() ? "feature" : "head";
  const std::int64_t place = is_flat() ? worst.feature : worst.head;
  check.lines.push_back(fmt::format("{}: greatest error {:.3g} of what is allowed, at token {}, {} {}", result.name,
                                    worst.error, worst.token, axis, place));
  if (misplaced > 0) {
    check.lines.push_back(fmt::format("{} values are NaN or infinite where fp64 has another value", misplaced));
  }
  check.write = [=, name = result.name](JsonWriter& json) {
    json.begin_object().member("rows", rows).key(name).begin_object().member("part_of_allowed", worst.error);
    json.member("token", worst.token).member(axis, place).end_object();
    json.key("lse").null().member("misplaced", misplaced).end_object();
  };
  return check;
}

void RowOpJob::run_variants(Transport& world, const VariantDone& done) {
  const Collective collective(world, Timeouts(variant_options_.timeout_seconds));
  const Layout even = even_layout(input().lengths(), world.size());
  const std::int64_t row_bytes = op_->heads() * op_->dim() * static_cast<std::int64_t>(size_of(op_->out_dtype()));
  const auto moved_view = [&](const std::vector<std::byte>& rows) {
    return dense_view(static_cast<const void*>(rows.data()), op_->out_dtype(), even.tokens(world.rank()), op_->heads(),
                      op_->dim());
  };
  std::vector<std::byte> first;
  for (const int ranks : variants_) {
    const std::unique_ptr<Transport> part = world.split_world(ranks, collective.timeouts().for_peer());
    std::optional<Error> agreed;  // agreed by the ranks of the part; the others don't know it yet
    out_.clear();
    if (part) {
      try {
        const Collective of_part(*part, Timeouts(variant_options_.timeout_seconds));
        prepare(*part, variant_options_);
        of_part.run_collectively([&] {
          load({});
          compute();
          fetch();
        });
      } catch (const AgreedError& error) {
        agreed = error;
      }
    }
    ringattn::agree(world, agreed ? &*agreed : nullptr, collective.timeouts().for_work(0.0));
    // In this world's layout, ranks beyond the part have no tokens.
    std::vector<std::vector<TokenRun>> owned(static_cast<std::size_t>(world.size()));
    const Layout of_part = even_layout(input().lengths(), ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      owned[static_cast<std::size_t>(rank)].assign(of_part.runs(rank).begin(), of_part.runs(rank).end());
    }
    std::vector<std::byte> moved(static_cast<std::size_t>(even.tokens(world.rank()) * row_bytes));
    reshard(world.host(), Layout(input().lengths(), std::move(owned)), even, out_.data(), moved.data(), row_bytes,
            collective.timeouts().for_peer());
    std::optional<Difference> difference;
    if (first.empty() && ranks == variants_.front()) {
      first = std::move(moved);
    } else {
      const std::vector<PackedRun> rows = packed_runs(even.runs(world.rank()), even.cu());
      difference = earliest(collective, first_difference(false, moved_view(first), moved_view(moved), rows));
    }
    release();
    done({fmt::format("{}", ranks)},
         difference ? difference_text(*difference, even, op_->results().front().name) : std::string());
  }
}

}  // namespace

RowOp::Kernel RowOp::choose(const KernelRequest& request, KernelScope scope) const {
  const KernelEntry* const rows[] = {&row_kernel()};
  const auto nothing_missing = [](std::size_t) { return std::vector<std::string>(); };
  return {rows[0], choose_entry(rows, nothing_missing, describe(), request, scope).reason};
}

void RowOp::check_model(const ModelComparison& compare) const {
  compare.refuse_kind(name(), layer_kind_name(compare.layer().kind));
}

void RowOp::compute(const RowReader&, std::int64_t, std::int64_t, std::span<float>) const {
  fail(ErrorCode::kInternal, fmt::format("rows of {} are computed by its kernels", name()));
}

std::unique_ptr<OpJob> make_row_job(std::unique_ptr<const RowOp> op) {
  return std::make_unique<RowOpJob>(std::move(op));
}

}  // namespace ringattn
