// SPDX-License-Identifier: Apache-2.0
#include "ops/common/tensor_file.hpp"

#include "base/error.hpp"

namespace ringattn {

std::shared_ptr<const TensorFile> open_tensor_file(const FileInput& input, JobShare& share) {
  return share.file.get([&](const TensorFile& open) { return open.request == input && open.file.is_current(); },
                        [&] { return std::make_shared<const TensorFile>(input); });
}

void refuse_page_order(const SafetensorsFile& file, const FileInput& input) {
  if (!input.page_order) return;
  fail(ErrorCode::kUsage, {setting("page_order", axis_order_name(*input.page_order)), " without pages"},
       file.path() + " holds no paged keys and values", "Leave it out, or check the tensors' names.");
}

}  // namespace ringattn
