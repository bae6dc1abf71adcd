// A shard, from this browser's own storage and from where the model lies: into memory as it comes, and into
// storage too, so that neither a lost connection nor a closed page costs what has come. Whether its bytes are
// right the decoder says in the end.
import { Refusal } from "./engine.js";

const TRIES = 6; // in a row without a byte
const PATIENCE = 30e3; // milliseconds without a byte

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// The files kept of one model, in the origin's private file system. Without one (a private window, another
// tab that is writing, no room) nothing is kept, and everything works.
export class Store {
  static async open(model) {
    const store = new Store();
    store.model = model;
    try {
      const root = await navigator.storage.getDirectory();
      const ours = await root.getDirectoryHandle("otaro", { create: true });
      store.folder = await ours.getDirectoryHandle(model, { create: true });
    } catch {
      store.folder = null;
    }
    return store;
  }

  // An open file, or null.
  async file(name) {
    try {
      return await (await this.folder.getFileHandle(name, { create: true })).createSyncAccessHandle();
    } catch {
      return null;
    }
  }

  async forget() {
    try {
      const root = await navigator.storage.getDirectory();
      await (await root.getDirectoryHandle("otaro")).removeEntry(this.model, { recursive: true });
    } catch {} // there is nothing
    this.folder = null;
  }
}

// Whether the bytes of all tensors are those that the header states, by the browser's own SHA-256: several
// times as fast as the decoder's, and beside the worker. False where the browser has none for this page, or
// the header is not what it should be: the decoder then looks at everything itself. It also sees to it that
// nobody has changed the header.
async function compared(engine, at, bytes) {
  if (!globalThis.crypto?.subtle) return false;
  let copy = new Uint8Array(0); // of a tensor: shared memory is not taken
  const hex = async (from, to) => {
    if (copy.length < to - from) copy = new Uint8Array(to - from);
    copy.set(engine.bytes(at + from, to - from));
    const digest = await crypto.subtle.digest("SHA-256", copy.subarray(0, to - from));
    return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  };
  let data, header, digests;
  try {
    data = 8 + Number(new DataView(engine.bytes(at, 8).slice().buffer).getBigUint64(0, true));
    header = JSON.parse(new TextDecoder().decode(engine.bytes(at + 8, data - 8).slice()));
    digests = JSON.parse(header.__metadata__.digests);
  } catch {
    return false;
  }
  for (const [name, { data_offsets: place }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [from, to] = place ?? [];
    if (!(from >= 0 && from <= to && data + to <= bytes)) return false;
    if ((await hex(data + from, data + to)) !== digests[name])
      throw new Refusal(
        `the bytes of ${name} do not match their digest; they were damaged where they lie, or on the way`,
      );
  }
  return true;
}

// Pieces of a file, [at, bytes], from `from` on; again from where it broke off.
async function* pieces(url, from, size) {
  let failures = 0;
  let reason = "";
  for (let at = from; at < size; ) {
    if (failures > TRIES) throw new Refusal(`the connection keeps breaking off (${reason})`);
    if (failures) await pause(100 * 2 ** failures);
    failures++;
    const controller = new AbortController();
    let silence;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => controller.abort(new Error("no byte for half a minute")), PATIENCE);
    };
    try {
      listen();
      const headers = at ? { range: `bytes=${at}-` } : {};
      const response = await fetch(url, {
        headers,
        cache: "no-store",
        credentials: "omit",
        signal: controller.signal,
      });
      if (response.status >= 400 && response.status < 500 && response.status !== 416)
        throw new Refusal(`the server answered ${response.status}`);
      const partial = response.status === 206;
      const range = response.headers.get("content-range"); // another origin's may not be readable
      if (!response.ok || (partial && range && !range.startsWith(`bytes ${at}-`)))
        throw new Error(`status ${response.status}`);
      if (!partial) at = 0; // it knows no ranges, and begins anew
      const reader = response.body.getReader();
      for (let read; !(read = await reader.read()).done; ) {
        listen();
        failures = 0;
        if (at + read.value.length > size) throw new Refusal("it is longer than the page says");
        yield [at, read.value];
        at += read.value.length;
      }
      reason = "it ended early";
    } catch (error) {
      if (error instanceof Refusal) throw error;
      reason = error.message;
    } finally {
      clearTimeout(silence);
      controller.abort();
    }
  }
}

// Adds a shard to the engine; `tell` hears how many bytes there are.
export async function bring(engine, store, url, { name, bytes }, tell) {
  const at = engine.room(bytes);
  let file = await store.file(name);
  const keep = (write) => {
    try {
      if (file) write();
    } catch { // no room: what is kept stays, and the rest comes each time
      file.close();
      file = null;
    }
  };
  try {
    let have = file ? Math.min(file.getSize(), bytes) : 0;
    if (have) have = file.read(engine.bytes(at, have), { at: 0 });
    tell(have);
    for await (const [from, piece] of pieces(url, have, bytes)) {
      engine.bytes(at + from, piece.length).set(piece);
      keep(() => file.write(piece, { at: from }));
      tell(from + piece.length);
    }
    engine.addShard(at, bytes, !(await compared(engine, at, bytes)));
    keep(() => file.flush());
    return Boolean(file);
  } catch (error) {
    engine.refused.push({ at, bytes });
    const whole = file && file.getSize() >= bytes;
    if (whole) keep(() => file.truncate(0)); // wrong bytes are not kept
    throw error instanceof Refusal ? new Refusal(`${name}: ${error.message}`) : error;
  } finally {
    file?.close();
  }
}
