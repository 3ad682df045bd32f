"""From how many tokens on sagebwd is faster than PyTorch's attention, and shorter calls."""

import json
import math
from pathlib import Path

import pytest

import sagebwd
from sagebwd import _core
from sagebwd.core import crossover, fastest

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"
GRADIENTS16 = "sagebwd:precision=gradients16,no-deterministic"
H200, H100, RTX_4090, RTX_3090, L40S = (
    (9, 0, "NVIDIA H200"), (9, 0, "NVIDIA H100 80GB HBM3"), (8, 9, "NVIDIA GeForce RTX 4090"),
    (8, 6, "NVIDIA GeForce RTX 3090"), (8, 9, "NVIDIA L40S"))  # fmt: skip
#: From how many tokens on one kernel forms all gradients (generator/operation.cpp).
FEWEST_OF_ONE_KERNEL = {
    (words, head_dim, causal): tokens
    for words, cells in {
        "six-of-seven": (946, 3587, 950, 3440),
        "six-of-seven dp_sums=fp16": (2198, 5930, 4143, 10364),
    }.items()
    for (head_dim, causal), tokens in zip(
        ((64, False), (64, True), (128, False), (128, True)), cells
    )
}


def crossing(speeds):
    """Finds where the last speed below 1 of (tokens, speed) becomes 1, in 1 / tokens. It gives the
    first number of tokens where none is below, and infinity where the last one is."""
    speeds = sorted(speeds)
    slower = [i for i, (_, speed) in enumerate(speeds) if speed < 1]
    if not slower:
        return speeds[0][0]
    if slower[-1] == len(speeds) - 1:
        return math.inf
    (least, low), (most, high) = speeds[slower[-1] : slower[-1] + 2]
    share = (1 / low - 1) / (1 / low - 1 / high)  # of the way from `least` to `most`
    return 1 / (1 / least + share * (1 / most - 1 / least))


def measured():
    """(GPU, words, head dimension, causal, training) -> (tokens, speed), ..."""
    found = {}
    times = {}
    for row in json.loads((RESULTS / "speed-grid.json").read_text())["rows"]:
        place = row["head_dim"], row["causal"], row["tokens"]
        times.setdefault(place, {})[row["attention"]] = row
    for (head_dim, causal, tokens), rows in times.items():
        for words, name in (("six-of-seven", "sagebwd"), ("gradients16", GRADIENTS16)):
            for training, of in enumerate(("forward", "forward+backward")):
                peers = [r[of]["median_ms"] for n, r in rows.items()
                         if of in r and not n.startswith("sagebwd")]
                if of in rows.get(name, ()):
                    key = H200, words, head_dim, causal, bool(training)
                    speed = min(peers) / rows[name][of]["median_ms"]
                    found.setdefault(key, []).append((tokens, speed))
    for row in json.loads((RESULTS / "balance.json").read_text())["rows"]:
        gpu = {"RTX 4090": RTX_4090, "L40S": L40S}.get(row["gpu"])
        for training, of in enumerate(("forward", "forward+backward")):
            key = gpu, row["plan"], row["head_dim"], row["causal"], bool(training)
            speed = row["predicted"][of]["ratio_to_fa2"]
            found.setdefault(key, []).append((row["tokens"], speed))
    return found


def crossing_of_default(records, gpu, words, head_dim, causal, training):
    """That of the kernels that calls of so many tokens have."""
    cell = head_dim, causal, training
    fewest = FEWEST_OF_ONE_KERNEL[words, *cell[:2]] if gpu != H200 and training else 0
    of_two = f"{words} gradient_kernels=split"
    found = crossing(records[gpu, of_two, *cell]) if fewest else math.inf
    return found if found < fewest else crossing(records[gpu, words, *cell])


def test_the_figures_are_those_of_the_records():
    records = measured()
    count = 0
    for gpu, table in ((H200, crossover._H200), (RTX_4090, crossover._RTX_4090),
                       (L40S, crossover._L40S)):  # fmt: skip
        for words, cells in table.items():
            for (head_dim, causal), both in cells.items():
                for training in (False, True):
                    expected = crossing_of_default(records, gpu, words, head_dim, causal, training)
                    found = both[training]
                    about = gpu, words, head_dim, causal, training
                    assert found == expected or abs(found - expected) < 1, (about, expected)
                    count += 1
    assert count == 2 * (12 + 8 + 4)


def told(gpu, head_dim=128, causal=True, training=True, precision="six-of-seven", dp_sums="fp32"):
    return crossover.lookup(gpu, head_dim, causal, training, precision, dp_sums)


def test_gpus_of_a_kind():
    assert told(RTX_4090) == told(RTX_3090) == told((12, 0, "NVIDIA GeForce RTX 5090")) == 3011
    assert told(RTX_4090, head_dim=96, dp_sums="fp16") == 2230
    assert told(RTX_4090, head_dim=40, causal=False, training=False) == 1024
    assert told(H200) == told(H100) == told(L40S) == math.inf
    assert told(H100, head_dim=200, precision="gradients16") == 5100


@pytest.mark.parametrize(("gpu", "given", "words"), [
    ((8, 0, "NVIDIA A100-SXM4-80GB"), {}, "nothing is known of the crossover on NVIDIA A100"),
    ((10, 0, "NVIDIA B200"), {}, "'sagebwd tune --lengths 512,1024,2048,4096,8192 --head-dim 128 "
     "--causal top-left --precision six-of-seven --dp-sums fp32'"),
    ((9, 0, "NVIDIA H20"), {}, "NVIDIA H20"),
    (RTX_4090, {"head_dim": 256},
     "known are 'six-of-seven', 'six-of-seven dp_sums=fp16' up to 128"),
    (RTX_4090, {"precision": "gradients16"}, "the crossover of 'gradients16'"),
    (H200, {"dp_sums": "fp16"}, "of 'six-of-seven dp_sums=fp16' with head dimension 128"),
])  # fmt: skip
def test_what_is_not_known_says_so(gpu, given, words):
    assert words in told(gpu, **given)


@pytest.fixture
def gpus(monkeypatch):
    """GPUs that the driver seems to have."""
    found = []
    monkeypatch.setattr(_core, "driver", lambda: {
        "missing": "" if found else "no driver", "devices": [gpu[:2] for gpu in found],
        "names": [gpu[2].encode() for gpu in found]})  # fmt: skip
    fastest.gpu_of.cache_clear()
    yield found
    fastest.gpu_of.cache_clear()


def test_of_a_gpu_here(gpus):
    gpus += [RTX_4090, H100]
    assert sagebwd.crossover_tokens(0, causal=True) == 3011
    assert sagebwd.crossover_tokens(0, causal=True, training=False) == 1697
    assert sagebwd.crossover_tokens(1) == sagebwd.crossover_tokens("cuda:1") == 97876
    assert sagebwd.crossover_tokens("cuda", causal=True) == 3011
    for wrong in ("cuda:x", "cuda:-1", "cpu", "0"):
        with pytest.raises(sagebwd.SpecError, match="the number of a GPU, such as 0, or a name"):
            sagebwd.crossover_tokens(wrong)
    for given, words in (({"head_dim": 260}, "head dimension 260"), ({"causal": 1}, "causal"),
                         ({"precision": "int4"}, "int4"), ({"device": 2}, "device 2"),
                         ({"precision": "qk16"}, "nothing is known")):  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match=words):
            sagebwd.crossover_tokens(**{"device": 0, **given})


def test_without_a_gpu(gpus):
    with pytest.raises(sagebwd.LibraryError, match="The crossover is that of a GPU"):
        sagebwd.crossover_tokens()


def test_calls_of_unlike_lengths():
    assert crossover.tokens_of(4096, 4096) == 4096 and crossover.tokens_of(4096, 77) == 151
    assert crossover.tokens_of(0, 0) == 0


# ---- doors ---------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch.nn.functional import scaled_dot_product_attention as call  # noqa: E402

kernels = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


def tensors(queries=24, keys=24):
    torch.manual_seed(0)
    return [torch.randn(1, 2, n, 64, dtype=torch.bfloat16) for n in (queries, keys, keys)]


@kernels
@pytest.mark.parametrize("causal", [False, True])
def test_short_calls_are_pytorchs(causal):
    short, long = tensors(), tensors(25, 25)
    with sagebwd.sdpa(min_tokens=25, granularity="block") as mode:
        found = [call(*of, is_causal=causal) for of in (short, long)]
        positional = call(*short, None, 0.0, causal)
    assert torch.equal(found[0], call(*short, is_causal=causal)) and mode.short_calls == 2
    assert torch.equal(positional, found[0]) and not mode.fallbacks
    assert torch.equal(found[1], sagebwd.attention(*long, causal=causal, granularity="block"))
    assert mode.report() == ("of 3 calls sagebwd computed 1; PyTorch 2, which have fewer than 25 "
                             "tokens")  # fmt: skip


@kernels
def test_unlike_lengths_count_as_their_work():
    with sagebwd.sdpa(min_tokens=24) as mode:
        call(*tensors(48, 15))  # as 22 tokens
        call(*tensors(48, 16))  # as 24
    assert (mode.calls, mode.short_calls) == (2, 1)


@pytest.mark.parametrize(("given", "words"), [
    (0, "min_tokens"), (2.5, "min_tokens"), (True, "min_tokens"), ("long", "'auto', or None"),
])  # fmt: skip
def test_bad_numbers_are_refused(given, words):
    with pytest.raises(sagebwd.SpecError, match=words):
        sagebwd.sdpa(min_tokens=given)


@pytest.mark.parametrize("lost", [{"window_left": 3}, {"sink_logits": None}, {"seqused_k": None}])
def test_options_that_short_calls_would_lose_are_refused(lost):
    with pytest.raises(sagebwd.SpecError, match=f"min_tokens with {next(iter(lost))}: PyTorch's"):
        sagebwd.sdpa(min_tokens=25, **lost)
    sagebwd.sdpa(**lost), sagebwd.sdpa(min_tokens=25, precision="gradients16", deterministic=False)


@kernels
def test_all_calls_are_short_where_the_crossover_is_never():
    with sagebwd.sdpa(min_tokens=math.inf) as mode:
        call(*tensors(25, 25))
    assert mode.short_calls == 1


@kernels
def test_auto_needs_a_gpu():
    with pytest.raises(sagebwd.SpecError, match="min_tokens='auto'.*pass a number"):
        with sagebwd.sdpa(min_tokens="auto"):
            call(*tensors())
    with pytest.raises(sagebwd.SpecError, match="min_tokens='auto'"):  # no fallback hides that
        with sagebwd.sdpa(min_tokens="auto", fallback="torch"):
            call(*tensors())


@kernels
def test_what_is_wrong_is_still_refused():
    with pytest.raises(TypeError), sagebwd.sdpa(min_tokens=99):
        call(None, *tensors()[1:])
    rows = [torch.nested.nested_tensor([t[0].transpose(0, 1)], layout=torch.jagged)
            for t in tensors()]  # fmt: skip
    nested = [t.transpose(1, 2) for t in rows]
    with pytest.raises(sagebwd.SpecError, match="nested"), sagebwd.sdpa(min_tokens=99) as mode:
        call(*nested)
    assert mode.report() == "of 1 calls sagebwd computed 0"


@kernels
def test_short_calls_of_transformers():
    """Calls with padding stay with sagebwd. PyTorch's attention takes no lengths of sequences."""
    door = pytest.importorskip("sagebwd.integrations.transformers", reason="needs transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=100, hidden_size=128, intermediate_size=128,
                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=32)  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    ids, padding = torch.randint(0, 100, (2, 24)), torch.ones(2, 24, dtype=torch.int64)
    padding[1, 17:] = 0
    expected = model(ids, attention_mask=None).logits
    model.set_attn_implementation("sagebwd")
    try:
        door.use(min_tokens=25)
        assert torch.equal(model(ids, attention_mask=None).logits, expected)
        assert door.report() == ("of 2 calls sagebwd computed 0; PyTorch 2, which have fewer than "
                                 "25 tokens")  # fmt: skip
        model(ids, attention_mask=padding)
        assert door.report().startswith("of 4 calls sagebwd computed 2; PyTorch 2,")
        before = door._short.count
        model.generate(ids[:1], max_new_tokens=3, do_sample=False)
        assert door._short.count == before + 6  # in two layers the prompt, and two queries
        for given, words in (({"min_tokens": 0}, "min_tokens"), ({"min_tokens": "x"}, "'auto'")):
            with pytest.raises(sagebwd.SpecError, match=words):
                door.use(**given)
        with pytest.raises(sagebwd.SpecError, match="leave one of the two out"):
            door.use(min_tokens=25, mesh=object())
    finally:
        door.use()
    assert door.report() == "of 0 calls sagebwd computed 0"


@kernels
def test_models_whose_queries_see_all_keys():
    """A mask of ones, as a tokenizer gives it, says nothing of a causal mask."""
    door = pytest.importorskip("sagebwd.integrations.transformers", reason="needs transformers")
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=100, hidden_size=128, intermediate_size=128,
                        num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model = BertModel(config).bfloat16().eval()
    ids, ones = torch.randint(0, 100, (2, 24)), torch.ones(2, 24, dtype=torch.int64)
    model.set_attn_implementation("sdpa")
    expected = model(ids, attention_mask=ones).last_hidden_state
    model.set_attn_implementation("sagebwd")
    try:
        for given, ours in (({}, 1), ({"min_tokens": 25}, 0)):
            door.use(**given)
            found = model(ids, attention_mask=ones).last_hidden_state
            assert (found - expected).abs().max() < 0.1
            assert door.report().startswith(f"of 1 calls sagebwd computed {ours}")
        assert torch.equal(found, expected)
    finally:
        door.use()
