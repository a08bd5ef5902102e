// SPDX-License-Identifier: Apache-2.0
// What the ranks of a process share of a job's input: opened, read or made once, by the first rank that asks. Whoever
// starts a job makes one, and passes it to the ranks that are threads of the process.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "base/heartbeat_lock.hpp"

namespace ringattn {

struct InputFile;
struct SsmFile;
struct SharedBlockMask;
struct SyntheticTensors;
struct TensorFile;

// The last value, as long as somebody holds it, or the share itself (`keep`).
template <typename Value>
class MadeOnce {
 public:
  explicit MadeOnce(bool keep = false) : keep_(keep) {}

  // The last value if it is the `same` as the wanted one, else the one that `make` returns. Ranks wait for each other,
  // so a value that is refused is in memory once, too.
  std::shared_ptr<const Value> get(const std::function<bool(const Value&)>& same,
                                   const std::function<std::shared_ptr<const Value>()>& make) {
    const auto lock = lock_with_heartbeat(mutex_);
    if (std::shared_ptr<const Value> last = last_.lock(); last != nullptr && same(*last)) return last;
    kept_.reset();
    std::shared_ptr<const Value> made = make();
    last_ = made;
    if (keep_) kept_ = made;
    return made;
  }

 private:
  std::mutex mutex_;
  std::weak_ptr<const Value> last_;
  std::shared_ptr<const Value> kept_;
  bool keep_;
};

struct JobShare {
  MadeOnce<TensorFile> file{true};  // open_tensor_file()
  MadeOnce<InputFile> attention{true};
  MadeOnce<SsmFile> ssm{true};
  MadeOnce<SharedBlockMask> block_mask;
  MadeOnce<SyntheticTensors> synthetic;  // compressed keys and values of a seed
};

// The share, or a new one where there is none.
inline std::shared_ptr<JobShare> share_or_new(std::shared_ptr<JobShare> share) {
  return share != nullptr ? std::move(share) : std::make_shared<JobShare>();
}

}  // namespace ringattn
