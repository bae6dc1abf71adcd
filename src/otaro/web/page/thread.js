// A thread of the decoder.
import { help } from "./engine.js";

addEventListener("message", ({ data }) => help(data), { once: true });
