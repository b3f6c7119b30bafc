"""MemRL: what a frozen model is shown and what its memory learns (2601.03192)."""

import pytest

from memrl_jax.envs import lab, pool
from memrl_jax.memory import embed, episodic
from memrl_jax.methods import memrl
from memrl_jax.rollout import collect, policies
from memrl_jax.types import Recall, Trial

GO = "<action>go hall</action>"


def kept(note="tip", tasks=0, method=None, **episodes):
  build = "note" if note == "tip" else "proceduralization"
  config = episodic.EpisodicConfig(**{"build": build, "delta": 0.1} | episodes)
  memory = episodic.Episodic.open(None, embed.Hash(64), config)
  return memrl.Episodes(memrl.MemrlConfig(note=note, query="goal", **method or {}), memory, tasks)


def play(memory, answer, style="brief", update=0, number=2, frozen=False):
  """Trials at the lab by scripted answers; what they read and leave behind is `memory`'s."""
  options = lab.Options(style=style, turns=3)
  envs = pool.EnvPool(lab.FAMILY, options, isolation="inline")
  who = policies.TextPolicy(answer)
  trials = [Trial("lab", 5 + n, n, 0, update=update) for n in range(number)]
  method = memrl.make(memory.config, memory)
  collect.collect(
    trials,
    method.arms["memory"] if frozen else method.trial,
    lambda trial, request: who,
    envs,
    lab.FAMILY.prompts(options),
    horizon=3,
    seed=(1,),
    memory=memory.observer if frozen else memory.reader,
  )
  envs.close()
  assert not any(trial.void for trial in trials)
  return trials


def says(note):
  return lambda trial, request, key: GO if request.phase == "play" else note


def test_an_empty_memory_leaves_the_prompt_alone_and_a_filled_one_is_read_once_an_attempt():
  memory = kept()
  first = play(memory, says("<remark>key kitchen box</remark>"))
  assert not any(turn.reads for trial in first for turn in trial.turns)
  assert not any("tip:" in turn.messages[0].content for trial in first for turn in trial.turns)
  memory.remember(first)
  second = play(memory, says("<remark>other</remark>"), update=1)
  for trial in second:
    turns = [turn for turn in trial.turns if turn.phase == "play"]
    assert len({turn.reads for turn in turns}) == 1 and turns[0].reads
    assert all("tip:key kitchen box" in turn.messages[0].content for turn in turns)
  assert memory.memory.stats("lab")["queries"] == 4  # one an attempt, however many turns


def test_what_was_shown_is_worth_what_came_of_it():
  memory = kept(alpha=0.5)
  memory.remember(play(memory, says("<remark>key kitchen box</remark>"), number=1))
  (trial,) = play(memory, says("<remark>x</remark>"), update=1, number=1)
  memory.remember([trial])
  (entry,) = memory.memory.memory.get("lab", [trial.story.shown[0][0]])
  assert entry.score == -0.5  # a failure: 0 + .5 (-1 - 0)
  memory.remember([trial])  # told twice, it counts once
  assert memory.memory.memory.get("lab", [entry.id])[0].score == -0.5


def test_an_evaluation_changes_nothing():
  memory = kept()
  memory.remember(play(memory, says("<remark>key kitchen box</remark>")))
  version, stats = memory.memory.memory.version, memory.memory.stats("lab")
  played = play(memory, says("<remark>y</remark>"), update=1, frozen=True)
  assert all(turn.reads for trial in played for turn in trial.turns)
  assert not any(trial.story for trial in played)
  assert (memory.memory.memory.version, memory.memory.stats("lab")) == (version, stats)


@pytest.mark.parametrize("style", ["full", "chat"])
def test_in_sentences_the_model_is_asked_for_a_lesson_and_shown_it_as_a_caution(style):
  memory = kept(note="story")
  (first,) = play(memory, says("Do not open the case first."), style=style, number=1)
  asked = [turn for turn in first.turns if turn.phase == "reflect"]
  assert len(asked) == 1 and "failed" in asked[0].messages[0].content
  assert "> go hall" in asked[0].messages[-1].content
  memory.remember([first])
  (second,) = play(memory, says("Again."), style=style, update=1, number=1)
  prompt = "\n".join(message.content for message in second.turns[0].messages)
  assert "Do not open the case first." in prompt and "Take it as a caution" in prompt


def test_rounds_say_what_was_solved_at_least_once_and_what_was_forgotten():
  memory = kept(tasks=2)
  for update, won in enumerate([(True, False), (False, True)]):
    trials = play(memory, says("<remark>z</remark>"), update=update)
    for trial, success in zip(trials, won, strict=True):
      trial.attempts[0].success = success
    numbers = memory.remember(trials)
  assert numbers["epoch/rounds"] == 2 and numbers["epoch/last"] == 0.5
  assert numbers["epoch/cumulative"] == 1.0 and numbers["epoch/forgotten"] == 0.5


def test_it_goes_back_to_where_it_was_saved():
  memory = kept(tasks=2)
  memory.remember(play(memory, says("<remark>key kitchen box</remark>")))
  saved, before = memory.state(), memory.epochs()
  memory.remember(play(memory, says("<remark>later</remark>"), update=1))
  memory.load(*saved)
  assert memory.epochs() == before and memory.memory.stats("lab")["memories"] == 1
  (found,) = memory.reader.recall([Recall("lab", "goal key")])
  assert [memo.text for memo in found] == ["key kitchen box"]


def attempted(**episodes):
  """Two attempts at a task, both lost, over a memory that has A for its state and B for the one after a
  loss; A is worth 0 and B .5. The names and Q of A and B, and what was told."""
  memory = kept(method={"attempts": 2}, alpha=0.5, lambda_=0.0, k2=1, **episodes)
  (first,) = play(memory, says("<remark>look</remark>"), number=1)
  begin, after = [turn.key for turn in first.turns if turn.phase == "play" and turn.index == 0]
  bank = memory.memory
  bank.remember("lab", [episodic.Episode("A", begin, "", False, note="A")])
  bank.remember("lab", [episodic.Episode("B", after, "", False, note="B")])
  (b,) = [entry for entry in bank.memory.entries("lab") if entry.text == "B"]
  bank.feedback("lab", [episodic.Feedback("b", True, [(b.id, b.version)])])
  (trial,) = play(memory, says("<remark>x</remark>"), update=1, number=1)
  return memory, trial


def scores(memory):
  return {entry.text: entry.score for entry in memory.memory.memory.entries("lab")}


@pytest.mark.parametrize("gamma,q_a", [(0.0, -0.5), (0.5, -0.375)])
def test_an_attempt_is_paid_with_what_the_memory_is_worth_where_it_led(gamma, q_a):
  memory, trial = attempted(gamma=gamma)
  shown = [{t.reads for t in trial.turns if t.phase == "play" and t.attempt == n} for n in (0, 1)]
  assert all(len(reads) == 1 for reads in shown) and shown[0] != shown[1]
  memory.remember([trial])
  # A: 0 + .5 (-1 + gamma .5 - 0), B, after which nothing comes: .5 + .5 (-1 - .5)
  assert scores(memory)["A"] == q_a and scores(memory)["B"] == -0.25


def test_each_attempt_becomes_a_memory_of_the_state_that_it_began_in():
  memory, trial = attempted(add_similarity=1.0)
  first, second = (
    next(t.key for t in trial.turns if t.phase == "play" and t.attempt == n) for n in (0, 1)
  )
  assert second.startswith(f"{first}\nThe attempt before failed with:\n> go hall\n")
  assert [len(attempt) for attempt in (trial.attempts, trial.story.messages)] == [2, 2]
  before = len(memory.memory.memory.entries("lab"))
  memory.remember([trial])
  new = memory.memory.memory.entries("lab")[before:]
  assert [entry.key for entry in new] == [first, second]
  assert [entry.data["parents"] for entry in new] == [[1], [2]]
  memory.remember([trial])  # told twice, kept once
  assert len(memory.memory.memory.entries("lab")) == before + 2


def test_after_a_success_there_is_no_next_state():
  memory, trial = attempted(gamma=0.5)
  trial.attempts.pop()
  trial.story.messages.pop()
  trial.turns = [turn for turn in trial.turns if turn.attempt == 0]
  trial.attempts[0].success = True
  memory.remember([trial])
  assert scores(memory)["A"] == 0.5  # 0 + .5 (1 - 0)


@pytest.mark.parametrize(
  "wrong,name",
  [
    ({"gamma": 0.9}, "config.method.attempts"),
    ({"gamma": 0.9, "alpha": 0.0, "method": {"attempts": 2}}, "config.episodic.gamma"),
    ({"build": "trajectory"}, "config.episodic.build"),
    ({"method": {"retry": "unsolved"}}, "config.train.tasks"),
    ({"method": {"judges": "both"}}, "config.method.judges"),
    ({"method": {"reads": False}}, "config.method.learns"),
    ({"method": {"attempts": 0}}, "config.method.attempts"),
  ],
)
def test_what_would_do_nothing_is_refused_by_name(wrong, name):
  with pytest.raises(ValueError, match=name):
    kept(**wrong)


def test_along_lineage_gamma_needs_no_second_attempt():
  memory = kept(gamma=0.5, trace=1.0, alpha=0.5)
  for update in range(2):
    memory.remember(play(memory, says(f"<remark>{update}</remark>"), update=update, number=1))
  parent, child = memory.memory.memory.entries("lab")
  assert child.data["parents"] == [parent.id]
  memory.memory.feedback("lab", [episodic.Feedback("c", True, [(child.id, child.version)])])
  # The child moves by .5 (1 - 0), its parent by gamma lambda times that, from the -.5 of its own failure.
  assert scores(memory) == {"0": -0.25, "1": 0.5}
