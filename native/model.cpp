// The functions of otaro.h but for files: decoder.json and shards become a Decoder. Nothing here trusts a
// number or a name before it was checked; what points into a shard stays within its tensor.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <set>

#include "guarded.h"
#include "select.h"

namespace otaro {
namespace {

constexpr int64_t kMostHeads = 1 << 16, kMostLayers = 1 << 12, kMostRopes = 64, kMore = int64_t{1} << 40;
constexpr int64_t kPositionsAtOnce = 1024;
constexpr double kMostFrequency = 1000;

float to_float(const uint8_t* bytes, const std::string& dtype) {
  if (dtype == "F64") {
    double value;
    std::memcpy(&value, bytes, sizeof value);
    return static_cast<float>(value);
  }
  if (dtype == "F32") {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  const uint32_t half = bytes[0] | uint32_t{bytes[1]} << 8;
  if (dtype == "BF16") return from_bits(half << 16);
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023, sign = (half >> 15) << 31;
  if (exponent == 31) return from_bits(sign | kInfinity | fraction << 13);
  if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float small = static_cast<float>(fraction) * power_of_two(-24);
  return sign ? -small : small;
}

// An object of decoder.json, every field of which must be asked for.
class Fields {
 public:
  Fields(const Value& object, std::string what, std::string& why)
    : object_(object), what_(std::move(what)), why_(why) {
    if (!object.is(Value::kObject)) refuse("is not there");
  }

  Value operator[](const char* name) {
    asked_.insert(name);
    return object_[name];
  }
  bool has(const char* name) { return static_cast<bool>((*this)[name]); }
  int64_t integer(const char* name, int64_t least, int64_t most) {
    int64_t value = least;
    if ((*this)[name].integer(value) && value >= least && value <= most) return value;
    refuse("must have a whole number '" + std::string(name) + "' from " + std::to_string(least) + " to " +
           std::to_string(most));
    return least;
  }
  int64_t integer(const char* name, int64_t least, int64_t most, int64_t otherwise) {
    return has(name) ? integer(name, least, most) : otherwise;
  }
  float number(const char* name) {
    double value = 0;
    if (!(*this)[name].number(value) || !std::isfinite(static_cast<float>(value)))
      refuse("must have a number '" + std::string(name) + "'");
    return static_cast<float>(value);
  }
  bool boolean(const char* name) {
    const Value value = (*this)[name];
    if (!value.is(Value::kTrue) && !value.is(Value::kFalse))
      refuse("must say '" + std::string(name) + "', true or false");
    return value.is(Value::kTrue);
  }
  std::string text(const char* name) {
    const Value value = (*this)[name];
    if (!value.is(Value::kString)) refuse("must have a text '" + std::string(name) + "'");
    return value.text();
  }
  void check_all_asked() {
    for (Value member = object_.first(); member; member = member.next())
      if (!asked_.count(member.key())) refuse("has '" + member.key() + "', which this program does not know");
  }
  // The first refusal counts.
  void refuse(const std::string& problem) {
    if (why_.empty()) why_ = "decoder.json: " + what_ + " " + problem;
  }

 private:
  const Value object_;
  const std::string what_;
  std::string& why_;
  std::set<std::string> asked_;
};

// Makes the decoder of a description and a base shard, in a model of its own: it is thrown away if anything
// is wrong.
class Builder {
 public:
  Builder(otaro_model& model, const Shard& base) : model_(model), base_(base) {}

  std::string build(const Value& root) {
    Fields given(root, "the file", why_);
    if (given.integer("version", 0, kMore) != 1) given.refuse("has another version than 1; write it anew");
    if (given.text("model") != base_.model) given.refuse("describes another model; write it anew");
    given["architecture"];
    shape_.heads = given.integer("heads", 1, kMostHeads),
    shape_.kv_heads = given.integer("kv_heads", 1, kMostHeads);
    shape_.head = given.integer("head_dim", 2, kMaxHead);
    shape_.eps = given.number("eps"), shape_.scale = given.number("scale");
    shape_.attention_cap = given.number("attention_cap"), shape_.logit_cap = given.number("logit_cap");
    shape_.embedding_scale = given.number("embedding_scale");
    shape_.residual_scale = given.number("residual_scale"), shape_.logit_scale = given.number("logit_scale");
    if (shape_.heads % shape_.kv_heads || shape_.head % 2)
      given.refuse("has heads that do not share keys evenly");
    const std::string activation = given.text("activation");
    shape_.gelu = activation == "gelu_tanh";
    if (!shape_.gelu && activation != "silu") given.refuse("has an unknown activation");
    norm_offset_ = given.number("norm_offset");
    model_.positions = given.integer("positions", 1, kMostPositions, kMostPositions);
    model_.trained_positions = given.integer("trained_positions", 1, kMore, 0);
    ropes(given["ropes"]);

    Linear embedding, head;
    const auto found = base_.schema.packed.find(given["embedding"]["tensor"].text());
    if (found == base_.schema.packed.end() || found->second.shape.size() != 2) {
      given.refuse("names no packed embedding");
      return why_;
    }
    shape_.vocabulary = found->second.shape[0], shape_.hidden = found->second.shape[1];
    matrix(given["embedding"], "the embedding", 1, shape_.vocabulary, shape_.hidden, embedding);
    const Value all = given["layers"];
    if (!all.is(Value::kArray) || !all.size() || all.size() > kMostLayers)
      given.refuse("has no layers, or too many");
    std::vector<Layer> layers(why_.empty() ? all.size() : 0);
    size_t number = 0;
    for (Value one = all.first(); one && why_.empty(); one = one.next(), ++number)
      layer(one, "layer " + std::to_string(number), layers[number]);
    matrix(given["lm_head"], "the head", 1, shape_.vocabulary, shape_.hidden, head);
    const float* norm = vector(given.text("norm"), shape_.hidden, norm_offset_);
    given.check_all_asked();
    if (!why_.empty()) return why_;

    model_.decoder =
      std::make_unique<Decoder>(shape_, std::move(layers), embedding, head, norm, std::move(ropes_));
    model_.cache = std::make_unique<Cache>(static_cast<int64_t>(number), shape_, 0);
    model_.slots[0].linear = &model_.decoder->embedding;
    size_t slot = 1;
    for (Layer& one : model_.decoder->layers)
      for (Linear* linear : {&one.query, &one.key, &one.value, &one.output, &one.gate, &one.up, &one.down})
        model_.slots[slot++].linear = linear;
    model_.slots[slot].linear = &model_.decoder->head;
    return "";
  }

 private:
  void ropes(const Value& all) {
    if (!all.is(Value::kArray) || all.size() > kMostRopes) {
      if (why_.empty()) why_ = "decoder.json: 'ropes' is no list";
      return;
    }
    for (Value one = all.first(); one; one = one.next()) {
      Fields given(one, "a rope", why_);
      Rope rope;
      rope.scale = given.number("scale");
      const Value frequencies = given["frequencies"];
      if (!frequencies.is(Value::kArray) || !frequencies.size() ||
          2 * int64_t{frequencies.size()} > shape_.head)
        given.refuse("must have frequencies, for a whole head at most");
      else
        for (Value item = frequencies.first(); item; item = item.next()) {
          double value = 0;
          if (!item.number(value) || !(std::fabs(value) <= kMostFrequency))
            given.refuse("has an absurd frequency");
          rope.frequencies.push_back(static_cast<float>(value));
        }
      given.check_all_asked();
      ropes_.push_back(std::move(rope));
    }
  }

  void layer(const Value& one, const std::string& what, Layer& layer) {
    Fields given(one, what, why_);
    const int64_t of_queries = shape_.heads * shape_.head, of_keys = shape_.kv_heads * shape_.head;
    Experts& experts = layer.experts;
    if (given.has("experts")) {
      Fields some(given["experts"], "the experts of " + what, why_);
      const std::string name = some.text("router");
      const auto router = base_.tensors.find(name);
      if (router == base_.tensors.end() || router->second.shape.size() != 2 || router->second.shape[0] < 1 ||
          router->second.shape[0] > kMostExperts)
        return some.refuse("have no router");
      experts.count = router->second.shape[0];
      experts.chosen = some.integer("chosen", 1, experts.count);
      experts.normalize = some.boolean("normalize");
      experts.router = vector(name, experts.count * shape_.hidden, 0);
      some.check_all_asked();
    }
    const int64_t stacked = std::max<int64_t>(1, experts.count);
    matrix(given["query"], what + "'s query", 1, of_queries, shape_.hidden, layer.query);
    matrix(given["key"], what + "'s key", 1, of_keys, shape_.hidden, layer.key);
    matrix(given["value"], what + "'s value", 1, of_keys, shape_.hidden, layer.value);
    matrix(given["output"], what + "'s output", 1, shape_.hidden, of_queries, layer.output);
    matrix(given["gate"], what + "'s gate", stacked, 0, shape_.hidden, layer.gate);
    matrix(given["up"], what + "'s up", stacked, layer.gate.weight.rows, shape_.hidden, layer.up);
    matrix(given["down"], what + "'s down", stacked, shape_.hidden, layer.gate.weight.rows, layer.down);
    layer.attention_norm = norm(given, "attention_norm", shape_.hidden);
    layer.attention_output_norm = norm(given, "attention_output_norm", shape_.hidden);
    layer.mlp_norm = norm(given, "mlp_norm", shape_.hidden);
    layer.mlp_output_norm = norm(given, "mlp_output_norm", shape_.hidden);
    const auto of_query = base_.tensors.find(given["query_norm"].text());
    layer.norms_all_heads =
      of_query != base_.tensors.end() && of_query->second.shape != std::vector{shape_.head};
    layer.query_norm = norm(given, "query_norm", layer.norms_all_heads ? of_queries : shape_.head);
    layer.key_norm = norm(given, "key_norm", layer.norms_all_heads ? of_keys : shape_.head);
    layer.window = given.integer("window", 0, kMore, 0);
    layer.rope = static_cast<int>(given.integer("rope", 0, static_cast<int64_t>(ropes_.size()) - 1, -1));
    given.check_all_asked();
  }

  // The rows of one expert, and how many lie between two. `rows` 0: as many as it says.
  void matrix(const Value& one, const std::string& what, int64_t experts, int64_t rows, int64_t length,
              Linear& into) {
    Fields given(one, what, why_);
    const std::string name = given.text("tensor");
    const auto stated = base_.schema.packed.find(name);
    if (!why_.empty()) return;
    if (stated == base_.schema.packed.end()) return given.refuse("is " + name + ", which is not packed");
    const Tensor &base = base_.tensors.at(name), &scales = base_.tensors.at(name + ".scales");
    const int64_t all = base.rows(), first = given.integer("first", 0, all, 0),
                  stride = given.integer("stride", 0, all, 0);
    const int64_t some = given.integer("rows", 1, all, all);
    // A row has sixteen bytes, so none of these overflows.
    if ((rows && some != rows) || stated->second.shape.back() != length || (experts > 1 && stride < some) ||
        first + (experts - 1) * stride + some > all)
      return given.refuse("has the wrong shape");
    Packed& weight = into.weight;
    weight.length = length, weight.rows = some;
    weight.group_size = base_.schema.group_size, weight.truncate = base_.schema.truncate;
    weight.scale_exponent = stated->second.scale_exponent;
    weight.base = base.data + first * weight.blocks() * kBaseBytes;
    weight.scales = scales.data + first * weight.groups();
    into.stride = stride, into.number = static_cast<int>(model_.slots.size());
    if (given.has("bias")) {
      const float* bias = vector(given.text("bias"), all, 0);
      into.bias = bias ? bias + first : nullptr;
    }
    model_.slots.push_back({nullptr, name, first});
    given.check_all_asked();
  }

  const float* norm(Fields& given, const char* name, int64_t count) {
    return given.has(name) ? vector(given.text(name), count, norm_offset_) : nullptr;
  }

  const float* vector(const std::string& name, int64_t count, float offset) {
    const auto found = base_.tensors.find(name);
    const auto refuse = [&](const char* problem) -> const float* {
      if (why_.empty()) why_ = "decoder.json: " + name + " " + problem;
      return nullptr;
    };
    if (found == base_.tensors.end() || base_.schema.packed.count(name))
      return refuse("is no tensor that is not packed");
    const Tensor& tensor = found->second;
    const int64_t size = tensor.dtype == "F64" ? 8 : tensor.dtype == "F32" ? 4 : 2;
    if (tensor.dtype != "F64" && tensor.dtype != "F32" && tensor.dtype != "F16" && tensor.dtype != "BF16")
      return refuse("is not of floats");
    if (static_cast<int64_t>(tensor.bytes) != count * size) return refuse("has the wrong length");
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) {
      const float value = to_float(tensor.data + i * size, tensor.dtype);
      values.push_back(offset == 0 ? value : value + offset);
    }
    model_.floats.push_back(std::move(values));
    return model_.floats.back().data();
  }

  otaro_model& model_;
  const Shard& base_;
  std::string why_;
  Shape shape_;
  float norm_offset_ = 0;
  std::vector<Rope> ropes_;
};

// Lets matrices see the planes that follow those they have.
void attach(otaro_model& model) {
  while (model.finest < kFinest && model.shards[model.finest + 1 - kCoarsest]) {
    const Shard& shard = *model.shards[++model.finest - kCoarsest];
    for (otaro_model::Slot& slot : model.slots) {
      Packed& weight = slot.linear->weight;
      weight.planes[model.finest - kCoarsest - 1] =
        shard.tensors.at(slot.tensor).data + slot.first * weight.blocks() * kPlaneBytes;
      weight.bits = model.finest;
    }
  }
}

std::string add_base(otaro_model& model, std::unique_ptr<Shard> shard) {
  Json json;
  if (const std::string why = json.parse(model.description); !why.empty())
    return "decoder.json is not valid JSON: " + why;
  otaro_model made;
  if (std::string why = Builder(made, *shard).build(json.root()); !why.empty()) return why;
  made.bits.assign(made.slots.size(), kCoarsest);
  made.logits.resize(static_cast<size_t>(made.decoder->shape.vocabulary));
  made.shards[0] = std::move(shard), made.finest = kCoarsest;
  made.description = std::move(model.description), made.files = std::move(model.files);
  model = std::move(made);
  return "";
}

// Why there is no such precision.
std::string lacks(const otaro_model& model, int mantissa_bits) {
  if (!model.finest) return "the model has no base shard yet";
  std::string why = "needs the shard of plane " + std::to_string(model.finest + 1);
  if (!model.missing.empty()) why = "needs " + model.missing + ", which is missing";
  if (!model.damaged.empty()) why = "cannot be had: " + model.damaged;
  return "E5M" + std::to_string(mantissa_bits) + " " + why + "; the model is complete up to E5M" +
         std::to_string(model.finest);
}

}  // namespace

int refuse(otaro_model* model, std::string why) {
  model->error = std::move(why);
  return -1;
}

}  // namespace otaro

using otaro::guarded;
using otaro::refuse;

otaro_model* otaro_new(void) { return new (std::nothrow) otaro_model; }

void otaro_free(otaro_model* model) { delete model; }

const char* otaro_error(const otaro_model* model) { return model->error.c_str(); }

int otaro_describe(otaro_model* model, const char* json, size_t bytes) {
  return guarded(model, -1, [&] {
    if (model->decoder) return refuse(model, "the model has its base shard already");
    otaro::Json document;
    const std::string text(json, bytes);
    if (const std::string why = document.parse(text); !why.empty())
      return refuse(model, "decoder.json is not valid JSON: " + why);
    model->description = text;
    return 0;
  });
}

int otaro_add_shard(otaro_model* model, const void* data, size_t bytes, int check) {
  return guarded(model, -1, [&] {
    if (model->description.empty()) return refuse(model, "decoder.json comes before the shards");
    auto shard = std::make_unique<otaro::Shard>();
    std::string why = shard->read(static_cast<const uint8_t*>(data), bytes);
    const bool first = !model->decoder, base = shard->plane == otaro::kCoarsest;
    if (why.empty() && first && !base)
      why = "it is of plane " + std::to_string(shard->plane) + ", and the base shard comes first";
    if (why.empty() && !first && model->shards[shard->plane - otaro::kCoarsest])
      why = "its plane is there already";
    if (why.empty() && !first) why = shard->check_against(*model->shards[0]);
    if (why.empty() && check) why = shard->check_digests();
    if (!why.empty()) return refuse(model, "the shard is refused: " + why);
    if (first) {
      why = otaro::add_base(*model, std::move(shard));
      return why.empty() ? 0 : refuse(model, why);
    }
    model->shards[shard->plane - otaro::kCoarsest] = std::move(shard);
    const int before = model->finest;
    otaro::attach(*model);
    if (model->finest > before) model->missing.clear(), model->damaged.clear();
    return 0;
  });
}

int otaro_verify(otaro_model* model) {
  return guarded(model, -1, [&] {
    if (!model->damaged.empty()) return refuse(model, model->damaged);
    for (const auto& shard : model->shards)
      if (const std::string why = shard ? shard->check_digests() : ""; !why.empty())
        return refuse(model, "the shard of plane " + std::to_string(shard->plane) + ": " + why);
    return 0;
  });
}

int otaro_set_precision(otaro_model* model, int mantissa_bits) {
  return guarded(model, -1, [&] {
    if (mantissa_bits < otaro::kCoarsest || mantissa_bits > otaro::kFinest)
      return refuse(model, "precisions have 3 to 8 mantissa bits");
    if (mantissa_bits > model->finest) return refuse(model, otaro::lacks(*model, mantissa_bits));
    std::fill(model->bits.begin(), model->bits.end(), static_cast<uint8_t>(mantissa_bits));
    return 0;
  });
}

int otaro_precision(const otaro_model* model) { return model->bits.empty() ? 0 : model->bits[0]; }

int otaro_finest(const otaro_model* model) { return model->finest; }

const char* otaro_damaged(const otaro_model* model) { return model->damaged.c_str(); }

const float* otaro_forward(otaro_model* model, const int32_t* tokens, size_t count) {
  return guarded(model, static_cast<const float*>(nullptr), [&]() -> const float* {
    const auto wrong = [&](std::string why) -> const float* {
      return refuse(model, std::move(why)), nullptr;
    };
    if (!model->decoder) return wrong("the model has no base shard yet");
    otaro::Decoder& decoder = *model->decoder;
    if (!count) return wrong("there are no tokens");
    const int64_t before = model->cache->length();
    if (count > static_cast<uint64_t>(model->positions - before))
      return wrong("the model knows " + std::to_string(model->positions) +
                   " positions, and the text would be longer");
    const int64_t end = before + static_cast<int64_t>(count);
    for (size_t i = 0; i < count; ++i)
      if (tokens[i] < 0 || tokens[i] >= decoder.shape.vocabulary)
        return wrong("token " + std::to_string(tokens[i]) + " is not in the vocabulary of " +
                     std::to_string(decoder.shape.vocabulary));
    const int64_t rounded =
      (end + otaro::kPositionsAtOnce - 1) / otaro::kPositionsAtOnce * otaro::kPositionsAtOnce;
    decoder.extend_positions(std::min(rounded, model->positions));
    // Should anything be refused, or memory run out, the sequence is as it was.
    struct Restore {
      otaro::Cache& cache;
      int64_t length;
      ~Restore() { cache.crop(length); }
    } restore{*model->cache, before};
    for (int64_t at = before; at < end; at += otaro::kMaxStep) {
      const int64_t some = std::min(otaro::kMaxStep, end - at);
      const std::vector<int64_t> ids(tokens + (at - before), tokens + (at - before + some));
      const std::vector<int64_t> wanted(at + some == end ? 1 : 0, some - 1);
      const std::vector<otaro::Sequence> one = {{model->cache.get(), some, model->bits.data()}};
      if (!decoder.step(ids.data(), one, wanted, model->logits.data()).empty())
        return wrong("a key or value is too large for the cache, which holds float16, or not finite");
    }
    restore.length = end;
    return model->logits.data();
  });
}

size_t otaro_vocabulary(const otaro_model* model) { return model->logits.size(); }

size_t otaro_length(const otaro_model* model) {
  return model->cache ? static_cast<size_t>(model->cache->length()) : 0;
}

size_t otaro_positions(const otaro_model* model) { return static_cast<size_t>(model->positions); }

size_t otaro_trained_positions(const otaro_model* model) {
  return static_cast<size_t>(model->trained_positions);
}

int otaro_truncate(otaro_model* model, size_t length) {
  return guarded(model, -1, [&] {
    if (length > otaro_length(model)) return refuse(model, "the sequence is not that long");
    if (model->cache) model->cache->crop(static_cast<int64_t>(length));
    return 0;
  });
}

void otaro_set_threads(int count) { otaro::Pool::shared().set_threads(std::clamp(count, 1, 1024)); }

const char* otaro_backend(void) { return otaro::kernels().name; }
