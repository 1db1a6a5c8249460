// Kernels that stand in for a network: each holds its thread blocks for a given time and moves the
// bytes that the collective would move through device memory, paced evenly over that time.
//
// The device code also compiles under NVRTC (with EMULATION_DEVICE_ONLY), which has no host headers.
#ifndef EMULATION_DEVICE_ONLY
#include <cuda_runtime.h>
#endif

typedef unsigned long long u64;
typedef unsigned int u32;

namespace {

constexpr u32 kThreads = 512;
constexpr u32 kLoads = 8;              // independent loads in flight per thread
constexpr u32 kTile = kThreads * kLoads;
constexpr u32 kTilesPerPace = 8;       // the timer is read once in so many tiles

__device__ __forceinline__ u64 timer() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Every block waits for itself; all blocks of a launch start within microseconds of each other
// unless multiprocessors are taken, and then a real collective would wait as well.
__device__ __forceinline__ void wait_until(u64 start, u64 due) {
  if (threadIdx.x == 0) {
    while (timer() - start < due) __nanosleep(64);
  }
  __syncthreads();
}

__device__ __forceinline__ u32 fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }
__device__ __forceinline__ u32 fold(u32 v) { return v; }
__device__ __forceinline__ u32 fold(unsigned short v) { return v; }
__device__ __forceinline__ u32 fold(unsigned char v) { return v; }

// out[i] = in[i % shard]: this rank's shard stands for every rank's.
template <typename Unit>
__device__ __forceinline__ void gather(Unit* out, const Unit* in, u32 shard, u32 total, u64 ns) {
  const u64 start = timer();
  const u32 tiles = (total + kTile - 1) / kTile;
  const u32 mine = blockIdx.x < tiles ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
  for (u32 n = 0; n < mine; ++n) {
    const u64 base = (u64)(blockIdx.x + n * gridDim.x) * kTile + threadIdx.x;
    u32 source = (u32)base % shard;
    Unit value[kLoads];
#pragma unroll
    for (u32 j = 0; j < kLoads; ++j) {
      if (base + j * kThreads < total) value[j] = in[source];
      source += kThreads;
      if (source >= shard) source %= shard;
    }
#pragma unroll
    for (u32 j = 0; j < kLoads; ++j) {
      if (base + j * kThreads < total) out[base + j * kThreads] = value[j];
    }
    if (n % kTilesPerPace == kTilesPerPace - 1) {
      wait_until(start, (u64)((double)ns * (n + 1) / mine));
    }
  }
  wait_until(start, ns);
}

// Reads the whole input, as a reduction must, and writes this rank's slice of it.
template <typename Unit>
__device__ __forceinline__ void scatter(Unit* out, const Unit* in, u32 shard, u32 total, u64 ns) {
  const u64 start = timer();
  const u32 tiles = (total + kTile - 1) / kTile;
  const u32 mine = blockIdx.x < tiles ? (tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
  u32 folded = 0;
  for (u32 n = 0; n < mine; ++n) {
    const u64 base = (u64)(blockIdx.x + n * gridDim.x) * kTile + threadIdx.x;
    Unit value[kLoads];
#pragma unroll
    for (u32 j = 0; j < kLoads; ++j) {
      if (base + j * kThreads < total) value[j] = in[base + j * kThreads];
    }
#pragma unroll
    for (u32 j = 0; j < kLoads; ++j) {
      if (base + j * kThreads < total) folded ^= fold(value[j]);
      if (base + j * kThreads < shard) out[base + j * kThreads] = value[j];
    }
    if (n % kTilesPerPace == kTilesPerPace - 1) {
      wait_until(start, (u64)((double)ns * (n + 1) / mine));
    }
  }
  // Never true, but only known at run time: keeps the loads from being dropped.
  if (shard == 0xffffffffu) *reinterpret_cast<u32*>(out) = folded;
  wait_until(start, ns);
}

}  // namespace

#define EMULATION_KERNELS(width, Unit)                                                        \
  extern "C" __global__ void __launch_bounds__(512)                                           \
      emulated_all_gather_##width(void* out, const void* in, u32 shard, u32 total, u64 ns) {  \
    gather<Unit>((Unit*)out, (const Unit*)in, shard, total, ns);                              \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(512)                                           \
      emulated_reduce_scatter_##width(void* out, const void* in, u32 shard, u32 total,        \
                                      u64 ns) {                                               \
    scatter<Unit>((Unit*)out, (const Unit*)in, shard, total, ns);                             \
  }

EMULATION_KERNELS(16, uint4)
EMULATION_KERNELS(4, u32)
EMULATION_KERNELS(2, unsigned short)
EMULATION_KERNELS(1, unsigned char)

// Time alone: all-reduce, broadcast, all-to-all.
extern "C" __global__ void __launch_bounds__(512) emulated_hold(u64 ns) {
  wait_until(timer(), ns);
}

#ifndef EMULATION_DEVICE_ONLY

namespace {

// One wire carries one collective at a time, whatever stream it is issued on, as a communicator
// does. Events recorded inside a graph capture cannot be waited on outside it, nor the other way
// round, so there is a set for each.
struct Line {
  cudaEvent_t event;
  cudaStream_t stream;
  unsigned long long capture;
  bool used;
};

struct Wire {
  Line eager, captured;
};

Line* line_of(Wire* wire, cudaStream_t stream, bool* follow) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &id) != cudaSuccess) {
    cudaGetLastError();
    status = cudaStreamCaptureStatusNone;
  }
  const bool capturing = status == cudaStreamCaptureStatusActive;
  Line* line = capturing ? &wire->captured : &wire->eager;
  *follow = line->used && line->stream != stream && (!capturing || line->capture == id);
  line->capture = id;
  line->stream = stream;
  line->used = true;
  return line;
}

}  // namespace

extern "C" void* emulation_wire() {
  Wire* wire = new Wire();
  cudaEventCreateWithFlags(&wire->eager.event, cudaEventDisableTiming);
  cudaEventCreateWithFlags(&wire->captured.event, cudaEventDisableTiming);
  return wire;
}

// kind: 0 all-gather, 1 reduce-scatter, 2 time alone. `shard` and `total` are in bytes; a null
// wire means that nothing else has to be waited for. Returns a cudaError_t.
extern "C" int emulation_run(void* wire, int kind, void* out, const void* in, u64 shard, u64 total,
                             u64 ns, int blocks, cudaStream_t stream) {
  Line* line = nullptr;
  if (wire) {
    bool follow = false;
    line = line_of((Wire*)wire, stream, &follow);
    if (follow) {
      const cudaError_t error = cudaStreamWaitEvent(stream, line->event, 0);
      if (error != cudaSuccess) return error;
    }
  }
  const u64 bits = (u64)out | (u64)in | shard;
  const int width = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
  if (kind != 2 && (shard == 0 || total / width > 0xfffffff0ull)) return cudaErrorInvalidValue;
  const u32 s = (u32)(shard / width), t = (u32)(total / width);
  if (kind == 2) {
    emulated_hold<<<blocks, kThreads, 0, stream>>>(ns);
  } else if (kind == 0) {
    if (width == 16) emulated_all_gather_16<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
    else if (width == 4) emulated_all_gather_4<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
    else if (width == 2) emulated_all_gather_2<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
    else emulated_all_gather_1<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
  } else {
    if (width == 16) emulated_reduce_scatter_16<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
    else if (width == 4) emulated_reduce_scatter_4<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
    else if (width == 2) emulated_reduce_scatter_2<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
    else emulated_reduce_scatter_1<<<blocks, kThreads, 0, stream>>>(out, in, s, t, ns);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || !line) return error;
  return cudaEventRecord(line->event, stream);
}

// The own slice alone: what a network that costs nothing leaves to do.
extern "C" int emulation_copy(void* out, const void* in, u64 bytes, cudaStream_t stream) {
  if (out == in || bytes == 0) return 0;
  return cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, stream);
}

#endif  // EMULATION_DEVICE_ONLY
