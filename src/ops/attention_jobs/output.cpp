// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/output.hpp"

#include <fmt/format.h>

#include <memory>

#include "base/build.hpp"
#include "base/failpoint.hpp"
#include "ops/common/digest.hpp"

namespace ringattn {

Digests digest_result(const JobInput& input, const RankResult& result, const Collective& collective) {
  const AttentionSpec& spec = input.job().spec;
  const std::int64_t tokens = input.job().batch.q_tokens();
  return {digest(collective, result.out_view(spec), result.runs, tokens),
          digest(collective, result.lse_view(spec), spec.heads, result.runs, tokens)};
}

void write_collectively(const Collective& collective, const std::vector<OutputTensor>& tensors,
                        const FileMetadata& metadata, const std::string& path, bool replace,
                        const std::function<void(SafetensorsWriter&)>& write) {
  SafetensorsPlan plan;
  std::unique_ptr<SafetensorsWriter> writer;
  collective.run_collectively([&] {
    plan = plan_safetensors(tensors, metadata);
    if (collective.rank() == 0) writer = SafetensorsWriter::create(plan, path, replace);
  });
  const std::string mine = writer ? writer->temporary_path() : std::string();
  const std::string temporary = collective.gather(mine).front();
  collective.run_collectively([&] {
    if (!writer) writer = SafetensorsWriter::open_existing(plan, temporary);
  });
  collective.run_collectively([&] {
    write(*writer);
    writer->sync();
  });
  collective.run_collectively([&] {
    failpoint("renaming");
    if (collective.rank() == 0) writer->commit();
  });
  writer->release();
}

void write_output(const JobInput& input, const RankResult& result, const std::string& path, bool replace,
                  const FileMetadata& metadata, const Collective& collective) {
  const AttentionSpec& spec = input.job().spec;
  const RowGrid& grid = input.out_grid();
  const std::vector<OutputTensor> tensors{{"out", file_dtype(spec.dtype), grid.shape()},
                                          {"lse", FileDtype::kF32, lse_shape(grid)}};
  write_collectively(collective, tensors, metadata, path, replace, [&](SafetensorsWriter& writer) {
    writer.write_rows("out", grid, result.runs, result.out_view(spec));
    failpoint("writing");
    writer.write_lse("lse", grid, result.runs, result.lse_view(spec));
  });
}

FileMetadata output_metadata(const KernelEntry& kernel, const std::string& target) {
  return {{"tool", fmt::format("ringattn {}", version())},
          {"git", fmt::format("{}{}", git_revision(), git_dirty() ? "-dirty" : "")},
          {"kernel", std::string(kernel.name)},
          {"target", target}};
}

FileMetadata output_metadata(const KernelEntry& kernel, const std::string& target, const Digests& digests) {
  FileMetadata metadata = output_metadata(kernel, target);
  metadata.insert(metadata.end(), {{"digest.out", digests.out}, {"digest.lse", digests.lse}});
  return metadata;
}

}  // namespace ringattn
