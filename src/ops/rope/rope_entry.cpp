// SPDX-License-Identifier: Apache-2.0
// The row of RoPE in the table of ops.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/rope/rope_oracle.hpp"
#include "ops/common/staging.hpp"
#include "ops/common/values.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/jobs/row_op.hpp"
#include "ops/rope/rope.hpp"
#include "ops/rope/rope_settings.hpp"

namespace ringattn {

namespace {

constexpr OpTensor kTensors[] = {{"q", "[tokens, heads, head_dim]", true},
                                 {"k", "[tokens, kv_heads, head_dim]", true},
                                 {"cu_seqlens", "[sequences + 1]", true}};
constexpr std::string_view kNotes[] = {
    "a file with q, k or both, and no other tensor, where the op is named or one of its settings given; positions are "
    "those of tokens in their sequences"};
constexpr std::string_view kSettings[] = {"kv-heads", "head-dim"};
// Reads a rank's rows, and rotates them into one buffer with the heads of q before those of k.
class LoadedRope final : public RowKernel {
 public:
  LoadedRope(RopeSpec spec, std::int64_t heads, const KernelRequest& kernel, Transport& world, const Options& options)
      : rope_(std::move(spec), {kernel, options.threads, world.device()}),
        heads_(heads),
        timeouts_(options.timeout_seconds) {}

  Backend& backend() override { return rope_.backend(); }

  void load(const RowInput& input, const Layout& layout, int rank, int threads) override {
    const RopeSpec& spec = rope_.spec();
    const std::vector<PackedRun> runs = packed_runs(layout.runs(rank), layout.cu());
    const std::int64_t tokens = layout.tokens(rank);
    const std::vector<std::int64_t> positions = layout.positions(rank);
    positions_ = upload(backend(), std::span(positions));
    out_ = backend().allocate(static_cast<std::size_t>(tokens * heads_ * spec.head_dim) * size_of(spec.dtype));
    MutableTensorView y = dense_view(static_cast<void*>(out_.data()), spec.dtype, tokens, heads_, spec.head_dim);
    rows_.resize(input.tensors().size());
    tensors_.clear();
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const MutableTensorView x =
          make_rows(backend(), spec.dtype, tokens, input.tensors()[i].heads, spec.head_dim, rows_[i]);
      Staging(backend(), timeouts_)
          .load(
              runs, x,
              [&](std::span<const PackedRun> piece, const MutableTensorView& into) {
                input.read(i, piece, into, threads);
              },
              [](std::int64_t) {});
      y.heads = x.heads;
      tensors_.push_back({x, y});
      y.data = y.at(0, y.heads);
    }
    await(backend(), timeouts_);
  }
  double run() override {
    const auto begin = std::chrono::steady_clock::now();
    rope_.run({{positions_.data(), true}, tensors_}, backend().stream());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  void fetch(std::span<std::byte> out) override {
    Staging(backend(), timeouts_).store(out_.data(), out.data(), out.size());
  }

 private:
  Rope rope_;
  std::int64_t heads_;  // of q and k
  Timeouts timeouts_;
  std::vector<Buffer> rows_;
  Buffer positions_, out_;
  std::vector<RopeTensor> tensors_;
};

// q and k, or the one of them that a file has. Synthetic input has both.
std::vector<RowTensor> tensors_of(const OpRequest& request) {
  std::vector<RowTensor> tensors{{"q", request.settings.heads, request.settings.head_dim},
                                 {"k", request.settings.kv_heads, request.settings.head_dim}};
  if (!request.from_file()) return tensors;
  const auto opened = open_tensor_file(file_input(request.settings), *request.share);
  const auto missing = [&](const RowTensor& tensor) {
    return !opened->file.contains(name_in(opened->request.names, tensor.name));
  };
  if (std::ranges::all_of(tensors, missing)) {
    fail(ErrorCode::kFile, fmt::format("{} has neither q nor k", opened->request.path), "these are rotated",
         {"Name them with ", setting("tensors"), "."});
  }
  std::erase_if(tensors, missing);
  return tensors;
}

class RopeOp final : public RowOp {
 public:
  explicit RopeOp(const OpRequest& request)
      : input_(request, tensors_of(request)),
        spec_(rope_spec_of(request.settings, input_.dtype(), input_.tensors().front().dim)) {
    for (const RowTensor& tensor : input_.tensors()) {
      results_.push_back({std::string(tensor.name), heads_, tensor.heads});
      heads_ += tensor.heads;
      if (tensor.dim == spec_.head_dim) continue;
      fail(ErrorCode::kFile, fmt::format("k has heads of {}", tensor.dim),
           fmt::format("those of q have {}", spec_.head_dim), "Give q and k of one layer.");
    }
    for (const SettingRow& row : kRopeSettings) {
      std::string name(row.name);
      std::ranges::replace(name, '-', '_');
      settings_.emplace(std::move(name), request.settings.own.find(row.name)->second);
    }
  }

  std::string_view name() const override { return "rope"; }
  std::string describe() const override {
    std::string text = ringattn::describe(spec_);
    for (const RowResult& result : results_) text += fmt::format(", {} {}", result.name, result.heads);
    const std::string& scaling = settings_.at("rope_scaling");
    text += fmt::format(", {}, theta {}", settings_.at("rope_type"), settings_.at("rope_theta"));
    return scaling == kNoRopeScaling ? text : fmt::format("{}, {}", text, scaling);
  }
  const RowInput& input() const override { return input_; }
  std::int64_t heads() const override { return heads_; }
  std::int64_t dim() const override { return spec_.head_dim; }
  Dtype out_dtype() const override { return spec_.dtype; }
  std::vector<RowResult> results() const override { return results_; }
  void check_model(const ModelComparison& compare) const override {
    const ModelLayer& layer = compare.layer();
    if (layer.kind != LayerKind::kAttention) compare.refuse_kind(name(), layer_kind_name(layer.kind));
    std::optional<int> parts;  // of tensor parallelism
    for (const RowResult& result : results_) {
      const auto heads = static_cast<int>(result.heads);
      if (result.name == "q") {
        parts = compare.parts("num_attention_heads", heads, layer.heads);
      } else if (parts) {
        compare.shared("num_key_value_heads", heads, layer.kv_heads, *parts);
      } else {
        compare.parts("num_key_value_heads", heads, layer.kv_heads);
      }
    }
    compare.same("head_dim", spec_.head_dim, layer.head_dim);
  }
  double flops() const override {
    return 3.0 * static_cast<double>(input_.tokens()) * static_cast<double>(heads_) * spec_.rotary_dim;
  }
  std::vector<std::pair<std::string, BenchValue>> members() const override {
    std::vector<std::pair<std::string, BenchValue>> members;
    for (const RowResult& result : results_) {
      members.emplace_back(result.name == "q" ? "heads" : "kv_heads", result.heads);
    }
    members.emplace_back("head_dim", std::int64_t{spec_.head_dim});
    for (const auto& [name, value] : settings_) members.emplace_back(name, value);
    return members;
  }

  Kernel choose(const KernelRequest& request, KernelScope scope) const override {
    const RopeChoice choice = choose_kernel(spec_, request, scope);
    return {choice.row, choice.reason};
  }
  std::unique_ptr<RowKernel> make_kernel(const Kernel& kernel, Transport& world, const Options& options,
                                         const Layout&) const override {
    const KernelRequest same{std::string(kernel.entry->backend), std::string(kernel.entry->name)};
    return std::make_unique<LoadedRope>(spec_, heads_, same, world, options);
  }
  void compute_exactly(const RowReader& rows, std::int64_t token, std::int64_t head, std::span<double> out,
                       std::span<double> allowed) const override {
    std::size_t tensor = 0;
    while (head >= results_[tensor].first_head + results_[tensor].heads) ++tensor;
    const std::vector<std::int64_t> positions(kMaxRopeAxes, token - rows.sequence(token).begin);
    rope_oracle(spec_, positions, false, rows.row(tensor, token, head - results_[tensor].first_head), out, allowed);
  }

 private:
  RowInput input_;
  RopeSpec spec_;
  std::int64_t heads_ = 0;
  std::vector<RowResult> results_;
  std::map<std::string, std::string> settings_;  // values of kRopeSettings, by name
};

// A file with more tensors belongs to another op.
bool recognizes_rope(const TensorFile& opened) {
  const InputNames& names = opened.request.names;
  std::size_t known = 0;
  for (const OpTensor& tensor : kTensors) known += opened.file.contains(name_in(names, tensor.name)) ? 1 : 0;
  const bool rows = opened.file.contains(name_in(names, "q")) || opened.file.contains(name_in(names, "k"));
  return rows && known == opened.file.names().size();
}

void refuse_unnamed_rope(const TensorFile& opened) {
  const InputNames& names = opened.request.names;
  const bool q = opened.file.contains(name_in(names, "q")), k = opened.file.contains(name_in(names, "k"));
  fail(ErrorCode::kFile,
       fmt::format("{} has {}{}{} and no v", opened.request.path, q ? "q" : "", q && k ? ", " : "", k ? "k" : ""),
       "these are rows to rotate by RoPE, or attention without its values",
       {"For RoPE give ", setting("op", "rope"), " or one of its settings; for attention give v."});
}

void fill_rope(const ModelLayer& layer, const Settings&, const FillSetting& fill) {
  Fill{fill}("heads", layer.heads)("kv-heads", layer.kv_heads)("head-dim", layer.head_dim);
  fill_rope_settings(layer.rope, fill);
}

}  // namespace

extern const OpEntry kRopeOp;
const OpEntry kRopeOp{.name = "rope",
                      .help = "rotary position embedding (RoPE) of q and k",
                      .file = "a file with q or k alone",
                      .tensors = kTensors,
                      .tensor_notes = kNotes,
                      .settings = kSettings,
                      .own_settings = kRopeSettings,
                      .layers = layer_bit(LayerKind::kAttention),
                      .fill = fill_rope,
                      .recognizes = recognizes_rope,
                      .refuse_unnamed = refuse_unnamed_rope,
                      .make = [](const OpRequest& request) { return make_row_job(std::make_unique<RopeOp>(request)); }};

}  // namespace ringattn
