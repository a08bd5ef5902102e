// SPDX-License-Identifier: Apache-2.0
#include "ops/common/input_file.hpp"

#include "base/error.hpp"
#include "ops/common/position_tensors.hpp"
#include "ops/decode/cache_tensors.hpp"

namespace ringattn {

namespace {

InputTensors find_tensors(const SafetensorsFile& file, const FileInput& input,
                          std::optional<CompressedTensors>& compressed, std::optional<MlaTensors>& latents,
                          std::optional<SsmTensors>& scan) {
  const bool scans = holds_ssm(file, input.names);
  const bool latent = !scans && holds_latents(file, input.names);
  const bool cache = !scans && !latent && holds_cache(file, input.names);
  if (latent && holds_positions(file)) refuse_positions(file, "latents");
  if (cache) {
    InputTensors pages = find_cache(file, input.names, input.order, input.page_order, compressed);
    if (holds_positions(file)) read_positions(file, input.names, pages);
    return pages;
  }
  if (input.page_order) {
    fail(ErrorCode::kUsage, {setting("page_order", axis_order_name(*input.page_order)), " without pages"},
         file.path() + " holds no paged keys and values", "Leave it out, or check the tensors' names.");
  }
  if (scans) {
    scan = find_ssm(file, input.names, input.order);
    return {};
  }
  if (!latent) {
    InputTensors rows = holds_compressed(file) ? find_compressed(file, input.names, input.order, compressed)
                                               : find_input(file, input.names, input.order);
    if (holds_positions(file)) read_positions(file, input.names, rows);
    return rows;
  }
  auto [tensors, found] = find_latents(file, input.names, input.order, input.latent_dim);
  latents = found;
  return std::move(tensors);
}

}  // namespace

InputFile::InputFile(const FileInput& input)
    : request(input), file(input.path), tensors(find_tensors(file, input, compressed, latents, ssm)) {}

std::shared_ptr<const InputFile> open_input_file(const FileInput& input, JobShare& share) {
  return share.file.get([&](const InputFile& open) { return open.request == input && open.file.is_current(); },
                        [&] { return std::make_shared<const InputFile>(input); });
}

}  // namespace ringattn
