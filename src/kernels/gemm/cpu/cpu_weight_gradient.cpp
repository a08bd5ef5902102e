// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/cpu/cpu_weight_gradient.hpp"

#include <algorithm>

#include "kernels/common/cpu/cpu_backend.hpp"
#include "kernels/common/cpu/thread_pool.hpp"
#include "kernels/common/token_units.hpp"
#include "kernels/gemm/cpu/gemm_ops.hpp"

namespace ringattn::cpu {

namespace {

class CpuWeightGradient final : public WeightGradientKernel {
 public:
  CpuWeightGradient(const WeightGradientSpec& spec, const CpuBackend& backend)
      : spec_(spec), widen_(backend.tile_ops().widen), ops_(best_gemm_ops()), threads_(backend.threads()) {}

  void compute(const WeightGradientTask& task, Stream, const Progress& progress) override {
    check_weight_gradient(spec_, task);
    const std::vector<TokenUnit> units = token_units(task.lengths);
    if (units.empty()) std::fill_n(task.dw, task.dout.heads * matrix_size(), 0.0F);
    std::int64_t max_tokens = 0;
    for (const TokenUnit& unit : units) max_tokens = std::max(max_tokens, unit.tokens);
    const Buffer panels = allocate_host(ops_.panel_floats(spec_.dim_k, max_tokens) * sizeof(float));
    for (const TokenUnit& unit : units) {
      const bool first = &unit == units.data();
      auto* const packed = reinterpret_cast<float*>(panels.data());
      const auto element = static_cast<std::int64_t>(size_of(spec_.dtype));
      ops_.pack({task.rows.at(unit.first, 0), spec_.dtype, spec_.dim_k, unit.tokens, element,
                 task.rows.token_stride * element},
                packed);
      ThreadPool heads(task.dout.heads);
      heads.run(threads_, progress, [&](int, const Checkpoint& checkpoint) {
        Scratch scratch;
        for (std::int64_t head; (head = heads.take()) >= 0;) {
          if (checkpoint.should_stop()) return;
          add_head(task, unit, head, packed, first, scratch);
        }
      });
    }
  }

 private:
  struct Scratch {
    std::vector<float> row;      // [dim_n]
    std::vector<float> columns;  // [dim_n, tokens of a unit], dout transposed
    std::vector<float> sums;     // [dim_n, dim_k]
  };

  std::int64_t matrix_size() const { return std::int64_t{spec_.dim_n} * spec_.dim_k; }

  void add_head(const WeightGradientTask& task, const TokenUnit& unit, std::int64_t head, const float* panels,
                bool first, Scratch& scratch) const {
    scratch.row.resize(static_cast<std::size_t>(spec_.dim_n));
    scratch.columns.resize(static_cast<std::size_t>(spec_.dim_n * unit.tokens));
    for (std::int64_t token = 0; token < unit.tokens; ++token) {
      widen_(task.dout.at(unit.first + token, head), spec_.dtype, spec_.dim_n, scratch.row.data());
      for (int n = 0; n < spec_.dim_n; ++n) {
        scratch.columns[static_cast<std::size_t>(n * unit.tokens + token)] = scratch.row[static_cast<std::size_t>(n)];
      }
    }
    float* const dw = task.dw + head * matrix_size();
    if (!first) scratch.sums.resize(static_cast<std::size_t>(matrix_size()));
    float* const sums = first ? dw : scratch.sums.data();
    ops_.multiply({scratch.columns.data(), spec_.dim_n, reinterpret_cast<std::byte*>(sums),
                   spec_.dim_k * static_cast<std::int64_t>(sizeof(float)), Dtype::kF32},
                  spec_.dim_k, unit.tokens, panels);
    if (first) return;
    for (std::int64_t i = 0; i < matrix_size(); ++i) dw[i] += sums[i];
  }

  WeightGradientSpec spec_;
  decltype(TileOps::widen) widen_;
  const GemmOps& ops_;
  int threads_;
};

}  // namespace

std::unique_ptr<WeightGradientKernel> make_cpu_weight_gradient(const WeightGradientSpec& spec, Backend& backend) {
  return std::make_unique<CpuWeightGradient>(spec, static_cast<const CpuBackend&>(backend));
}

}  // namespace ringattn::cpu
