// Text to tokens and back.
import { Template } from "./lib/jinja.js";
import { Tokenizer } from "./lib/tokenizers.js";

export class Text {
  constructor(tokenizer, config, { chat_template, special_tokens }) {
    this.tokenizer = new Tokenizer(tokenizer, config);
    this.special = special_tokens;
    this.template = chat_template === null ? null : new Template(chat_template);
  }

  // Of a conversation where the model has a form for one, else of its last message.
  encode(messages) {
    if (!this.template) return this.tokenizer.encode(messages.at(-1).content).ids;
    const text = this.template.render({ messages, add_generation_prompt: true, ...this.special });
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  decode(ids) {
    return ids.length ? this.tokenizer.decode(ids, { skip_special_tokens: true }) : "";
  }
}

// Tokens into text as they come. A character may be several tokens, and a token may be worded by the one
// before it.
export class Pieces {
  constructor(text) {
    this.text = text;
    this.ids = [];
    this.first = 0; // of those that are decoded together,
    this.told = 0; // and of those that are not told yet
  }

  // What one more token adds; at the end what is left.
  add(id) {
    if (id !== undefined) this.ids.push(id);
    const before = this.text.decode(this.ids.slice(this.first, this.told));
    const now = this.text.decode(this.ids.slice(this.first));
    if (id !== undefined && now.endsWith("\ufffd")) return ""; // half a character
    this.first = this.told;
    this.told = this.ids.length;
    return now.slice(before.length);
  }
}
