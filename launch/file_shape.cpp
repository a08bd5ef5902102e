// SPDX-License-Identifier: Apache-2.0
#include "launch/file_shape.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "attention/files/model_config.hpp"
#include "base/error.hpp"
#include "launch/job_request.hpp"
#include "launch/scan_request.hpp"

namespace ringattn {

namespace {

bool all_alike(const std::vector<std::int64_t>& lengths) {
  return std::ranges::all_of(lengths, [&](std::int64_t length) { return length == lengths.front(); });
}

// The dims of a file beside those of a model's config.
class Comparison {
 public:
  Comparison(const Config& config) : config_(config), model_(ModelConfig::open(config.options.model_config)) {}

  const ModelConfig& model() const { return model_; }

  void same(std::string_view name, int of_file, int of_model) const {
    if (of_file != of_model) refuse(name, of_file, of_model, "a layer of the model has the config's");
  }
  // Of what a layer may be divided by.
  void share(std::string_view name, int of_file, int of_model) const {
    if (of_file > of_model || of_model % of_file != 0) {
      refuse(name, of_file, of_model, "a job has all of a layer's, or a share that divides them");
    }
  }
  [[noreturn]] void refuse_kind(std::string_view file, std::string_view model) const {
    fail(ErrorCode::kUsage, contradiction(), fmt::format("the file holds {}, and the config is of {}", file, model),
         kRemedy);
  }

 private:
  static constexpr std::string_view kRemedy = "Give the config that belongs to the file, or leave it out.";

  std::string contradiction() const {
    return fmt::format("{} {} contradicts {} {}", config_.origin("model-config"), config_.options.model_config,
                       config_.origin("input"), config_.options.input);
  }
  [[noreturn]] void refuse(std::string_view name, int of_file, int of_model, std::string_view why) const {
    fail(ErrorCode::kUsage, contradiction(),
         fmt::format("{} is {} in the config and {} by the file's tensors; {}", name, of_model, of_file, why), kRemedy);
  }

  const Config& config_;
  ModelConfig model_;
};

bool has_both(const Config& config) { return config.given("model-config") && config.given("input"); }

}  // namespace

FileShape file_shape(Op op, const Job& job, const LatentSpec* latents) {
  const FoldSpec& spec = job.spec;
  FileShape shape;
  const auto add = [&](std::string_view flag, auto value) { shape[std::string(flag)] = fmt::format("{}", value); };
  add("op", op_name(op));
  add("dtype", dtype_name(spec.dtype));
  add("heads", spec.heads);
  add("head-dim", latents == nullptr ? spec.head_dim : latents->head_dim);
  add("head-dim-v", spec.head_dim_v);
  if (latents != nullptr) {
    add("rope-dim", latents->rope_dim);
    add("latent-dim", latents->latent_dim);
  } else {
    add("kv-heads", spec.kv_heads);
  }
  const std::vector<std::int64_t> q = job.batch.q_lengths();
  const std::vector<std::int64_t> k = job.batch.k_lengths();
  add("batch", k.size());
  if (!k.empty() && all_alike(k)) add("seq", k.front());
  if (!q.empty() && all_alike(q)) add("q-len", q.front());
  return shape;
}

FileShape file_shape(const ScanJob& job) {
  const ScanSpec& spec = job.spec;
  FileShape shape{{"op", std::string(op_name(scan_op(job)))},
                  {"dtype", std::string(dtype_name(spec.dtype))},
                  {"heads", fmt::format("{}", spec.heads)},
                  {"batch", fmt::format("{}", job.lengths.size())}};
  if (!job.alone) {
    shape["state-dim"] = fmt::format("{}", spec.state_dim);
    shape["groups"] = fmt::format("{}", spec.groups);
  }
  if (!spec.state_decays) shape["head-dim"] = fmt::format("{}", spec.head_dim);
  if (job.update) {
    shape.emplace("q-len", fmt::format("{}", job.lengths.front()));
  } else if (!job.lengths.empty() && all_alike(job.lengths)) {
    shape["seq"] = fmt::format("{}", job.lengths.front());
  }
  shape["conv-width"] = fmt::format("{}", job.convolution ? job.convolution->width : 0);
  return shape;
}

FileShape shape_of(const JobInput& input) {
  return file_shape(input.op(), input.job(), input.op() == Op::kLatent ? &input.latent().spec : nullptr);
}

FileShape shape_of_input(const Config& config) {
  const OpenSource source = open_source(config, true);
  if (source.scan) return file_shape(open_scan(config).job());
  return shape_of(open_input(config, true));
}

void check_model(const Config& config, const JobInput& input) {
  if (!has_both(config)) return;
  const Comparison compare(config);
  const ModelConfig& model = compare.model();
  if (!model.has_attention()) compare.refuse_kind("attention", "scans alone");
  const FoldSpec& spec = input.job().spec;
  compare.share("num_attention_heads", spec.heads, model.heads());
  if (input.op() != Op::kLatent) {
    if (model.is_latent()) return;  // its keys and values, expanded by somebody else
    compare.share("num_key_value_heads", spec.kv_heads, model.kv_heads());
    compare.same("head_dim", spec.head_dim, model.head_dim());
    return;
  }
  if (!model.is_latent()) compare.refuse_kind("latents", "keys and values: it has no kv_lora_rank");
  const LatentSpec& latent = input.latent().spec;
  compare.same("kv_lora_rank", latent.latent_dim, model.latent_dim());
  compare.same("qk_rope_head_dim", latent.rope_dim, model.rope_dim());
  if (const auto nope_dim = input.nope_dim()) compare.same("qk_nope_head_dim", *nope_dim, model.nope_dim());
  if (!latent.out_in_latent) compare.same("v_head_dim", latent.head_dim_v, model.latent_dim_v());
}

void check_model(const Config& config, const ScanJob& job) {
  if (!has_both(config)) return;
  const Comparison compare(config);
  const ModelConfig& model = compare.model();
  const ScanSpec& spec = job.spec;
  if (!model.has_scans())
    compare.refuse_kind("a scan", "no scan: it has no state_size, mamba_d_state or ssm_state_size");
  if (job.alone) {
    compare.share("the number of channels", spec.heads, model.scan_conv_channels());
    compare.same("the convolution's width", job.convolution->width, model.scan_conv_width());
    return;
  }
  if (model.scans_channels() != spec.state_decays) {
    compare.refuse_kind(spec.state_decays ? "a selective scan" : "a scan of Mamba-2",
                        spec.state_decays ? "Mamba-2" : "Mamba-1");
  }
  compare.share(spec.state_decays ? "the number of channels" : "the number of heads", spec.heads, model.scan_heads());
  if (!spec.state_decays) compare.same("the dim of a head", spec.head_dim, model.scan_head_dim());
  compare.same("the state's dim", spec.state_dim, model.scan_state_dim());
  compare.share("the number of groups", spec.groups, model.scan_groups());
  if (job.convolution) compare.same("the convolution's width", job.convolution->width, model.scan_conv_width());
}

}  // namespace ringattn
