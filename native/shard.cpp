#include "shard.h"

#include <algorithm>

#include "json.h"
#include "sefp_format.h"
#include "sha256.h"

namespace otaro {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr std::string_view kScales = ".scales";

// Bytes of a value, 0 for types that the format does not use.
int64_t item_size(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64") return 8;
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL" || dtype == "F8_E4M3") return 1;
  return 0;
}

bool is_digest(std::string_view text) {
  const auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  return text.size() == 64 && std::all_of(text.begin(), text.end(), hex);
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// a * b, refused from 2^56 on, so that nothing later overflows.
bool multiply(int64_t a, int64_t b, int64_t& out) {
  constexpr int64_t kMost = int64_t{1} << 56;
  if (a < 0 || b < 0 || (b && a > kMost / b)) return false;
  out = a * b;
  return true;
}

bool numbers(const Value& array, std::vector<int64_t>& out) {
  out.clear();
  if (!array.is(Value::kArray)) return false;
  for (Value item = array.first(); item; item = item.next()) {
    int64_t number;
    if (!item.integer(number) || number < 0) return false;
    out.push_back(number);
  }
  return true;
}

bool product(const std::vector<int64_t>& shape, int64_t& out) {
  out = 1;
  for (const int64_t one : shape)
    if (!multiply(out, one, out)) return false;
  return true;
}

std::string shown(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t one : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(one);
  return text + "]";
}

// The seal is the SHA-256 of the header with the seal's own digits as zeros.
bool seal_holds(std::string_view header, const std::string& seal) {
  const std::string stated = "\"seal\":\"" + seal + "\"", blank = "\"seal\":\"" + std::string(64, '0') + "\"";
  Sha256 sum;
  for (size_t at; (at = header.find(stated)) != std::string_view::npos;
       header.remove_prefix(at + stated.size())) {
    sum.add(header.data(), at);
    sum.add(blank.data(), blank.size());
  }
  sum.add(header.data(), header.size());
  return sum.hex() == seal;
}

std::string read_schema(const Value& stated, Schema& schema) {
  int64_t group_size = 0;
  if (!stated["group_size"].integer(group_size) || group_size < 1 || group_size % kBlock ||
      group_size > 1 << 24)
    return "the group size is not a positive multiple of 32";
  schema.group_size = static_cast<int>(group_size);
  const std::string reconstruction = stated["reconstruction"].text();
  if (reconstruction != "midpoint" && reconstruction != "truncate") return "its reconstruction is unknown";
  schema.truncate = reconstruction == "truncate";
  const Value shapes = stated["shapes"], exponents = stated["scale_exponents"];
  if (!shapes.is(Value::kObject) || !exponents.is(Value::kObject))
    return "'sefp' gives no shapes or exponents";
  for (Value member = shapes.first(); member; member = member.next()) {
    Schema::Entry entry;
    int64_t weights;
    const bool whole =
      numbers(member, entry.shape) && entry.shape.size() >= 2 && product(entry.shape, weights);
    if (!whole || weights == 0) return "the packed tensor " + member.key() + " has an impossible shape";
    schema.packed.emplace(member.key(), entry);
  }
  for (Value member = exponents.first(); member; member = member.next()) {
    const auto found = schema.packed.find(member.key());
    int64_t exponent;
    if (found == schema.packed.end() || !member.integer(exponent) || exponent < kMinScaleExponent ||
        exponent > kMaxScaleExponent)
      return "the scale exponent of " + member.key() + " is none";
    found->second.scale_exponent = static_cast<int>(exponent);
  }
  if (exponents.size() != schema.packed.size())
    return "'sefp' does not give one scale exponent for every packed tensor";
  for (const auto& [name, entry] : schema.packed)
    if (schema.packed.count(name + std::string(kScales))) return "the scales of " + name + " are packed";
  return "";
}

// The tensors that a plane has of packed ones must be as the base shard implies.
std::string check_schema(const Schema& schema, int plane,
                         const std::map<std::string, Tensor, std::less<>>& tensors) {
  const auto wrong = [&](const std::string& name, const char* dtype,
                         std::vector<int64_t> shape) -> std::string {
    const auto found = tensors.find(name);
    if (found == tensors.end()) return "it lacks the tensor " + name;
    if (found->second.dtype == dtype && found->second.shape == shape) return "";
    return name + " is " + found->second.dtype + " " + shown(found->second.shape) +
           " where the model's base shard implies " + dtype + " " + shown(shape);
  };
  for (const auto& [name, entry] : schema.packed) {
    std::vector<int64_t> shape = entry.shape;
    const int64_t length = shape.back(), blocks = (length + kBlock - 1) / kBlock;
    shape.back() = blocks * (plane == kCoarsest ? kBaseBytes : kPlaneBytes);
    if (std::string why = wrong(name, "U8", shape); !why.empty()) return why;
    if (plane > kCoarsest) continue;
    shape.back() = (length + schema.group_size - 1) / schema.group_size;
    if (std::string why = wrong(name + std::string(kScales), "F8_E4M3", shape); !why.empty()) return why;
  }
  if (plane > kCoarsest && tensors.size() != schema.packed.size())
    return "it holds a tensor that the base shard does not know";
  return "";
}

// Entries must tile the data without gap or overlap, each as large as its type and shape say.
std::string read_tensors(const Value& header, const uint8_t* data, uint64_t bytes,
                         std::map<std::string, Tensor, std::less<>>& tensors) {
  struct Place {
    int64_t start, end;
  };
  std::vector<Place> places;
  for (Value member = header.first(); member; member = member.next()) {
    const std::string name = member.key();
    if (name == "__metadata__") continue;
    Tensor tensor;
    tensor.dtype = member["dtype"].text();
    std::vector<int64_t> offsets;
    if (!numbers(member["shape"], tensor.shape) || !numbers(member["data_offsets"], offsets) ||
        offsets.size() != 2)
      return "the header entry of " + name + " is malformed";
    const int64_t size = item_size(tensor.dtype);
    if (!size || (tensor.dtype == "F8_E4M3" && !ends_with(name, kScales)))
      return name + " has an unknown dtype";
    int64_t count;
    if (!product(tensor.shape, count) || !multiply(count, size, count) || offsets[0] > offsets[1] ||
        offsets[1] - offsets[0] != count)
      return name + " claims another number of bytes than its shape takes";
    if (static_cast<uint64_t>(offsets[1]) > bytes) return "it is truncated: " + name + " ends behind it";
    tensor.data = data + offsets[0], tensor.bytes = static_cast<size_t>(count);
    places.push_back({offsets[0], offsets[1]});
    tensors.emplace(name, std::move(tensor));
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.start != b.start ? a.start < b.start : a.end < b.end;
  });
  int64_t reached = 0;
  for (const Place& place : places) {
    if (place.start != reached) return "its tensors overlap or leave gaps";
    reached = place.end;
  }
  return static_cast<uint64_t>(reached) == bytes ? "" : "it has bytes after its last tensor";
}

}  // namespace

int64_t Tensor::rows() const {
  int64_t count = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) count *= shape[i];
  return count;
}

std::string Shard::read(const uint8_t* data, size_t bytes) {
  uint64_t length = 0;
  if (bytes < 8) return "it is truncated inside its header";
  for (int i = 7; i >= 0; --i) length = length << 8 | data[i];
  if (length > kMaxHeader) return "its header claims " + std::to_string(length) + " bytes, over the limit";
  if (length > bytes - 8) return "it is truncated inside its header";
  const std::string_view text(reinterpret_cast<const char*>(data) + 8, static_cast<size_t>(length));
  Json header, stated;
  if (const std::string why = header.parse(text); !why.empty()) return "its header is not valid JSON: " + why;
  const Value metadata = header.root()["__metadata__"];
  const std::string version = metadata["otaro"].text();
  if (version.empty()) return "it is not an OTARo shard: its header has no format version";
  if (version != "2")
    return "it has another format version than 2; pack the checkpoint anew with `otaro pack`";
  const std::string seal = metadata["seal"].text();
  if (!is_digest(seal) || !seal_holds(text, seal))
    return "its header does not match its seal; fetch it again";
  if (std::string why = read_tensors(header.root(), data + 8 + length, bytes - 8 - length, tensors);
      !why.empty())
    return why;
  const std::string digests = metadata["digests"].text();
  if (const std::string why = stated.parse(digests); !why.empty())
    return "'digests' is not valid JSON: " + why;
  for (Value member = stated.root().first(); member; member = member.next()) {
    const auto found = tensors.find(member.key());
    if (found == tensors.end() || !is_digest(member.text()))
      return "'digests' does not give a SHA-256 for every tensor";
    found->second.digest = member.text();
  }
  if (stated.root().size() != tensors.size()) return "'digests' does not give a SHA-256 for every tensor";
  model = metadata["model"].text();
  if (!is_digest(model)) return "'model' is not a SHA-256";
  const std::string number = metadata["plane"].text();
  if (number.size() != 1 || number[0] < '0' + kCoarsest || number[0] > '0' + kFinest)
    return "it is of no plane";
  plane = number[0] - '0';
  if (plane != kCoarsest) return "";
  const std::string sefp = metadata["sefp"].text();
  if (const std::string why = stated.parse(sefp); !why.empty()) return "'sefp' is not valid JSON: " + why;
  if (std::string why = read_schema(stated.root(), schema); !why.empty()) return why;
  return check_schema(schema, plane, tensors);
}

std::string Shard::check_against(const Shard& base) const {
  if (model != base.model) return "it belongs to another model; fetch the shard of this one";
  return check_schema(base.schema, plane, tensors);
}

std::string Shard::check_digests() const {
  for (const auto& [name, tensor] : tensors) {
    Sha256 sum;
    sum.add(tensor.data, tensor.bytes);
    if (sum.hex() != tensor.digest) return "the bytes of " + name + " are damaged; fetch the shard again";
  }
  return "";
}

}  // namespace otaro
