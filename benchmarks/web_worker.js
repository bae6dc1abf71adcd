// bench_web.py's part in the browser: the decoder alone, on one thread.
import { Engine } from "./engine.js";

let engine;

const asked = {
  async open() {
    engine = await Engine.open(1);
    engine.describe(await (await fetch("/model/decoder.json")).text());
    for (let bits = 3; bits <= 8; bits++) {
      const bytes = new Uint8Array(await (await fetch(`/model/model-m${bits}.safetensors`)).arrayBuffer());
      const at = engine.room(bytes.length);
      engine.bytes(at, bytes.length).set(bytes);
      engine.addShard(at, bytes.length);
    }
    return {};
  },
  read({ bits, prompt }) {
    engine.precision = bits;
    engine.truncate(0);
    const started = performance.now();
    engine.forward(prompt);
    return { mean: (performance.now() - started) / 1e3 / prompt.length };
  },
  decode({ bits, prompt, count }) {
    engine.precision = bits;
    engine.truncate(0);
    let logits = engine.forward(prompt);
    const begun = performance.now();
    let shortest = Infinity;
    for (let i = 0; i < count; i++) {
      const started = performance.now();
      let best = 0;
      for (let j = 1; j < logits.length; j++) if (logits[j] > logits[best]) best = j;
      logits = engine.forward([best]);
      shortest = Math.min(shortest, (performance.now() - started) / 1e3);
    }
    return { shortest, mean: (performance.now() - begun) / 1e3 / count };
  },
};

addEventListener("message", async ({ data }) => {
  try {
    postMessage(await asked[data.what](data));
  } catch (error) {
    postMessage({ error: String(error) });
  }
});
