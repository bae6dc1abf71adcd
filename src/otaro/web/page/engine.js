// The decoder: otaro.h, compiled to WebAssembly. On several threads where the page is isolated from other
// origins, which shared memory asks for, else on one.

const PAGES = 64; // of 64 KiB, that a module begins with: build.py
const MOST_PAGES = 65535;
const STACK = 1 << 18; // bytes, of a thread that helps
const NO_SYSTEM = 52; // WASI's ENOSYS: there are no files

const NO_MEMORY = "this browser has not enough memory for that";

export class Refusal extends Error {}

function imports(memory) {
  const text = (at) => {
    const bytes = new Uint8Array(memory().buffer);
    // A copy: shared memory cannot be decoded.
    return new TextDecoder().decode(bytes.slice(at, bytes.indexOf(0, at)));
  };
  const nothing = () => NO_SYSTEM;
  return {
    text,
    host: { refuse: (words) => { throw new Refusal(text(words)); } },
    wasi_snapshot_preview1: { fd_close: nothing, fd_seek: nothing, fd_write: nothing },
  };
}

async function compile(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Refusal(`${name} could not be fetched: the server answered ${response.status}`);
  return WebAssembly.compile(await response.arrayBuffer());
}

// A thread that helps, for the rest of its life.
export async function help({ module, memory, number, stack, local }) {
  const { exports } = await WebAssembly.instantiate(module, { ...imports(() => memory), env: { memory } });
  exports.__stack_pointer.value = stack;
  if (local) exports.__wasm_init_tls(local);
  exports.otaro_web_thread(number);
}

export class Engine {
  // Also says on how many threads.
  static async open(threads) {
    const engine = new Engine();
    engine.threads = 1;
    engine.refused = []; // room of shards
    let memory;
    if (threads > 1 && globalThis.crossOriginIsolated) {
      try {
        memory = new WebAssembly.Memory({ initial: PAGES, maximum: MOST_PAGES, shared: true });
        engine.threads = threads;
      } catch {} // no room for so large a range of addresses: one thread then
    }
    const module = await compile(memory ? "decoder-threads.wasm" : "decoder.wasm");
    const given = imports(() => engine.memory);
    if (memory) given.env = { memory };
    const { exports } = await WebAssembly.instantiate(module, given);
    engine.exports = exports;
    engine.memory = memory ?? exports.memory;
    engine.text = given.text;
    exports._initialize();
    engine.model = exports.otaro_new();
    for (let number = 0; number < engine.threads - 1; number++) {
      const [stack, local] = [engine.allocate(STACK) + STACK, engine.allocate(exports.__tls_size.value)];
      const helper = new Worker("thread.js", { type: "module" });
      helper.postMessage({ module, memory, number, stack, local });
    }
    exports.otaro_set_threads(engine.threads);
    return engine;
  }

  allocate(bytes) {
    const at = this.exports.malloc(bytes);
    if (!at && bytes) throw new Refusal(NO_MEMORY);
    return at;
  }

  release(at) {
    this.exports.free(at);
  }

  // Room for a shard; that of one that was refused is taken again.
  room(bytes) {
    const again = this.refused.findIndex((one) => one.bytes === bytes);
    if (again >= 0) return this.refused.splice(again, 1)[0].at;
    const at = this.exports.otaro_web_pages(bytes);
    if (!at) throw new Refusal(NO_MEMORY);
    return at;
  }

  bytes(at, count) {
    // Anew each time: memory that grows has another buffer.
    return new Uint8Array(this.memory.buffer, at, count);
  }

  check(failed) {
    if (failed) throw new Refusal(this.text(this.exports.otaro_error(this.model)));
  }

  describe(text) {
    const bytes = new TextEncoder().encode(text);
    const at = this.allocate(bytes.length);
    this.bytes(at, bytes.length).set(bytes);
    try {
      this.check(this.exports.otaro_describe(this.model, at, bytes.length));
    } finally {
      this.release(at);
    }
  }

  // In its room, where it stays. `digests`: compare them too, for whoever has not.
  addShard(at, bytes, digests = true) {
    this.check(this.exports.otaro_add_shard(this.model, at, bytes, Number(digests)));
  }

  get finest() {
    return this.exports.otaro_finest(this.model);
  }

  set precision(bits) {
    this.check(this.exports.otaro_set_precision(this.model, bits));
  }

  get length() {
    return this.exports.otaro_length(this.model);
  }

  get positions() {
    return this.exports.otaro_positions(this.model);
  }

  truncate(length) {
    this.check(this.exports.otaro_truncate(this.model, length));
  }

  // The logits of the last token, valid until the next call.
  forward(tokens) {
    const at = this.allocate(4 * tokens.length);
    new Int32Array(this.memory.buffer, at, tokens.length).set(tokens);
    const logits = this.exports.otaro_forward(this.model, at, tokens.length);
    this.release(at);
    this.check(!logits);
    return new Float32Array(this.memory.buffer, logits, this.exports.otaro_vocabulary(this.model));
  }
}
