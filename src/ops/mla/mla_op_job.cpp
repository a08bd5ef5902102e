// SPDX-License-Identifier: Apache-2.0
#include "ops/mla/mla_op_job.hpp"

#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "base/json_writer.hpp"
#include "base/size.hpp"
#include "ops/jobs/model_comparison.hpp"
#include "ops/jobs/ring_report.hpp"

namespace ringattn {

std::string MlaOpJob::describe_shape() const {
  return fmt::format("{}{}", input().decodes() ? "decode, " : "", ringattn::describe(spec()));
}

void MlaOpJob::check_model(const ModelComparison& compare) const {
  const ModelLayer& layer = compare.layer();
  if (layer.is_ssm()) compare.refuse_kind("attention", "SSM layers only");
  compare.parts("num_attention_heads", spec().heads, layer.heads);
  if (layer.kind != LayerKind::kMla) compare.refuse_kind("latents", "keys and values: it has no kv_lora_rank");
  compare.same("kv_lora_rank", spec().latent_dim, layer.latent_dim);
  compare.same("qk_rope_head_dim", spec().rope_dim, layer.rope_dim);
  if (const auto nope_dim = input().nope_dim()) compare.same("qk_nope_head_dim", *nope_dim, layer.head_dim);
  if (!spec().out_in_latent) compare.same("v_head_dim", spec().head_dim_v, layer.head_dim_v);
}

std::vector<MessageTemplate> MlaOpJob::notes() const {
  const std::int64_t rows = origin().measured_rows;
  if (rows == 0) return {};
  if (input().makes_cache()) {
    return {{"op: mla, a decode step, as ", setting("q_len", rows), " makes one; ", setting("layout", "striped"),
             " measures them as ring attention"}};
  }
  if (input().decodes() || !input().not_decoded_reason().empty()) return {};
  return {{"op: mla, ring attention; ", setting("form", "absorbed"), " measures decode steps"}};
}

InputShape MlaOpJob::shape() const {
  InputShape shape = AttentionOpJob::shape();
  shape.erase("kv-heads");
  shape["head-dim"] = fmt::format("{}", spec().head_dim);
  shape["rope-dim"] = fmt::format("{}", spec().rope_dim);
  shape["latent-dim"] = fmt::format("{}", spec().latent_dim);
  return shape;
}

void MlaOpJob::write_job(JsonWriter& json) const {
  json.begin_object();
  write_attention_spec(json, input().job().spec);
  json.member("rope_dim", spec().rope_dim).member("latent_dim", spec().latent_dim);
  write_attention_tokens(json, input().job().batch);
  json.end_object();
}

PlanFigures MlaOpJob::plan(const Collective& collective) {
  if (!input().decodes()) {
    const auto received = collective.gather_values(prepared().latent().expanded_bytes_received());
    bytes_moved_expanded_ = std::accumulate(received.begin(), received.end(), std::int64_t{0});
  }
  return AttentionOpJob::plan(collective);
}

void MlaOpJob::write_plan(JsonWriter& json) {
  AttentionOpJob::write_plan(json);
  json.member("form", form_name(input().form().form));
  if (input().decodes()) return;
  json.member("heads_at_a_time", prepared().latent().heads_at_a_time());
  json.member("bytes_moved_expanded", bytes_moved_expanded_);
}

std::vector<std::string> MlaOpJob::plan_lines(const PlanFigures& plan) {
  std::vector<std::string> lines{form_text(input())};
  if (!input().decodes()) {
    const auto heads = static_cast<std::uint64_t>(prepared().latent().heads_at_a_time());
    lines.front() += fmt::format("; {} at a time", counted(heads, "head"));
    if (plan.bytes_moved > 0) {
      const std::string of_heads = spec().q_in_latent || spec().out_in_latent
                                       ? ""
                                       : fmt::format(" instead of {} of keys and values",
                                                     format_bytes(static_cast<double>(bytes_moved_expanded_)));
      lines.push_back(fmt::format("latents: {} sent{}", format_bytes(static_cast<double>(plan.bytes_moved)), of_heads));
    }
  }
  for (std::string& line : AttentionOpJob::plan_lines(plan)) lines.push_back(std::move(line));
  return lines;
}

std::string MlaOpJob::non_finite_text(const NonFinite& total) const {
  return fmt::format("{} values of q, {} of latents and rotary keys and {} of matrices", total.q, total.k, total.v);
}

std::string MlaOpJob::format_text() const {
  const RowFormat& format = input().mla()->format;
  return format.is_plain() ? "" : ", " + ringattn::describe(format);
}

FileMetadata MlaOpJob::own_metadata() const {
  return {{"op", std::string(op())},
          {"form", std::string(form_name(input().form().form))},
          {"latent_dim", fmt::format("{}", spec().latent_dim)},
          {"rope_dim", fmt::format("{}", spec().rope_dim)},
          {"head_dim", fmt::format("{}", spec().head_dim)},
          {"head_dim_v", fmt::format("{}", spec().head_dim_v)}};
}

BenchJob MlaOpJob::bench_job(std::string source) const {
  BenchJob result = AttentionOpJob::bench_job(std::move(source));
  if (!input().decodes()) result.members.emplace_back("keys", input().job().batch.k_tokens());
  result.members.emplace_back("form", std::string(form_name(input().form().form)));
  result.members.emplace_back("rope_dim", spec().rope_dim);
  result.members.emplace_back("latent_dim", spec().latent_dim);
  return result;
}

VariantTable MlaOpJob::list_variants(const VariantRequest& request, const Options& options) {
  VariantTable table = AttentionOpJob::list_variants(request, options);
  if (!input().decodes()) table.columns.push_back({"heads", "at a time", ""});
  return table;
}

std::vector<std::string> MlaOpJob::variant_cells(const Shape& shape, const ShapeResult& result) const {
  std::vector<std::string> cells = AttentionOpJob::variant_cells(shape, result);
  if (!input().decodes()) {
    cells.push_back(shape.heads_at_a_time > 0 ? fmt::format("{}", shape.heads_at_a_time) : "auto");
  } else if (!shape.decoded) {
    cells[1] = "mla, over rows";
  }
  return cells;
}

}  // namespace ringattn
