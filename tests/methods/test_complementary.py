"""Complementary RL: what the actor is shown and paid, against its specification (2603.17621)."""

import dataclasses

import jax
import numpy as np
import pytest

from memrl_jax.envs import lab, pool
from memrl_jax.memory import embed, experience, experience_config, manager
from memrl_jax.methods import complementary
from memrl_jax.models import policy as models
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import collect, credit, pack, policies
from memrl_jax.training import mesh, objective, step
from memrl_jax.types import Attempt, Memo, Story, Trial
from tests.rollout import trials as make

Config = complementary.ComplementaryConfig
SPLIT = credit.CreditConfig(
  estimator="grpo", normalise="mean_std_population", batch_scale=False, invalid_penalty=0.0
)
A, B = 0.5773503, 1.7320508  # of {1,1,1,0}: mean .75, population std .4330


# What is paid.


def group(rewards, mode, number=0):
  trials = []
  for index, reward in enumerate(rewards):
    one = make.trial(number, index, [[reward]], success=reward > 0)
    one.mode = one.subgroup = mode
    trials.append(one)
  return trials


def advantages(trials, config=SPLIT):
  credit.make(config, credit.Shape(16, 1, 2))(trials)
  return [turn.advantage for trial in trials for turn in trial.turns]


def test_each_part_of_a_group_is_compared_with_itself():
  trials = group([1, 1, 1, 0], "guided") + group([0, 0, 0, 1], "free")
  np.testing.assert_allclose(advantages(trials), [A, A, A, -B, -A, -A, -A, B], rtol=1e-4)
  mean = advantages(trials, dataclasses.replace(SPLIT, normalise="mean"))
  np.testing.assert_allclose(mean, [0.25] * 3 + [-0.75] + [-0.25] * 3 + [0.75], rtol=1e-5)
  # Pooled it is +-1 by success alone, so that being guided is paid.
  for trial in trials:
    trial.subgroup = ""
  np.testing.assert_allclose(advantages(trials), [1, 1, 1, -1, -1, -1, -1, 1], rtol=1e-4)


def test_a_part_that_says_nothing_leaves_the_other_alone():
  trials = group([1, 1, 1, 1], "guided") + group([0, 0, 0, 1], "free")
  np.testing.assert_allclose(advantages(trials)[4:], [-A, -A, -A, B], rtol=1e-4)
  assert advantages(trials)[:4] == [None] * 4


def test_the_parts_weigh_half_and_half_whatever_their_lengths():
  # 1 guided row of 4 tokens beside 4 free rows of 2: of 12 tokens each part gets 6.
  trials = group([1], "guided") + group([0, 0, 0, 1], "free")
  trials[0].turns[0].sample = make.sample(ids=(4, 5, 6, 7))
  for trial in trials:
    trial.turns[0].advantage = 1.0
  complementary.halve(trials, 16, per_token=True)
  np.testing.assert_allclose([t.turns[0].advantage for t in trials], [1.5] + [0.75] * 4)
  for trial in trials:
    trial.turns[0].advantage = 1.0
  complementary.halve(trials, 16, per_token=False)  # of 5 rows 2.5 each
  np.testing.assert_allclose([t.turns[0].advantage for t in trials], [2.5] + [0.625] * 4)


@pytest.mark.parametrize(
  ("critic", "verdict", "success", "expected"),
  [
    ("none", "", True, 1.0),
    ("none", "", False, -1.0),
    ("paper", "accept", True, 2.0),
    ("paper", "refine", False, -0.5),
    ("paper", "reject", True, 1.0),
    ("release", "accept", False, 0.0),
    ("release", "refine", True, 0.5),
    ("release", "reject", True, -1.0),
    ("release", "none", True, None),  # not readable: the experience earns nothing
  ],
)
def test_what_a_pair_is_worth(critic, verdict, success, expected):
  story = Story("s", "q", (), [], verdict)
  assert complementary.pay(Config(critic=critic), story, success) == expected


# What is shown.


class Bank:
  """Finds one entry for every ask, and keeps what it was asked."""

  def __init__(self):
    self.asks = []

  def recall(self, asks):
    self.asks += asks
    return [(Memo(7, 3, "key kitchen box", 0.0, 0.9),)] * len(asks)


def play(config, answers, style="full", rate=None, size=4, update=9):
  """A group in the lab, by scripted answers to (trial, request)."""
  options = lab.Options(style=style, turns=3)
  envs = pool.EnvPool(lab.FAMILY, options, isolation="inline")
  who, other, memory = (
    policies.TextPolicy(answers),
    policies.TextPolicy(lambda *_: "Go <b>up</b>."),
    Bank(),
  )
  trials = [Trial("lab", 5, 0, index, update=update) for index in range(size)]
  complementary.plan(config, trials)
  collect.collect(
    trials,
    complementary.trial(config, reads=True, writes=True, rate=rate),
    lambda trial, request: other if request.phase == "advise" else who,
    envs,
    lab.FAMILY.prompts(options),
    horizon=3,
    seed=(1,),
    memory=memory,
  )
  envs.close()
  assert not any(trial.void for trial in trials)
  return trials, memory


def go(trial, request, key):
  return "<action>go hall</action>"


def test_half_of_a_group_is_guided_and_reads_once_an_attempt():
  trials, memory = play(Config(), go, style="brief")
  assert [trial.mode for trial in trials] == ["free", "free", "guided", "guided"]
  assert len(memory.asks) == 2 and {ask.scope for ask in memory.asks} == {"lab"}
  for trial in trials:
    prompts = [turn.messages[0].content for turn in trial.turns]
    assert len(prompts) == 3
    assert all(("tip:key kitchen box" in text) == (trial.mode == "guided") for text in prompts)
    assert trial.story.shown == (((7, 3),) if trial.mode == "guided" else ())
    told = trial.story.messages[0].content
    assert ("tip 1:key kitchen box" in told) == (trial.mode == "guided") and " hall" in told


def test_the_free_part_reads_nothing_and_hears_of_no_tool():
  ask = "<ask>where is the key?</ask>"
  trials, memory = play(
    Config(questions=2), lambda t, r, k: ask if t.mode == "free" else go(t, r, k)
  )
  assert len(memory.asks) == 2  # those of the guided trials, before they begin
  for trial in trials[:2]:
    assert {turn.phase for turn in trial.turns} == {"play"}
    assert not any(turn.reads for turn in trial.turns)
    assert not any("<ask>" in turn.messages[0].content for turn in trial.turns)
  assert all("<ask>" in turn.messages[0].content for turn in trials[2].turns)


@pytest.mark.parametrize(("share", "guided"), [(0.0, 0), (0.25, 1), (1.0, 4)])
def test_the_share_of_guided_trials(share, guided):
  trials, memory = play(Config(guided=share), go)
  assert sum(trial.mode == "guided" for trial in trials) == len(memory.asks) == guided


def test_during_warm_up_nobody_is_guided_and_all_are_told():
  trials, memory = play(Config(warmup=5), go, update=4)
  assert not memory.asks and all(trial.story for trial in trials)


def test_questions_cost_no_turn_and_their_answers_stay():
  def answers(trial, request, key):
    asks = request.turn == 1 and len(request.view.tips) < 4
    return "<ask>which case?</ask>" if asks else go(trial, request, key)

  trials, memory = play(Config(guided=1.0, questions=2), answers, size=2)
  for trial in trials:
    assert [turn.phase for turn in trial.turns] == [
      "play",
      "play",
      "advise",
      "play",
      "advise",
      "play",
      "play",
    ]
    assert trial.attempts[0].turns == 3
    advice = [turn for turn in trial.turns if turn.phase == "advise"]
    assert all(not turn.trained and "which case?" in turn.messages[0].content for turn in advice)
    last = trial.turns[-1]
    assert last.messages[0].content.count("Go <b>up</b>.") == 2 and last.reads == ((7, 3),)
    assert "<ask>" not in last.messages[0].content  # both questions are asked
  assert [ask.query for ask in memory.asks].count("which case?") == 4


def test_an_actor_may_reject_or_rewrite_what_it_was_given():
  def answers(trial, request, key):
    if request.phase != "judge":
      return go(trial, request, key)
    assert "50%" in request.build(request.view)[0].content
    return (
      "<remark>reject</remark>" if trial.index else "<remark>refine: look in the attic</remark>"
    )

  trials, _ = play(Config(guided=1.0, critic="paper"), answers, size=2, rate=lambda task: 0.5)
  refined, rejected = trials
  assert (refined.story.verdict, rejected.story.verdict) == ("refine", "reject")
  assert "look in the attic" in refined.turns[1].messages[0].content
  assert "key kitchen box" not in refined.turns[1].messages[0].content
  assert not rejected.turns[1].reads and rejected.story.shown == ((7, 3),)


# Imitation without experience.


def test_guided_trials_that_beat_the_free_ones_are_imitated_without_experience():
  trials, _ = play(Config(imitate_every=2), go, style="brief")
  for trial, reward in zip(trials, (0.0, 1.0, 1.0, 0.4), strict=True):
    trial.attempts[0] = Attempt(reward > 0.5, reward, reward, 3)
    for turn in trial.turns:
      turn.sample = make.sample()
  assert complementary.imitate(Config(imitate_weight=0.05), trials) == 3  # 1 > .5 > .4
  for turn in trials[2].turns:
    assert turn.imitate == 0.05 and "tip" not in turn.plain[0].content


def test_imitation_adds_its_own_mean_to_the_loss():
  """The gradient of one mean over all rows is that of both means, the second times its weight."""
  cfg = DecoderConfig.tiny(32, dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=16)
  params = models.init(jax.random.key(0), cfg)
  rows = [make.turn(0, "play", n, sample=make.sample(ids=range(4, 6 + n))) for n in range(3)]
  for n, row in enumerate(rows):
    row.advantage = float(n) - 0.7

  def gradient(turns, surrogate):
    loss = objective.LossConfig(surrogate=surrogate, dual_bound=10.0)
    trainer = step.Trainer(
      cfg, loss, step.optimiser(step.OptimConfig(), 1), mesh.make(mesh.MeshConfig()), max_tokens=8
    )
    batches = pack.pack(turns, pack.PackConfig(sequences=1, length=64, rows=4, response=8))
    return trainer.gradients({"policy": params}, batches)["policy"]

  copied = dataclasses.replace(rows[2], plain_ids=np.array([9, 8]), advantage=0.3)
  alone = gradient(rows, "ppo_clip"), gradient([copied], "reinforce")
  rows[2].imitate = 0.3
  more = pack.imitated(rows, per_token=True)
  more[0].plain_ids = np.array([9, 8])
  both = gradient(rows + more, "ppo_clip")
  for one, two, sum_ in zip(*map(jax.tree.leaves, (*alone, both)), strict=True):
    np.testing.assert_allclose(sum_, one + two, rtol=1e-4, atol=1e-6)


def test_imitation_ends_for_good_where_the_policy_loses_its_entropy():
  config, calm = Config(imitate_every=1), {"entropy": None, "stopped": ""}
  assert (
    complementary.watch(config, calm, {"train/entropy": 1.0, "train/kl_old": 0.0})[
      "imitate/stopped"
    ]
    == 0
  )
  complementary.watch(config, calm, {"train/entropy": 0.4, "train/kl_old": 0.0})
  assert calm["stopped"] == "entropy"
  again = complementary.watch(config, calm, {"train/entropy": 1.0, "train/kl_old": 0.0})
  assert again["imitate/stopped"] == 1


# What is remembered.


def test_trials_pay_who_guided_them_and_wait_for_the_extractor():
  bank = experience.ExperienceBank.open(None, embed.Hash(64), experience_config.ExperienceConfig())
  kept = complementary.Experiences(
    Config(warmup=0), manager.ExperienceManager(manager.ManagerConfig(), bank)
  )
  number = bank.record(make.sample(), extractor=0, step=0)
  (entry,) = bank.put("lab", [("q", "key kitchen box")])
  bank.memory.change("lab", entry, data=bank._data("t", number, []))
  trials, _ = play(Config(), go, style="brief")
  version = bank.memory.get("lab", [entry])[0].version
  for trial, won in zip(trials, (False, True, True, False), strict=True):
    trial.attempts[0] = dataclasses.replace(trial.attempts[0], success=won)
    for turn in trial.turns:
      turn.reads = ((entry, version),) if turn.reads else ()
  kept.remember(trials)
  assert bank.stats()["waiting"] == 1 and kept.manager.waiting() == 4
  assert bank._samples._buffer[number] == (0.0, 2)  # one won, one lost
  assert kept.rate(trials[0].task) == 0.5
  kept.close()
