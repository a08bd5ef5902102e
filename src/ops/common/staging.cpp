// SPDX-License-Identifier: Apache-2.0
#include "ops/common/staging.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/gpu.hpp"

namespace ringattn {

namespace {

constexpr std::size_t kHalfBytes = std::size_t{32} << 20;

}  // namespace

std::vector<PackedRun> part_of(std::span<const PackedRun> runs, std::int64_t skip, std::int64_t rows) {
  std::vector<PackedRun> piece;
  for (const PackedRun& run : runs) {
    if (rows == 0) break;
    if (skip >= run.tokens()) {
      skip -= run.tokens();
      continue;
    }
    const std::int64_t begin = run.begin + skip;
    const std::int64_t end = std::min(run.end, begin + rows);
    piece.push_back({begin, end});
    rows -= end - begin;
    skip = 0;
  }
  return piece;
}

Staging::Staging(Backend& backend, const Timeouts& timeouts) : backend_(backend), timeouts_(timeouts) {
  if (backend.memory() == MemoryKind::kHost) return;
  copied_ = backend.make_events(std::size(halves_), false);
  for (Half& half : halves_) half.bytes = allocate_pinned(kHalfBytes);
}

void Staging::load(std::span<const PackedRun> runs, const MutableTensorView& target, const Fill& fill,
                   const Moved& moved) {
  const std::int64_t rows = target.tokens;
  const auto row_bytes =
      static_cast<std::size_t>(target.heads * target.dim) * size_of(target.dtype);  // not called for 0 rows
  if (rows == 0) return;
  const auto most = static_cast<std::int64_t>(std::max<std::size_t>(1, kHalfBytes / row_bytes));
  for (std::int64_t done = 0; done < rows;) {
    const std::int64_t count = std::min(most, rows - done);
    const std::vector<PackedRun> piece = part_of(runs, done, count);
    MutableTensorView host = target;
    host.tokens = count;
    host.data = target.at(done, 0);
    if (backend_.memory() == MemoryKind::kHost) {
      fill(piece, host);
    } else {
      Half& half = take();
      // A row larger than the buffer gets one of its own size.
      const std::size_t bytes = static_cast<std::size_t>(count) * row_bytes;
      if (half.bytes.bytes() < bytes) half.bytes = allocate_pinned(bytes);
      host.data = half.bytes.data();
      fill(piece, host);
      send(half, target.at(done, 0), half.bytes.data(), bytes);
    }
    done += count;
    if (moved) moved(done);
  }
  finish();
}

void Staging::store(const std::byte* source, std::byte* target, std::size_t bytes) {
  if (bytes == 0) return;
  if (backend_.memory() == MemoryKind::kHost) {
    std::memcpy(target, source, bytes);
    return;
  }
  struct Landed {
    Half* half;
    std::byte* target;
    std::size_t bytes;
  };
  std::vector<Landed> landing;  // copies in flight, the oldest first
  const auto land = [&] {
    const Landed& first = landing.front();
    await_copy(*first.half);
    std::memcpy(first.target, first.half->bytes.data(), first.bytes);
    landing.erase(landing.begin());
  };
  for (std::size_t at = 0; at < bytes; at += kHalfBytes) {
    if (landing.size() == std::size(halves_)) land();
    const std::size_t count = std::min(kHalfBytes, bytes - at);
    Half& half = take();
    send(half, half.bytes.data(), source + at, count);
    landing.push_back({&half, target + at, count});
  }
  while (!landing.empty()) land();
}

Staging::Half& Staging::take() {
  Half& half = halves_[next_];
  next_ = 1 - next_;
  await_copy(half);
  return half;
}

void Staging::await_copy(Half& half) {
  if (half.in_flight) copied_->synchronize(number_of(half), timeouts_.for_peer(), {});
  half.in_flight = false;
}

void Staging::send(Half& half, void* target, const void* source, std::size_t bytes) {
  const auto size = static_cast<std::int64_t>(bytes);
  backend_.copy_rows(target, size, source, size, size, 1, backend_.stream());
  copied_->record(number_of(half), backend_.stream());
  half.in_flight = true;
}

void Staging::finish() {
  for (Half& half : halves_) await_copy(half);
}

MutableTensorView make_rows(Backend& backend, Dtype dtype, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                            Buffer& memory) {
  memory = backend.allocate(static_cast<std::size_t>(tokens * heads * dim) * size_of(dtype));
  return dense_view(static_cast<void*>(memory.data()), dtype, tokens, heads, dim);
}

void mark_unwritten(Backend& backend, std::initializer_list<const Buffer*> buffers) {
  constexpr std::byte kUnwritten{0xff};
  for (const Buffer* buffer : buffers) {
    if (buffer->bytes() > 0) backend.fill_bytes(buffer->data(), kUnwritten, buffer->bytes(), backend.stream());
  }
}

void bring_to_host(Backend& backend, const Timeouts& timeouts, std::initializer_list<Buffer*> buffers) {
  if (backend.memory() == MemoryKind::kHost) return;
  Staging staging(backend, timeouts);
  for (Buffer* buffer : buffers) {
    Buffer host = allocate_host(buffer->bytes());
    staging.store(buffer->data(), host.data(), buffer->bytes());
    *buffer = std::move(host);
  }
}

void await(Backend& backend, const Timeouts& timeouts) {
  backend.synchronize(backend.stream(), timeouts.for_peer(), {});
}

}  // namespace ringattn
