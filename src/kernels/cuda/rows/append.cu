// SPDX-License-Identifier: Apache-2.0
// Rows that join a compressed cache, on any GPU: one launch, which a graph may hold. Lengths and block tables lie on
// the device.
#include "kernels/cuda/rows/row_launch.hpp"
#include "kernels/cuda/rows/row_writer.cuh"

namespace ringattn::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
// Pages have multiples of so many tokens, and a group of kInt4Channel begins at a multiple: its tokens lie one behind
// the other in pieces of so many.
constexpr int kTokensTogether = 16;
constexpr int kMostGroup = 64;

// A warp has a head of a sequence, and takes its new rows in order.
template <class Element, int kQuads>
__global__ void __launch_bounds__(kThreads, 3) append_kernel(const __grid_constant__ AppendParams p) {
  __shared__ CachePlace of_groups[kWarps][kMostGroup / kTokensTogether];
  const RowParams& rows = p.rows;
  const CacheUpdate& places = p.places;
  const std::int64_t sequence = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / 32);
  if (head >= rows.heads) return;
  const std::int64_t length = places.lengths[sequence];
  if (length_fault(places, length).kind != CacheFault::Kind::kNone) return;
  if (places.checked != nullptr && places.checked[sequence] == 0) return;
  const int group = rows.format.group;
  const auto at = [&](int stream, const CachePlace& place) {
    return rows.streams[stream].at(place.token, head) + place.page * p.page_strides[stream];
  };
  for (int i = 0; i < places.rows; ++i) {
    const std::int64_t position = length - places.rows + i;
    const CachePlace place = place_of_row(places, sequence, position);
    if (place.page < 0) continue;
    const std::int64_t token = sequence * places.rows + i;
    const std::byte* const plain = rows.plain.at(token, head);
    if (rows.format.coding != RowCoding::kInt4Channel) {
      RowQuads<kQuads> quads;
      quads.load(rows, plain);
      if (rows.fault != nullptr) quads.template check<Element>(rows, token, head);
      std::byte* streams[kMostStreams];
#pragma unroll
      for (int s = 0; s < kMostStreams; ++s) streams[s] = at(s, place);
      const RowWriter<Element, kQuads> writer(rows, quads);
      switch (rows.format.coding) {  // neither formats with a rank nor plain ones are appended to
        case RowCoding::kFp8:
          writer.template write<RowCoding::kFp8>(streams, head, plain, nullptr);
          break;
        case RowCoding::kInt8:
          writer.template write<RowCoding::kInt8>(streams, head, plain, nullptr);
          break;
        case RowCoding::kInt4Token:
          writer.template write<RowCoding::kInt4Token>(streams, head, plain, nullptr);
          break;
        case RowCoding::kVector:
          writer.template write<RowCoding::kVector>(streams, head, plain, nullptr);
          break;
        case RowCoding::kLatent:
          writer.template write<RowCoding::kLatent>(streams, head, plain, nullptr);
          break;
        default:
          break;
      }
      continue;
    }
    const auto tail_at = [&](std::int64_t t) {
      return rows.tables[0] + ((sequence * group + t) * rows.heads + head) * static_cast<std::int64_t>(2 * rows.dim);
    };
    write_tail(rows, plain, tail_at(position % group), at(0, place), at(1, place), [&](uint2 raw, int channel) {
      if (rows.fault != nullptr) check_elements<Element>(rows, raw, 0, token, head, channel);
    });
    if ((position + 1) % group != 0) continue;
    const std::int64_t first = position + 1 - group;
    CachePlace* const together = of_groups[threadIdx.x / 32];
    const auto lane = static_cast<int>(threadIdx.x % 32);
    if (lane < group / kTokensTogether) {
      together[lane] = place_of_row(places, sequence, first + lane * kTokensTogether);
    }
    __syncwarp();  // places are there; and a lane reads pairs' rows that another one has cleared
    write_group<Element>(
        rows, [&](int t) { return tail_at(t); },
        [&](int stream, int t) -> std::byte* {
          CachePlace of_token = together[t / kTokensTogether];
          of_token.token += t % kTokensTogether;
          return of_token.page < 0 ? nullptr : at(stream, of_token);
        },
        [](uint2, int, int) {});
    __syncwarp();
  }
}

template <class Element>
void launch(const AppendParams& p, dim3 grid, Stream stream) {
  const cudaStream_t queue = cuda_stream(stream);
  if (p.rows.dim <= kLaneStep) {
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
}

}  // namespace

void append(const AppendTask& task, Stream stream) {
  const CompressedCache& cache = task.cache;
  if (task.places->sequences == 0) {
    cache.shape.dtype == Dtype::kBf16 ? load<__nv_bfloat16>() : load<__half>();
    return;
  }
  CompressedRows streams;
  AppendParams p;
  for (std::size_t i = 0; i < kMostStreams; ++i) {
    streams.streams[i] = {cache.streams[i].data, cache.streams[i].token_stride, cache.streams[i].head_stride};
    p.page_strides[i] = cache.streams[i].page_stride;
  }
  streams.tables = cache.tables;
  check_coded(cache.shape);
  p.rows = row_params(cache.format, cache.shape, streams, task.rows, {}, task.fault);
  p.rows.by_four = p.rows.by_four && takes_four(p.rows, p.page_strides);
  p.places = *task.places;
  const dim3 grid(static_cast<unsigned>(p.places.sequences),
                  static_cast<unsigned>((p.rows.heads + kWarps - 1) / kWarps));
  if (p.rows.bf16) {
    launch<__nv_bfloat16>(p, grid, stream);
  } else {
    launch<__half>(p, grid, stream);
  }
}

}  // namespace ringattn::cuda
