// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention/sm90/tensor_maps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "base/cuda.hpp"
#include "base/error.hpp"
#include "kernels/attention/sm90/config.hpp"

namespace ringattn::sm90 {

namespace {

constexpr std::int64_t kElementBytes = 2;
constexpr std::int64_t kAlignment = 16;

// The driver's function, looked up at run time so that a program starts without a driver.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
               "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess) {
      fail(ErrorCode::kUnsupported, "the CUDA driver has no tensor maps", "cuTensorMapEncodeTiled was not found",
           {"Use a newer driver, or ", setting("kernel", "sm80_attention"), "."});
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

bool can_map_stride(std::int64_t elements) {
  constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;  // bytes, exclusive
  return elements > 0 && elements * kElementBytes % kAlignment == 0 && elements * kElementBytes < kMaxStride;
}

// A box narrower than a panel is its own panel, with the swizzle of its width.
CUtensorMapSwizzle swizzle_of(int box_columns) {
  return box_columns == 16   ? CU_TENSOR_MAP_SWIZZLE_32B
         : box_columns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                             : CU_TENSOR_MAP_SWIZZLE_128B;
}

// `rank` is the map's: 4 leaves out the page dimension.
CUtensorMap encode(const MappedPages& pages, unsigned rank, Dtype dtype, int box_rows, int box_columns,
                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  const MappedTensor& tensor = pages.page;
  const auto size = [](std::int64_t n) { return static_cast<cuuint64_t>(n); };
  const int panel = std::min(box_columns, kPanelColumns);
  const std::int64_t panels = box_columns / panel;
  const cuuint64_t sizes[5] = {size(tensor.columns - (panels - 1) * panel), size(tensor.rows), size(panels),
                               size(tensor.heads), size(pages.pages)};
  const cuuint64_t strides[4] = {size(tensor.token_stride * kElementBytes), size(panel * kElementBytes),
                                 size(tensor.head_stride * kElementBytes), size(pages.page_stride * kElementBytes)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(panel), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(panels), 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank,
                const_cast<void*>(tensor.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(ErrorCode::kInternal, "the driver refuses a tensor map",
         fmt::format("error {} for {} x [{}, {}, {}], strides {}, {} and {}", static_cast<int>(result), pages.pages,
                     tensor.rows, tensor.heads, tensor.columns, pages.page_stride, tensor.token_stride,
                     tensor.head_stride));
  }
  return map;
}

}  // namespace

bool can_map(const MappedTensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(kAlignment) == 0 &&
         can_map_stride(tensor.token_stride) && can_map_stride(tensor.head_stride) && tensor.rows > 0 &&
         tensor.rows < std::numeric_limits<std::int32_t>::max();
}

bool can_map(const MappedPages& tensor) {
  if (tensor.pages == 0) return true;
  return can_map(tensor.page) && can_map_stride(tensor.page_stride) && tensor.pages > 0 &&
         tensor.pages < std::numeric_limits<std::int32_t>::max();
}

CUtensorMap map_tensor(const MappedTensor& tensor, Dtype dtype, int box_rows, int box_columns) {
  return encode({tensor, 1, tensor.head_stride}, 4, dtype, box_rows, box_columns, swizzle_of(box_columns),
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

CUtensorMap map_matrix(const MappedTensor& tensor, Dtype dtype, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(tensor.columns), static_cast<cuuint64_t>(tensor.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(tensor.token_stride * kElementBytes)};
  const cuuint32_t box[2] = {kPanelColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  CUtensorMap map;
  const CUresult result =
      encoder()(&map, dtype == Dtype::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                const_cast<void*>(tensor.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    fail(ErrorCode::kInternal, "the driver refuses a tensor map",
         fmt::format("error {} for [{}, {}], stride {}", static_cast<int>(result), tensor.rows, tensor.columns,
                     tensor.token_stride));
  }
  return map;
}

CUtensorMap map_pages(const MappedPages& tensor, Dtype dtype, int box_rows, int box_columns) {
  if (tensor.pages == 0) return {};  // a rank without KV splits reads no pages
  return encode(tensor, 5, dtype, box_rows, box_columns, swizzle_of(box_columns), CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

CUtensorMap map_plain_pages(const MappedPages& tensor, int box_rows, int box_columns) {
  if (tensor.pages == 0) return {};
  return encode(tensor, 5, Dtype::kBf16, box_rows, box_columns, CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

}  // namespace ringattn::sm90
