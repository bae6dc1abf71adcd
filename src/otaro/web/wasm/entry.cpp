// What WebAssembly needs besides the decoder's own sources: threads that are workers, and exceptions that are
// JavaScript's. Everything else that JavaScript calls is otaro.h's.
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <typeinfo>

namespace {

constexpr int kMostThreads = 64;
constexpr size_t kPage = 65536;

struct Work {
  std::atomic<int> there{0};
  void* kept;
  void (*run)(void*);
};

Work works[kMostThreads];
std::atomic<int> started{0};

}  // namespace

void std::thread::start(void* work, void (*run)(void*)) {
  Work& mine = works[started.fetch_add(1)];
  mine.kept = work, mine.run = run;
  mine.there.store(1);
  wake(mine.there, 1);
}

extern "C" {

// Tells JavaScript, which throws.
__attribute__((import_module("host"), import_name("refuse"))) [[noreturn]] void host_refuse(
  const char* words);

// Memory for a shard, never given back; null where there is none. malloc would take up to twice as much: its
// large pieces are powers of two.
void* otaro_web_pages(size_t bytes) {
  const size_t page = __builtin_wasm_memory_grow(0, (bytes + kPage - 1) / kPage);
  return page == static_cast<size_t>(-1) ? nullptr : reinterpret_cast<void*>(page * kPage);
}

// Worker `number`, from 0 on, of those that help. Returns only where it never gets work.
void otaro_web_thread(int number) {
  Work& mine = works[number];
#ifdef __wasm_atomics__
  while (!mine.there.load()) std::wait_on(mine.there, 0);
#endif
  mine.run(mine.kept);
}

// Nothing here is caught: an exception ends the module.
void* __cxa_allocate_exception(size_t bytes) { return std::malloc(bytes); }

[[noreturn]] void __cxa_throw(void* thrown, std::type_info* type, void (*)(void*)) {
  host_refuse(*type == typeid(std::bad_alloc) ? "there is not enough memory"
                                              : static_cast<std::exception*>(thrown)->what());
}
}
