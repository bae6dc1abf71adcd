// Files of a directory, which the core knows nothing of. What is wrong is told in words; empty if nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace otaro {

struct File {
  std::shared_ptr<void> memory;  // null where it is empty
  size_t bytes = 0;
};

// For reading; pages come when they are used.
std::string map_file(const std::string& path, File& out);
std::string read_text(const std::string& path, std::string& text);

}  // namespace otaro
