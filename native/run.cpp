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

#if defined(__unix__) || defined(__APPLE__)
#include <fcntl.h>
#include <sys/select.h>
#include <unistd.h>
#endif

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
  "answer. Wrong usage exits with 2, Ctrl-C under --prompt with 130, what else fails with 1.\n"
  "\n"
  "  --prompt TEXT       the text to continue\n"
  "  --tokens N          at most so many new tokens (default 128)\n"
  "  --precision P       E5M3 to E5M8 (default: the finest there is)\n"
  "  --template TEXT     what is made of a prompt or line, which takes the place of {}; \\n is a new line\n"
  "  --temperature T     draw tokens; 0, the default, takes the likeliest\n"
  "  --top-p P           draw among the likeliest that have this probability together (default 1)\n"
  "  --seed N            of what is drawn (default 0)\n"
  "  --threads N         (default: all)\n"
  "  --verify            check all bytes against their digests first\n"
  "  --version           and the instruction set in use\n";

bool complain(const std::string& why) {
  std::fprintf(stderr, "otaro-run: %s\n", why.c_str());
  return false;
}

[[noreturn]] void fail(const std::string& why) {
  complain(why);
  std::exit(1);
}

// What signals ask for. Each is looked at before the next token, and while a line is waited for.
volatile std::sig_atomic_t asked_down = 0, asked_up = 0, asked_to_stop = 0;

#ifdef SIGUSR1
// Every signal leaves a byte here, so that whoever waits for a line hears of one that came just before, too.
int signalled[2] = {-1, -1};

void open_signalled() {
  if (::fcntl(0, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);  // or the pipe would be the standard input
  if (::pipe(signalled) || signalled[0] >= FD_SETSIZE) fail("no more files can be opened");
  for (const int end : signalled) ::fcntl(end, F_SETFL, O_NONBLOCK);  // a full one says enough
}
#endif

void on_signal(int signal) {
  if (signal == SIGINT) {
    if (asked_to_stop) {  // and nobody looked
      std::signal(SIGINT, SIG_DFL);
      std::raise(SIGINT);
    }
    asked_to_stop = 1;
  }
#ifdef SIGUSR1
  if (signal == SIGUSR1) asked_down = asked_down + 1;
  if (signal == SIGUSR2) asked_up = asked_up + 1;
  const int before = errno;
  static_cast<void>(!::write(signalled[1], "", 1));
  errno = before;
#endif
}

[[noreturn]] void fail_usage(const std::string& why) {
  complain(why + "; see --help");
  std::exit(2);
}

struct Options {
  std::string directory, prompt, layout = "{}";
  bool interactive = true, verify = false;
  int precision = 0, threads = 0;
  long tokens = 128;
  double temperature = 0, top_p = 1;
  uint64_t seed = 0;
};

constexpr const char* kPrecisions = "E5M8, E5M7, E5M6, E5M5, E5M4 or E5M3";
constexpr double kMostTokens = 1e9;

// 0 where it is none.
int precision_of(const std::string& name) {
  const bool known = name.size() == 4 && (name[0] == 'E' || name[0] == 'e') && name[1] == '5' &&
                     (name[2] == 'M' || name[2] == 'm') && name[3] >= '3' && name[3] <= '8';
  return known ? name[3] - '0' : 0;
}

struct Range {
  double least, most;
  bool whole;

  // Whether a text is such a number.
  bool read(const std::string& text, double& out) const {
    char* end = nullptr;
    out = std::strtod(text.c_str(), &end);
    return end != text.c_str() && !*end && out >= least && out <= most && (!whole || out == std::floor(out));
  }
  std::string words() const {
    char some[80];
    std::snprintf(some, sizeof some, "a %snumber from %.16g to %.16g", whole ? "whole " : "", least, most);
    return some;
  }
};

constexpr Range kTokens = {1, kMostTokens, true};

double number(const std::string& option, const std::string& text, const Range& range) {
  double value = 0;
  if (!range.read(text, value)) fail_usage(option + " takes " + range.words() + ", not " + text);
  return value;
}

void set(Options& options, const std::string& name, const std::string& value) {
  if (name == "--prompt") {
    options.prompt = value, options.interactive = false;
  } else if (name == "--tokens") {
    options.tokens = static_cast<long>(number(name, value, kTokens));
  } else if (name == "--precision") {
    options.precision = precision_of(value);
    if (!options.precision) fail_usage("--precision takes " + std::string(kPrecisions) + ", not " + value);
  } else if (name == "--template") {
    options.layout = value;
    for (size_t at; (at = options.layout.find("\\n")) != std::string::npos;)
      options.layout.replace(at, 2, "\n");
    if (options.layout.find("{}") == std::string::npos)
      fail_usage("--template must say by {} where the text goes");
  } else if (name == "--temperature") {
    options.temperature = number(name, value, {0, 100, false});
  } else if (name == "--top-p") {
    options.top_p = number(name, value, {1e-6, 1, false});
  } else if (name == "--seed") {
    options.seed = static_cast<uint64_t>(number(name, value, {0, 0x1p53, true}));
  } else if (name == "--threads") {
    options.threads = static_cast<int>(number(name, value, {1, 1024, true}));
  }
}

Options parse(int count, char** words) {
  Options options;
  const std::vector<std::string> with_value = {"--prompt",      "--tokens", "--precision", "--template",
                                               "--temperature", "--top-p",  "--seed",      "--threads"};
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--help" || word == "-h") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (word == "--version") {
      std::printf("otaro-run %s, %s\n", OTARO_VERSION, otaro_backend());
      std::exit(0);
    }
    if (word == "--verify") {
      options.verify = true;
      continue;
    }
    if (word.size() < 2 || word[0] != '-') {
      if (!options.directory.empty()) fail_usage("one directory, please: " + word + " is one too many");
      options.directory = word;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    if (std::find(with_value.begin(), with_value.end(), name) == with_value.end())
      fail_usage(name == "--verify" ? "--verify takes no value" : "there is no option " + name);
    if (equals == std::string::npos && i + 1 == count) fail_usage(name + " takes a value");
    set(options, name, equals == std::string::npos ? words[++i] : word.substr(equals + 1));
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

// What was written is where it goes, or the end: an answer that nobody gets is no success.
void flush() {
  if (std::fflush(stdout) || std::ferror(stdout))
    fail(std::string("the text cannot be written: ") + std::strerror(errno));
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
    flush();
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

constexpr const char* kSpaces = " \t\r";

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(kSpaces), last = text.find_last_not_of(kSpaces);
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool is_terminal() {
#if defined(__unix__) || defined(__APPLE__)
  return ::isatty(0);
#else
  return true;
#endif
}

// Lines of the standard input.
class Input {
 public:
  // Whether there is one. It is empty where a signal asked for another precision meanwhile.
  bool read(std::string& line) {
    size_t end;
    while ((end = held_.find('\n')) == std::string::npos) {
      if (asked_to_stop) return false;
      if (asked_down || asked_up) return line.clear(), true;
      if (!more()) break;
    }
    const bool last = end == std::string::npos;
    line = held_.substr(0, end);
    held_.erase(0, last ? end : end + 1);
    if (!last && !line.empty() && line.back() == '\r') line.pop_back();
    return !last || !line.empty();
  }

 private:
  // Waits for bytes, or a signal; false at the end.
  bool more() {
#ifdef SIGUSR1
    char some[4096];
    fd_set either;
    FD_ZERO(&either);
    FD_SET(0, &either);
    FD_SET(signalled[0], &either);
    if (::select(signalled[0] + 1, &either, nullptr, nullptr, nullptr) < 0) return errno == EINTR;
    const bool signal = FD_ISSET(signalled[0], &either);
    const ssize_t size = ::read(signal ? signalled[0] : 0, some, sizeof some);
    if (size < 0) return errno == EINTR || errno == EAGAIN;
    if (!signal) held_.append(some, static_cast<size_t>(size));
    return size > 0;
#else
    const int c = std::fgetc(stdin);
    if (c == EOF) return false;
    held_ += static_cast<char>(c);
    return true;
#endif
  }

  std::string held_;
};

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
    if (const char* damaged = otaro_damaged(model_.get()); *damaged && !options.precision)
      std::fprintf(stderr, "note: %s; so %s is the finest\n", damaged, precision().c_str());
    const auto all = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    otaro_set_threads(options.threads ? options.threads : all);
  }

  // Reads a text and writes its continuation, after an `echo`. Whether it could.
  bool answer(const std::string& text, long most, const std::string& echo = "") {
    const size_t before = otaro_length(model_.get());
    std::vector<int32_t> tokens = pending_;
    if (const std::string why = tokenizer_.encode(text, tokens.empty() && !before, tokens); !why.empty())
      return complain(why);
    if (tokens.size() == pending_.size()) return complain("the text holds no token");
    if (const size_t known = otaro_positions(model_.get()); tokens.size() > known - before)
      return complain("the text is longer than the " + std::to_string(known) + " positions the model knows");
    std::fputs(echo.c_str(), stdout);
    Told told;
    Output out;
    const auto began = std::chrono::steady_clock::now();
    const float* logits = nullptr;
    std::string why;
    // In parts, so that Ctrl-C need not wait for all of a long text. The logits are the same.
    while (told.read < tokens.size() && !asked_to_stop) {
      const size_t some = std::min(kReadAtOnce, tokens.size() - told.read);
      if (!(logits = forward(tokens.data() + told.read, some, told))) break;
      told.read += some;
    }
    const auto read = std::chrono::steady_clock::now();
    if (told.read < tokens.size()) {
      if (!asked_to_stop) why = otaro_error(model_.get());
      otaro_truncate(model_.get(), before);
      logits = nullptr;
    }
    while (logits) {
      const int32_t token = sampler_.choose(logits, otaro_vocabulary(model_.get()));
      ++told.made;
      pending_ = {token};
      if (std::find(ends_.begin(), ends_.end(), token) != ends_.end()) break;
      out.add(tokenizer_.piece(token));
      obey_signals();
      if (told.made == most || asked_to_stop) break;
      if (!(logits = forward(&token, 1, told))) why = otaro_error(model_.get());
    }
    out.end();
    if (told.made || !echo.empty() || asked_to_stop) std::printf("\n");
    flush();
    note_positions();
    told.prompt_s = seconds(read - began), told.rest_s = seconds(std::chrono::steady_clock::now() - read);
    if (told.made || asked_to_stop) told.print();
    return why.empty() || complain(why);
  }

  // Lines, until there are none.
  void converse() {
    const bool typed = is_terminal();
    if (typed)
      std::fprintf(stderr, "%s at %s; /help for commands\n", options_.directory.c_str(), precision().c_str());
    for (std::string line; prompt(typed), input_.read(line);) {
      obey_signals();
      const std::string word = trimmed(line);
      if (word.empty()) continue;
      if (word[0] != '/') {
        answer(laid_out(line), tokens_);
        asked_to_stop = 0;  // that was for the answer
      } else if (!command(word)) {
        return;
      }
    }
    if (typed) std::fputs("\n", stderr);  // for who comes after Ctrl-C or Ctrl-D
  }

  std::string laid_out(const std::string& text) const {
    std::string out = options_.layout;
    return out.replace(out.find("{}"), 2, text);
  }

 private:
  static constexpr size_t kReadAtOnce = 256;

  // What the last line of an answer tells.
  struct Told {
    std::vector<int> precisions;
    size_t read = 0;
    long made = 0;
    double prompt_s = 0, rest_s = 0;

    void print() const {
      std::string at;
      for (const int bits : precisions) at += (at.empty() ? "E5M" : ", then E5M") + std::to_string(bits);
      std::fprintf(stderr, "[%s: %zu tokens read in %.2f s; %ld made, %.1f a second]\n",
                   at.empty() ? "stopped" : at.c_str(), read, prompt_s, made,
                   made > 1 ? static_cast<double>(made - 1) / rest_s : 0.0);
    }
  };

  static double seconds(std::chrono::steady_clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }

  const float* forward(const int32_t* tokens, size_t count, Told& told) {
    const int bits = otaro_precision(model_.get());
    if (told.precisions.empty() || told.precisions.back() != bits) told.precisions.push_back(bits);
    return otaro_forward(model_.get(), tokens, count);
  }

  // Once, and after an answer: within, it would be in the middle of a line.
  void note_positions() {
    const size_t trained = otaro_trained_positions(model_.get());
    if (noted_ || !trained || otaro_length(model_.get()) <= trained) return;
    noted_ = true;
    std::fprintf(
      stderr,
      "note: this text goes past the %zu positions that the model was made for; what it says there "
      "may be poor\n",
      trained);
  }

  void prompt(bool typed) const {
    if (typed) std::fprintf(stderr, "%s> ", precision().c_str());
  }

  // Whether to go on.
  bool command(const std::string& line) {
    const size_t space = line.find_first_of(kSpaces);
    const std::string name = line.substr(0, space);
    const std::string value = space == std::string::npos ? "" : trimmed(line.substr(space));
    const bool takes_value = name == "/precision" || name == "/tokens";
    if (name != "/precision" && name != "/tokens" && name != "/reset" && name != "/quit" && name != "/exit" &&
        name != "/help") {
      complain("there is no command " + name + "; /help lists them");
    } else if (!takes_value && !value.empty()) {
      complain(name + " takes no value");
    } else if (name == "/precision") {
      if (!precision_of(value))
        complain("/precision takes " + std::string(kPrecisions) + (value.empty() ? "" : ", not " + value));
      else if (otaro_set_precision(model_.get(), precision_of(value)))
        complain(otaro_error(model_.get()));
    } else if (name == "/tokens") {
      double most = 0;
      if (kTokens.read(value, most))
        tokens_ = static_cast<long>(most);
      else
        complain("/tokens takes " + kTokens.words() + (value.empty() ? "" : ", not " + value));
    } else if (name == "/reset") {
      otaro_truncate(model_.get(), 0);
      pending_.clear();
    } else if (name == "/help") {
      std::fputs(
        "/precision E5M3 ... E5M8   from the next token on; what was read stays\n"
        "/tokens N                  the most that an answer has\n"
        "/reset                     forget the conversation\n"
        "/quit, /exit\n",
        stderr);
    } else {
      return false;
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

  std::string precision() const { return "E5M" + std::to_string(otaro_precision(model_.get())); }

  const Options& options_;
  std::unique_ptr<otaro_model, void (*)(otaro_model*)> model_;
  otaro::Tokenizer tokenizer_;
  const std::vector<int32_t> ends_;
  Sampler sampler_;
  Input input_;
  std::vector<int32_t> pending_;  // the last token made, which is not read yet
  long tokens_ = options_.tokens;
  bool noted_ = false;  // that a text is longer than those the model was made for
};

}  // namespace

#ifdef __GLIBCXX__
// What the C++ library calls where an exception is not caught. Its own tells the exception's type, and brings
// 47 kB of demangler for it; here only memory can have run out.
void __gnu_cxx::__verbose_terminate_handler() {
  complain("there is not enough memory");
  std::_Exit(1);
}
#endif

int main(int count, char** words) {
  const Options options = parse(count, words);
  Session session(options);
#ifdef SIGUSR1
  open_signalled();
  struct sigaction action = {};
  action.sa_handler = on_signal;
  for (const int signal : {SIGUSR1, SIGUSR2}) sigaction(signal, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
#else
  std::signal(SIGINT, on_signal);
#endif
  if (options.interactive) {
    session.converse();
    return 0;
  }
  const std::string echo = options.layout == "{}" ? options.prompt : "";
  if (!session.answer(session.laid_out(options.prompt), options.tokens, echo)) return 1;
  return asked_to_stop ? 130 : 0;  // as shells tell of Ctrl-C
}
