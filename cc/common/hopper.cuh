// SPDX-License-Identifier: Apache-2.0
// What sm_90a adds, as functions: mbarriers, the tensor copy engine (TMA), warpgroup matrix
// products (wgmma) and register reallocation. Names are PTX's. Included by *.cuh only.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "cc/common/cuda.cuh"

namespace tf_ops {

// The dimensions of a tile row, [rows, 64] 16-bit elements, in 128-byte swizzle: what one TMA
// box writes and one wgmma descriptor reads. Wider tiles are several such panels.
constexpr int kPanelCols = 64;
constexpr int kPanelRowBytes = 128;

// ---- mbarriers: a phase ends when all arrivals and all announced bytes are in.

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
__device__ __forceinline__ void BarrierExpectBytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Returns once the phase of that parity is over. A fresh barrier counts as past parity 1.
__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A barrier among `threads` threads of the block, by number 1 to 15.
__device__ __forceinline__ void NamedBarrierSync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedBarrierArrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Also tells all of them whether any said yes.
__device__ __forceinline__ bool NamedBarrierOr(int number, int threads, bool yes) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred mine, all;\nsetp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred all, %2, %3, mine;\nselp.u32 %0, 1, 0, all;\n}"
      : "=r"(any)
      : "r"(uint32_t(yes)), "r"(number), "r"(threads)
      : "memory");
  return any;
}

// ---- TMA: one thread copies a box of a rank-4 tensor; the bytes arrive at the barrier.

__device__ __forceinline__ void TmaLoad(void* shared, const CUtensorMap& map, uint64_t* barrier,
                                        int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// The same of a rank-2 tensor.
__device__ __forceinline__ void TmaLoad(void* shared, const CUtensorMap& map, uint64_t* barrier,
                                        int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1)
      : "memory");
}
// The other way; part of the box that lies outside the tensor is not written.
__device__ __forceinline__ void TmaStore(const CUtensorMap& map, const void* shared, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(SharedAddress(shared)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
// Returns once this thread's stores have read shared memory; TmaStoreWait, once they are done.
__device__ __forceinline__ void TmaStoreWaitRead() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void TmaStoreWait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders this thread's writes to shared memory before later reads by TMA or wgmma.
__device__ __forceinline__ void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void TmaPrefetchDescriptor(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// ---- setmaxnreg: the registers of each thread of this warpgroup from here on.

template <int kRegisters>
__device__ __forceinline__ void RegistersUp() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void RegistersDown() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma: D[64, N] += A[64, 16] B[16, N] by four warps, asynchronously.
//
// D is N / 2 floats a thread: d[4 g + {0, 1}] is row 16 warp + lane / 4, columns 8 g + 2 (lane
// % 4) + {0, 1}; d[4 g + {2, 3}] the same 8 rows below. A in registers is laid out likewise.

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Returns when at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler must not move uses of `d` across this point: it does not know that a wgmma
// writes them later than where it stands.
template <int kSize>
__device__ __forceinline__ void Pin(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Descriptor of 128-byte swizzled panels in shared memory. K-major: rows are the M or N
// index, the 64 columns K. MN-major: rows are K, columns the M or N index, and the next 64 of
// these lie `panel_bytes` further.
__device__ __forceinline__ uint64_t PanelDescriptor(const void* shared, uint32_t panel_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kPanelRowBytes / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{panel_bytes / 16} << 16 |
         ((SharedAddress(shared) & 0x3ffff) >> 4);
}
// Steps of 16 along K: 32 bytes in a K-major panel, 16 rows in an MN-major one.
constexpr uint64_t kStepKMajor = 32 / 16;
constexpr uint64_t kStepMnMajor = 16 * kPanelRowBytes / 16;

// Operand lists of the asm statements below.
#define TF_OPS_D8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TF_OPS_D40(i) \
  TF_OPS_D8(i), TF_OPS_D8(i + 8), TF_OPS_D8(i + 16), TF_OPS_D8(i + 24), TF_OPS_D8(i + 32)
#define TF_OPS_D32(i) TF_OPS_D8(i), TF_OPS_D8(i + 8), TF_OPS_D8(i + 16), TF_OPS_D8(i + 24)
#define TF_OPS_LIST48                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define TF_OPS_OUT48 TF_OPS_D8(0), TF_OPS_D8(8), TF_OPS_D8(16)
#define TF_OPS_LIST64                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TF_OPS_OUT64 TF_OPS_D32(0)
#define TF_OPS_LIST80                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define TF_OPS_OUT80 TF_OPS_D40(0)
#define TF_OPS_LIST96                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TF_OPS_OUT96 TF_OPS_D32(0), TF_OPS_D8(32), TF_OPS_D8(40)
#define TF_OPS_LIST128                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TF_OPS_OUT128 TF_OPS_D32(0), TF_OPS_D32(32)
#define TF_OPS_LIST256                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define TF_OPS_OUT256 TF_OPS_D32(0), TF_OPS_D32(32), TF_OPS_D32(64), TF_OPS_D32(96)
#define TF_OPS_WGMMA(n, type, a, b, transpose, accumulate_index, ...)                              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" accumulate_index                               \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TF_OPS_LIST##n \
               "}, " a ", %" b ", p, 1, 1, " transpose ";\n}"                                      \
               : TF_OPS_OUT##n                                                                     \
               : __VA_ARGS__)

// d += A B, or d = A B unless `accumulate`. T is half or bf16. A is K-major in shared memory,
// or in registers; B is K-major, or MN-major where kTransposedB.
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[24], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(48, "bf16", "%24", "25", "0, %27", "26", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(48, "f16", "%24", "25", "0, %27", "26", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(64, "bf16", "%32", "33", "0, %35", "34", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(64, "f16", "%32", "33", "0, %35", "34", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(64, "bf16", "{%32, %33, %34, %35}", "36", "%38", "37", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(64, "f16", "{%32, %33, %34, %35}", "36", "%38", "37", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(80, "bf16", "%40", "41", "0, %43", "42", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(80, "f16", "%40", "41", "0, %43", "42", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[40], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(80, "bf16", "{%40, %41, %42, %43}", "44", "%46", "45", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(80, "f16", "{%40, %41, %42, %43}", "44", "%46", "45", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[48], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(96, "bf16", "%48", "49", "0, %51", "50", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(96, "f16", "%48", "49", "0, %51", "50", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[48], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(96, "bf16", "{%48, %49, %50, %51}", "52", "%54", "53", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(96, "f16", "{%48, %49, %50, %51}", "52", "%54", "53", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(128, "bf16", "%64", "65", "0, %67", "66", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(128, "f16", "%64", "65", "0, %67", "66", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(128, "bf16", "{%64, %65, %66, %67}", "68", "%70", "69", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(128, "f16", "{%64, %65, %66, %67}", "68", "%70", "69", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[128], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(256, "bf16", "%128", "129", "0, %131", "130", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(256, "f16", "%128", "129", "0, %131", "130", "l"(a), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  }
}
template <typename T, bool kTransposedB>
__device__ __forceinline__ void Wgmma(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) {
    TF_OPS_WGMMA(256, "bf16", "{%128, %129, %130, %131}", "132", "%134", "133", "r"(a[0]),
                 "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)),
                 "n"(int(kTransposedB)));
  } else {
    TF_OPS_WGMMA(256, "f16", "{%128, %129, %130, %131}", "132", "%134", "133", "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransposedB)));
  }
}

#undef TF_OPS_WGMMA
#undef TF_OPS_D8
#undef TF_OPS_D32
#undef TF_OPS_D40
#undef TF_OPS_LIST48
#undef TF_OPS_OUT48
#undef TF_OPS_LIST64
#undef TF_OPS_OUT64
#undef TF_OPS_LIST80
#undef TF_OPS_OUT80
#undef TF_OPS_LIST128
#undef TF_OPS_OUT128
#undef TF_OPS_LIST96
#undef TF_OPS_OUT96
#undef TF_OPS_LIST256
#undef TF_OPS_OUT256

// cuTensorMapEncodeTiled for elements in order, in boxes; what lies outside reads as zero. False
// where it cannot.
template <int kRank>
bool EncodeTensorMap(CUtensorMapDataType type, const void* data, const cuuint64_t (&dims)[kRank],
                     const cuuint64_t* strides, const cuuint32_t (&box)[kRank],
                     CUtensorMapSwizzle swizzle, CUtensorMap* map) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  cuuint32_t steps[kRank];
  std::fill_n(steps, kRank, 1);
  return encode &&
         encode(map, type, kRank, const_cast<void*>(data), dims, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Describes 16-bit [batch, rows, heads, dim] to the copy engine, in boxes of 64 columns of one
// head and `box_rows` rows.
template <typename T>
bool MakeTensorMap(const void* data, int64_t dim, int64_t heads, int64_t rows, int64_t batch,
                   int box_rows, CUtensorMap* map) {
  const cuuint64_t dims[] = {cuuint64_t(dim), cuuint64_t(heads), cuuint64_t(rows),
                             cuuint64_t(batch)};
  const cuuint64_t row_bytes = dim * sizeof(T);
  const cuuint64_t strides[] = {row_bytes, row_bytes * heads, row_bytes * heads * rows};
  const cuuint32_t box[] = {kPanelCols, 1, cuuint32_t(box_rows), 1};
  return EncodeTensorMap(
      std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      data, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

// Describes float32 [rows, cols], in boxes of `box_cols` of one row.
inline bool MakeRowMap(const float* data, int64_t rows, int64_t cols, int box_cols,
                       CUtensorMap* map) {
  const cuuint64_t dims[] = {cuuint64_t(cols), cuuint64_t(rows)};
  const cuuint64_t strides[] = {cuuint64_t(cols) * sizeof(float)};
  const cuuint32_t box[] = {cuuint32_t(box_cols), 1};
  return EncodeTensorMap(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data, dims, strides, box,
                         CU_TENSOR_MAP_SWIZZLE_NONE, map);
}

}  // namespace tf_ops
