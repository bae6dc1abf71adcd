// Threads for the kernels, the caller among them. Work is cut into chunks. Each thread has a part of them,
// which it takes one after the other, so that it reads on in memory where it was; then it helps others with
// theirs. A result never depends on who took which. Helpers spin for some microseconds after their work,
// since a token is hundreds of short regions, then sleep: an idle pool costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace otaro {

class Pool {
 public:
  static Pool& shared();

  // How many threads work, the caller included; changes at the next region.
  void set_threads(int count);
  int threads() const { return wanted_.load(std::memory_order_relaxed); }

  // body(begin, end) for [0, count), in chunks of `grain`. If another thread is in a region, the caller works
  // alone. The body throws nothing and starts no region of its own.
  template <class Body>
  void run(int64_t count, int64_t grain, Body&& body) {
    if (grain < 1) grain = 1;
    if (count <= grain || threads() == 1) {
      if (count > 0) body(int64_t{0}, count);
      return;
    }
    run_chunks(
      count, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end);
      },
      &body);
  }

  // The chunk size that gives every thread a few turns.
  int64_t grain(int64_t count, int64_t multiple = 1) const {
    const int64_t turns = int64_t{threads()} * 4;
    const int64_t each = (count + turns - 1) / turns;
    return (each + multiple - 1) / multiple * multiple;
  }

  Pool() = default;
  ~Pool();

 private:
  using Call = void (*)(void* context, int64_t begin, int64_t end);
  void run_chunks(int64_t count, int64_t grain, Call call, void* context);
  void resize(int count);
  void work(size_t thread);
  void help(size_t thread);

  struct alignas(64) Part {
    std::atomic<int64_t> next{0};  // chunk
    int64_t end = 0;
  };

  std::atomic<int> wanted_{1};
  std::vector<std::thread> helpers_;
  // The number of threads last asked for; fewer helpers than that where the system gave no more.
  int resized_ = 1;
  std::mutex region_;  // held by the caller of a region

  // The region in progress. It is open while `epoch_` is odd. A helper counts itself in, looks whether the
  // region is still open, works and counts itself out; the caller closes the region when no chunk is left,
  // and waits for those inside. One that comes late finds the door closed, so nobody waits for a helper that
  // still sleeps.
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  std::vector<Part> parts_ = std::vector<Part>(1);  // by thread, the caller's first
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> stop_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> sleeping_{0};
};

}  // namespace otaro
