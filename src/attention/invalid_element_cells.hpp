// SPDX-License-Identifier: Apache-2.0
// The cells in which a front door's tasks over compressed rows tell what they have met that no tensor may hold: filled
// while runs go on, and looked at by whoever has waited for them.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/memory.hpp"
#include "comm/collective.hpp"
#include "comm/transport.hpp"
#include "kernels/backend.hpp"
#include "kernels/compressed_rows.hpp"

namespace ringattn {

class InvalidElementCells {
 public:
  // `count` cells in the backend's memory, empty. What it refers to outlives the object.
  InvalidElementCells(Backend& backend, const Collective& collective, Transport& transport, std::size_t count);

  InvalidElementCell* at(std::size_t cell) const {
    return reinterpret_cast<InvalidElementCell*>(memory_.data()) + cell;
  }

  // What has been told since the last call, a cell each; none where nothing has. Every run that tells has ended. Throws
  // kPeer where the device doesn't answer.
  std::vector<InvalidElementCell> drain();

 private:
  void clear();
  void await_device();

  Backend& backend_;
  const Collective& collective_;
  Transport& transport_;
  std::size_t count_;
  Buffer memory_;
  std::unique_ptr<Events> settled_;
};

}  // namespace ringattn
