// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/cuda/cuda_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <thread>

#include "base/error.hpp"
#include "base/gpu.hpp"
#include "kernels/attention/cuda/block_mask_choice.hpp"
#include "kernels/attention/cuda/gather_pages.hpp"
#include "kernels/common/cuda/multiprocessors.hpp"
#include "kernels/common/cuda/synthetic.hpp"
#include "kernels/common/platform.hpp"
#include "kernels/decode/cuda/block_choice.hpp"
#include "kernels/decode/cuda/cache_update.hpp"
#include "kernels/quant/cuda/rows.hpp"

namespace ringattn::cuda {

namespace {

const Gpu& gpu_of(int device) {
  const auto gpus = visible_gpus();
  if (device < 0 || static_cast<std::size_t>(device) >= gpus.size()) {
    const std::string why = gpus_unavailable();
    fail(ErrorCode::kUnsupported, fmt::format("there is no GPU {}", device),
         why.empty() ? fmt::format("this process sees {}", gpus.size()) : why, {"See ", command("info"), "."});
  }
  return gpus[static_cast<std::size_t>(device)];
}

// Returns when the event has completed. Throws kPeer if the deadline expires first.
void await_event(const CudaEvent& event, int device, const Deadline& deadline, const Progress& progress) {
  while (!event.passed()) {
    const bool late = deadline.expired();
    if (progress) progress();  // it may throw a more specific error
    if (late) {
      fail(ErrorCode::kPeer, fmt::format("GPU {} did not finish within {} s", device, deadline.seconds()),
           "it waits for a rank that has stalled, or its work takes longer than the timeout",
           {"Raise ", setting("timeout"), " if no rank has stalled."});
    }
    std::this_thread::yield();
  }
}

class CudaEvents final : public Events {
 public:
  CudaEvents(int device, std::size_t count, bool timed) : device_(device) {
    const DeviceGuard guard(device_);
    events_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) events_.emplace_back(timed);
  }

  void record(std::size_t mark, Stream stream) override {
    const DeviceGuard guard(device_);
    events_.at(mark).record(cuda_stream(stream));
  }
  void synchronize(std::size_t mark, const Deadline& deadline, const Progress& progress) override {
    const DeviceGuard guard(device_);
    await_event(events_.at(mark), device_, deadline, progress);
  }
  double elapsed(std::size_t from, std::size_t to) override {
    const DeviceGuard guard(device_);
    float milliseconds = 0.0F;
    check_cuda(cudaEventElapsedTime(&milliseconds, events_.at(from).get(), events_.at(to).get()),
               "cudaEventElapsedTime");
    return static_cast<double>(milliseconds) * 1e-3;
  }

 private:
  const int device_;
  std::vector<CudaEvent> events_;
};

class CudaPriorityStream final : public PriorityStream {
 public:
  CudaPriorityStream(int device, std::size_t marks) : device_(device) {
    const DeviceGuard guard(device_);
    int last = 0;
    int first = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&last, &first), "cudaDeviceGetStreamPriorityRange");
    for (std::size_t i = 0; i < marks; ++i) events_.emplace_back();
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, first), "cudaStreamCreateWithPriority");
  }
  ~CudaPriorityStream() override { cudaStreamDestroy(stream_); }
  CudaPriorityStream(const CudaPriorityStream&) = delete;
  CudaPriorityStream& operator=(const CudaPriorityStream&) = delete;

  Stream stream() override { return {stream_}; }
  void record(std::size_t mark, Stream stream) override {
    const DeviceGuard guard(device_);
    events_.at(mark).record(cuda_stream(stream));
  }
  void follow(std::size_t mark, Stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamWaitEvent(cuda_stream(stream), events_.at(mark).get(), 0), "cudaStreamWaitEvent");
  }

 private:
  const int device_;
  std::vector<CudaEvent> events_;
  cudaStream_t stream_ = nullptr;
};

class CudaReplay final : public Replay {
 public:
  CudaReplay(int device, cudaStream_t stream, const std::function<void()>& enqueue) : device_(device), stream_(stream) {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      enqueue();
    } catch (...) {
      if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess && graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();  // clear the error: the exception in flight is the one to report
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    const cudaError_t made = cudaGraphInstantiateWithFlags(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(made, "cudaGraphInstantiate");
  }
  ~CudaReplay() override {
    const DeviceGuard guard(device_);
    cudaGraphExecDestroy(executable_);
  }
  CudaReplay(const CudaReplay&) = delete;
  CudaReplay& operator=(const CudaReplay&) = delete;

  void launch() override {
    const DeviceGuard guard(device_);
    check_cuda(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
  }

 private:
  const int device_;
  const cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

CudaBackend::CudaBackend(int device) : device_(device) {
  if (device == kNoDevice) return;
  const Gpu& gpu = gpu_of(device);
  const DeviceGuard guard(device);
  stream_.emplace();
  identity_ = fmt::format("{} (sm_{}{})", gpu.name, gpu.compute_major, gpu.compute_minor);
  free_before_ = min_free_ = gpu_memory(device_).free;
}

Buffer CudaBackend::allocate(std::size_t bytes) {
  Buffer buffer = allocate_device(bytes, device_);
  update_min_free();
  return buffer;
}

void CudaBackend::copy_rows(void* target, std::int64_t target_stride, const void* source, std::int64_t source_stride,
                            std::int64_t row_bytes, std::int64_t rows, Stream stream) {
  if (rows <= 0 || row_bytes <= 0) return;
  const DeviceGuard guard(device_);
  if (target_stride == row_bytes && source_stride == row_bytes) {
    check_cuda(cudaMemcpyAsync(target, source, static_cast<std::size_t>(row_bytes * rows), cudaMemcpyDefault,
                               cuda_stream(stream)),
               "cudaMemcpyAsync");
    return;
  }
  if (rows > 1 && std::min(target_stride, source_stride) < row_bytes) {  // expanded rows: no pitch describes them
    auto* to = static_cast<std::byte*>(target);
    const auto* from = static_cast<const std::byte*>(source);
    for (std::int64_t row = 0; row < rows; ++row, to += target_stride, from += source_stride) {
      check_cuda(cudaMemcpyAsync(to, from, static_cast<std::size_t>(row_bytes), cudaMemcpyDefault, cuda_stream(stream)),
                 "cudaMemcpyAsync");
    }
    return;
  }
  check_cuda(cudaMemcpy2DAsync(target, static_cast<std::size_t>(target_stride), source,
                               static_cast<std::size_t>(source_stride), static_cast<std::size_t>(row_bytes),
                               static_cast<std::size_t>(rows), cudaMemcpyDefault, cuda_stream(stream)),
             "cudaMemcpy2DAsync");
}

void CudaBackend::gather_pages(void* target, const CacheView& cache, std::span<const std::int32_t> pages,
                               std::int64_t rows, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::gather_pages(target, cache, pages, rows, stream);
}

void CudaBackend::fill_synthetic(std::uint64_t seed, SyntheticTensor tensor, std::span<const PackedRun> runs,
                                 const MutableTensorView& rows, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::fill_synthetic(seed, tensor, runs, rows, stream);
}

void CudaBackend::fill_bytes(void* target, std::byte value, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(device_);
  check_cuda(cudaMemsetAsync(target, std::to_integer<int>(value), bytes, cuda_stream(stream)), "cudaMemsetAsync");
}

void CudaBackend::pool_keys(const BlockChoice& choice, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::pool_keys(choice, stream);
}

void CudaBackend::choose_blocks(const BlockChoice& choice, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::choose_blocks(choice, stream);
}

void CudaBackend::pool_rows(const RowPooling& pooling, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::pool_rows(pooling, stream);
}

void CudaBackend::choose_block_mask(const BlockMaskChoice& choice, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::choose_block_mask(choice, stream);
}

void CudaBackend::update_cache(const CacheUpdate& update, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::update_cache(update, stream);
}

void CudaBackend::decompress(const DecompressTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::decompress(task, stream);
}

void CudaBackend::compress(const CompressTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::compress(task, stream);
}

void CudaBackend::compute_absmax(const AbsmaxTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::compute_absmax(task, stream);
}

void CudaBackend::append(const AppendTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::append(task, stream);
}

void CudaBackend::check_finite(const FiniteTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::check_finite(task, stream);
}

void CudaBackend::find_codebook(const CodebookTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::find_codebook(task, stream);
}

void CudaBackend::add_gram(const GramTask& task, Stream stream) {
  const DeviceGuard guard(device_);
  cuda::add_gram(task, stream);
}

void CudaBackend::synchronize(Stream stream, const Deadline& deadline, const Progress& progress) {
  const DeviceGuard guard(device_);
  if (!passed_) passed_.emplace();
  passed_->record(cuda_stream(stream));
  await_event(*passed_, device_, deadline, progress);
  update_min_free();
}

std::unique_ptr<Events> CudaBackend::make_events(std::size_t count, bool timed) {
  return std::make_unique<CudaEvents>(device_, count, timed);
}

std::unique_ptr<PriorityStream> CudaBackend::make_priority_stream(std::size_t marks) {
  return std::make_unique<CudaPriorityStream>(device_, marks);
}

std::unique_ptr<Replay> CudaBackend::replay(Stream stream, const std::function<void()>& enqueue) {
  return std::make_unique<CudaReplay>(device_, cuda_stream(stream), enqueue);
}

bool CudaBackend::is_capturing(Stream stream) {
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(cuda_stream(stream), &status);
  // The legacy default stream can't be queried while another stream that it waits for is being captured.
  if (result == cudaErrorStreamCaptureImplicit) {
    cudaGetLastError();
    return true;
  }
  check_cuda(result, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

void CudaBackend::update_min_free() { min_free_ = std::min(min_free_, gpu_memory(device_).free); }

std::size_t CudaBackend::peak_memory() {
  update_min_free();
  return free_before_ - min_free_;
}

int multiprocessors_of(int device) {
  constexpr int kUsual = 132;  // of an H100 or H200, assumed by plans without a device
  if (device == kNoDevice) return kUsual;
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options) {
  return std::make_unique<CudaBackend>(options.device);
}

std::string cuda_unavailable() {
  const std::string none = gpus_unavailable();
  if (!none.empty()) return none;
#ifdef RINGATTN_CHECK_CUDA
  return "this build has only a part of the GPU code, to see that it compiles (RINGATTN_CHECK_CUDA)";
#endif
  for (const Gpu& gpu : visible_gpus()) {
    if (gpu.compute_major < 8) {
      return fmt::format("GPU {} ({}) has compute capability {}.{}, 8.0 is needed", gpu.device, gpu.name,
                         gpu.compute_major, gpu.compute_minor);
    }
  }
  return {};
}

std::string hopper_unavailable() {
  const std::string none = cuda_unavailable();
  if (!none.empty()) return none;
  for (const Gpu& gpu : visible_gpus()) {
    if (gpu.compute_major != 9 || gpu.compute_minor != 0) {
      return fmt::format("GPU {} ({}) has compute capability {}.{}, 9.0 is needed", gpu.device, gpu.name,
                         gpu.compute_major, gpu.compute_minor);
    }
  }
  return {};
}

}  // namespace ringattn::cuda
