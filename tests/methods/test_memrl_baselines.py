"""What MemRL is compared with, on its own engine: every documented line plays, and does what it is named for."""

import pytest

from experiments import base, frozen, run
from memrl_jax.envs import base as env_base
from memrl_jax.envs import hle_tasks, pool
from memrl_jax.memory import embed, episodic_prompt
from memrl_jax.memory.episodic import Episode
from memrl_jax.methods import memrl
from memrl_jax.rollout import collect, policies
from memrl_jax.training import memories, runs

FACT = '<answer>[{"op":"add","experience":"the sky is blue"}]</answer>'
# What of a baseline only a model can do that reads sentences: the tiny one of the lab cannot.
SENTENCES = [
  n for n, o in frozen.BASELINES.items() if any("build=" in x or "judges=" in x for x in o)
]


class Played:
  """A run of a config file whose model is a script: `answer(trial, request)`."""

  def __init__(self, name, overrides):
    experiment = run.load(f"experiments/memrl_{name}.py:smoke", overrides)
    self.settings = base.settings(experiment.config, name, "smoke")
    self.memory = memories.of_method(self.settings, embed.Hash(64), None)
    self.method = memrl.make(self.settings.method, self.memory)
    self.family = env_base.family(self.settings.env.name)
    self.asked = []

  def round(self, number, answer):
    """All updates of a round: its trials and the metrics of the last update."""
    train, trials, numbers = self.settings.train, [], {}
    updates = -(-train.tasks // train.groups)
    for update in range(number * updates, (number + 1) * updates):
      some, numbers = self.update(update, answer)
      trials += some
    return trials, numbers

  def update(self, update, answer):
    """The trials of one update, and the metrics of it."""

    def said(trial, request, key):
      self.asked.append((request.phase, trial.seed))
      return answer(trial, request)

    trials = runs.plan(self.settings, update)
    self.method.plan(trials, None)
    who, options = policies.TextPolicy(said), self.settings.env.options
    envs = pool.EnvPool(self.family, options, isolation="inline")
    collect.collect(
      trials,
      self.method.trial,
      lambda trial, request: who,
      envs,
      self.family.prompts(options),
      horizon=3,
      seed=(0, update),
      memory=self.memory.reader,
    )
    envs.close()
    assert not any(one.void for one in trials), trials[0].void
    return trials, self.method.remember(trials)


def wrong(trial, request):
  if request.phase == "play":
    return "<action>go hall</action>"
  if request.phase == "judge":
    return "yes"
  return f"{FACT} <remark>key kitchen box</remark>"


def reads(trials):
  return {read for one in trials for t in one.turns if t.phase == "play" for read in t.reads}


def prompt(trial):
  turn = next(turn for turn in trial.turns if turn.phase == "play")
  return "\n".join(message.content for message in turn.messages)


@pytest.mark.parametrize(
  "env,name",
  [("hle", name) for name in frozen.BASELINES]
  + [("lab", name) for name in frozen.BASELINES if name not in SENTENCES],
)
def test_every_documented_line_plays(env, name):
  played = Played(env, frozen.BASELINES[name])
  played.round(0, wrong)
  trials, numbers = played.round(1, wrong)
  assert numbers["epoch/rounds"] == 2 and numbers["epoch/cumulative"] == 0
  assert bool(reads(trials)) == (name not in ("no memory", "Pass@k"))


def solving(right):
  """Answers the exam rightly where `right(trial)`."""

  def answer(trial, request):
    if request.phase == "play" and right(trial):
      task = request.view.current.initial.task
      return f"<action>{hle_tasks.find(hle_tasks.Options(), task).answer}</action>"
    return wrong(trial, request)

  return answer


@pytest.mark.parametrize("name", ["Pass@k", "Reflexion"])
def test_a_solved_task_costs_nothing_more_and_counts_as_solved(name):
  played = Played("hle", frozen.BASELINES[name])
  seeds = {one.seed for update in range(2) for one in runs.plan(played.settings, update)}
  easy = min(seeds)
  first, _ = played.round(0, solving(lambda trial: trial.seed == easy))
  played.asked.clear()
  second, numbers = played.round(1, solving(lambda trial: trial.seed == max(seeds)))
  assert {seed for _, seed in played.asked} == seeds - {easy}
  assert [one.attempts[0].turns for one in second if one.seed == easy] == [0]
  assert numbers["epoch/cumulative"] == numbers["epoch/last"] == 2 / len(seeds)
  assert numbers["epoch/forgotten"] == 0  # it was not played again, so not lost either
  saved = played.memory.state()
  played.round(2, solving(lambda trial: True))  # lost
  played.memory.load(*saved)  # a resumed run knows what is solved
  _, numbers = played.round(2, wrong)
  assert numbers["epoch/cumulative"] == 2 / len(seeds) and len(first) == len(seeds)


def test_reflexion_shows_the_last_attempt_at_this_very_task_and_no_other():
  played = Played("hle", frozen.BASELINES["Reflexion"])

  def answer(trial, request):
    said = f"tried {trial.seed} in {trial.update}"
    return f"<action>{said}</action>" if request.phase == "play" else f"because {said}"

  played.round(0, answer)
  second, _ = played.round(1, answer)
  for one in played.round(2, answer)[0]:
    (before,) = [other.update for other in second if other.seed == one.seed]
    seen = prompt(one)
    assert f"because tried {one.seed} in {before}" in seen and episodic_prompt.AVOID in seen
    assert seen.count("> tried ") == 1 and f"> tried {one.seed} in {before}" in seen


def judged(answers, overrides=("method.judges=both",)):
  """One task with a good and a bad memory of it in the bank, judged as `answers` say, by number."""
  played = Played("hle", (*overrides, "train.groups=1"))
  task = runs.plan(played.settings, 0)[0]
  query = memrl_query(played, task.seed)
  played.memory.memory.remember(
    "hle",
    [Episode("g", query, "", True, note="GOOD"), Episode("b", query, "", False, note="BAD")],
  )

  def answer(trial, request):
    return answers[request.turn] if request.phase == "judge" else wrong(trial, request)

  return played, played.update(0, answer)[0][0]


def memrl_query(played, seed):
  env = played.family.make(played.settings.env.options)
  first = env.reset(seed)
  return memrl.query(played.settings.method, env_base.AttemptLog(0, first))


def test_self_rag_does_without_memory_where_the_model_says_so():
  played, mine = judged(["no", "yes", "yes"])
  assert not reads([mine]) and played.memory.memory.stats("hle")["queries"] == 0
  _, bare = judged(["yes"] * 9, ("method.reads=false", "method.learns=false"))
  assert prompt(mine) == prompt(bare)
  first = mine.turns[0]
  assert (first.phase, first.action, first.trained) == ("judge", "no", False)


def test_self_rag_shows_and_pays_only_what_the_model_calls_relevant():
  played, mine = judged(
    ["Yes, please.", "No.", "yes"], ("method.judges=both", "episodic.alpha=0.5")
  )
  seen = prompt(mine)
  assert "BAD" in seen and "GOOD" not in seen
  assert seen.count(episodic_prompt.AVOID) == 1 and episodic_prompt.FOLLOW not in seen
  q = {e.data["success"]: e.score for e in played.memory.memory.memory.get("hle", [1, 2])}
  assert q == {
    True: 1.0,
    False: -0.5,
  }  # 0 + .5 (-1 - 0) of the one that was shown; the other began at 1


def test_an_unreadable_verdict_retrieves_and_keeps():
  _, mine = judged(["perhaps", "<think>no, or", "maybe"])
  assert "GOOD" in prompt(mine) and "BAD" in prompt(mine)
  assert [turn.valid for turn in mine.turns if turn.phase == "judge"] == [False] * 3


def test_a_block_of_memories_keeps_its_heading_whichever_of_them_are_left():
  follow, avoid = f"{episodic_prompt.FOLLOW}\n", f"{episodic_prompt.AVOID}\n"
  texts = [f"{follow}A", "B", f"{avoid}C"]
  assert episodic_prompt.chosen(texts, [True] * 3) == texts
  assert episodic_prompt.chosen(texts, [False, True, True]) == [f"{follow}B", f"{avoid}C"]
  assert episodic_prompt.chosen(texts, [False, False, True]) == [f"{avoid}C"]


def test_a_trial_of_several_attempts_ends_with_its_first_success():
  played = Played("hle", frozen.BASELINES["TD over attempts"])

  def answer(trial, request):
    return solving(lambda trial: request.attempt == 1)(trial, request)

  trials, numbers = played.round(0, answer)
  assert {tuple(a.success for a in one.attempts) for one in trials} == {(False, True)}
  assert numbers["epoch/last"] == 1.0


def mem0(script):
  """Rounds of the Mem0-like baseline; `script(trial, request)` answers about facts."""
  played = Played("hle", frozen.BASELINES["Mem0-like"])

  def answer(trial, request):
    return script(trial, request) if request.phase == "reflect" else wrong(trial, request)

  rounds = [played.round(number, answer)[1] for number in range(3)]
  entries = played.memory.memory.memory.entries("hle")
  return rounds, entries, played


def facts_script(trial, request):
  """Two facts of the first update; then one is corrected, over and over, and one answer is no JSON."""
  if request.turn == 0:
    if trial.update % 2:
      return "nothing to say" if trial.index == 0 and trial.group == 0 else "<answer>[]</answer>"
    return f'<answer>[{{"op":"add","experience":"box {trial.group} holds a key"}}]</answer>'
  return '<answer>[{"op":"update","index":1,"experience":"box 0 holds a lamp"}]</answer>'


def test_mem0_adds_updates_and_counts_what_it_cannot_read():
  rounds, entries, played = mem0(facts_script)
  texts = [entry.text for entry in entries]
  # Updates 0, 2, 4 bring facts (2 trials each), 1, 3, 5 an answer that is no list. In update 0 nothing is
  # known: two facts are added. Later both trials correct what is nearest, and the second comes too late
  # where that is the same entry.
  assert "box 0 holds a lamp" in texts and len(texts) <= 2
  assert all(numbers["facts/malformed"] == 1 for numbers in rounds)
  (first, *_) = entries
  versions = [state.text for state, _ in played.memory.memory.memory.store.history(first.id)]
  assert versions[0] == "box 0 holds a key" and versions[-1] == "box 0 holds a lamp"
  again = mem0(facts_script)[1]
  assert [(e.id, e.version, e.text) for e in again] == [(e.id, e.version, e.text) for e in entries]


def test_mem0_goes_on_from_a_checkpoint_as_if_nothing_had_happened():
  whole, played = mem0(facts_script)[1], Played("hle", frozen.BASELINES["Mem0-like"])

  def answer(trial, request):
    return facts_script(trial, request) if request.phase == "reflect" else wrong(trial, request)

  played.round(0, answer)
  saved = played.memory.state()
  played.round(1, wrong)  # lost
  played.memory.load(*saved)
  for number in (1, 2):
    played.round(number, answer)
  entries = played.memory.memory.memory.entries("hle")
  assert [(e.id, e.version, e.text, e.data) for e in entries] == [
    (e.id, e.version, e.text, e.data) for e in whole
  ]
