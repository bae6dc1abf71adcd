// Enough of CUDA to run our kernels on a CPU, block after block, those of a cluster together: a thread is a
// fiber that runs until it has to wait for others. Slow, exact, and without a GPU.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct dim3 {
  unsigned x, y, z;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) ushort4 {
  unsigned short x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) {
  return {x, y, z, w};
}

namespace emulated {

constexpr int kWarp = 32, kMostBlocks = 4, kMost = 1024, kStack = 128 << 10, kWords = 8;
constexpr int kShared = 512 << 10;  // bytes of a block

struct Warp {
  uint64_t slots[2][32][kWords];
  int arrived[2] = {}, live = 0;
};

struct Fiber {
  ucontext_t beginning;
  jmp_buf place;
  bool begun, done;
  int generation, block_generation, goal;
};

// Threads that have met at a barrier; as many as there are, or as are named.
struct Block {
  int arrived[2], live, named;
};

inline Fiber fibers[kMostBlocks * kMost];
inline Warp warps[kMostBlocks * kMost / kWarp];
inline Block blocks[kMostBlocks];
inline jmp_buf scheduler;
inline int current, threads, all, cluster_arrived, live;  // `all` threads of a cluster
inline dim3 block_index, block_size, grid_size;
inline void (*body)(const void*);
inline const void* parameters;
inline int4 dynamic_shared[kMostBlocks * kShared / sizeof(int4)];  // of the blocks that run

inline char* shared(int block) { return reinterpret_cast<char*>(dynamic_shared) + block * kShared; }
inline int4* own_shared() { return reinterpret_cast<int4*>(shared(current / threads)); }

// By jumps, since swapcontext asks the system twice for every switch; only a fiber's first turn needs a
// context.
inline void yield() {
  if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.beginning);
}

inline void run() {
  body(parameters);
  fibers[current].done = true;
  --warps[current / kWarp].live;
  --blocks[current / threads].live;
  --live;
  yield();
}

// All live lanes of the warp leave words and meet; returns what they left. Two sets of slots: a lane is at
// most one meeting ahead.
inline const uint64_t (*meet(const uint64_t* words, int count)) [kWords] {
  Fiber& self = fibers[current];
  Warp& warp = warps[current / kWarp];
  const int set = self.generation++ % 2;
  for (int i = 0; i < count; ++i) warp.slots[set][current % kWarp][i] = words[i];
  ++warp.arrived[set];
  while (warp.arrived[set] % kWarp && warp.arrived[set] % kWarp < warp.live) yield();
  // The first to go on makes the counter whole, whoever has left the warp before.
  if (warp.arrived[set] % kWarp) warp.arrived[set] += kWarp - warp.arrived[set] % kWarp;
  return warp.slots[set];
}

inline void meet_block() {
  Block& block = blocks[current / threads];
  int& arrived = block.arrived[fibers[current].block_generation++ % 2];
  ++arrived;
  while (arrived % kMost && arrived % kMost < block.live) yield();
  if (arrived % kMost) arrived += kMost - arrived % kMost;
}
// So many of those that pass here.
inline void meet_some(int& arrived, int count) {
  const int goal = (arrived++ / count + 1) * count;
  while (arrived < goal) yield();
}

template <class T>
T exchanged(T value, int from) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  const auto* slots = meet(&word, 1);
  T result;
  std::memcpy(&result, &slots[from][0], sizeof result);
  return result;
}

inline float half(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline uint16_t half_bits(double value) {
  const _Float16 rounded = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}

template <class P>
void launch(void (*kernel)(P), const void* given, const unsigned* grid, unsigned count, unsigned cluster) {
  static const std::unique_ptr<char[]> stacks(new char[static_cast<size_t>(kMostBlocks) * kMost * kStack]);
  static void (*of_this)(P);
  of_this = kernel;
  body = [](const void* p) { of_this(*static_cast<const P*>(p)); };
  parameters = given;
  grid_size = {grid[0], grid[1], grid[2]};
  block_size = {count, 1, 1};
  threads = static_cast<int>(count);
  all = threads * static_cast<int>(cluster);
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; x += cluster) {
        block_index = {x, y, z};
        for (Block& block : blocks) block = {{}, threads};
        cluster_arrived = 0;
        live = all;
        for (Warp& warp : warps) warp.arrived[0] = warp.arrived[1] = warp.live = 0;
        for (int i = 0; i < live; ++i) {
          Fiber& fiber = fibers[i];
          fiber.begun = fiber.done = false;
          fiber.generation = fiber.block_generation = 0;
          ++warps[i / kWarp].live;
          getcontext(&fiber.beginning);
          fiber.beginning.uc_stack.ss_sp = stacks.get() + static_cast<size_t>(i) * kStack;
          fiber.beginning.uc_stack.ss_size = kStack;
          fiber.beginning.uc_link = nullptr;
          makecontext(&fiber.beginning, run, 0);
        }
        while (live)
          for (current = 0; current < all; ++current)
            if (!fibers[current].done) resume(fibers[current]);
      }
}

// Dynamic shared memory beyond what a launch asked for: marked before, and looked at afterwards.
inline void mark(unsigned asked) {
  for (int i = 0; i < kMostBlocks; ++i) std::memset(shared(i) + asked, '!', kShared - asked);
}
inline bool marked(unsigned asked) {
  for (int i = 0; i < kMostBlocks; ++i)
    if (!std::all_of(shared(i) + asked, shared(i) + kShared, [](char one) { return one == '!'; }))
      return false;
  return true;
}

// A barrier in shared memory: a phase ends when nobody is missing, and no byte.
struct Barrier {
  uint8_t count, missing;
  uint16_t phase;
  int bytes;
};
inline void arrive(void* at, int arrivals, int bytes) {
  Barrier& barrier = *static_cast<Barrier*>(at);
  barrier.missing -= arrivals;
  barrier.bytes += bytes;
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.count;
  barrier.phase ^= 1;
}

}  // namespace emulated

#define threadIdx (dim3{static_cast<unsigned>(emulated::current % emulated::threads), 0, 0})
#define blockIdx                                                                                  \
  (dim3{emulated::block_index.x + emulated::current / emulated::threads, emulated::block_index.y, \
        emulated::block_index.z})
#define blockDim emulated::block_size
#define gridDim emulated::grid_size

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

template <class T, class U>
T reinterpreted(U value) {
  T result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}
inline float __int_as_float(int bits) { return reinterpreted<float>(bits); }
inline float __uint_as_float(unsigned bits) { return reinterpreted<float>(bits); }
inline unsigned __float_as_uint(float value) { return reinterpreted<unsigned>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(lrintf(value)); }
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __expf(float x) { return expf(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
inline unsigned __cvta_generic_to_shared(const void* at) {
  return static_cast<unsigned>(static_cast<const char*>(at) -
                               emulated::shared(emulated::current / emulated::threads));
}
inline void __threadfence() {}
inline void __syncthreads() { emulated::meet_block(); }
inline void __syncwarp() { emulated::meet(nullptr, 0); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int mate) {
  return emulated::exchanged(value, (emulated::current % 32) ^ mate);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::exchanged(value, lane);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  return emulated::exchanged(value, std::min(emulated::current % 32 + by, 31));
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const uint64_t word = predicate != 0;
  const auto* slots = emulated::meet(&word, 1);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= static_cast<unsigned>(slots[i][0]) << i;
  return result;
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const uint64_t word = value;
  const auto* slots = emulated::meet(&word, 1);
  uint64_t result = 0;
  for (int i = 0; i < 32; ++i) result = std::max(result, slots[i][0]);
  return static_cast<unsigned>(result);
}
inline int __reduce_add_sync(unsigned, int value) {
  const uint64_t word = static_cast<uint32_t>(value);
  const auto* slots = emulated::meet(&word, 1);
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result += static_cast<uint32_t>(slots[i][0]);
  return static_cast<int>(result);
}
template <class T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at += value;
  return old;
}
template <class T>
T atomicMax(T* at, T value) {
  const T old = *at;
  *at = std::max(old, value);
  return old;
}
template <class T>
T atomicExch(T* at, T value) {
  const T old = *at;
  *at = value;
  return old;
}

// What the sources say in assembler, by the names of the functions it stands in.
namespace assembler {

inline float from_half(uint16_t bits) { return emulated::half(bits); }
inline uint16_t to_half(float value) { return emulated::half_bits(value); }
inline uint16_t to_bfloat(float value) {
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>(value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t add_halves(uint32_t a, uint32_t b) {
  const auto add = [](uint32_t x, uint32_t y) {
    return emulated::half_bits(static_cast<double>(emulated::half(static_cast<uint16_t>(x))) +
                               emulated::half(static_cast<uint16_t>(y)));
  };
  return add(a, b) | static_cast<uint32_t>(add(a >> 16, b >> 16)) << 16;
}
inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  const auto multiply = [](uint32_t x, uint32_t y) {
    return emulated::half_bits(static_cast<double>(emulated::half(static_cast<uint16_t>(x))) *
                               emulated::half(static_cast<uint16_t>(y)));
  };
  return multiply(a, b) | static_cast<uint32_t>(multiply(a >> 16, b >> 16)) << 16;
}
inline uint32_t fuse_halves(uint32_t a, uint32_t b, uint32_t c) {
  const auto fuse = [](uint32_t x, uint32_t y, uint32_t z) {
    const double product = static_cast<double>(emulated::half(static_cast<uint16_t>(x))) *
                           emulated::half(static_cast<uint16_t>(y));
    return emulated::half_bits(product + emulated::half(static_cast<uint16_t>(z)));
  };
  return fuse(a, b, c) | static_cast<uint32_t>(fuse(a >> 16, b >> 16, c >> 16)) << 16;
}
template <int Words>
void load_words(const uint32_t* from, uint32_t* to) {
  std::memcpy(to, from, 4 * Words);
}
inline uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) { return (mask & a) | (~mask & b); }
template <int Bytes>
void copy_to_shared(void* to, const void* from) {
  std::memcpy(to, from, Bytes);
}
inline void wait_for_copies() {}
template <int Bytes>
void copy_piece(void* to, const void* from) {
  std::memcpy(to, from, Bytes);
}
template <int Bytes>
void copy_to(uint32_t to, const void* from) {
  std::memcpy(emulated::shared(emulated::current / emulated::threads) + to, from, Bytes);
}
inline void copy_or_clear(uint32_t to, const void* from, bool there) {
  char* at = emulated::shared(emulated::current / emulated::threads) + to;
  there ? std::memcpy(at, from, 16) : std::memset(at, 0, 16);
}
inline void end_stage() {}
template <int Stages>
void wait_for_stage() {}
inline void begin_barrier(uint64_t* barrier, int count) {
  const uint8_t all = static_cast<uint8_t>(count);
  *reinterpret_cast<emulated::Barrier*>(barrier) = {all, all, 0, 0};
}
inline void arrive(uint64_t* barrier) { emulated::arrive(barrier, 1, 0); }
inline void arrive_with_copies(uint64_t* barrier) { emulated::arrive(barrier, 1, 0); }
inline void arrive_expecting(uint64_t* barrier, int bytes) { emulated::arrive(barrier, 1, bytes); }
inline void await(uint64_t* barrier, int phase) {
  while (reinterpret_cast<emulated::Barrier*>(barrier)->phase == phase) emulated::yield();
}
inline uint32_t remote(const void* at, int block) {
  return static_cast<uint32_t>(block * emulated::kShared) + __cvta_generic_to_shared(at);
}
inline void store_async(uint32_t at, float a, float b, float c, float d, uint32_t barrier) {
  const float four[4] = {a, b, c, d};
  std::memcpy(emulated::shared(0) + at, four, sizeof four);
  emulated::arrive(emulated::shared(0) + barrier, 0, -static_cast<int>(sizeof four));
}
inline void arrive_remote(uint32_t barrier) { emulated::arrive(emulated::shared(0) + barrier, 1, 0); }
inline void publish_barriers() {}
inline void arrive_at_cluster() {
  emulated::fibers[emulated::current].goal =
    (emulated::cluster_arrived++ / emulated::all + 1) * emulated::all;
}
inline void await_all_of_cluster() {
  while (emulated::cluster_arrived < emulated::fibers[emulated::current].goal) emulated::yield();
}
template <int Count>
void take_registers() {}
template <int Count>
void leave_registers() {}
inline void copy_bulk(void* to, const void* from, int bytes, uint64_t* barrier) {
  std::memcpy(to, from, bytes);
  emulated::arrive(barrier, 0, -bytes);
}
inline void await_all_but_one() {}
template <int Threads>
void meet() {
  emulated::meet_some(emulated::blocks[emulated::current / emulated::threads].named, Threads);
}
inline void publish() {}
inline void begin_products() {}
inline void commit_products() {}
inline void await_products() {}
inline void settle(int&) {}
inline void settle(float&) {}
inline void hold(uint32_t) {}
inline void wait_for_predecessor() {}
inline void let_successor_start() {}
// Does nothing, where it may be asked for: AddressSanitizer sees the bytes at both ends.
inline void ask_for(const void* from, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || !bytes) std::abort();
  const volatile char* at = static_cast<const char*>(from);
  static_cast<void>(at[0]), static_cast<void>(at[bytes - 1]);
}

// The fragments of m16n8k16 (halves) and m16n8k32 (bytes): thread (g, t) = (lane / 4, lane % 4) holds, of a
// row g of A, the elements 2t, 2t + 1 (four bytes from 4t on), of row g + 8 the same, then of both those half
// a depth further; of column g of B likewise; of C rows g and g + 8, columns 2t and 2t + 1.
inline const uint64_t (*fragments(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                  uint32_t b1)) [emulated::kWords] {
  const uint64_t words[6] = {a0, a1, a2, a3, b0, b1};
  return emulated::meet(words, 6);
} inline void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                                uint32_t b1) {
  const auto* slots = fragments(a0, a1, a2, a3, b0, b1);
  const int lane = emulated::current % 32, t = lane % 4, g = lane / 4;
  for (int i = 0; i < 4; ++i) {
    const int below = i / 2, column = 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const int thread = k % 8 / 2, shift = 16 * (k % 2);
      const uint64_t a = slots[4 * g + thread][2 * (k / 8) + below] >> shift,
                     b = slots[4 * column + thread][4 + k / 8] >> shift;
      sum += static_cast<double>(emulated::half(static_cast<uint16_t>(a))) *
             emulated::half(static_cast<uint16_t>(b));
    }
    c[i] = static_cast<float>(sum);
  }
}
inline void multiply(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
  const auto* slots = fragments(a0, a1, a2, a3, b0, b1);
  const int lane = emulated::current % 32, t = lane % 4, g = lane / 4;
  for (int i = 0; i < 4; ++i) {
    const int below = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int thread = k % 16 / 4, shift = 8 * (k % 4);
      const uint64_t a = slots[4 * g + thread][2 * (k / 16) + below] >> shift,
                     b = slots[4 * column + thread][4 + k / 16] >> shift;
      c[i] += static_cast<int>(a & 0xff) * static_cast<int8_t>(b);
    }
  }
}

// The same by a group of warps, each with sixteen rows of its own: columns lie in shared memory, in pieces of
// eight columns of sixteen bytes.
template <int Count>
void multiply_async(int (&c)[Count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                    int upon) {
  const auto* slots = fragments(a0, a1, a2, a3, 0, 0);
  const int lane = emulated::current % 32, t = lane % 4, g = lane / 4;
  const auto field = [&](int at) { return static_cast<int>(b >> at & 0x3fff) * 16; };
  const char* columns = emulated::shared(emulated::current / emulated::threads) + field(0);
  for (int i = 0; i < Count; ++i) {
    const int below = i % 4 / 2, column = i / 4 * 8 + 2 * t + i % 2;
    if (!upon) c[i] = 0;
    for (int k = 0; k < 32; ++k) {
      const uint64_t a = slots[4 * g + k % 16 / 4][2 * (k / 16) + below] >> 8 * (k % 4);
      const char byte = columns[k / 16 * field(16) + column / 8 * field(32) + column % 8 * 16 + k % 16];
      c[i] += static_cast<int>(a & 0xff) * static_cast<int8_t>(byte);
    }
  }
}
template <int Count>
void multiply_async(float (&c)[Count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
  const auto* slots = fragments(a0, a1, a2, a3, 0, 0);
  const int lane = emulated::current % 32, t = lane % 4, g = lane / 4;
  const auto field = [&](int at) { return static_cast<int>(b >> at & 0x3fff) * 16; };
  const char* columns = emulated::shared(emulated::current / emulated::threads) + field(0);
  for (int i = 0; i < Count; ++i) {
    const int below = i % 4 / 2, column = i / 4 * 8 + 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const uint64_t a = slots[4 * g + k % 8 / 2][2 * (k / 8) + below] >> 16 * (k % 2);
      uint16_t other;
      std::memcpy(&other, columns + k / 8 * field(16) + column / 8 * field(32) + column % 8 * 16 + k % 8 * 2,
                  2);
      sum += static_cast<double>(emulated::half(static_cast<uint16_t>(a))) * emulated::half(other);
    }
    c[i] = static_cast<float>(sum);
  }
}

}  // namespace assembler
