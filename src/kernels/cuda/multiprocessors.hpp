// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn::cuda {

// Of a device; of kNoDevice as many as plans count with.
int multiprocessors_of(int device);

}  // namespace ringattn::cuda
