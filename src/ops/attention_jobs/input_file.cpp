// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/input_file.hpp"

#include "base/error.hpp"
#include "ops/attention_jobs/position_tensors.hpp"
#include "ops/decode/cache_tensors.hpp"

namespace ringattn {

namespace {

InputTensors find_tensors(const SafetensorsFile& file, const FileInput& input,
                          std::optional<CompressedTensors>& compressed, std::optional<MlaTensors>& latents) {
  const bool latent = holds_latents(file, input.names);
  const bool cache = !latent && holds_cache(file, input.names);
  if (latent && holds_positions(file)) refuse_positions(file, "latents");
  if (cache) {
    InputTensors pages = find_cache(file, input.names, input.order, input.page_order, compressed);
    if (holds_positions(file)) read_positions(file, input.names, pages);
    return pages;
  }
  refuse_page_order(file, input);
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

InputFile::InputFile(std::shared_ptr<const TensorFile> opened_file)
    : opened(std::move(opened_file)), tensors(find_tensors(opened->file, opened->request, compressed, latents)) {}

std::shared_ptr<const InputFile> open_input_file(const FileInput& input, JobShare& share) {
  std::shared_ptr<const TensorFile> opened = open_tensor_file(input, share);
  return share.attention.get([&](const InputFile& found) { return found.opened == opened; },
                             [&] { return std::make_shared<const InputFile>(opened); });
}

}  // namespace ringattn
