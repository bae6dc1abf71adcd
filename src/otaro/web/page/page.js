// What is to be seen. The model lives in worker.js, so that nothing here ever waits. Whatever the model says
// is put in as text, never as HTML.

const $ = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const say = (kind, more = {}) => worker.postMessage({ kind, ...more });
const slider = $("precision");
const turns = []; // { question, text }
let shards = []; // { name, bits, bytes, have }
let finest = 0;
let chat = false;
let answers = 0;
let running = null; // the answer that is being written

// Words and numbers

const name = (bits) => `E5M${bits}`;
const plural = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;

function size(bytes) {
  const [unit, word] = bytes < 1e6 ? [1e3, "kB"] : bytes < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  const value = bytes / unit;
  return `${value.toFixed(value < 100 && bytes ? 1 : 0)} ${word}`;
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

function alarm(words, again = false) {
  $("alert").textContent = words;
  $("again").hidden = !again;
}

// Planes

function show() {
  const used = Number(slider.value);
  const [have, all] = ["have", "bytes"].map((key) => shards.reduce((sum, one) => sum + one[key], 0));
  const now = finest ? `${name(finest)} is here, ${finest + 1} bits a weight` : "The first plane is coming";
  // Screen readers tell of planes, not of each byte.
  if ($("now").textContent !== now) $("now").textContent = now;
  $("come").textContent = ` · ${have < all ? `${size(have)} of ${size(all)}` : size(all)}`;
  shards.forEach((one, number) => {
    const item = $("strip").children[number];
    item.classList.toggle("read", one.bits <= used && one.bits <= finest);
    item.firstChild.style.width = `${(100 * one.have) / one.bytes}%`;
  });
  slider.previousElementSibling.textContent = finest ? `${name(used)} · ${used + 1} bits` : "";
  slider.setAttribute("aria-valuetext", `${name(used)}, ${used + 1} bits a weight`);
}

function choose() {
  say("precision", { bits: slider.value === slider.max ? null : Number(slider.value) });
  show();
}

// Answers

class Answer {
  constructor(question) {
    this.id = ++answers;
    this.question = question;
    this.text = "";
    this.tokens = [];
    this.turn = element("section", "turn");
    this.node = element("article", "answer");
    this.node.setAttribute("aria-busy", "true");
    this.said = element("div", "said");
    this.figures = element("p", "note figures", "…");
    this.figures.setAttribute("aria-live", "off"); // numbers that change all the time
    this.node.append(this.said, this.figures);
    this.turn.append(element("p", "said question", question), this.node);
  }

  add(text) {
    if (!text) return;
    if (this.said.lastChild?.nodeType !== Node.TEXT_NODE) this.said.append("");
    this.said.lastChild.appendData(text);
    this.text += text;
  }

  take({ token, bits, text, at }) {
    const talk = $("talk");
    const pinned = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    if (bits !== this.bits) {
      const mark = element("span", "precision", name(bits));
      if (this.bits) this.said.append(mark);
      else this.node.prepend(mark);
      this.bits = bits;
    }
    this.add(text);
    this.tokens.push(token);
    this.begun ??= at;
    this.rate = (1e3 * (this.tokens.length - 1)) / (at - this.begun);
    this.tell();
    if (pinned) talk.scrollTop = talk.scrollHeight;
  }

  tell() {
    const known = Number.isFinite(this.rate) && this.rate > 0;
    const rate = known && `${this.rate.toFixed(this.rate < 100 ? 1 : 0)} tokens/s`;
    const parts = [this.tokens.length > 0 && plural(this.tokens.length, "token"), rate, this.ending];
    this.figures.textContent = parts.filter(Boolean).join(" · ") || "…";
  }

  end(reason) {
    this.ending = { length: "cut at the limit", stopped: "stopped" }[reason];
    this.node.removeAttribute("aria-busy");
    this.tell();
    running = null;
    if (this.text) turns.push({ question: this.question, text: this.text });
    busy(false);
  }

  // Nothing was answered: as if it had not been asked, and the question not lost.
  withdraw(words) {
    running = null;
    if (this.text) this.end("stopped");
    else {
      this.turn.remove();
      $("welcome").hidden = turns.length > 0;
      $("prompt").value ||= this.question;
    }
    alarm(words);
    busy(false);
  }
}

function ask() {
  const question = $("prompt").value;
  if (running || !finest || !question.trim()) return;
  const wrong = [$("temperature"), $("most")].find((field) => !field.validity.valid);
  if (wrong) {
    $("panel").open = true;
    wrong.focus();
    return alarm(`${wrong.labels[0].textContent}: ${wrong.validationMessage}`);
  }
  if ($("again").hidden) alarm("");
  running = new Answer(question);
  $("welcome").hidden = true;
  $("talk").append(running.turn);
  $("talk").scrollTop = $("talk").scrollHeight;
  $("prompt").value = "";
  busy(true);
  const before = turns.flatMap((one) => [
    { role: "user", content: one.question },
    { role: "assistant", content: one.text },
  ]);
  const messages = [...before, { role: "user", content: question }];
  const [temperature, most] = [Number($("temperature").value), Number($("most").value)];
  say("answer", { id: running.id, messages, temperature, most });
}

function stop() {
  if (running) say("stop", { id: running.id });
}

function busy(now) {
  const focused = document.activeElement === $("stop") || document.activeElement === $("send");
  $("send").hidden = now;
  $("stop").hidden = !now;
  if (focused) $("prompt").focus();
}

function begin() {
  stop();
  say("anew");
  running = null;
  turns.length = 0;
  for (const turn of document.querySelectorAll(".turn")) turn.remove();
  $("welcome").hidden = false;
  busy(false);
  $("prompt").focus();
}

// What the worker says

const heard = {
  page(told) {
    ({ chat } = told);
    shards = told.shards.map((one) => ({ ...one, have: 0 }));
    $("model").textContent = document.title = told.name;
    $("prompt").placeholder = chat ? "Ask something" : "Begin a text, and the model goes on";
    $("strip").replaceChildren(...shards.map((one) => {
      const item = element("li");
      item.style.flex = `${one.bytes} 0 0`;
      item.append(element("span"));
      return item;
    }));
    show();
  },
  progress({ bits, have }) {
    shards.find((one) => one.bits === bits).have = have;
    show();
  },
  plane({ bits, kept, threads, memory }) {
    const shard = shards.find((one) => one.bits === bits);
    shard.have = shard.bytes;
    const follows = slider.value === slider.max; // it stays at the finest, unless it was moved away
    finest = bits;
    slider.max = bits;
    if (follows) slider.value = bits;
    $("send").disabled = false;
    const where = kept ? "kept for your next visit" : "not kept: this browser gives no room here";
    $("here").textContent = `${size(memory)} of memory, ${plural(threads, "thread")}; ${where}.`;
    choose();
  },
  piece: (told) => running?.id === told.id && running.take(told),
  done(told) {
    if (running?.id !== told.id) return;
    running.add(told.text);
    running.end(told.reason);
  },
  refused(told) {
    if (told.about === "model") {
      const go = finest ? `It goes on at ${name(finest)}.` : "";
      alarm(`The model could not be fetched whole: ${told.words}. ${go}`, true);
    } else if (running?.id === told.id) running.withdraw(`${told.words}.`);
  },
  forgotten: () => ($("here").textContent = "Nothing is kept. The next visit fetches the model again."),
  reading() {},
};

worker.addEventListener("message", ({ data }) => heard[data.kind](data));
worker.addEventListener("error", (event) =>
  alarm(`The page broke: ${event.message || "a script is missing"}. Load it anew.`),
);

// What people do

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
addEventListener("keydown", (event) => event.key === "Escape" && stop());
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", begin);
$("forget").addEventListener("click", () => say("forget"));
$("again").addEventListener("click", () => {
  alarm("");
  say("again");
});
slider.addEventListener("input", choose);
$("settings").addEventListener("submit", (event) => event.preventDefault());

const narrow = matchMedia("(max-width: 56rem)"); // as in page.css
const unfold = () => ($("panel").open = !narrow.matches);
narrow.addEventListener("change", unfold);
unfold();
if (document.activeElement === document.body) $("prompt").focus(); // unless somebody was faster
const threads = Number(new URLSearchParams(location.search).get("threads"));
say("begin", { threads: threads || undefined });
