// For the tests: what the decoder and the tokenizer say, without a page.
import { Engine } from "./engine.js";
import { Text } from "./text.js";

const asked = {
  // SHA-256 of all logits of a prompt and of one more token, at every precision, and what computed them.
  async logits({ from, prompt, next, threads }) {
    const engine = await Engine.open(threads);
    engine.describe(await (await fetch(`${from}/decoder.json`)).text());
    const digests = {};
    for (let bits = 3; bits <= 8; bits++) {
      const bytes = new Uint8Array(await (await fetch(`${from}/model-m${bits}.safetensors`)).arrayBuffer());
      const at = engine.room(bytes.length);
      engine.bytes(at, bytes.length).set(bytes);
      engine.addShard(at, bytes.length);
      engine.precision = bits;
      engine.truncate(0);
      const all = [...engine.forward(prompt), ...engine.forward([next])];
      const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new Float32Array(all)));
      digests[bits] = [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    }
    return { digests, backend: engine.text(engine.exports.otaro_backend()), threads: engine.threads };
  },
  async tokens({ texts, conversation, chat_template }) {
    const [tokenizer, config] = await Promise.all(
      ["tokenizer.json", "tokenizer_config.json"].map(async (name) => (await fetch(`model/${name}`)).json()),
    );
    const plain = new Text(tokenizer, config, { chat_template: null, special_tokens: {} });
    const chat = new Text(tokenizer, config, { chat_template, special_tokens: {} });
    const ids = texts.map((content) => plain.encode([{ content }]));
    return { ids, back: ids.map((one) => plain.decode(one)), chat: chat.encode(conversation) };
  },
};

addEventListener("message", async ({ data }) => {
  try {
    postMessage(await asked[data.what](data));
  } catch (error) {
    postMessage({ error: String(error) });
  }
});
