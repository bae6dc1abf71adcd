// otaro-run: a nested directory in, text out.
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "files.h"
#include "json.h"
#include "otaro.h"
#include "tokenizer.h"

namespace {

constexpr const char* kHelp =
  "usage: otaro-run DIR [--prompt TEXT] [options]\n"
  "\n"
  "Continues a text with the nested model in DIR. Without --prompt it reads lines, and answers each; /help "
  "tells\n"
  "what else can be typed. While it answers, SIGUSR1 drops a bit of precision and SIGUSR2 adds one; Ctrl-C "
  "ends an\n"
  "answer.\n"
  "\n"
  "  --prompt TEXT       the text to continue\n"
  "  --tokens N          at most so many new tokens (default 128)\n"
  "  --precision P       E5M3 to E5M8 (default: the finest there is)\n"
  "  --template TEXT     what is made of a prompt or line, which takes the place of {}; \\n is a new line\n"
  "  --temperature T     draw tokens; 0, the default, takes the likeliest\n"
  "  --top-p P           draw among the likeliest that have this probability together (default 1)\n"
  "  --seed N            of what is drawn (default 0)\n"
  "  --threads N         (default: all)\n"
  "  --verify            check all bytes against their digests first\n";

// What signals ask for. Each is looked at before the next token.
volatile std::sig_atomic_t asked_down = 0, asked_up = 0, asked_to_stop = 0;

void on_signal(int signal) {
  if (signal == SIGINT) asked_to_stop = 1;
#ifdef SIGUSR1
  if (signal == SIGUSR1) asked_down = asked_down + 1;
  if (signal == SIGUSR2) asked_up = asked_up + 1;
#endif
}

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "otaro-run: %s\n", why.c_str());
  std::exit(1);
}

struct Options {
  std::string directory, prompt, layout = "{}";
  bool interactive = true, verify = false;
  int precision = 0, threads = 0;
  long tokens = 128;
  double temperature = 0, top_p = 1;
  uint64_t seed = 0;
};

int precision_of(const std::string& name) {
  const bool known = name.size() == 4 && name.compare(0, 3, "E5M") == 0 && name[3] >= '3' && name[3] <= '8';
  return known ? name[3] - '0' : 0;
}

double number(const char* option, const char* text, double least, double most) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (end == text || *end || !(value >= least && value <= most))
    fail(std::string(option) + " takes a number, not " + text);
  return value;
}

Options parse(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--help" || word == "-h") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (word == "--verify") {
      options.verify = true;
      continue;
    }
    if (word.compare(0, 2, "--") != 0) {
      if (!options.directory.empty()) fail("one directory, please: " + word + " is one too many");
      options.directory = word;
      continue;
    }
    if (i + 1 == count) fail(word + (word.size() > 2 ? " takes a value, or is unknown; see --help" : ""));
    const char* value = words[++i];
    if (word == "--prompt") {
      options.prompt = value, options.interactive = false;
    } else if (word == "--tokens") {
      options.tokens = static_cast<long>(number("--tokens", value, 1, 1e9));
    } else if (word == "--precision") {
      options.precision = precision_of(value);
      if (!options.precision) fail(std::string("--precision takes E5M3 to E5M8, not ") + value);
    } else if (word == "--template") {
      options.layout = value;
      for (size_t at; (at = options.layout.find("\\n")) != std::string::npos;)
        options.layout.replace(at, 2, "\n");
      if (options.layout.find("{}") == std::string::npos)
        fail("--template must say by {} where the text goes");
    } else if (word == "--temperature") {
      options.temperature = number("--temperature", value, 0, 100);
    } else if (word == "--top-p") {
      options.top_p = number("--top-p", value, 1e-6, 1);
    } else if (word == "--seed") {
      options.seed = static_cast<uint64_t>(number("--seed", value, 0, 9e15));
    } else if (word == "--threads") {
      options.threads = static_cast<int>(number("--threads", value, 1, 1024));
    } else {
      fail("there is no option " + word + "; see --help");
    }
  }
  if (options.directory.empty()) {
    std::fputs(kHelp, stderr);
    std::exit(2);
  }
  return options;
}

// How many bytes from a place on could begin a character that is not complete, 1 at least.
size_t begun(std::string_view text, size_t at) {
  const auto first = static_cast<unsigned char>(text[at]);
  const size_t wanted = first >= 0xf5 ? 1 : first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc2 ? 2 : 1;
  size_t size = 1;
  for (; size < wanted && at + size < text.size(); ++size) {
    const auto byte = static_cast<unsigned char>(text[at + size]);
    const int least = size > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const int most = size > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    if (byte < least || byte > most) break;
  }
  return size;
}

// Bytes as they come, written in whole characters. What will never be one becomes U+FFFD, as everywhere.
class Output {
 public:
  void add(std::string_view bytes) { write(bytes, false); }
  void end() { write({}, true); }

 private:
  void write(std::string_view bytes, bool end) {
    held_ += bytes;
    size_t at = 0;
    while (at < held_.size()) {
      const auto size = static_cast<size_t>(otaro::character_at(held_, at).bytes);
      const size_t part = begun(held_, at);
      const bool incomplete =
        !size && at + part == held_.size() && static_cast<unsigned char>(held_[at]) >= 0xc2;
      if (incomplete && !end) break;
      if (size)
        std::fwrite(held_.data() + at, 1, size, stdout);
      else
        std::fputs("\xef\xbf\xbd", stdout);
      at += size ? size : part;
    }
    held_.erase(0, at);
    std::fflush(stdout);
  }

  std::string held_;
};

class Sampler {
 public:
  Sampler(double temperature, double top_p, uint64_t seed)
    : temperature_(temperature), top_p_(top_p), state_(seed) {}

  int32_t choose(const float* logits, size_t count) {
    const auto best = static_cast<size_t>(std::max_element(logits, logits + count) - logits);
    if (temperature_ == 0) return static_cast<int32_t>(best);
    probabilities_.clear();
    double sum = 0;
    for (size_t i = 0; i < count; ++i) {
      const double p = std::exp((static_cast<double>(logits[i]) - logits[best]) / temperature_);
      probabilities_.push_back({p, static_cast<int32_t>(i)});
      sum += p;
    }
    if (top_p_ < 1) {
      std::sort(probabilities_.begin(), probabilities_.end(),
                [](const Chance& a, const Chance& b) { return a.p != b.p ? a.p > b.p : a.token < b.token; });
      double some = 0;
      size_t kept = 0;
      while (kept < probabilities_.size() && some < top_p_ * sum) some += probabilities_[kept++].p;
      probabilities_.resize(kept);
      sum = some;
    }
    double left = uniform() * sum;
    for (const Chance& one : probabilities_)
      if ((left -= one.p) < 0) return one.token;
    return probabilities_.back().token;
  }

 private:
  struct Chance {
    double p;
    int32_t token;
  };

  double uniform() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return static_cast<double>((z ^ z >> 31) >> 11) * 0x1p-53;
  }

  const double temperature_, top_p_;
  uint64_t state_;
  std::vector<Chance> probabilities_;
};

// Tokens that end a text, as generation_config.json or config.json says.
std::vector<int32_t> ends_of(const std::string& directory) {
  std::vector<int32_t> ends;
  for (const char* name : {"/generation_config.json", "/config.json"}) {
    std::string text;
    otaro::Json json;
    if (!otaro::read_text(directory + name, text).empty() || !json.parse(text).empty()) continue;
    const otaro::Value stated = json.root()["eos_token_id"];
    int64_t id;
    if (stated.integer(id)) ends.push_back(static_cast<int32_t>(id));
    for (otaro::Value one = stated.first(); one; one = one.next())
      if (one.integer(id)) ends.push_back(static_cast<int32_t>(id));
    if (!ends.empty()) break;
  }
  return ends;
}

class Session {
 public:
  explicit Session(const Options& options)
    : options_(options),
      model_(otaro_open(options.directory.c_str()), otaro_free),
      ends_(ends_of(options.directory)),
      sampler_(options.temperature, options.top_p, options.seed) {
    if (!model_) fail("there is not enough memory");
    if (*otaro_error(model_.get())) fail(otaro_error(model_.get()));
    if (options.verify && otaro_verify(model_.get())) fail(otaro_error(model_.get()));
    std::string text;
    const std::string path = options.directory + "/tokenizer.json";
    if (const std::string why = otaro::read_text(path, text); !why.empty()) fail(why);
    if (const std::string why = tokenizer_.read(text); !why.empty()) fail(path + ": " + why);
    if (options.precision && otaro_set_precision(model_.get(), options.precision))
      fail(otaro_error(model_.get()));
    const auto all = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    otaro_set_threads(options.threads ? options.threads : all);
  }

  // Reads a text and writes its continuation. Whether it could.
  bool answer(const std::string& text, long most) {
    std::vector<int32_t> tokens = std::move(pending_);
    pending_.clear();
    if (const std::string why =
          tokenizer_.encode(text, tokens.empty() && !otaro_length(model_.get()), tokens);
        !why.empty())
      return complain(why);
    if (tokens.empty()) return complain("the text holds no token");
    const auto began = std::chrono::steady_clock::now();
    const float* logits = otaro_forward(model_.get(), tokens.data(), tokens.size());
    if (!logits) return complain(otaro_error(model_.get()));
    const auto read = std::chrono::steady_clock::now();
    long made = 0;
    Output out;
    while (true) {
      const int32_t token = sampler_.choose(logits, otaro_vocabulary(model_.get()));
      ++made;
      pending_ = {token};
      if (std::find(ends_.begin(), ends_.end(), token) != ends_.end()) break;
      out.add(tokenizer_.piece(token));
      obey_signals();
      if (made == most || asked_to_stop) break;
      logits = otaro_forward(model_.get(), &token, 1);
      if (!logits) {
        out.end();
        return complain(otaro_error(model_.get()));
      }
    }
    out.end();
    const std::chrono::duration<double> prompt = read - began, rest = std::chrono::steady_clock::now() - read;
    std::printf("\n");
    std::fflush(stdout);
    std::fprintf(stderr, "[%s: %zu tokens read in %.2f s; %ld made, %.1f a second]\n", precision().c_str(),
                 tokens.size(), prompt.count(), made,
                 made > 1 ? static_cast<double>(made - 1) / rest.count() : 0.0);
    return true;
  }

  // Lines, until there are none.
  void converse() {
    std::fprintf(stderr, "%s at %s; /help for commands\n", options_.directory.c_str(), precision().c_str());
    std::string line;
    while (std::fprintf(stderr, "%s> ", precision().c_str()), read_line(line)) {
      asked_to_stop = 0;
      obey_signals();
      if (line.empty()) continue;
      if (line[0] != '/') {
        answer(laid_out(line), tokens_);
      } else if (!command(line)) {
        break;
      }
    }
  }

  std::string laid_out(const std::string& text) const {
    std::string out = options_.layout;
    return out.replace(out.find("{}"), 2, text);
  }

 private:
  // Whether to go on.
  bool command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space),
                      value = space == std::string::npos ? "" : line.substr(space + 1);
    if (name == "/quit") return false;
    if (name == "/reset") {
      otaro_truncate(model_.get(), 0);
      pending_.clear();
    } else if (name == "/tokens" && std::atol(value.c_str()) > 0) {
      tokens_ = std::atol(value.c_str());
    } else if (name == "/precision" && precision_of(value)) {
      if (otaro_set_precision(model_.get(), precision_of(value))) complain(otaro_error(model_.get()));
    } else {
      std::fputs(
        "/precision E5M3 ... E5M8   from the next token on; what was read stays\n"
        "/tokens N                  the most that an answer has\n"
        "/reset                     forget the conversation\n"
        "/quit\n",
        stderr);
    }
    return true;
  }

  void obey_signals() {
    const int steps = static_cast<int>(asked_up) - static_cast<int>(asked_down);
    asked_up = asked_down = 0;
    if (!steps) return;
    const int wanted = std::clamp(otaro_precision(model_.get()) + steps, 3, otaro_finest(model_.get()));
    otaro_set_precision(model_.get(), wanted);
  }

  static bool read_line(std::string& line) {
    line.clear();
    for (int c; (c = std::fgetc(stdin)) != EOF;) {
      if (c == '\n') return true;
      line += static_cast<char>(c);
    }
    if (errno == EINTR && !asked_to_stop) {  // a signal for another precision
      std::clearerr(stdin);
      errno = 0;
      return true;
    }
    return !line.empty();
  }

  static bool complain(const std::string& why) {
    std::fprintf(stderr, "otaro-run: %s\n", why.c_str());
    return false;
  }

  std::string precision() const { return "E5M" + std::to_string(otaro_precision(model_.get())); }

  const Options& options_;
  std::unique_ptr<otaro_model, void (*)(otaro_model*)> model_;
  otaro::Tokenizer tokenizer_;
  const std::vector<int32_t> ends_;
  Sampler sampler_;
  std::vector<int32_t> pending_;  // the last token made, which is not read yet
  long tokens_ = options_.tokens;
};

}  // namespace

int main(int count, char** words) {
  const Options options = parse(count, words);
  Session session(options);
#ifdef SIGUSR1
  struct sigaction action = {};
  action.sa_handler = on_signal;
  for (const int signal : {SIGUSR1, SIGUSR2}) sigaction(signal, &action, nullptr);
  if (options.interactive) sigaction(SIGINT, &action, nullptr);
#endif
  if (options.interactive) {
    session.converse();
    return 0;
  }
  std::fputs(options.layout == "{}" ? options.prompt.c_str() : "", stdout);
  return session.answer(session.laid_out(options.prompt), options.tokens) ? 0 : 1;
}
