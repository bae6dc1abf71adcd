// What kernels for Hopper's matrix units (`wgmma`, compute capability 9.0) have in common: stages of weights
// in shared memory and who copies them there, barriers in shared memory, blocks of a cluster, products that
// run by themselves.
#pragma once

#include "sefp.cuh"

constexpr int kGroupWarps = 4, kTileRows = 64;  // of a group of warps, and of its product
constexpr int kUnit = 64, kStageUnits = 4;
constexpr int kQuads = 4;  // of a thread's quarter of a unit

// A stage: base bytes, planes and scales of four units of so many rows. Where the sixteen bytes of a piece
// lie in their row depends on the row, so that threads of a warp read from different banks.
constexpr int kBasePieces = 2 * kStageUnits, kBasePitch = 16 * kBasePieces;
constexpr int kPlanePieces = 2, kPlanePitch = 16 * kPlanePieces;
template <int Rows, int Planes>
struct Stage {
  static constexpr int kPlanesAt = Rows * kBasePitch, kScalesAt = kPlanesAt + Planes * Rows * kPlanePitch;
  static constexpr int kBytes = kScalesAt + Rows * kStageUnits;
};
__device__ __forceinline__ int base_piece(int row, int piece) { return piece ^ 2 * (row % 4); }
__device__ __forceinline__ int plane_piece(int row, int piece) { return piece ^ row % 8 / 4; }

template <int Bytes>
__device__ __forceinline__ void copy_piece(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(Bytes)
                 : "memory");
}

// Copies stages, by so many warps; threads are numbered through these. Units have a scale each.
template <int Rows, int Planes, int Warps>
struct Copier {
  const int thread, base_row, plane_row;
  const Packed* weights;
  const int8_t *base, *scales;
  int64_t plane, row_bytes;  // bytes of a row's planes: base bytes are four times, scales an eighth of these
  int rows;

  __device__ __forceinline__ explicit Copier(int thread)
    : thread(thread), base_row(thread / kBasePieces), plane_row(thread / kPlanePieces) {}

  // The rows from this one on, of so many units.
  __device__ __forceinline__ void enter(const Packed& matrix, int64_t first_row, int units) {
    weights = &matrix, row_bytes = 2 * kPlaneBytes * units;
    rows = static_cast<int>(min(static_cast<int64_t>(Rows), matrix.rows - first_row));
    base = reinterpret_cast<const int8_t*>(matrix.base) + 4 * (first_row + base_row) * row_bytes +
           16 * (thread % kBasePieces);
    plane = (first_row + plane_row) * row_bytes + 16 * (thread % kPlanePieces);
    scales = matrix.scales + (first_row + thread) * units;
  }

  // Pieces of all rows, dealt out to threads, of which a row takes `Pieces`: `to` and `from` are this
  // thread's piece of its first row.
  template <int Pieces, int Bytes, int Pitch>
  __device__ __forceinline__ void copy_rows(int8_t* to, const int8_t* from, int64_t bytes, int row) const {
    constexpr int kTogether = kWarp * Warps / Pieces;
#pragma unroll
    for (int i = 0; i < Rows; i += kTogether, from += kTogether * bytes)
      if (row + i < rows) copy_piece<Bytes>(to + Pitch * i, from);
  }

  // Four units from this one on.
  __device__ __forceinline__ void copy(int8_t* stage, int unit) const {
    const int base_to = kBasePitch * base_row + 16 * base_piece(base_row, thread % kBasePieces);
    const int plane_to = kPlanePitch * plane_row + 16 * plane_piece(plane_row, thread % kPlanePieces);
    copy_rows<kBasePieces, 16, kBasePitch>(stage + base_to, base + 2 * kBaseBytes * unit, 4 * row_bytes,
                                           base_row);
#pragma unroll
    for (int k = 0; k < Planes; ++k)
      copy_rows<kPlanePieces, 16, kPlanePitch>(
        stage + Stage<Rows, Planes>::kPlanesAt + plane_to + Rows * kPlanePitch * k,
        reinterpret_cast<const int8_t*>(weights->planes[k]) + plane + 2 * kPlaneBytes * unit, row_bytes,
        plane_row);
    copy_rows<1, kStageUnits, kStageUnits>(stage + Stage<Rows, Planes>::kScalesAt + kStageUnits * thread,
                                           scales + unit, row_bytes / 8, thread);
  }
};

// Barriers in shared memory: each phase ends with the arrival of the last of `count`.
__device__ __forceinline__ void begin_barrier(uint64_t* barrier, int count) {
  asm volatile(
    "mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
    "r"(count)
    : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile(
    "mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
    : "memory");
}
// As soon as this thread's copies are there.
__device__ __forceinline__ void arrive_with_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                 static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
               : "memory");
}
__device__ __forceinline__ void await(uint64_t* barrier, int phase) {
  asm volatile(
    "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra "
    "again;\n}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
    "r"(phase)
    : "memory");
}
// Arrives, and lets the phase wait for so many bytes of `store_async`.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                 static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(bytes)
               : "memory");
}

// The shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t remote(const void* at, int block) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))), "r"(block));
  return address;
}
__device__ __forceinline__ void store_async(uint32_t at, float a, float b, float c, float d,
                                            uint32_t barrier) {
  asm volatile(
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
      at),
    "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
    : "memory");
}
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void await_all_of_cluster() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// So many threads of a block. Warps of different tasks come here by instructions of their own, which an
// aligned barrier (`bar.sync`) would forbid.
template <int Threads>
__device__ __forceinline__ void meet() {
  asm volatile("barrier.sync 1, %0;" ::"n"(Threads) : "memory");
}

// Warps that multiply need more registers than others.
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count) : "memory");
}
template <int Count>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count) : "memory");
}

// Matrix units read shared memory past the order of a thread's own stores, and registers until they are
// waited for.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
__device__ __forceinline__ void settle(int& value) { asm volatile("" : "+r"(value)::"memory"); }
// A compiler takes registers for free that were handed to the matrix units; what reads them later keeps them.
__device__ __forceinline__ void hold(uint32_t value) { asm volatile("" ::"r"(value) : "memory"); }

// How `wgmma` finds 32 bytes of so many columns: in pieces of eight columns of sixteen bytes, Columns * 16
// bytes apart along the bytes, 128 along the columns.
template <int Columns>
__device__ __forceinline__ uint64_t columns_at(uint32_t sixteens) {
  return static_cast<uint64_t>(128 / 16) << 32 | (Columns << 16 | sixteens);
}

// Where a thread finds what it has of a unit, in a stage: of its group's row g and, eight rows further, g
// + 8.
struct Places {
  int base, planes, scale, shift;
};

template <class Stage>
__device__ __forceinline__ Places places_of(int row, int t) {
  return {kBasePitch * row + 16 * base_piece(row, t / 2) + 8 * (t % 2),
          Stage::kPlanesAt + kPlanePitch * row + 16 * plane_piece(row, 0) + 4 * (t / 2),
          Stage::kScalesAt + kStageUnits * row, t % 2 * 4};
}
