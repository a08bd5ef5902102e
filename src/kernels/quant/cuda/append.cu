// SPDX-License-Identifier: Apache-2.0
// Appends rows to a compressed cache on any GPU, in one launch that a graph may capture. Lengths and block tables are
// on the device.
#include "kernels/quant/cuda/row_launch.hpp"
#include "kernels/quant/cuda/row_writer.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kAppendThreads = 32 * kGroupWarps;
constexpr int kWarps = kAppendThreads / 32;
// Page sizes are multiples of this number of tokens, and a group of kInt4Channel begins at a multiple of it. So this
// many tokens of a group are contiguous in a page.
constexpr int kContiguousTokens = 16;
constexpr int kMaxGroup = 64;

// Page slots of the new rows of a sequence, for a head.
struct NewRows {
  const AppendParams& p;
  std::int64_t sequence, length;
  int head;

  __device__ NewRows(const AppendParams& params, int of_head)
      : p(params), sequence(blockIdx.x), length(params.update.lengths[blockIdx.x]), head(of_head) {}

  // Returns true if nothing is appended to the sequence.
  __device__ bool none() const {
    if (length_out_of_range(p.update, length).kind != OutOfRangeEntry::Kind::kNone) return true;
    return p.update.checked != nullptr && p.update.checked[sequence] == 0;
  }
  __device__ std::byte* at(int stream, const PageSlot& slot) const {
    return p.rows.streams[stream].at(slot.token, head) + slot.page * p.page_strides[stream];
  }
  // Calls with(row, token among all new ones, position in the sequence, slot) for rows that have a page slot.
  template <class With>
  __device__ void each(const With& with) const {
    for (int i = 0; i < p.update.rows; ++i) {
      const std::int64_t position = length - p.update.rows + i;
      const PageSlot slot = page_slot_of(p.update, sequence, position);
      if (slot.page < 0) continue;
      const std::int64_t token = sequence * p.update.rows + i;
      with(p.rows.plain.at(token, head), token, position, slot);
    }
  }
};

// A warp has a head of a sequence and appends its new rows in order.
template <class Element, int kQuads>
__global__ void __launch_bounds__(kAppendThreads, 3) append_kernel(const __grid_constant__ AppendParams p) {
  const RowParams& rows = p.rows;
  const auto head = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
  if (head >= rows.heads) return;
  const NewRows new_rows(p, head);
  if (new_rows.none()) return;
  new_rows.each([&](const std::byte* plain, std::int64_t token, std::int64_t, const PageSlot& slot) {
    RowQuads<kQuads> quads;
    quads.load(rows, plain);
    if (rows.invalid != nullptr) quads.template check<Element>(rows, token, head);
    std::byte* streams[kMaxStreams];
#pragma unroll
    for (int s = 0; s < kMaxStreams; ++s) streams[s] = new_rows.at(s, slot);
    const RowWriter<Element, kQuads> writer(rows, quads);
    switch (rows.format.encoding) {  // formats with a rank and plain formats are not appended to
      case RowEncoding::kFp8:
        writer.template write<RowEncoding::kFp8>(streams, head, plain, nullptr);
        break;
      case RowEncoding::kInt8:
        writer.template write<RowEncoding::kInt8>(streams, head, plain, nullptr);
        break;
      case RowEncoding::kInt4Token:
        writer.template write<RowEncoding::kInt4Token>(streams, head, plain, nullptr);
        break;
      case RowEncoding::kVector:
        writer.template write<RowEncoding::kVector>(streams, head, plain, nullptr);
        break;
      case RowEncoding::kLatent:
        writer.template write<RowEncoding::kLatent>(streams, head, plain, nullptr);
        break;
      default:
        break;
    }
  });
}

// Appends to kInt4Channel. A thread block has a head of a sequence. A row goes to the tail, and a group that becomes
// full is quantized.
template <class Element>
__global__ void __launch_bounds__(kAppendThreads) append_group_kernel(const __grid_constant__ AppendParams p) {
  __shared__ PageSlot group_slots[kMaxGroup / kContiguousTokens];
  __shared__ GroupExtremes extremes[kGroupWarps][kMaxQuads];
  const RowParams& rows = p.rows;
  const auto head = static_cast<int>(blockIdx.y);
  const NewRows new_rows(p, head);
  if (new_rows.none()) return;
  const int group = rows.format.group;
  const auto tail_at = [&](std::int64_t t) {
    return rows.tables[0] +
           ((new_rows.sequence * group + t) * rows.heads + head) * static_cast<std::int64_t>(2 * rows.dim);
  };
  new_rows.each([&](const std::byte* plain, std::int64_t token, std::int64_t position, const PageSlot& slot) {
    if (threadIdx.x < 32) {
      write_tail(rows, plain, tail_at(position % group), new_rows.at(0, slot), new_rows.at(1, slot),
                 [&](uint2 raw, int channel) {
                   if (rows.invalid != nullptr) check_elements<Element>(rows, raw, 0, token, head, channel);
                 });
    }
    if ((position + 1) % group != 0) return;
    const std::int64_t first = position + 1 - group;
    if (threadIdx.x < group / kContiguousTokens) {
      group_slots[threadIdx.x] = page_slot_of(p.update, new_rows.sequence, first + threadIdx.x * kContiguousTokens);
    }
    __syncthreads();  // the slots, the new row in the tail, and what write_tail() cleared are visible
    write_group_by_block<Element>(
        rows, extremes, [&](int t) { return tail_at(t); },
        [&](int stream, int t) -> std::byte* {
          PageSlot slot = group_slots[t / kContiguousTokens];
          slot.token += t % kContiguousTokens;
          return slot.page < 0 ? nullptr : new_rows.at(stream, slot);
        });
    __syncthreads();
  });
}

template <class Element>
void launch_append(const AppendParams& p, Stream stream) {
  const cudaStream_t queue = cuda_stream(stream);
  const auto sequences = static_cast<unsigned>(p.update.sequences), heads = static_cast<unsigned>(p.rows.heads);
  const dim3 grid(sequences, (heads + kWarps - 1) / kWarps);
  if (p.rows.format.encoding == RowEncoding::kInt4Channel) {
    append_group_kernel<Element><<<dim3(sequences, heads), kAppendThreads, 0, queue>>>(p);
  } else if (p.rows.dim <= kLaneStep) {
    append_kernel<Element, 1><<<grid, kAppendThreads, 0, queue>>>(p);
  } else if (p.rows.dim <= 2 * kLaneStep) {
    append_kernel<Element, 2><<<grid, kAppendThreads, 0, queue>>>(p);
  } else {
    append_kernel<Element, 5><<<grid, kAppendThreads, 0, queue>>>(p);
  }
  check_cuda(cudaGetLastError(), "append");
}

template <class Element>
void load() {
  load_kernel(append_kernel<Element, 1>);
  load_kernel(append_kernel<Element, 2>);
  load_kernel(append_kernel<Element, 5>);
  load_kernel(append_group_kernel<Element>);
}

}  // namespace

void append(const AppendTask& task, Stream stream) {
  const CompressedCache& cache = task.cache;
  if (task.update->sequences == 0) {
    cache.shape.dtype == Dtype::kBf16 ? load<__nv_bfloat16>() : load<__half>();
    return;
  }
  CompressedRows streams;
  AppendParams p;
  for (std::size_t i = 0; i < kMaxStreams; ++i) {
    streams.streams[i] = {cache.streams[i].data, cache.streams[i].token_stride, cache.streams[i].head_stride};
    p.page_strides[i] = cache.streams[i].page_stride;
  }
  streams.tables = cache.tables;
  check_quantizable(cache.shape);
  p.rows = row_params(cache.format, cache.shape, streams, task.rows, {}, task.invalid);
  p.rows.by_four = p.rows.by_four && allows_4_channels(p.rows, p.page_strides);
  p.update = *task.update;
  if (p.rows.bf16) {
    launch_append<__nv_bfloat16>(p, stream);
  } else {
    launch_append<__half>(p, stream);
  }
}

}  // namespace ringattn::cuda
