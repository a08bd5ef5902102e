// SPDX-License-Identifier: Apache-2.0
#include "base/gpu_links.hpp"

#include <fmt/format.h>

#include "base/gpu.hpp"

#if defined(RINGATTN_HAVE_CUDA)
#include <dlfcn.h>

#include <array>
#include <string_view>

#include "base/cuda.hpp"
#endif

namespace ringattn {

#if defined(RINGATTN_HAVE_CUDA)

namespace {

// The driver's management library, opened at run time if it is there: NVML's header is not part of every CUDA Toolkit.
// Its functions return 0 for success.
class Nvml {
 public:
  using Device = void*;

  static const Nvml& opened() {
    static const Nvml nvml;
    return nvml;
  }

  // Why NVML can't be used; empty if it can.
  const std::string& missing() const { return missing_; }

  template <typename... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    if (library_ == nullptr) return false;
    auto* const function = reinterpret_cast<int (*)(Arguments...)>(::dlsym(library_, name));
    return function != nullptr && function(arguments...) == 0;
  }

  std::string driver_version() const {
    std::array<char, 96> text{};
    return call("nvmlSystemGetDriverVersion", text.data(), static_cast<unsigned>(text.size() - 1)) ? text.data() : "";
  }

 private:
  Nvml() : library_(::dlopen("libnvidia-ml.so.1", RTLD_LAZY | RTLD_LOCAL)) {  // never closed
    if (library_ == nullptr) {
      missing_ = "no libnvidia-ml.so.1";
    } else if (!call("nvmlInit_v2")) {
      missing_ = "nvmlInit_v2 failed";
    }
  }

  void* library_;
  std::string missing_;
};

std::string cuda_number(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace

std::string cuda_versions() {
  std::string text = cuda_number(CUDART_VERSION) + " (runtime)";
  int newest = 0;
  if (cudaDriverGetVersion(&newest) != cudaSuccess || newest == 0) return text + ", no driver";
  const Nvml& nvml = Nvml::opened();
  const std::string driver = nvml.driver_version();
  return fmt::format("{}, driver {} for CUDA up to {}", text,
                     driver.empty() ? fmt::format("of unknown version ({})", nvml.missing()) : driver,
                     cuda_number(newest));
}

std::string peer_access_text(int first, int second) {
  const auto access = [](int from, int to) {
    int can = 0;
    if (cudaDeviceCanAccessPeer(&can, from, to) != cudaSuccess) {
      cudaGetLastError();
      return "unknown";
    }
    return can != 0 ? "yes" : "no";
  };
  const std::string_view there = access(first, second);
  const std::string_view back = access(second, first);
  int rank = -1;  // 0: the fastest kind of link
  if (cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, first, second) != cudaSuccess) {
    cudaGetLastError();
    rank = -1;
  }
  return fmt::format("peer access {}{}{}", there, there == back ? "" : fmt::format(", back {}", back),
                     rank < 0 ? "" : fmt::format(", performance rank {}", rank));
}

std::string gpu_details(int device) {
  std::array<char, 32> bus{};
  if (cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), device) != cudaSuccess) {
    cudaGetLastError();
    return "PCI address unknown";
  }
  std::string text = fmt::format("PCI {}", bus.data());
  const Nvml& nvml = Nvml::opened();
  Nvml::Device handle = nullptr;
  if (!nvml.call("nvmlDeviceGetHandleByPciBusId_v2", static_cast<const char*>(bus.data()), &handle)) {
    const std::string& why = nvml.missing();
    return text + fmt::format(", links and limits unknown ({})", why.empty() ? "NVML does not know it" : why);
  }
  constexpr unsigned kMaxLinks = 18;
  unsigned active = 0;
  for (unsigned link = 0; link < kMaxLinks; ++link) {
    unsigned state = 0;
    if (nvml.call("nvmlDeviceGetNvLinkState", handle, link, &state) && state == 1) ++active;
  }
  text += active == 0 ? ", no NVLink" : fmt::format(", {} NVLinks active", active);
  unsigned milliwatts = 0;
  text += nvml.call("nvmlDeviceGetEnforcedPowerLimit", handle, &milliwatts)
              ? fmt::format(", power limit {} W", milliwatts / 1000)
              : ", power limit unknown";
  constexpr int kSmClock = 1;
  unsigned megahertz = 0;
  text += nvml.call("nvmlDeviceGetMaxClockInfo", handle, kSmClock, &megahertz)
              ? fmt::format(", SM clock up to {} MHz", megahertz)
              : ", SM clock unknown";
  return text;
}

#else

std::string cuda_versions() { return fmt::format("none ({})", gpus_unavailable()); }
std::string peer_access_text(int, int) { return {}; }
std::string gpu_details(int) { return {}; }

#endif

}  // namespace ringattn
