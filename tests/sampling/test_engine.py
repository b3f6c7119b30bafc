"""The engine tells the truth about log-probs, and nothing but the request decides the answer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import engine as engine_lib
from memrl_jax.types import TokenBatch

CFG = DecoderConfig.tiny(128, dim=64, layers=2)
SHAPES = engine_lib.EngineConfig(
  slots=8, buckets=(32, 64), prefill_rows=(2, 4), prefill_chunks=(8, 16), round_steps=4
)


@functools.cache
def params_of(seed=0):
  return policy.init(jax.random.key(seed), CFG)


def engine_of(seed=0, config=SHAPES):
  return engine_lib.Engine(CFG, params_of(seed), config)


def request(prompt, seed=0, **settings):
  settings = dict(max_tokens=6) | settings
  return engine_lib.Request(np.array([seed, 7], np.uint32), np.asarray(prompt), **settings)


def mixed(count, seed=0, longest=40):
  """Requests of all lengths; many begin with parts of one common text."""
  rng = np.random.default_rng(seed)
  common = rng.integers(0, 128, longest)
  made = []
  for index in range(count):
    own = rng.integers(0, 128, rng.integers(1, 10))
    prompt = np.concatenate([common[: rng.integers(0, longest - 10)], own])
    budget, temperature = int(rng.integers(1, 20)), [0.7, 1.0][index % 2]
    made.append(request(prompt, index, max_tokens=budget, temperature=temperature, stop=(3, 77)))
  return made


@jax.jit
def _logprobs(params, batch):
  return policy.logprobs(params, CFG, batch, entropy=False)[0]


def scored(requests, completions, params):
  """The training path's log-probs of what was sampled, two responses packed in a sequence."""
  rows = -(-len(requests) // 2)
  T, K = 128, max(len(completion.ids) for completion in completions)
  tokens, segment, position = (np.zeros((rows, T), np.int32) for _ in range(3))
  gather, target = np.zeros((rows, 2, K), np.int32), np.zeros((rows, 2, K), np.int32)
  mask, temperature = np.zeros((rows, 2, K), bool), np.ones((rows, 2), np.float32)
  end = np.zeros(rows, np.int32)
  for index, (asked, answer) in enumerate(zip(requests, completions, strict=True)):
    b, s = divmod(index, 2)
    text = np.concatenate([asked.prompt, answer.ids])
    span = slice(end[b], end[b] + len(text))
    tokens[b, span], segment[b, span], position[b, span] = text, s + 1, np.arange(len(text))
    n = len(answer.ids)
    gather[b, s, :n] = end[b] + len(asked.prompt) - 1 + np.arange(n)
    target[b, s, :n], mask[b, s, :n], temperature[b, s] = answer.ids, True, asked.temperature
    end[b] = span.stop
  zeros = np.zeros((rows, 2), np.float32)
  batch = TokenBatch(
    tokens_BT=tokens,
    segment_BT=segment,
    position_BT=position,
    gather_BSK=gather,
    target_BSK=target,
    mask_BSK=mask,
    behaviour_BSK=np.zeros((rows, 2, K), np.float32),
    advantage_BS=zeros,
    temperature_BS=temperature,
    value_target_BS=zeros,
    value_index_BS=np.zeros((rows, 2), np.int32),
  )
  logp_BSK = np.asarray(_logprobs(params, batch))
  return [logp_BSK[index // 2, index % 2, : len(c.ids)] for index, c in enumerate(completions)]


@functools.cache
def _forward():
  return jax.jit(
    lambda params, tokens, segment: policy.logits(
      params,
      CFG,
      policy.hidden(params, CFG, tokens, segment, jnp.arange(tokens.shape[1])[None]),
    )
  )


def next_logits(params, tokens):
  """Logits after `tokens` by one uncached forward pass."""
  padded = np.zeros((1, 64), np.int32)
  padded[0, : len(tokens)] = tokens
  return _forward()(params, padded, (np.arange(64) < len(tokens))[None].astype(np.int32))[
    0, len(tokens) - 1
  ]


def assert_same(one, two):
  for first, second in zip(one, two, strict=True):
    assert first.ids.tolist() == second.ids.tolist()
    assert first.finish == second.finish
    np.testing.assert_allclose(first.logps, second.logps, atol=1e-5)


def test_log_probs_are_those_of_the_training_path():
  requests = mixed(30)
  engine = engine_of()
  completions = engine.generate(requests)
  assert engine.stats.reused > 100  # the claim covers copied and continued prefixes
  for got, want in zip(completions, scored(requests, completions, params_of()), strict=True):
    np.testing.assert_allclose(got.logps, want, atol=1e-5)


def test_company_slots_and_shapes_change_no_answer():
  requests = mixed(12, seed=1)
  together = engine_of().generate(requests)
  engine = engine_of()
  assert_same(together, [engine.generate([one])[0] for one in requests])
  assert_same(together, engine_of().generate(requests[::-1])[::-1])
  other = engine_lib.EngineConfig(
    slots=3, buckets=(64,), prefill_rows=(3,), prefill_chunks=(5,), round_steps=7
  )
  assert_same(together, engine_of(config=other).generate(requests))


def test_greedy_is_the_argmax_of_the_full_forward_pass():
  requests = [one._replace(temperature=0.0, stop=()) for one in mixed(6, seed=2)]
  for asked, answer in zip(requests, engine_of().generate(requests), strict=True):
    text = asked.prompt.tolist()
    for token, logp in zip(answer.ids, answer.logps, strict=True):
      logits = next_logits(params_of(), text)
      assert token == int(jnp.argmax(logits))
      assert logp == pytest.approx(float(jax.nn.log_softmax(logits)[token]), abs=1e-5)
      text.append(int(token))


def test_stop_token_is_kept_and_ends_the_answer_there():
  free = request(np.arange(9), 5, max_tokens=20)
  ids = engine_of().generate([free])[0].ids
  stop = int(ids[6])
  first = ids.tolist().index(stop)
  answer = engine_of().generate([free._replace(stop=(stop, 127))])[0]
  assert answer.ids.tolist() == ids[: first + 1].tolist()
  assert answer.finish == "stop"
  on_the_last_token = free._replace(stop=(stop,), max_tokens=first + 1)
  assert engine_of().generate([on_the_last_token])[0].finish == "stop"


def test_budget_is_exact_and_prompts_of_one_token_work():
  requests = [request([index], index, max_tokens=index + 1) for index in range(12)]
  answers = engine_of().generate(requests)
  assert [len(answer.ids) for answer in answers] == list(range(1, 13))
  assert {answer.finish for answer in answers} == {"length"}


def test_context_filled_to_the_last_column():
  rng = np.random.default_rng(3)
  requests = [request(rng.integers(0, 128, 64 - n), n, max_tokens=n) for n in (1, 5, 30, 63)]
  answers = engine_of().generate(requests)
  assert [len(answer.ids) for answer in answers] == [1, 5, 30, 63]
  for got, want in zip(answers, scored(requests, answers, params_of()), strict=True):
    np.testing.assert_allclose(got.logps, want, atol=1e-5)


def test_a_chunk_that_would_pass_the_end_of_the_cache_starts_earlier():
  # 60 + the token that was fed = 61 columns are known, one is missing; a chunk of 8 from column 61
  # on would end at 69, but the cache has 64 + 4 columns.
  prompt = np.random.default_rng(8).integers(0, 128, 63)
  engine = engine_of()
  engine.generate([request(prompt[:61], 1, max_tokens=1)])
  asked = [request(prompt, 2, max_tokens=1)]
  answers = engine.generate(asked)
  assert engine.stats.reused == 61
  np.testing.assert_allclose(answers[0].logps, scored(asked, answers, params_of())[0], atol=1e-5)


def test_growth_in_the_middle_of_an_answer_changes_nothing():
  short, long = request(np.arange(8), 1, max_tokens=16), request(np.arange(50), 2, max_tokens=9)
  alone = engine_of().generate([short])[0]
  engine = engine_of()
  engine.submit(short)
  assert engine.run_round() == []
  engine.submit(long)
  finished = {}
  while engine.pending:
    finished.update(engine.run_round())
  assert_same([finished[0]], [alone])


def test_a_finished_row_leaves_while_others_go_on():
  engine = engine_of()
  slow, quick = (
    engine.submit(request([1, 2], 1, max_tokens=12)),
    engine.submit(request([3], 2, max_tokens=1)),
  )
  assert [ticket for ticket, _ in engine.run_round()] == [quick]
  late = engine.submit(request([4], 3, max_tokens=2))
  assert [ticket for ticket, _ in engine.run_round()] == [late]
  assert engine.pending == 1
  while engine.pending:
    done = engine.run_round()
  assert [ticket for ticket, _ in done] == [slow]
  assert engine.run_round() == []


def test_equal_prompts_are_computed_once_and_a_next_turn_computes_what_is_new():
  prompt = np.random.default_rng(4).integers(0, 128, 20)
  engine = engine_of()
  answers = engine.generate([request(prompt, seed, max_tokens=5) for seed in range(8)])
  assert (engine.stats.prefilled, engine.stats.reused) == (19, 7 * 19)
  # The last sampled token has no keys yet: 20 + 4 columns are cached, the next prompt adds 3 + 1.
  turn = np.concatenate([prompt, answers[2].ids, [9, 9, 9]])
  before = engine.stats
  engine.generate([request(turn, 1)])
  assert engine.stats.reused - before.reused == 24
  assert engine.stats.prefilled - before.prefilled == len(turn) - 1 - 24


def test_a_shared_beginning_is_computed_once_in_a_wave():
  rng = np.random.default_rng(5)
  header = rng.integers(0, 128, 16)
  prompts = [np.concatenate([header, [index], rng.integers(0, 128, 4)]) for index in range(6)]
  engine = engine_of()
  engine.generate([request(prompt, seed) for seed, prompt in enumerate(prompts)])
  assert engine.stats.reused == 5 * 16
  assert engine.stats.prefilled == 6 * 20 - 5 * 16


def test_reading_a_beginning_in_place_changes_no_answer_and_copies_nothing():
  rng = np.random.default_rng(9)
  header = rng.integers(0, 128, 20)
  tails = [[], [], [], [5], [5, 6, 7], [], [8] * 12, [9]]
  asked = [
    request(np.concatenate([header, tail]), seed, max_tokens=10 + seed)
    for seed, tail in enumerate(tails)
  ]
  engine = engine_of()
  answers = engine.generate(asked)
  copying = engine_of(config=dataclasses.replace(SHAPES, share=0))
  assert_same(answers, copying.generate(asked))
  assert copying.stats.in_place == 0
  # All others read the 19 tokens that row 0 computes; three copy a 20th from the row that has it.
  assert engine.stats.reused == copying.stats.reused == 7 * 19 + 3
  assert engine.stats.in_place == 7 * 19
  turn = [one._replace(prompt=np.concatenate([one.prompt, a.ids, [1, 2]]), max_tokens=3)
          for one, a in zip(asked, answers, strict=True)]  # fmt: skip
  assert_same(engine.generate(turn), engine_of().generate(turn))


def test_who_reads_in_place_keeps_its_columns_when_their_slot_is_given_away():
  prompt = np.random.default_rng(10).integers(0, 128, 25)
  group = [request(prompt, seed, max_tokens=[1, 14][seed > 0]) for seed in range(8)]
  other = request(np.random.default_rng(11).integers(0, 128, 30), 99, max_tokens=4)
  want = engine_of(config=dataclasses.replace(SHAPES, share=0)).generate([*group, other])
  engine = engine_of()
  tickets = [engine.submit(one) for one in group]
  finished = dict(engine.run_round())
  assert list(finished) == tickets[:1]  # the lead, whose slot is now the only free one
  tickets.append(engine.submit(other))
  while engine.pending:
    finished.update(engine.run_round())
  assert_same([finished[ticket] for ticket in tickets], want)


def test_groups_that_come_and_go_get_the_answers_of_an_engine_that_copies():
  rng = np.random.default_rng(12)
  engine, copying = engine_of(), engine_of(config=dataclasses.replace(SHAPES, share=0))
  texts = [one.prompt for one in mixed(9, seed=12)]
  for wave in range(3):
    asked = [
      request(text[: rng.integers(1, len(text) + 1)], wave, max_tokens=int(rng.integers(1, 12)))
      for text in texts
      for _ in range(rng.integers(1, 5))
    ]
    asked = [asked[index] for index in rng.permutation(len(asked))]
    asked += [asked[0]._replace(key=np.array([at, 1], np.uint32)) for at in range(6)]
    answers = engine.generate(asked)
    assert_same(answers, copying.generate(asked))
    texts = [
      np.concatenate([one.prompt, answer.ids, [wave]])[:50]
      for one, answer in zip(asked, answers, strict=True)
    ][::3]
  assert engine.stats.in_place > 200


def test_bfloat16_weights_give_the_log_probs_of_their_own_forward_pass():
  half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of())
  config = engine_lib.EngineConfig(
    slots=1, buckets=(32,), prefill_rows=(1,), prefill_chunks=(8,), round_steps=8
  )
  asked = [request(np.arange(9), 3)]
  answers = engine_lib.Engine(CFG, half, config).generate(asked)
  assert answers[0].logps.dtype == np.float32
  np.testing.assert_allclose(answers[0].logps, scored(asked, answers, half)[0], atol=0.05)


def test_new_weights_forget_every_prefix():
  prompt = np.random.default_rng(6).integers(0, 128, 30)
  asked = [request(prompt, seed, max_tokens=8) for seed in range(3)]
  engine = engine_of(seed=0)
  old = engine.generate(asked)
  engine.set_params(params_of(1))
  new = engine.generate(asked)
  assert engine.version == 1
  assert_same(new, engine_of(seed=1).generate(asked))
  cached = engine.generate(asked)  # by what the new weights cached
  assert_same(new, cached)
  assert new[0].ids.tolist() != old[0].ids.tolist()
  engine.submit(asked[0])
  engine.run_round()
  with pytest.raises(ValueError, match="1 requests are half sampled"):
    engine.set_params(params_of(0))


def test_nothing_compiles_after_warmup():
  engine = engine_of()
  engine.warmup()
  seen = []

  def hear(name, *_, **__):
    if name.endswith("backend_compile_duration"):
      seen.append(name)

  jax.monitoring.register_event_duration_secs_listener(hear)
  try:
    jax.jit(lambda x: x * 3 + len(seen))(np.ones(3))
    assert len(seen) == 1  # the listener hears a compilation
    compiled = engine_lib.compiled()
    for wave in range(3):
      requests = mixed(25, seed=wave, longest=[20, 40, 30][wave])
      odd = [dict(top_p=0.9), dict(top_k=5, temperature=1.7), dict(temperature=0.0, stop=())]
      requests += [one._replace(**odd[at % 3]) for at, one in enumerate(requests)]
      engine.generate(requests)
      engine.generate(requests[:1])
    engine.set_params(params_of(1))
    engine.generate(requests)
    assert engine_lib.compiled() == compiled
    assert len(seen) == 1
  finally:
    jax.monitoring.unregister_event_duration_listener(hear)


def test_top_k_of_a_row_restricts_that_row():
  prompt = np.arange(10)
  free = [request(prompt, seed, temperature=3.0) for seed in range(4)]
  tight = [request(prompt, seed, temperature=3.0, top_k=1) for seed in range(4)]
  answers = engine_of().generate(free + tight)
  assert len({tuple(answer.ids.tolist()) for answer in answers[:4]}) > 1
  assert len({tuple(answer.ids.tolist()) for answer in answers[4:]}) == 1


def test_weights_that_are_not_finite_are_reported():
  broken = jax.tree.map(lambda leaf: leaf * np.nan, params_of())
  with pytest.raises(FloatingPointError, match="not finite"):
    engine_lib.Engine(CFG, broken, SHAPES).generate([request([1, 2, 3])])


@pytest.mark.parametrize(
  ("asked", "sentence"),
  [
    (request(np.zeros(60, int)), "prompt of 60 tokens and 6 more do not fit a context of 64"),
    (request([]), "at least one token"),
    (request([128]), "vocabulary of 128"),
    (request([1], max_tokens=0), "max_tokens must be at least 1"),
    (request([1], temperature=-1.0), "temperature >= 0"),
    (request([1], top_p=0.0), "0 < top_p <= 1"),
    (request([1], stop=(1, 2, 3, 4, 5)), "5 stop ids exceed max_stop = 4"),
    (request([1], stop=(-1,)), "stop ids"),
    (request([1])._replace(key=np.zeros(2, np.int64)), "two uint32"),
  ],
)
def test_impossible_requests_are_refused_in_a_sentence(asked, sentence):
  engine = engine_of()
  with pytest.raises(ValueError, match=sentence):
    engine.submit(asked)
  assert engine.pending == 0


def test_impossible_shapes_are_refused_in_a_sentence():
  with pytest.raises(ValueError, match="chunk of 32 tokens does not fit the smallest bucket of 16"):
    engine_lib.EngineConfig(slots=4, buckets=(16,))
  with pytest.raises(ValueError, match="ascending"):
    engine_lib.EngineConfig(slots=4, buckets=(128, 64))
