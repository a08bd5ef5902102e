// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn::cuda {

// Multiprocessors of a device. For kNoDevice, the number that plans assume.
int multiprocessors_of(int device);

}  // namespace ringattn::cuda
