// SPDX-License-Identifier: Apache-2.0
#include "ops/rope/rope.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

#include "attention/ring/enqueued_runs.hpp"
#include "base/device_timeouts.hpp"
#include "base/error.hpp"
#include "base/host.hpp"
#include "ops/common/memory_shape.hpp"
#include "ops/common/shard_checks.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kMaxRopeHeads = 1 << 16;
constexpr const char* kTensorNames[] = {"q", "k"};

[[noreturn]] void refuse_task(const std::string& what, const std::string& why, const std::string& suggestion) {
  fail(ErrorCode::kUsage, what, why, suggestion);
}

bool is_in_place(const RopeTensor& tensor) {
  return tensor.x.data == tensor.y.data && tensor.x.token_stride == tensor.y.token_stride &&
         tensor.x.head_stride == tensor.y.head_stride;
}

void check_tensor(const RopeSpec& spec, const char* name, const RopeTensor& tensor, std::int64_t tokens) {
  const TensorView& x = tensor.x;
  if (x.heads < 0 || x.heads > kMaxRopeHeads) {
    refuse_task(fmt::format("{} has {} heads", name, x.heads), fmt::format("at most {} are possible", kMaxRopeHeads),
                "Check the order of its axes.");
  }
  check_shard("Rope", name, x, {spec.dtype, tokens, x.heads, spec.head_dim});
  check_shard("Rope", name, tensor.y, {spec.dtype, tokens, x.heads, spec.head_dim});
  if (tokens == 0 || x.heads == 0) return;
  if (x.data == nullptr || tensor.y.data == nullptr) {
    refuse_task(fmt::format("{} is missing", name), fmt::format("there are {} tokens", tokens), "Pass it.");
  }
  if (!is_in_place(tensor)) check_apart(name, tensor.y, name, x);
  if (!MemoryShape(TensorView(tensor.y)).overlaps_itself()) return;
  refuse_task(fmt::format("the rotated {} has strides {} and {}", name, tensor.y.token_stride, tensor.y.head_stride),
              "its rows would overlap", "Give each row memory of its own.");
}

void check_rope_call(const RopeSpec& spec, const RopeTask& task) {
  if (task.tensors.empty() || task.tensors.size() > kMaxRopeTensors) {
    refuse_task(fmt::format("{} tensors are to be rotated", task.tensors.size()), "there are one or two",
                "Pass q or k.");
  }
  const std::int64_t tokens = task.tensors.front().x.tokens;
  for (std::size_t i = 0; i < task.tensors.size(); ++i) check_tensor(spec, kTensorNames[i], task.tensors[i], tokens);
  if (task.tensors.size() < 2 || tokens == 0) return;
  const RopeTensor& q = task.tensors[0];
  const RopeTensor& k = task.tensors[1];
  check_apart("rotated q", q.y, "k", k.x);
  check_apart("rotated k", k.y, "q", q.x);
  check_apart("rotated q", q.y, "rotated k", k.y);
}

}  // namespace

struct Rope::Impl {
  Impl(RopeSpec the_spec, const RopeOptions& options) : spec(std::move(the_spec)) {
    check_rope(spec);
    choice = choose_kernel(spec, options.kernel);
    const int threads = options.threads == 0 ? usable_processors().count : options.threads;
    backend = choice.row->make_backend({threads, options.device});
    kernel = choice.row->make_kernel(spec, *backend);
    ended = backend->make_events(1, false);
  }

  RopeSpec spec;
  RopeChoice choice;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<RopeKernel> kernel;
  std::unique_ptr<Events> ended;  // end of the last enqueued rotation
};

Rope::Rope(RopeSpec spec, RopeOptions options) : impl_(std::make_unique<Impl>(std::move(spec), options)) {}

Rope::~Rope() = default;
Rope::Rope(Rope&&) noexcept = default;

const RopeSpec& Rope::spec() const { return impl_->spec; }
const RopeChoice& Rope::kernel() const { return impl_->choice; }
Backend& Rope::backend() { return *impl_->backend; }
std::size_t Rope::memory_bytes() const { return impl_->kernel->memory_bytes(); }

void Rope::enqueue(const RopeTask& task, Stream stream) {
  Impl& impl = *impl_;
  check_rope_call(impl.spec, task);
  if (task.tensors.front().x.tokens == 0) return;
  impl.kernel->rotate(task, stream, {});
  if (!impl.backend->is_capturing(stream)) impl.ended->record(0, stream);
}

void Rope::wait() { impl_->ended->synchronize(0, DeviceTimeouts::for_queue(), {}); }

void Rope::run(const RopeTask& task, Stream stream) {
  check_not_captured(*impl_->backend, stream);
  enqueue(task, stream);
  wait();
}

}  // namespace ringattn
