// SPDX-License-Identifier: Apache-2.0
// MLA as an OpJob: an AttentionOpJob over latents, in one of two forms.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/attention/attention_op_job.hpp"

namespace ringattn {

class MlaOpJob final : public AttentionOpJob {
 public:
  using AttentionOpJob::AttentionOpJob;

  std::string describe_shape() const override;
  void check_model(const ModelComparison& compare) const override;
  std::vector<MessageTemplate> notes() const override;
  InputShape shape() const override;
  void write_job(JsonWriter& json) const override;
  PlanFigures plan(const Collective& collective) override;
  void write_plan(JsonWriter& json) override;
  std::vector<std::string> plan_lines(const PlanFigures& plan) override;
  std::string non_finite_text(const NonFinite& total) const override;
  BenchJob bench_job(std::string source) const override;
  VariantTable list_variants(const VariantRequest& request, const Options& options) override;

 private:
  std::string format_text() const override;
  FileMetadata own_metadata() const override;
  std::vector<std::string> variant_cells(const Shape& shape, const ShapeResult& result) const override;
  const MlaSpec& spec() const { return input().mla()->spec; }

  std::int64_t bytes_moved_expanded_ = 0;  // around the ring, if K and V of all heads were sent
};

}  // namespace ringattn
