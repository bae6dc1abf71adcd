#include "pool.h"

#include <algorithm>
#include <new>
#include <system_error>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace otaro {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

constexpr int kSpins = 4000;  // some 50 to 100 microseconds

Pool* the_pool = nullptr;
std::mutex the_mutex;

}  // namespace

Pool& Pool::shared() {
  std::lock_guard lock(the_mutex);
  if (!the_pool) {
    the_pool = new Pool;  // never destroyed: helpers may outlive static destructors
#if defined(__unix__) || defined(__APPLE__)
    // A forked child has no helpers: it leaves the parent's pool alone and starts its own.
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      const int threads = the_pool ? the_pool->threads() : 1;
      the_pool = new Pool;
      the_pool->set_threads(threads);
      new (&the_mutex) std::mutex;
    });
    static_cast<void>(registered);
#endif
  }
  return *the_pool;
}

Pool::~Pool() { resize(1); }

void Pool::set_threads(int count) { wanted_.store(count < 1 ? 1 : count, std::memory_order_relaxed); }

void Pool::resize(int count) {
  if (resized_ == count) return;
  resized_ = count;
  {
    std::lock_guard lock(sleep_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
  helpers_.clear();
  stop_.store(false);
  parts_ = std::vector<Part>(static_cast<size_t>(count));
  try {
    for (size_t i = 1; i < parts_.size(); ++i) helpers_.emplace_back([this, i] { help(i); });
  } catch (const std::system_error&) {  // the system gives no more threads: those that there are do the work
  }
}

void Pool::run_chunks(int64_t count, int64_t grain, Call call, void* context) {
  std::unique_lock region(region_, std::try_to_lock);
  if (!region.owns_lock()) return call(context, 0, count);
  resize(threads());
  call_ = call, context_ = context, count_ = count, grain_ = grain;
  const int64_t chunks = (count + grain - 1) / grain, threads = static_cast<int64_t>(parts_.size());
  for (int64_t i = 0; i < threads; ++i) {
    Part& part = parts_[static_cast<size_t>(i)];
    part.next.store(chunks * i / threads, std::memory_order_relaxed);
    part.end = chunks * (i + 1) / threads;
  }
  epoch_.fetch_add(1);  // open
  if (sleeping_.load()) {
    std::lock_guard lock(sleep_);
    wake_.notify_all();
  }
  work(0);
  epoch_.fetch_add(1);  // closed
  // A helper may have lost its core to somebody else; then spinning on would only keep the next core from it.
  for (int spins = 0; inside_.load(); ++spins) spins < kSpins ? relax() : std::this_thread::yield();
}

void Pool::work(size_t thread) {
  for (size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[(thread + i) % parts_.size()];
    for (int64_t chunk; (chunk = part.next.fetch_add(1, std::memory_order_relaxed)) < part.end;)
      call_(context_, chunk * grain_, std::min((chunk + 1) * grain_, count_));
  }
}

void Pool::help(size_t thread) {
  uint64_t seen = 0;  // epochs of regions are odd
  const auto open = [&] {
    const uint64_t epoch = epoch_.load();
    return epoch % 2 && epoch != seen;
  };
  while (!stop_.load()) {
    for (int spins = 0; spins < kSpins && !open() && !stop_.load(std::memory_order_relaxed); ++spins) relax();
    if (!open()) {
      std::unique_lock lock(sleep_);
      sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return open() || stop_.load(); });
      sleeping_.fetch_sub(1);
    }
    const uint64_t epoch = epoch_.load();
    inside_.fetch_add(1);
    if (epoch % 2 && epoch == epoch_.load()) {
      work(thread);
      seen = epoch;
    }
    inside_.fetch_sub(1);
  }
}

}  // namespace otaro
