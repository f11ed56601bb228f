// SPDX-License-Identifier: Apache-2.0
// Cpu::ParallelFor on a pool of threads, TensorFlow's or XLA's: anything with Schedule(closure).
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "cc/common/tensor_view.h"

namespace tf_ops {

// The caller works along, while the others wake up, and waits only for blocks already taken: it
// may itself run on the pool, which then has no other thread left.
template <typename Pool>
void ParallelFor(Pool& pool, int64_t threads, int64_t n, int64_t cost_per_item,
                 const Cpu::Block& f) {
  constexpr double kCyclesPerBlock = 20000;  // as much as waking a thread costs
  constexpr int64_t kBlocksPerThread = 16;   // so many that the last ones end together
  const int64_t blocks =
      std::min<int64_t>({n, kBlocksPerThread * threads,
                         int64_t(1 + double(n) * double(cost_per_item) / kCyclesPerBlock)});
  if (threads <= 1 || blocks <= 1) return f(0, n);

  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
  };
  auto shared = std::make_shared<Shared>();
  // A task that starts late finds no block left and must not touch f, which is gone.
  auto work = [shared, blocks, n, &f] {
    for (int64_t b; (b = shared->next++) < blocks;) {
      f(n / blocks * b + n % blocks * b / blocks,
        n / blocks * (b + 1) + n % blocks * (b + 1) / blocks);
      std::lock_guard<std::mutex> lock(shared->mutex);
      if (++shared->done == blocks) shared->all_done.notify_one();
    }
  };
  for (int64_t i = 1; i < std::min(threads, blocks); ++i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done == blocks; });
}

}  // namespace tf_ops
