// Everything but what is to be seen: fetches, keeps and checks the planes, and answers meanwhile. Messages
// come in and go out; none waits for another, and between two tokens all that have come are heard.
import { Engine, Refusal } from "./engine.js";
import { bring, Store } from "./shards.js";
import { Pieces, Text } from "./text.js";

const PROMPT = 32; // tokens that are read at a time, so that Stop is heard

let page, engine, store, text;
let context = []; // the tokens that the decoder has read
let wanted = null; // mantissa bits; null: the finest there are
let current = null; // the answer that is being written

const tell = (kind, more) => postMessage({ kind, ...more });
const words = (error) => (error instanceof Error && error.message) || String(error);

const { port1, port2 } = new MessageChannel();
const turn = () => new Promise((resolve) => {
  port1.onmessage = resolve;
  port2.postMessage(null);
});

async function read(name) {
  const response = await fetch(name, { cache: "no-cache" });
  if (!response.ok) throw new Refusal(`${name} could not be fetched: the server answered ${response.status}`);
  return response.text();
}

async function begin({ threads }) {
  page = JSON.parse(await read("page.json"));
  if (page.version !== 1)
    throw new Refusal("page.json is of another version of this page: write the folder again");
  tell("page", { name: page.name, chat: page.chat_template !== null, shards: page.shards });
  const opening = Engine.open(threads ?? navigator.hardwareConcurrency ?? 1);
  opening.catch(() => {}); // it is waited for below
  const [description, tokenizer, config] = await Promise.all(
    ["decoder.json", "tokenizer.json", "tokenizer_config.json"].map((name) => read(`model/${name}`)),
  );
  engine = await opening;
  store = await Store.open(page.model);
  engine.describe(description);
  text = new Text(JSON.parse(tokenizer), JSON.parse(config), page);
  await planes();
}

// The planes that are missing, one after the other.
async function planes() {
  for (const shard of page.shards.slice(engine.finest ? engine.finest - 2 : 0)) {
    const { name, bits } = shard;
    const url = new URL(name, new URL(page.from, location.href)).href;
    const steps = shard.bytes / 200;
    let told = 0;
    const kept = await bring(engine, store, url, shard, (have) => {
      if (have > told && have - told < steps) return;
      told = have;
      tell("progress", { bits, have });
    });
    tell("plane", { bits, kept, threads: engine.threads, memory: engine.memory.buffer.byteLength });
  }
}

// Answers

function chosen(logits, temperature) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  if (!temperature) return best;
  const weights = new Float64Array(logits.length);
  let sum = 0;
  for (let i = 0; i < logits.length; i++)
    sum += weights[i] = Math.exp((logits[i] - logits[best]) / temperature);
  let left = Math.random() * sum;
  for (let i = 0; i < logits.length; i++) if ((left -= weights[i]) < 0) return i;
  return best;
}

async function answer({ id, messages, temperature, most }) {
  const mine = (current = { id, stopped: false });
  const pieces = new Pieces(text);
  let reason = "length";
  const prompt = text.encode(messages);
  if (!prompt.length) throw new Refusal("there is nothing to go on from: write something");
  if (prompt.length >= engine.positions)
    throw new Refusal(
      `that is too long for this model (${prompt.length} of ${engine.positions} tokens): ` +
        "shorten it, or begin anew",
    );
  const room = engine.positions - prompt.length;
  let same = 0; // tokens of this conversation that are read already, at whatever precision
  while (text.template && same < prompt.length - 1 && prompt[same] === context[same]) same++;
  engine.truncate(same);
  context.length = same;
  let logits;
  const forward = (tokens) => {
    mine.bits = Math.min(wanted ?? engine.finest, engine.finest);
    engine.precision = mine.bits;
    logits = engine.forward(tokens);
    context.push(...tokens);
  };
  for (let at = same; at < prompt.length && !mine.stopped; at += PROMPT) {
    forward(prompt.slice(at, at + PROMPT));
    tell("reading", { id, read: context.length, of: prompt.length });
    await turn();
  }
  for (let count = 0; count < Math.min(most, room); count++) {
    if (mine.stopped) {
      reason = "stopped";
      break;
    }
    const token = chosen(logits, temperature);
    if (page.stop.includes(token)) {
      reason = "stop";
      break;
    }
    tell("piece", { id, token, bits: mine.bits, text: pieces.add(token), at: performance.now() });
    if (count + 1 < Math.min(most, room)) forward([token]);
    await turn();
  }
  tell("done", { id, reason, text: pieces.add() });
}

// What the page says

const heard = {
  begin: (data) => begin(data).catch((error) => tell("refused", { about: "model", words: words(error) })),
  again: () => (engine && text ? planes() : begin({})).catch(
    (error) => tell("refused", { about: "model", words: words(error) }),
  ),
  answer: (data) =>
    answer(data).catch((error) =>
      tell("refused", { about: "answer", id: data.id, words: words(error) }),
    ),
  stop: ({ id }) => current?.id === id && (current.stopped = true),
  anew: () => (context = []),
  precision: ({ bits }) => (wanted = bits),
  forget: async () => {
    await store?.forget();
    tell("forgotten", {});
  },
};

addEventListener("message", ({ data }) => heard[data.kind](data));
