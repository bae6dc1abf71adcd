// otaro_open: a nested directory, its shards mapped.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>

#include "files.h"
#include "guarded.h"
#include "model.h"
#include "text.h"

#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace otaro {

std::string read_text(const std::string& path, std::string& text) {
  constexpr size_t kMostBytes = size_t{256} << 20;
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) return "cannot open " + path + ": " + std::strerror(errno);
  text.clear();
  char some[1 << 16];
  size_t count = 0;
  while (text.size() <= kMostBytes && (count = std::fread(some, 1, sizeof some, file)) > 0)
    text.append(some, count);
  const bool failed = std::ferror(file);
  std::fclose(file);
  if (failed) return "cannot read " + path;
  return text.size() > kMostBytes ? path + " is larger than any such file" : "";
}

#if defined(__unix__) || defined(__APPLE__)
std::string map_file(const std::string& path, File& out) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return "cannot open " + path + ": " + std::strerror(errno);
  struct stat about;
  std::string why;
  if (::fstat(descriptor, &about) != 0 || !S_ISREG(about.st_mode)) {
    why = path + " is no file";
  } else if (const auto bytes = static_cast<size_t>(about.st_size); bytes > 0) {
    void* memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED)
      why = "cannot map " + path + ": " + std::strerror(errno);
    else
      out = {std::shared_ptr<void>(memory, [bytes](void* mapped) { ::munmap(mapped, bytes); }), bytes};
  }
  ::close(descriptor);
  return why;
}
#else
std::string map_file(const std::string& path, File& out) {
  auto text = std::make_shared<std::string>();
  std::string why = read_text(path, *text);
  out = {std::shared_ptr<void>(text, text->data()), text->size()};
  return why;
}
#endif

namespace {

// Also where it cannot be read, which is told when it is.
bool exists(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) return errno != ENOENT;
  std::fclose(file);
  return true;
}

std::string add(otaro_model& model, std::vector<File>& files, const std::string& path, int plane) {
  File file;
  if (std::string why = map_file(path, file); !why.empty()) return why;
  files.push_back(file);
  if (otaro_add_shard(&model, file.memory.get(), file.bytes, 0)) return path + ": " + model.error;
  if (model.finest == plane) return "";
  for (int other = plane; other <= kFinest; ++other) model.shards[other - kCoarsest].reset();
  return path + ": it holds another plane than its name says";
}

std::string open_directory(otaro_model& model, const std::string& directory) {
  const auto shard = [&](int plane) {
    return directory + "/model-m" + std::to_string(plane) + ".safetensors";
  };
  if (!exists(shard(kCoarsest))) return directory + " is no nested model: it has no model-m3.safetensors";
  std::string text;
  if (!exists(directory + "/decoder.json"))
    return directory + " has no decoder.json; `otaro describe " + directory + "` writes it";
  if (std::string why = read_text(directory + "/decoder.json", text); !why.empty()) return why;
  if (otaro_describe(&model, text.data(), text.size())) return directory + "/" + model.error;
  auto files = std::make_shared<std::vector<File>>();
  model.files = files;
  for (int plane = kCoarsest; plane <= kFinest; ++plane) {
    if (!exists(shard(plane))) {
      model.missing = shard(plane);
      break;
    }
    if (const std::string why = add(model, *files, shard(plane), plane); !why.empty()) {
      if (plane == kCoarsest) return why;
      model.damaged = why;  // precisions below it need nothing of it
      break;
    }
  }
  otaro_set_precision(&model, model.finest);
  return "";
}

}  // namespace
}  // namespace otaro

otaro_model* otaro_open(const char* directory) {
  otaro_model* model = otaro_new();
  if (!model) return nullptr;
  const int failed = otaro::guarded(model, -1, [&] {
    const std::string why = otaro::open_directory(*model, directory);
    return why.empty() ? 0 : otaro::refuse(model, why);
  });
  if (failed) model->decoder.reset(), model->cache.reset();  // no file is half-used
  return model;
}

otaro_tokenizer* otaro_tokenizer_open(const char* directory) {
  otaro_tokenizer* tokenizer = otaro_tokenizer_new();
  if (!tokenizer) return nullptr;
  otaro::guarded(tokenizer, -1, [&] {
    const std::string path = std::string(directory) + "/tokenizer.json";
    std::string text, why = otaro::read_text(path, text);
    if (why.empty() && otaro_tokenizer_read(tokenizer, text.data(), text.size()))
      why = path + ": " + tokenizer->error;
    tokenizer->error = why;
    return 0;
  });
  return tokenizer;
}
