// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm90/hopper_params.hpp"

#include <fmt/format.h>

#include <bit>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/sm90/tensor_maps.hpp"

namespace ringattn::sm90 {

HopperParams hopper_params(const cuda::AttentionParams& p, const AttentionConfig& config) {
  HopperParams params{};
  params.attention = p;
  const auto dtype = static_cast<Dtype>(p.dtype);
  const MappedTensor q{p.q.data, p.rows, p.heads, p.head_dim, p.q.token_stride, p.q.head_stride};
  params.bulk_in = p.tables.all_inline && can_map(q);
  const bool whole = p.tables.page_runs == 1;
  params.page_run_keys = config.key_tile / p.tables.page_runs;
  params.lanes_log = static_cast<std::int32_t>(std::bit_width(static_cast<unsigned>(p.tables.page_runs - 1)));
  const int box_rows = whole ? config.key_box_rows() : params.page_run_keys;
  const auto box_columns = [&](int dim) { return whole ? config.key_box_columns(dim) : kPanelColumns; };
  for (int i = 0; params.bulk_in && i < cuda::kInlineSources; ++i) {
    const cuda::SourceEntry& source = p.tables.inline_sources[i];
    if (source.rows == 0) continue;  // an empty source has no map
    const MappedTensor k{source.k, source.rows, p.kv_heads, p.head_dim, source.k_token_stride, source.k_head_stride};
    const MappedTensor v{source.v, source.rows, p.kv_heads, p.head_dim_v, source.v_token_stride, source.v_head_stride};
    params.bulk_in = !source.has_pages() && can_map(k) && can_map(v);
    if (!params.bulk_in) break;
    params.k[i] = map_tensor(k, dtype, box_rows, box_columns(p.head_dim));
    params.v[i] = map_tensor(v, dtype, box_rows, box_columns(p.head_dim_v));
  }
  if (params.bulk_in) params.q = map_tensor(q, dtype, kQueryTile, AttentionConfig::box_columns(p.head_dim));
  const MappedTensor out{p.out.data, p.rows, p.heads, p.head_dim_v, p.out.token_stride, p.out.head_stride};
  params.bulk_out = p.finish && can_map(out);
  if (params.bulk_out) params.out = map_tensor(out, dtype, kQueryTile / 4, kPanelColumns);
  params.overlaps_epilogue = params.bulk_out && !p.state.resume && !p.state.save && !p.softmax.scaled_first;
  return params;
}

void check_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const auto attribute = [device](cudaDeviceAttr name) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
    return value;
  };
  const std::string obstacle =
      device_obstacle(attribute(cudaDevAttrReservedSharedMemoryPerBlock), attribute(cudaDevAttrMultiProcessorCount));
  if (!obstacle.empty()) {
    fail(ErrorCode::kUnsupported, fmt::format("sm90_attention can't run on GPU {}", device), obstacle,
         {"Use ", setting("kernel", "sm80_attention"), "."});
  }
}

}  // namespace ringattn::sm90
