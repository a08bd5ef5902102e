// SPDX-License-Identifier: Apache-2.0
#include "attention/files/list_request.hpp"

#include <mutex>
#include <utility>

#include "attention/files/list_tensors.hpp"
#include "base/pulse.hpp"
#include "base/pulsing_lock.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kSuffix = ".safetensors";

RequestedLists make_requested(const ListRequest& request, const Job& job, const BestBlocks& best) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 29;
  ListRoom room{kMostBytes, "they lie in the host's memory, and may take no more"};
  if (request.memory_budget > 0 && request.memory_budget < static_cast<std::size_t>(kMostBytes)) {
    room = {static_cast<std::int64_t>(request.memory_budget), "a rank's memory budget is no larger"};
  }
  if (!request.text.ends_with(kSuffix)) {
    return {std::make_shared<const TileLists>(lists_of_pattern(request.text, job, best, room)), nullptr, {}};
  }
  auto file = std::make_shared<const SafetensorsFile>(request.text);
  auto lists = std::make_shared<const TileLists>(lists_of_file(*file, job, room));
  std::vector<TensorSource> used = list_tensors(*file);
  return {std::move(lists), std::move(file), std::move(used)};
}

// What was asked for, and the answer.
struct SharedLists {
  ListRequest request;
  Job job;
  RequestedLists made;

  bool answers(const ListRequest& other, const Job& of) const {
    return request.text == other.text && request.file == other.file && request.seed == other.seed &&
           request.memory_budget == other.memory_budget && job.spec == of.spec && job.format == of.format &&
           job.batch == of.batch && (made.file == nullptr || made.file->is_current());
  }
};

}  // namespace

RequestedLists requested_lists(const ListRequest& request, const Job& job, const BestBlocks& best) {
  static std::mutex mutex;
  static std::weak_ptr<const SharedLists> last;
  const auto lock = lock_with_pulse(mutex);
  std::shared_ptr<const SharedLists> shared = last.lock();
  if (!shared || !shared->answers(request, job)) {
    shared = std::make_shared<const SharedLists>(SharedLists{request, job, make_requested(request, job, best)});
    last = shared;
  }
  return {{shared, shared->made.lists.get()}, shared->made.file, shared->made.used};
}

}  // namespace ringattn
