"""GGUF files hold a precision's values, with the right names and order; and llama.cpp computes with them."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from otaro.errors import OtaroError, TargetError
from otaro.export import gguf_blocks as blocks
from otaro.export.grid import Grid
from otaro.export.run import export
from otaro.sefp.codec import MAX_SCALE_EXPONENT, MIN_SCALE_EXPONENT
from tests.export.conftest import FITTING, every_code

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
needs_llama = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama-cpp-python is not installed (pip install 'otaro-llm[llama]')",
)


def read(path):
    """Tensors by name, as float32, and the reader."""
    reader = gguf.GGUFReader(path)
    return {
        t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors
    }, reader


def fields(reader):
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize(
    ("bits", "reconstruction", "kind", "least_exponent"),
    [
        (3, "midpoint", "Q4_0", -12),
        (4, "midpoint", "Q5_1", -10),
        (5, "midpoint", "Q8_0", -9),
        (6, "midpoint", "F16", -8),
        (3, "truncate", "Q4_0", -12),
        (4, "truncate", "Q5_0", -11),
        (5, "truncate", "Q8_0", -10),
        (6, "truncate", "Q8_0", -9),
        (7, "truncate", "Q8_0", -8),
    ],
)
def test_every_code_at_every_scale_is_held_exactly(bits, reconstruction, kind, least_exponent):
    """But for scales so small that float16 has no steps there: from `least_exponent` on, there are none."""
    assert blocks.smallest(Grid(bits, reconstruction)) == kind
    for exponent in range(MIN_SCALE_EXPONENT, MAX_SCALE_EXPONENT + 1):
        rows = every_code(bits, reconstruction, exponent)
        data = blocks.encode(kind, rows, gguf)
        assert data.shape == (256, blocks.row_bytes(kind, rows.codes.shape[-1]))
        found = torch.tensor(gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind]))
        wanted = rows.values()
        units = rows.grid.units(rows.scales)[:, :1]
        exact = (units.half().float() == units).expand_as(wanted)
        assert torch.equal(found[exact], wanted[exact])
        assert bool(exact.all()) == (exponent >= least_exponent)
        # Steps of 2^-24 round a unit by half of that at most, and there are so many units in a weight.
        assert ((found - wanted).abs() <= 2.0**-25 * max(-rows.grid.least, 32)).all()


def test_the_finest_precisions_have_no_small_type():
    assert blocks.smallest(Grid(7, "midpoint")) == blocks.smallest(Grid(8, "midpoint")) == "F16"
    assert blocks.smallest(Grid(8, "truncate")) == "F16"


@pytest.mark.parametrize("precision", ["E5M3", "E5M4", "E5M5", "E5M6"])
def test_a_file_is_exact_and_says_so(precision, make_fitting, tmp_path):
    report = export(make_fitting("llama"), tmp_path / "m.gguf", precision=precision, to="gguf")
    assert report.exact
    kind = {"E5M3": "Q4_0", "E5M4": "Q5_1", "E5M5": "Q8_0", "E5M6": "F16"}[precision]
    assert set(report.types) == {kind, "F16", "F32"}, "rows of 112 are no whole blocks"
    assert report.types["F32"].tensors == 5
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


# Those that transformers reads from GGUF; of the others llama.cpp is asked.
@pytest.mark.parametrize(
    "architecture", ["llama", "llama_tied", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3"]
)
def test_transformers_reads_the_values_of_the_precision(architecture, make_fitting, decoded, tmp_path):
    nested = make_fitting(architecture)
    report = export(nested, tmp_path / "m.gguf", precision="E5M4", to="gguf")
    assert report.exact, report
    state = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    ).state_dict()
    for name, wanted in decoded(nested, "E5M4").items():
        # one was added for the file, and is taken away again
        if architecture.startswith("gemma") and "norm" in name:
            assert torch.equal(state[name] + 1, wanted + 1), name
        else:
            assert torch.equal(state[name], wanted), name


def test_queries_and_keys_are_put_into_the_order_of_llama(make_fitting, decoded, tmp_path):
    export(make_fitting("llama"), tmp_path / "m.gguf", precision="E5M3", to="gguf")
    tensors, _ = read(tmp_path / "m.gguf")
    rows = decoded(make_fitting("llama"), "E5M3")["model.layers.1.self_attn.k_proj.weight"]
    for head in range(2):
        for pair in range(12):  # 2i and 2i + 1 turn together there, i and i + 12 here
            assert torch.equal(tensors["blk.1.attn_k.weight"][24 * head + 2 * pair], rows[24 * head + pair])
            assert torch.equal(
                tensors["blk.1.attn_k.weight"][24 * head + 2 * pair + 1], rows[24 * head + pair + 12]
            )


def test_experts_are_split_into_gates_and_ups(make_fitting, decoded, tmp_path):
    export(make_fitting("mixtral"), tmp_path / "m.gguf", precision="E5M3", to="gguf")
    tensors, reader = read(tmp_path / "m.gguf")
    both = decoded(make_fitting("mixtral"), "E5M3")["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(tensors["blk.0.ffn_gate_exps.weight"], both[:, :112])
    assert torch.equal(tensors["blk.0.ffn_up_exps.weight"], both[:, 112:])
    assert tensors["blk.0.ffn_gate_inp.weight"].dtype == torch.float32
    about = fields(reader)
    assert (about["llama.expert_count"], about["llama.expert_used_count"]) == (4, 2)


def test_rounding_is_told_to_the_weight(make_fitting, decoded, tmp_path):
    nested = make_fitting("qwen3")
    report = export(nested, tmp_path / "m.gguf", precision="E5M8", to="gguf", type="q8_0")
    tensors, _ = read(tmp_path / "m.gguf")
    names = {"mlp.up_proj": "ffn_up", "self_attn.q_proj": "attn_q"}
    wanted, told = decoded(nested, "E5M8"), report.types["Q8_0"]
    for ours, theirs in names.items():
        found = tensors[f"blk.0.{theirs}.weight"]
        error = (found - wanted[f"model.layers.0.{ours}.weight"]).abs().max()
        assert 0 < error <= told.largest_error
    assert not report.exact
    assert export(nested, tmp_path / "f32.gguf", precision="E5M8", to="gguf", type="F32").exact


def test_refusals_name_what_llama_cpp_does_otherwise(make_nested, make_fitting, copy_of, tmp_path):
    out = tmp_path / "m.gguf"
    for architecture, why in {
        "gpt2": r"gpt2 models cannot be written as GGUF here, but llama, .* can; export --to hf",
        "gemma2": r"its scores are divided by the root of 20, there by that of 28",
        "smollm3": r"it leaves out positions in other layers than every fourth",
        "qwen3_moe_mixed": r"the weights of its experts do not add up to one",
    }.items():
        with pytest.raises(OtaroError, match=why):
            export(make_nested(architecture), out, precision="E5M3", to="gguf")
    with pytest.raises(OtaroError, match=r"unknown type 'Q4_K'; choose from Q4_0"):
        export(make_nested("llama"), out, precision="E5M3", to="gguf", type="Q4_K")
    changed = copy_of(make_nested("qwen3_moe_mixed"))
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"norm_topk_prob": True}))
    with pytest.raises(
        OtaroError,
        match=r"GGUF's qwen3_moe models have no model.layers.0.mlp.gate_proj.weight; export "
        r"--to hf",
    ):
        export(changed, out, precision="E5M3", to="gguf")
    changes = {
        "its activation is gelu": {"hidden_act": "gelu"},
        "positions are of type dynamic": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        },
    }
    for why, change in changes.items():
        changed = copy_of(make_fitting("llama"))
        config = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(OtaroError, match=why):
            export(changed, out, precision="E5M3", to="gguf")
    assert not out.exists()


def test_a_window_that_llama_cpp_lacks_is_noted(make_nested, tmp_path):
    report = export(make_nested("phi3"), tmp_path / "m.gguf", precision="E5M3", to="gguf")
    assert report.notes[0] == (
        "llama.cpp has no window for phi3 models: beyond 11 tokens it sees more than this model does"
    )


def test_only_an_earlier_export_is_replaced(make_fitting, tmp_path):
    nested, out = make_fitting("llama"), tmp_path / "m.gguf"
    export(nested, out, precision="E5M3", to="gguf")
    first = out.read_bytes()
    with pytest.raises(TargetError, match=r"exists; choose another place"):
        export(nested, out, precision="E5M4", to="gguf")
    export(nested, out, precision="E5M4", to="gguf", overwrite=True)
    assert out.read_bytes() != first
    out.write_bytes(b"GGUF of somebody else")
    with pytest.raises(TargetError, match=r"is no earlier export and is not overwritten"):
        export(nested, out, precision="E5M4", to="gguf", overwrite=True)
    with pytest.raises(TargetError, match=r"is a directory; name the file to write"):
        export(nested, tmp_path, precision="E5M4", to="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_memory_stays_near_the_largest_tensor(random_model, tmp_path, in_child):
    """Of a file of 70 MB whose largest tensor takes 4; anonymous memory alone counts, not mapped files."""
    changes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "vocab_size": 1024,
        "head_dim": 64,
    }
    model = random_model("llama_tied", **changes, num_attention_heads=8, num_key_value_heads=8)
    model.save_pretrained(tmp_path / "checkpoint")
    del model
    done = in_child(
        f"""
        import threading, time, otaro
        from otaro.export.run import export
        otaro.pack({str(tmp_path / "checkpoint")!r}, {str(tmp_path / "nested")!r})

        def anonymous():
            return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])

        nested, how = {str(tmp_path / "nested")!r}, dict(precision="E5M3", to="gguf", type="F32")
        export(nested, {str(tmp_path / "warm.gguf")!r}, **how)
        before, peak, going = anonymous(), 0, True
        def watch():
            global peak
            while going:
                peak = max(peak, anonymous())
                time.sleep(0.005)
        thread = threading.Thread(target=watch)
        thread.start()
        export(nested, {str(tmp_path / "m.gguf")!r}, **how)
        going = False
        thread.join()
        print(peak - before)
        """
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "m.gguf").stat().st_size
    assert written > 65e6
    assert int(done.stdout) * 1024 < 30e6, "1 MiB of weights at a time, as codes, integers and floats"


def logits_of(path, tokens):
    """llama.cpp's for each of the tokens, with keys and values in float32."""
    from otaro.evaluate.llama_cpp import library

    lib = library()
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = lib.llama_model_load_from_file(str(path).encode(), settings)
    assert model, "llama.cpp opens the file"
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 64, 1, 1
    options.type_k = options.type_v = 0  # float32
    options.flash_attn_type = 0
    context = lib.llama_init_from_model(model, options)
    count = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                token,
                i,
                1,
                0,
                True,
            )
        assert lib.llama_decode(context, batch) == 0
        rows = [
            np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (count,)).copy()
            for i in range(len(tokens))
        ]
        return torch.from_numpy(np.stack(rows)).double()
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)
        lib.llama_model_free(model)


@needs_llama
@pytest.mark.parametrize("architecture", FITTING)
def test_llama_cpp_computes_what_transformers_does(architecture, make_fitting, tmp_path):
    """In float32 on both sides; a wrong name, order, setting or norm moves logits by their own size."""
    nested = make_fitting(architecture)
    export(nested, tmp_path / "m.gguf", precision="E5M8", to="gguf", type="F32")
    export(nested, tmp_path / "hf", precision="E5M8", to="hf")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = [(7 * i * i + 3) % 120 for i in range(20)]
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].double()
    # GELU comes from a table in float16 there
    tolerance = 2.0**-9 if architecture.startswith("gemma") else 2.0**-12
    assert (logits_of(tmp_path / "m.gguf", tokens) - wanted).abs().max() < tolerance * wanted.abs().max()


@needs_llama
@pytest.mark.parametrize("rope", [
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 16},
    {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
], ids=lambda rope: rope["rope_type"])  # fmt: skip
def test_scaled_positions_too(rope, random_model, tmp_path):
    import otaro

    random_model("llama", rope_parameters=rope).save_pretrained(tmp_path / "checkpoint")
    otaro.pack(tmp_path / "checkpoint", tmp_path / "nested")
    test_llama_cpp_computes_what_transformers_does("", lambda _: tmp_path / "nested", tmp_path)


@needs_llama
@pytest.mark.slow
def test_smollm2_says_the_same_in_llama_cpp(smollm2, shared_data, tmp_path):
    """With the same numbers in float32 to the token; as Q4_0 activations are rounded to eight bits there, and
    texts part.
    """
    import llama_cpp
    from transformers import AutoTokenizer

    import otaro

    nested = tmp_path / "nested"
    otaro.pack(smollm2, nested)
    files = {kind: tmp_path / f"{kind}.gguf" for kind in ("Q4_0", "F32")}
    for kind, path in files.items():
        assert export(nested, path, precision="E5M3", to="gguf", type=kind).exact
    theirs = {
        kind: llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False)
        for kind, path in files.items()
    }
    ours, tokenizer = otaro.load(nested, "E5M3"), AutoTokenizer.from_pretrained(nested)
    text = (shared_data / "wikitext-2" / "wiki.test.raw").read_text()[:8000]
    ids = tokenizer(text).input_ids
    assert theirs["Q4_0"].tokenize(text.encode(), add_bos=True, special=True) == ids

    def said(model, prompt):
        return [
            token
            for token, _ in zip(model.generate(prompt, temp=0.0, repeat_penalty=1.0), range(40), strict=False)
        ]

    for words, kinds in {
        "The capital of France is": ("F32", "Q4_0"),
        "Once upon a time, there was": ("F32",),
    }.items():
        prompt = tokenizer(words).input_ids
        wanted = ours.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for kind in kinds:
            assert said(theirs[kind], prompt) == wanted

    def loss(logits):
        return float(torch.nn.functional.cross_entropy(logits[:511], torch.tensor(ids[1:512])))

    with torch.no_grad():
        wanted = loss(ours(torch.tensor([ids[:512]])).logits[0])
    for kind, tolerance in {"F32": 0.001, "Q4_0": 0.02}.items():
        theirs[kind].reset()
        theirs[kind].eval(ids[:512])
        assert abs(loss(torch.tensor(theirs[kind].scores)) - wanted) < tolerance
