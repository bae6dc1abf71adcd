/* OTARo without Python: a nested model in memory, tokens in, logits out, at a precision that may change
 * between any two calls. docs/native.md has a complete program.
 *
 * A model is made of `decoder.json` and of shards (FORMAT.md), which are used where they lie and must stay
 * until otaro_free. All of them are taken for a stranger's: what does not fit is refused in words. Functions
 * that can fail return 0 if they did not, or say otherwise; otaro_error tells why, and the model is as it was
 * before.
 *
 * A model or tokenizer serves one thread at a time; different models may serve different threads. Logits have
 * the same bits on every machine, with any number of threads, and however a text is cut into calls. They are
 * those of the Python package. */
#ifndef OTARO_H
#define OTARO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OTARO_VERSION "0.2.0" /* of the package */
#define OTARO_API 1           /* of this header; a change that breaks callers counts it up */

typedef struct otaro_model otaro_model;

/* A model in a nested directory: maps its files, as many planes as there are, and sets the finest precision.
 * A precision then reads only the planes it needs. A shard that is refused ends the planes, as one that is
 * missing does: otaro_damaged says what is wrong with it, and otaro_set_precision, when a precision needs it.
 * Returns a model even when the directory is refused; otaro_error is not empty then. NULL where there is not
 * even memory for the words. */
otaro_model* otaro_open(const char* directory);
const char* otaro_damaged(const otaro_model* model); /* empty if nothing is */

/* A model of parts. Give it the text of decoder.json (copied), then the base shard, then any further ones, at
 * any time: also between two tokens of an answer. NULL if memory is short. */
otaro_model* otaro_new(void);
int otaro_describe(otaro_model* model, const char* json, size_t bytes);
/* `check` other than 0: the bytes must match their digests (SHA-256), not only the header its seal. The first
 * shard sets the precision to E5M3; later ones leave it as it is. */
int otaro_add_shard(otaro_model* model, const void* data, size_t bytes, int check);

/* Checks the bytes of all shards against their digests, as `otaro verify` does. Refuses a damaged shard that
 * otaro_open left out, too. */
int otaro_verify(otaro_model* model);

void otaro_free(otaro_model* model); /* NULL is fine */

/* What was wrong with the last call that failed; empty if none did. Valid until the next call. */
const char* otaro_error(const otaro_model* model);

/* Mantissa bits: 3 for E5M3 to 8 for E5M8. Takes effect with the next token; what was read stays. */
int otaro_set_precision(otaro_model* model, int mantissa_bits);
int otaro_precision(const otaro_model* model);
int otaro_finest(const otaro_model* model); /* that the shards are there for; 0 before the base shard */

/* Reads tokens after those of the sequence so far. Returns the logits of the last one, otaro_vocabulary
 * floats that are valid until the next call, or NULL: then none of the tokens was read. */
const float* otaro_forward(otaro_model* model, const int32_t* tokens, size_t count);
size_t otaro_vocabulary(const otaro_model* model);

/* How many tokens the sequence has, how many it can have, and how many the model was made for: what it says
 * beyond may be poor; 0 if decoder.json does not say. otaro_truncate forgets those from `length` on. */
size_t otaro_length(const otaro_model* model);
size_t otaro_positions(const otaro_model* model);
size_t otaro_trained_positions(const otaro_model* model);
int otaro_truncate(otaro_model* model, size_t length);

/* Of the whole process: threads that work on a step, 1 unless said otherwise, and the instruction set in use.
 */
void otaro_set_threads(int count);
const char* otaro_backend(void);

/* Text and tokens, as tokenizer.json says: byte-level BPE, and BPE that falls back to bytes, which is what
 * LLaMA, Mistral, Qwen, Gemma, Phi, SmolLM and their like have. What is not known is refused by name. */
typedef struct otaro_tokenizer otaro_tokenizer;

/* Of tokenizer.json in a directory; as otaro_open, it returns one whose otaro_tokenizer_error is not empty
 * where that is refused. Or of its text. */
otaro_tokenizer* otaro_tokenizer_open(const char* directory);
otaro_tokenizer* otaro_tokenizer_new(void); /* NULL if memory is short */
int otaro_tokenizer_read(otaro_tokenizer* tokenizer, const char* json, size_t bytes); /* once */
const char* otaro_tokenizer_error(const otaro_tokenizer* tokenizer);
void otaro_tokenizer_free(otaro_tokenizer* tokenizer);

/* How many tokens a text (UTF-8) has, -1 if it is refused; the first `room` of them are written. With
 * `begin_and_end` other than 0 they include those that begin and end every text, such as <s>. */
ptrdiff_t otaro_encode(otaro_tokenizer* tokenizer, const char* text, size_t bytes, int begin_and_end,
                       int32_t* tokens, size_t room);
/* The bytes that a token adds to a text: they may be a part of a character, and special tokens have none.
 * Valid as long as the tokenizer. */
const char* otaro_piece(const otaro_tokenizer* tokenizer, int32_t token, size_t* bytes);

#ifdef __cplusplus
}
#endif

#endif
