// SPDX-License-Identifier: Apache-2.0
#include "attention/files/input_file.hpp"

#include <mutex>

namespace ringattn {

std::shared_ptr<const InputFile> open_input_file(const FileInput& input) {
  static std::mutex mutex;
  static std::weak_ptr<const InputFile> last;
  const std::lock_guard lock(mutex);
  if (std::shared_ptr<const InputFile> open = last.lock()) {
    if (open->request == input && open->file.is_current()) return open;
  }
  auto opened = std::make_shared<const InputFile>(input);
  last = opened;
  return opened;
}

}  // namespace ringattn
