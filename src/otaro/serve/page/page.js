// A page to play with: chats over /v1, the precision by a slider, also in the middle of an answer.
// Whatever a model or a server says is put in as text, never as HTML.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const sliders = [$("precision-0"), $("precision-1")];
  const turns = []; // { question, answers }, of which the first is the left one
  let running = []; // the answers that are being written
  let told = null; // what /v1/resident said last

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

  function alarm(words, about = "request") {
    $("alert").textContent = words;
    $("alert").dataset.about = about;
  }

  // The server

  class Refusal extends Error {
    constructor(status, message) {
      super(message);
      this.status = status;
    }
  }

  async function call(path, body, signal) {
    const key = $("key").value.trim();
    const possible = /^[\x21-\x7e]*$/.test(key); // others cannot even be sent
    if (!possible) throw new Refusal(401, "No API key looks like that. Check it under Settings.");
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const options = { headers, signal, cache: "no-store", credentials: "omit" };
    if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    if (body) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0, "The server does not answer. Is it still running?");
    }
    if (!response.ok) throw await refusal(response, key);
    return response;
  }

  async function refusal(response, key) {
    const error = (await response.json().catch(() => null))?.error ?? {};
    const after = response.headers.get("retry-after");
    const message = error.message ?? `it answered with status ${response.status}`;
    const words = message.startsWith(`${error.param}: `) ? message.slice(error.param.length + 2) : message;
    const unknown = "The server does not know this API key. Check it under Settings.";
    const usual = {
      401: key ? unknown : "This server wants an API key. Enter it under Settings.",
      413: "That is too long for this server. Shorten it, or begin a new conversation.",
      429: `The server is busy. Ask again in ${plural(Number(after) || 1, "second")}.`,
    };
    const tooLong = `That is too long for this model (${words}). Shorten it, or begin a new conversation.`;
    const known = error.code === "context_length_exceeded" ? tooLong : usual[response.status];
    return new Refusal(response.status, known ?? `The server refused: ${words}.`);
  }

  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new Refusal(0, "The connection broke off before the answer ended.");
      const parts = (buffer + value).split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        const event = JSON.parse(part.replace(/^data: /, ""));
        if (event.error) throw new Refusal(500, `The answer broke off: ${event.error.message}`);
        yield event;
      }
    }
  }

  // One answer

  class Answer {
    constructor(side) {
      this.side = side;
      this.text = "";
      this.switches = []; // { at, bits }: from this character on, at this precision
      this.id = null;
      this.asked = this.wanted = Number(sliders[side].value);
      this.controller = new AbortController();
      this.marks = []; // [from, to]: characters that the other answer does not have
      this.node = element("article", "answer");
      this.node.setAttribute("aria-busy", "true");
      this.first = element("span", "precision", name(this.asked));
      this.said = element("div", "said");
      this.figures = element("p", "note figures", "…");
      this.figures.setAttribute("aria-live", "off"); // numbers that change all the time
      this.node.append(this.first, this.said, this.figures);
    }

    async run(path, body) {
      try {
        const response = await call(path, { ...body, precision: name(this.asked) }, this.controller.signal);
        for await (const event of events(response)) this.take(event);
      } catch (error) {
        if (error.name === "AbortError") this.ending = "stopped";
        else this.fail(error);
      }
      this.node.removeAttribute("aria-busy");
      this.id = null;
      this.tell();
    }

    take(event) {
      const pinned = $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60;
      this.id = event.id;
      const bits = Number(event.precision.slice(-1)); // "E5M8, then E5M3"
      if (bits !== this.bits) {
        if (this.bits === undefined) this.first.textContent = name(bits);
        else this.switches.push({ at: this.text.length, bits });
        this.bits = bits;
        if (this.switches.length) this.said.append(element("span", "precision", name(bits)));
      }
      const choice = event.choices[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (piece) {
        if (this.said.lastChild?.nodeType !== Node.TEXT_NODE) this.said.append("");
        this.said.lastChild.appendData(piece);
        this.text += piece;
      }
      if (choice?.finish_reason === "length") this.ending = "cut at the limit";
      this.count(event.usage);
      this.tell();
      this.follow();
      if (pinned) $("talk").scrollTop = $("talk").scrollHeight;
    }

    count(usage) {
      if (usage.completion_tokens === (this.tokens ?? 0)) return; // an event without a token
      this.tokens = usage.completion_tokens;
      this.context = usage.total_tokens;
      const now = performance.now();
      this.begun ??= { tokens: this.tokens, at: now };
      const since = this.tokens - this.begun.tokens;
      if (since) this.rate = (1e3 * since) / (now - this.begun.at);
    }

    tell() {
      const row = told?.precisions.find((one) => one.precision === name(this.bits));
      const read = row && row.weight_bytes_per_token + told.cache_bytes_per_token * this.context;
      const parts = [
        this.tokens && plural(this.tokens, "token"),
        this.rate && `${this.rate.toFixed(this.rate < 100 ? 1 : 0)} tokens/s`,
        this.tokens && read && `${size(read)} read per token`,
        this.ending,
        this.difference,
      ];
      this.figures.textContent = parts.filter(Boolean).join(" · ") || (this.error ? "" : "…");
    }

    fail(error) {
      this.error = error;
      this.node.append(element("p", "error", error.message));
    }

    // At the slider's precision from now on; of several moves at once the last one counts.
    async follow() {
      if (this.following || !this.id || this.asked === this.wanted) return;
      this.following = true;
      try {
        while (this.id && this.asked !== this.wanted) {
          const wanted = this.wanted;
          await call(`/v1/answers/${encodeURIComponent(this.id)}/precision`, { precision: name(wanted) });
          this.asked = wanted;
        }
      } catch (error) {
        this.wanted = this.asked;
        if (error.status !== 404) alarm(error.message); // 404: it has ended meanwhile
      }
      this.following = false;
    }

    // The text again, with what differs marked.
    draw() {
      const marked = this.marks.flat(); // an odd number of them up to here: inside a mark
      const cuts = new Set([0, ...marked, ...this.switches.map((one) => one.at), this.text.length]);
      const ordered = [...cuts].sort((a, b) => a - b);
      this.said.replaceChildren();
      ordered.forEach((from, number) => {
        const switched = this.switches.filter((one) => one.at === from);
        this.said.append(...switched.map((one) => element("span", "precision", name(one.bits))));
        const text = this.text.slice(from, ordered[number + 1] ?? from);
        const inside = marked.filter((at) => at <= from).length % 2;
        if (text) this.said.append(inside ? element("mark", "", text) : text);
      });
    }
  }

  // Differences, word by word: what is not in the longest common sequence

  const words = (text) =>
    [...text.matchAll(/\S+/g)].map(({ 0: word, index }) => ({ word, from: index, to: index + word.length }));

  function differing(left, right) {
    const least = Math.min(left.length, right.length);
    let start = 0;
    while (start < least && left[start].word === right[start].word) start++;
    let end = 0;
    while (end < least - start && left.at(-1 - end).word === right.at(-1 - end).word) end++;
    const a = left.slice(start, left.length - end);
    const b = right.slice(start, right.length - end);
    if (a.length * b.length > 1 << 24) return [a, b]; // too long to compare: all of it
    const width = b.length + 1;
    const common = new Uint16Array((a.length + 1) * width); // of what is left of both
    for (let i = a.length - 1; i >= 0; i--) {
      for (let j = b.length - 1; j >= 0; j--) {
        const at = i * width + j;
        const same = a[i].word === b[j].word;
        common[at] = same ? common[at + width + 1] + 1 : Math.max(common[at + width], common[at + 1]);
      }
    }
    const [onlyA, onlyB] = [[], []];
    for (let i = 0, j = 0; i < a.length || j < b.length; ) {
      const at = i * width + j;
      if (i === a.length) onlyB.push(b[j++]);
      else if (j === b.length) onlyA.push(a[i++]);
      else if (a[i].word === b[j].word) i++, j++;
      else if (common[at + width] >= common[at + 1]) onlyA.push(a[i++]);
      else onlyB.push(b[j++]);
    }
    return [onlyA, onlyB];
  }

  function compare(pair) {
    const all = pair.map((answer) => words(answer.text));
    const only = differing(...all);
    pair.forEach((answer, side) => {
      const numbers = new Map(all[side].map((one, number) => [one, number]));
      answer.marks = [];
      only[side].forEach((one, at) => {
        const before = only[side][at - 1];
        const joined = before && numbers.get(one) === numbers.get(before) + 1;
        if (joined) answer.marks.at(-1)[1] = one.to; // with the space between
        else answer.marks.push([one.from, one.to]);
      });
      const count = only[side].length;
      answer.difference = count ? `${count} of ${plural(all[side].length, "word")} differ` : "the same words";
      answer.draw();
      answer.tell();
    });
  }

  // The conversation

  function messages(side) {
    return turns.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: (turn.answers[side] ?? turn.answers[0]).text },
    ]);
  }

  async function ask() {
    const question = $("prompt").value;
    if (running.length || !question.trim()) return;
    const wrong = [$("temperature"), $("most")].find((field) => !field.validity.valid);
    if (wrong) {
      $("panel").open = true;
      wrong.focus();
      return alarm(`${wrong.labels[0].textContent}: ${wrong.validationMessage}`);
    }
    alarm("");
    if (!told && !(await look())) return;
    const body = { temperature: Number($("temperature").value), stream: true };
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
    if ($("most").value) body.max_tokens = Number($("most").value);
    else if (!told.chat) body.max_tokens = 256; // completions are short otherwise
    if (body.temperature) body.seed = crypto.getRandomValues(new Uint32Array(1))[0]; // the same on both sides
    const turn = element("section", "turn");
    const answers = element("div", "answers");
    running = ($("compare").checked ? [0, 1] : [0]).map((side) => new Answer(side));
    turn.classList.toggle("pair", running.length > 1);
    turn.append(element("p", "said question", question), answers);
    answers.append(...running.map((answer) => answer.node));
    $("welcome").hidden = true;
    $("talk").append(turn);
    $("talk").scrollTop = $("talk").scrollHeight;
    $("prompt").value = "";
    busy(true);

    const mine = running;
    await Promise.all(mine.map((answer) => {
      if (!told.chat) return answer.run("/v1/completions", { ...body, prompt: question });
      const all = [...messages(answer.side), { role: "user", content: question }];
      return answer.run("/v1/chat/completions", { ...body, messages: all });
    }));
    if (mine !== running) return; // another conversation has begun
    const written = mine.filter((answer) => answer.text);
    if (written.length > 1) compare(written);
    if (written.length) turns.push({ question, answers: written });
    else if (mine.some((one) => one.error || one.ending === "stopped")) withdraw(turn, question, mine);
    running = [];
    busy(false);
    if (!mine.some((answer) => answer.error)) look();
  }

  // Nothing was answered: as if it had not been asked, and the question not lost.
  function withdraw(turn, question, answers) {
    turn.remove();
    $("welcome").hidden = turns.length > 0;
    $("prompt").value ||= question;
    const error = answers.find((answer) => answer.error)?.error;
    if (error) alarm(error.message);
    if (error?.status === 401) askForKey();
  }

  function stop() {
    for (const answer of running) answer.controller.abort();
  }

  function busy(now) {
    const focused = document.activeElement === $("stop") || document.activeElement === $("send");
    $("send").hidden = now;
    $("stop").hidden = !now;
    if (focused) $("prompt").focus();
  }

  function begin() {
    stop();
    running = [];
    turns.length = 0;
    for (const turn of document.querySelectorAll(".turn")) turn.remove();
    $("welcome").hidden = false;
    alarm("");
    busy(false);
    $("prompt").focus();
  }

  // What is in memory

  async function look() {
    try {
      told = await (await call("/v1/resident")).json();
    } catch (error) {
      alarm(error.message, "server");
      if (error.status === 401) askForKey();
      return false;
    }
    if ($("alert").dataset.about === "server") alarm("");
    $("model").textContent = told.model;
    $("prompt").placeholder = told.chat ? "Ask something" : "Begin a text, and the model goes on";
    for (const slider of sliders) slider.max = 2 + told.precisions.length;
    show();
    return true;
  }

  const inMemory = (one) => Math.min(one.resident_bytes ?? 0, one.plane_bytes); // the last page counts whole

  function show() {
    for (const slider of sliders) {
      const bits = Number(slider.value) + 1; // with the sign
      slider.previousElementSibling.textContent = `${name(slider.value)} · ${bits} bits`;
      slider.setAttribute("aria-valuetext", `${name(slider.value)}, ${bits} bits a weight`);
    }
    if (!told) return;
    const used = Math.max(sliders[0].value, $("compare").checked ? sliders[1].value : 0);
    const known = told.precisions.every((one) => one.resident_bytes !== null);
    $("planes").replaceChildren(...told.precisions.map((one, number) => {
      const row = element("tr", 3 + number <= used ? "read" : "");
      const heading = element("th", "", one.precision);
      heading.scope = "row";
      const memory = element("td", "", known ? size(inMemory(one)) : "not known here");
      const read = element("td", "", size(one.weight_bytes_per_token));
      const bar = element("span", "bar");
      const filled = element("span");
      filled.style.width = `${(100 * inMemory(one)) / one.plane_bytes}%`;
      bar.append(filled);
      memory.append(bar);
      row.append(heading, memory, read);
      return row;
    }));
    const planes = told.precisions.reduce((sum, one) => sum + inMemory(one), 0);
    const keysAndValues = `${size(told.cache_bytes)} of keys and values.`;
    $("memory").textContent = known ? `${size(planes)} of planes, and ${keysAndValues}` : keysAndValues;
  }

  function askForKey() {
    $("panel").open = true;
    $("key").focus();
  }

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
  $("compare").addEventListener("change", () => {
    sliders[1].parentElement.hidden = !$("compare").checked;
    sliders[0].labels[0].textContent = $("compare").checked ? "Left" : "Precision";
    show();
  });
  sliders.forEach((slider, side) => {
    let settled;
    slider.addEventListener("input", () => {
      show();
      clearTimeout(settled);
      settled = setTimeout(() => {
        for (const answer of running.filter((one) => one.side === side)) {
          answer.wanted = Number(slider.value);
          answer.follow();
        }
      }, 120); // a slider that is dragged passes many precisions
    });
  });
  $("key").value = sessionStorage.getItem("key") ?? "";
  $("key").addEventListener("change", () => {
    sessionStorage.setItem("key", $("key").value);
    alarm("");
    look();
  });

  $("settings").addEventListener("submit", (event) => event.preventDefault());

  const narrow = matchMedia("(max-width: 56rem)"); // as in page.css
  const unfold = () => ($("panel").open = !narrow.matches);
  narrow.addEventListener("change", unfold);
  unfold();
  // Not by autofocus: that comes when the page is drawn, which may be after the key was asked for.
  if (document.activeElement === document.body) $("prompt").focus();
  show();
  look().then((known) => {
    if (!known) return;
    // A fit is no place of the slider.
    sliders[0].value = told.precision.match(/^E5M(\d)$/)?.[1] ?? sliders[0].max;
    show();
  });
  let ticks = 0;
  setInterval(() => {
    const due = running.length || ++ticks % 20 === 0; // planes that nobody uses are given back
    if (due && document.visibilityState === "visible") look();
  }, 1500);
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && look());
})();
