// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/peer_file.hpp"

#include <fmt/format.h>

#include <utility>

#include "base/error.hpp"
#include "ops/common/output_tensor.hpp"

namespace ringattn {

PeerFile::PeerFile(const std::string& path, const JobInput& input)
    : file_(std::make_unique<const SafetensorsFile>(path)), grid_(input.out_grid()) {
  if (!file_->contains("out")) {
    fail(ErrorCode::kFile, fmt::format("{} can't be compared", path), "it has no tensor out",
         {setting("peer"), " takes a file with another system's out, and its lse if it has one."});
  }
  out_ = file_->tensor("out");
  check_output_tensor(path, out_, grid_.shape(), file_dtype(input.job().spec.dtype));
  if (!file_->contains("lse")) return;
  lse_ = file_->tensor("lse");
  check_output_tensor(path, *lse_, lse_shape(grid_), FileDtype::kF32);
}

std::vector<FileFingerprint> PeerFile::fingerprints() const {
  std::vector<TensorSource> tensors{out_};
  if (lse_) tensors.push_back(*lse_);
  return ringattn::fingerprints(tensors);
}

PeerFile::Rows PeerFile::read(std::span<const PackedRun> runs, Dtype dtype) const {
  Rows rows;
  const std::int64_t tokens = total_tokens(runs);
  const auto values = static_cast<std::size_t>(tokens * grid_.heads);
  rows.out_bytes = allocate_host(values * static_cast<std::size_t>(grid_.dim) * size_of(dtype));
  const MutableTensorView out =
      dense_view(static_cast<void*>(rows.out_bytes.data()), dtype, tokens, grid_.heads, grid_.dim);
  read_rows(out_, grid_, runs, out);
  rows.out = out;
  if (!lse_) return rows;
  rows.lse_bytes = allocate_host(values * sizeof(float));
  read_rows(*lse_, lse_grid(grid_), runs,
            dense_view(static_cast<void*>(rows.lse_bytes.data()), Dtype::kF32, tokens, grid_.heads, 1));
  rows.lse = {reinterpret_cast<float*>(rows.lse_bytes.data()), grid_.heads, 1};
  return rows;
}

}  // namespace ringattn
