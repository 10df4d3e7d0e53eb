"""The task of a language model: its options, its vocabulary and what pads it, and what it refuses."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from lib import api
from lib.laws import assert_close, make_settings, more

from jaxpar import (
    MeshConfig,
    OptimizerConfig,
    Parallel,
    TrainConfig,
    init_state,
    make_train_step,
)
from jaxpar.lm import IGNORE, LM, Vocabulary

# Sums in another order differ by float32 rounding; 1e-5 is the project's promise.
RELATIVE_ERROR = 1e-5

NUM_WORDS = 22
TASK = LM(
    num_layers=2, hidden_size=16, embed_size=8, vocab_size=96, num_words=NUM_WORDS, dropout=0.3,
    batch_size=8, seq_len=6, optimizer=OptimizerConfig(warmup_steps=0),
)  # fmt: skip
TIED = dataclasses.replace(TASK, embed_size=16, tie_embedding=True)
ONE = Parallel(MeshConfig(devices=(0,)))


def on_mesh(mesh, units=(1, 1), **pipeline):
    return make_settings(mesh, units, **pipeline).parallel


# ---- layers ----


@pytest.mark.more
@pytest.mark.parametrize("layer", ["gru", *map(more, ("rglru", "mingru", "slstm", "gated_delta"))])
def test_layers_of_any_kind_learn_a_batch_by_heart(layer):
    config = OptimizerConfig(learning_rate=0.02, lr_schedule="constant", warmup_steps=0)
    task = dataclasses.replace(TASK, layer=layer, dropout=0.0, optimizer=config)
    state, batch, losses = init_state(task, ONE), task.example_batch(), []
    assert {name.split("/")[2] for name in api.stored(task, ONE, state) if "layers" in name} >= {
        layer
    }
    step = make_train_step(task, ONE, TrainConfig(num_steps=99))
    for _ in range(100):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.5 * losses[0]


def test_what_other_layers_than_lstm_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"forget_bias=0\.5: layer='rglru' has no forget bias"):
        dataclasses.replace(TASK, layer="rglru", forget_bias=0.5)


# ---- padding words ----


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("task", [TASK, TIED], ids=["apart", "tied"])
@pytest.mark.parametrize("head", ["last", "sharded"])
def test_padding_has_no_gradient(task, head):
    parallel = on_mesh((2, 2, 2), (2, 3), head=head)
    grads = api.gradients(task, parallel, task.example_batch()).grads
    of_padding = {
        "embedding.table": np.s_[NUM_WORDS:],
        "head_bias": np.s_[NUM_WORDS:],
        "head.bias": np.s_[NUM_WORDS:],
        "head.kernel": np.s_[:, NUM_WORDS:],
    }
    found = {name: grads[name][part] for name, part in of_padding.items() if name in grads}
    assert len(found) == (2 if task.tie_embedding else 3)
    for name, grad in found.items():
        np.testing.assert_array_equal(grad, 0.0, err_msg=name)
        assert np.any(grads[name] != 0.0)


@pytest.mark.rows(1)
@pytest.mark.parametrize("parallel", [ONE, on_mesh((2, 2, 2), (1, 2))], ids=["one", "eight"])
def test_an_untrained_model_is_as_perplexed_as_it_has_words(parallel):
    task = dataclasses.replace(TASK, dropout=0.0)
    sums, _ = api.evaluation(task, parallel, init_state(task, parallel), task.example_batch())
    perplexity = task.metrics(sums["loss"] / sums["weight"], {})["perplexity"]
    assert perplexity == pytest.approx(NUM_WORDS, rel=0.05)


def test_the_probabilities_of_the_words_add_up_to_one():
    model = api.model(TASK, ONE, init_state(TASK, ONE))
    scores = model(TASK.example_batch().inputs_BT)
    probabilities = np.asarray(jax.nn.softmax(scores), np.float64)
    np.testing.assert_allclose(probabilities[..., :NUM_WORDS].sum(-1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(probabilities[..., NUM_WORDS:], 0.0)


@pytest.mark.full
def test_training_leaves_padding_as_it_is():
    task = dataclasses.replace(TASK, optimizer=OptimizerConfig("sgd", 0.5, warmup_steps=0))
    found = api.updates(task, ONE, TrainConfig(num_steps=1), [task.example_batch()])
    before, after = found.weights["head.kernel"], found.trained["head.kernel"]
    np.testing.assert_array_equal(after[:, NUM_WORDS:], before[:, NUM_WORDS:])
    assert np.all(np.any(after[:, :NUM_WORDS] != before[:, :NUM_WORDS], axis=0))


# ---- what the text says ----


def test_resolving_reads_the_text_only_if_it_must(text, tmp_path):
    folder = shutil.copytree(text, tmp_path / "text")
    task = LM(corpus=str(folder)).resolve()
    assert (task.num_words, task.vocab_size) == (11, 384)
    # What has been read is at hand, and what says its size is not read.
    shutil.rmtree(folder)
    assert len(task.read_text().vocabulary) == 11
    assert task.make_batches("valid").length == 70
    sized = dataclasses.replace(TASK, corpus="nowhere")
    assert sized.resolve() == sized
    assert sized.example_batch().inputs_BT.max() < NUM_WORDS


def test_a_vocabulary_that_the_text_does_not_fit_is_refused(text):
    def with_sizes(vocab_size, num_words=None):
        return LM(corpus=str(text), vocab_size=vocab_size, num_words=num_words)

    with pytest.raises(ValueError, match=r"(?s)vocab_size=2 is less than .*Fix: leave it out"):
        with_sizes(2).make_batches("train", 0)
    with pytest.raises(ValueError, match=r"vocab_size=5 is less than the 11 words"):
        with_sizes(5).make_batches("train", 0)
    with pytest.raises(ValueError, match="num_words=10 is less than the 11 words of corpus"):
        with_sizes(384, 10).make_batches("train", 0)
    with pytest.raises(
        ValueError, match=r"(?s)vocab_size=96 has more rows than words: .* has 11.*num_words=11"
    ):
        with_sizes(96).make_batches("train", 0)
    for sizes in ((11,), (96, 11), (96, 20)):
        assert with_sizes(*sizes).make_batches("train", 0).num_windows > 0
    with pytest.raises(ValueError, match="num_words=12 is more than vocab_size=11"):
        with_sizes(11, 12)


def test_what_identifies_the_text_and_what_is_kept_of_it(text, tmp_path):
    task = LM(corpus=str(text))
    kept = task.files()
    assert list(kept) == ["vocabulary.json"]
    assert Vocabulary.from_json(kept["vocabulary.json"]) == task.read_text().vocabulary
    found = task.fingerprint()
    assert {split: part["array"] for split, part in found.items()} == {
        "train": "int32[1400]", "valid": "int32[70]", "test": "int32[70]",
    }  # fmt: skip
    assert found["valid"] == found["test"] != found["train"]
    assert json.loads(json.dumps(found)) == found


def test_the_table_before_a_run(text):
    told = dict(LM(corpus=str(text)).resolve().describe())
    assert told == {
        "data": f"{text}, words: 1,400 train, 70 valid, 70 test",
        "vocabulary": "11 + 373 padding",
        "batch": "16 rows x 32 steps = 512 tokens",
    }
    told = dict(LM(corpus=str(text), num_buckets=3).describe())
    assert told["vocabulary"] == "11"
    assert told["batch"] == "16 rows x 32 steps or less, in buckets"
    told = api.summary(LM(corpus=str(text), num_buckets=3), "dp1")
    assert told["batches"].splitlines()[0] == "length  sequences  batches  padding"


def test_evaluations_stand_beside_word_frequencies(text):
    task = LM(
        num_layers=1, hidden_size=8, embed_size=8, corpus=str(text), batch_size=8, seq_len=4
    ).resolve()
    found = api.evaluation_of_split(task, ONE, init_state(task, ONE), "valid")
    assert found.metrics == {"perplexity": math.exp(found.loss)}
    assert found.metrics["perplexity"] == pytest.approx(11, rel=0.1)
    assert 5 < found.baseline["unigram perplexity"] < 11
    assert task.metrics(1e4, {}) == {"perplexity": math.inf}


@pytest.mark.rows(1)
@pytest.mark.law
@pytest.mark.parametrize("mesh", [(1, 1, 1), (4, 1, 1), (2, 2, 1)])
def test_a_text_of_fewer_tokens_than_rows_is_evaluated_in_the_batch_as_it_is(tmp_path, mesh):
    for split, words in (("train", "a b c a b a c\n" * 20), ("valid", "b c"), ("test", "a\n")):
        (tmp_path / f"{split}.txt").write_text(words)
    parallel = on_mesh(mesh)
    task = LM(
        num_layers=2, hidden_size=8, embed_size=8, corpus=str(tmp_path), batch_size=8, seq_len=4
    ).resolve()
    batches = task.make_batches("valid")
    assert (batches.num_windows, batches.length) == (1, 3)
    batch = batches.batch(0)
    assert batch.inputs_BT.shape == (8, 4)
    assert np.sum(batch.targets_BT != IGNORE) == 2
    state = init_state(task, parallel)
    loss = api.evaluation_of_split(task, parallel, state, "valid").loss
    # Each of the two targets is in a row of its own, after a token and the zero state.
    model = api.model(task, parallel, state)
    tokens = task.read_text().valid
    logits = np.asarray(model(tokens[:2, None])[:, 0, :], np.float64)
    nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(2), tokens[1:]]
    assert loss == pytest.approx(nll.mean(), rel=RELATIVE_ERROR)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: must be positive"),
        ({"hidden_size": -4}, "hidden_size=-4: must be positive"),
        ({"embed_size": 17}, "embed_size=17 is larger than hidden_size=16"),
        ({"tie_embedding": True}, "tie_embedding needs embed_size=8 equal to hidden_size=16"),
        ({"vocab_size": 0, "num_words": None}, "vocab_size=0: must be positive"),
        ({"num_words": 0}, "num_words=0: must be positive"),
        ({"dropout": 1.0}, r"dropout=1\.0: must be at least 0 and less than 1"),
        ({"dropout": math.nan}, "dropout=nan: must be a finite number"),
        ({"dtype": "float16"}, "dtype='float16': must be 'float32' or 'bfloat16'"),
        ({"corpus": ""}, "corpus='' is empty"),
        ({"level": "byte"}, "level='byte': must be 'auto' or 'word' or 'char'"),
        ({"max_vocab": 0}, "max_vocab=0: must be positive"),
        ({"batch_size": 0}, "batch_size=0: must be positive"),
        ({"seq_len": True}, "seq_len=True.*: must be a whole number"),
        ({"num_buckets": -1}, "num_buckets=-1: must not be negative"),
        ({"bucket_multiple": 0}, "bucket_multiple=0: must be positive"),
        ({"optimizer": "adam"}, "optimizer='adam': must be an OptimizerConfig"),
    ],
)
def test_fields_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TASK, **changes)


def test_a_model_of_no_known_vocabulary_is_refused():
    task = dataclasses.replace(TASK, vocab_size=None, num_words=None)
    for use in (task.example_batch, lambda: task.make_model(nnx.Rngs(0))):
        with pytest.raises(ValueError, match="vocab_size=None is not known yet"):
            use()


def test_a_width_that_tensor_does_not_divide_is_refused():
    task = dataclasses.replace(TASK, hidden_size=18)
    with pytest.raises(
        ValueError,
        match=r"hidden_size=18 does not divide by tensor=4\nFix: use hidden_size=16 or 20",
    ):
        init_state(task, on_mesh((1, 1, 4)))


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "inputs_BT",
            22,
            "token 22 at position 2, 5 of the inputs is outside the vocabulary of 22",
        ),
        ("inputs_BT", -1, "token -1 at position 2, 5 of the inputs"),
        ("targets_BT", 22, r"5 of the targets is outside .* 22 words\.\nFix: encode the text with"),
        ("targets_BT", -2, "token -2 at position 2, 5 of the targets"),
    ],
)
def test_a_step_takes_no_token_outside_the_vocabulary(name, value, message):
    state, step, batch = init_state(TASK, ONE), make_train_step(TASK, ONE), TASK.example_batch()
    tokens = np.array(getattr(batch, name))
    tokens[2, 5] = value
    with pytest.raises(ValueError, match=message):
        step(state, batch._replace(**{name: tokens}))
    tokens[2, 5] = IGNORE if name == "targets_BT" else 21
    _, metrics = step(state, batch._replace(**{name: tokens}))
    assert np.isfinite(metrics.loss)


# ---- the pieces of the model ----


@pytest.mark.more
@pytest.mark.law
@pytest.mark.parametrize(("mesh", "units"), [((1, 1, 1), (1, 1)), ((1, 2, 2), (2, 2))])
def test_logits_in_pieces_are_those_at_once(mesh, units):
    parallel = on_mesh(mesh, units, head="last")
    task = dataclasses.replace(TASK, batch_size=64, seq_len=8)
    expected = api.gradients(task, parallel, task.example_batch())
    task = dataclasses.replace(task, corpus="another")  # what has been traced of a task is kept
    with api.logits_are_in_pieces():
        found = api.gradients(task, parallel, task.example_batch())
    assert found.loss == pytest.approx(expected.loss, rel=RELATIVE_ERROR)
    assert_close(found.grads, expected.grads)


def test_a_narrow_table_is_widened_only_where_tensor_splits_it():
    model = TASK.make_model(nnx.Rngs(0))
    assert model.prepare({"tensor": 1}) is model
    wide = model.prepare({"tensor": 2})
    assert (wide.embedding.table.shape, model.embedding.table.shape) == ((96, 16), (96, 8))
    np.testing.assert_array_equal(wide.embedding.table[:, 8:], 0.0)
    tied = TIED.make_model(nnx.Rngs(0))
    assert tied.prepare({"tensor": 2}) is tied
