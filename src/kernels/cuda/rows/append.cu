// SPDX-License-Identifier: Apache-2.0
// Rows that join a compressed cache, on any GPU: one launch, which a graph may hold. Lengths and block tables lie on
// the device.
#include "kernels/cuda/rows/row_launch.hpp"
#include "kernels/cuda/rows/row_writer.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 32 * kGroupWarps;
constexpr int kWarps = kThreads / 32;
// Pages have multiples of so many tokens, and a group of kInt4Channel begins at a multiple: its tokens lie one behind
// the other in pieces of so many.
constexpr int kTokensTogether = 16;
constexpr int kMaxGroup = 64;

// Where the new rows of a sequence go, for a head.
struct NewRows {
  const AppendParams& p;
  std::int64_t sequence, length;
  int head;

  __device__ NewRows(const AppendParams& params, int of_head)
      : p(params), sequence(blockIdx.x), length(params.places.lengths[blockIdx.x]), head(of_head) {}

  // Whether the sequence gets none.
  __device__ bool none() const {
    if (length_out_of_range(p.places, length).kind != OutOfRangeEntry::Kind::kNone) return true;
    return p.places.checked != nullptr && p.places.checked[sequence] == 0;
  }
  __device__ std::byte* at(int stream, const PageSlot& place) const {
    return p.rows.streams[stream].at(place.token, head) + place.page * p.page_strides[stream];
  }
  // Calls with(row, token among all new ones, position in the sequence, place) for those that have a place.
  template <class With>
  __device__ void each(const With& with) const {
    for (int i = 0; i < p.places.rows; ++i) {
      const std::int64_t position = length - p.places.rows + i;
      const PageSlot place = page_slot_of(p.places, sequence, position);
      if (place.page < 0) continue;
      const std::int64_t token = sequence * p.places.rows + i;
      with(p.rows.plain.at(token, head), token, position, place);
    }
  }
};

// A warp has a head of a sequence, and takes its new rows in order.
template <class Element, int kQuads>
__global__ void __launch_bounds__(kThreads, 3) append_kernel(const __grid_constant__ AppendParams p) {
  const RowParams& rows = p.rows;
  const auto head = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
  if (head >= rows.heads) return;
  const NewRows fresh(p, head);
  if (fresh.none()) return;
  fresh.each([&](const std::byte* plain, std::int64_t token, std::int64_t, const PageSlot& place) {
    RowQuads<kQuads> quads;
    quads.load(rows, plain);
    if (rows.fault != nullptr) quads.template check<Element>(rows, token, head);
    std::byte* streams[kMaxStreams];
#pragma unroll
    for (int s = 0; s < kMaxStreams; ++s) streams[s] = fresh.at(s, place);
    const RowWriter<Element, kQuads> writer(rows, quads);
    switch (rows.format.encoding) {  // neither formats with a rank nor plain ones are appended to
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

// Of kInt4Channel: a block has a head of a sequence. A row joins the tail, and a group that has become full becomes
// quantized.
template <class Element>
__global__ void __launch_bounds__(kThreads) append_group_kernel(const __grid_constant__ AppendParams p) {
  __shared__ PageSlot together[kMaxGroup / kTokensTogether];
  __shared__ GroupExtremes extremes[kGroupWarps][kMaxQuads];
  const RowParams& rows = p.rows;
  const auto head = static_cast<int>(blockIdx.y);
  const NewRows fresh(p, head);
  if (fresh.none()) return;
  const int group = rows.format.group;
  const auto tail_at = [&](std::int64_t t) {
    return rows.tables[0] +
           ((fresh.sequence * group + t) * rows.heads + head) * static_cast<std::int64_t>(2 * rows.dim);
  };
  fresh.each([&](const std::byte* plain, std::int64_t token, std::int64_t position, const PageSlot& place) {
    if (threadIdx.x < 32) {
      write_tail(rows, plain, tail_at(position % group), fresh.at(0, place), fresh.at(1, place),
                 [&](uint2 raw, int channel) {
                   if (rows.fault != nullptr) check_elements<Element>(rows, raw, 0, token, head, channel);
                 });
    }
    if ((position + 1) % group != 0) return;
    const std::int64_t first = position + 1 - group;
    if (threadIdx.x < group / kTokensTogether) {
      together[threadIdx.x] = page_slot_of(p.places, fresh.sequence, first + threadIdx.x * kTokensTogether);
    }
    __syncthreads();  // places are there, and so are the row that has just come and what was cleared for it
    write_group_together<Element>(
        rows, extremes, [&](int t) { return tail_at(t); },
        [&](int stream, int t) -> std::byte* {
          PageSlot of_token = together[t / kTokensTogether];
          of_token.token += t % kTokensTogether;
          return of_token.page < 0 ? nullptr : fresh.at(stream, of_token);
        });
    __syncthreads();
  });
}

template <class Element>
void launch(const AppendParams& p, Stream stream) {
  const cudaStream_t queue = cuda_stream(stream);
  const auto sequences = static_cast<unsigned>(p.places.sequences), heads = static_cast<unsigned>(p.rows.heads);
  const dim3 grid(sequences, (heads + kWarps - 1) / kWarps);
  if (p.rows.format.encoding == RowEncoding::kInt4Channel) {
    append_group_kernel<Element><<<dim3(sequences, heads), kThreads, 0, queue>>>(p);
  } else if (p.rows.dim <= kLaneStep) {
    append_kernel<Element, 1><<<grid, kThreads, 0, queue>>>(p);
  } else if (p.rows.dim <= 2 * kLaneStep) {
    append_kernel<Element, 2><<<grid, kThreads, 0, queue>>>(p);
  } else {
    append_kernel<Element, 5><<<grid, kThreads, 0, queue>>>(p);
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
  p.rows = row_params(cache.format, cache.shape, streams, task.rows, {}, task.fault);
  p.rows.by_four = p.rows.by_four && takes_four(p.rows, p.page_strides);
  p.places = *task.update;
  if (p.rows.bf16) {
    launch<__nv_bfloat16>(p, stream);
  } else {
    launch<__half>(p, stream);
  }
}

}  // namespace ringattn::cuda
