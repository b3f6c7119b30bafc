"""A memory of a question with an image brings the image along, and which memories are drawn is nobody else's."""

import json

import pytest

from experiments import run
from memrl_jax.envs import base, hle, hle_tasks, lab, pool
from memrl_jax.memory import episodic
from memrl_jax.methods import memrl
from memrl_jax.models import tiny
from memrl_jax.rollout import collect, policies
from memrl_jax.rollout import trial as trial_lib
from memrl_jax.sampling import chat, images
from memrl_jax.training import metrics
from memrl_jax.types import Recall, Trial
from tests.methods.test_memrl import GO, kept
from tests.sampling.test_images import ROW, model
from tests.sampling.test_remote import serving

CAT, DOG = "data:image/png;base64,AAAA", "data:image/png;base64,BBBB"
SMOKE = [
  "--config=experiments/memrl_hle.py:smoke", "--config.env.split=all", "--config.train.groups=1",
  "--config.train.tasks=2", "--config.train.updates=3", "--config.eval.tasks=1",
  "--config.model.checkpoint=no/such/model", "--config.remote.api=chat",
]  # fmt: skip


@pytest.fixture
def exam(tmp_path):
  path = tmp_path / "hle.jsonl"
  rows = [ROW | {"id": "first", "image": CAT}, ROW | {"id": "second", "image": DOG}]
  rows[1]["question"] = "What is shown here?"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def asked(exam, place, reads, *more):
  """The last message of each prompt of play of a run with this model: of both questions, and of one again."""
  calls = []
  with serving(model(calls, reads)) as url:
    words = [*SMOKE, f"--config.remote.url={url}", f"--config.env.data={exam}", *more]
    assert run.main([*words, f"--workdir={place}"]) == 0
  names = [trial["task"] for update in (1, 2, 3) for trial in rollout(place, update)]
  sent = [call["messages"][-1]["content"] for call in calls]
  return names, [content for content in sent if "You sit an exam" in str(content)][:3]


def rollout(place, update):
  return metrics.read(place / "rollouts" / f"{update:06d}.jsonl")


def parts(content):
  text, *pictures = content
  return text["text"], [picture["image_url"]["url"] for picture in pictures]


@pytest.mark.parametrize("style", ["chat", "full"])
def test_what_a_memory_has_seen_is_in_the_prompt_and_nothing_is_there_twice(exam, tmp_path, style):
  place = tmp_path / "run"
  names, sent = asked(exam, place, "images", f"--config.env.style={style}")
  assert sorted(names[:2]) == ["first", "second"]
  url = {"first": CAT, "second": DOG}
  texts, pictures = zip(*map(parts, sent), strict=True)
  one, two, again = names
  assert pictures[:2] == ([url[one]], [url[two], url[one]])
  assert "(images:" not in texts[0] and "in this prompt" not in texts[0]
  assert f"(images: {one})" in texts[1] and texts[1].count("image is number") == 1
  assert "(Its image is number 2 in this prompt.)" in texts[1]
  other = two if again == one else one
  assert pictures[2] == [url[again], url[other]]  # two memories, one of this very question
  for number, name in enumerate((again, other), start=1):
    memory = texts[2][texts[2].index(f"(images: {name})") :]
    assert memory[memory.index("image is number") :].startswith(f"image is number {number} ")
  (trial,) = rollout(place, 2)
  assert len(trial["turns"][0]["images"]) == 2  # the record has their names, not their bytes
  assert DOG not in json.dumps(trial) and CAT not in json.dumps(trial)


def test_a_model_of_text_is_told_that_a_memory_s_image_is_left_out(exam, tmp_path):
  names, sent = asked(exam, tmp_path / "run", "text")
  assert [text.count(images.LEFT_OUT) for text in sent] == [1, 2, 2]
  assert f"(images: {names[0]})" in sent[1]


def test_a_memory_that_has_no_room_takes_its_image_with_it(exam):
  options = hle_tasks.Options(data=exam, split="all")
  log = base.AttemptLog(0, hle.FAMILY.make(options).reset(0))
  mine, other = log.initial.images[0], CAT + DOG
  view = base.View((), log, tips=("near " * 9, "far " * 9), images=((mine,), (other,)))
  play = hle.FAMILY.prompts(options).play
  assert play(view)[-1].images == (mine, other)
  assert play(view.without_tips()) == play(base.View((), log))
  text = chat.load(tiny.tokenizer_directory(), tiny.directory("darkroom"))
  request = trial_lib.Generate("play", 0, 0, play, view)
  _, _, whole = policies.fit(request, text, 100_000)
  messages, fitted, _ = policies.fit(request, text, len(whole) - 1)
  assert fitted.tips == view.tips[:1] and play(fitted)[-1].images == (mine,)
  assert images.left_out(messages) == 1


def test_an_image_that_the_exam_no_longer_has_is_missed_aloud_and_once(exam, caplog):
  options = hle_tasks.Options(data=exam, images="skip")
  memory = kept("story")
  memory = memrl.Episodes(
    memory.config, memory.memory, 0, lambda name: hle.FAMILY.image(options, name)
  )
  memory.memory.remember(
    "hle", [episodic.Episode("e", "a cat", "x", True, images=("first",), note="plan")]
  )
  for _ in range(2):
    ((memo,),) = memory.reader.recall([Recall("hle", "a cat")])
    assert memo.images == () and "(images: first)" in memo.text
  assert len(caplog.records) == 1 and "the image of task 'first'" in caplog.text


# What exploration draws.


class Late(policies.TextPolicy):
  """Answers a request at a time: of those that wait the oldest, or the newest."""

  def __init__(self, place):
    super().__init__(
      lambda trial, request, key: GO if request.phase == "play" else "<remark>x</remark>"
    )
    self._place = place

  def poll(self):
    return [self._answers.pop(self._place)]


def drawn(place, concurrency):
  """By trial, the memories that it was shown, where each attempt draws one of nine that are equally good."""
  memory = kept(method={"attempts": 2}, explore="epsilon", explore_rate=1.0, k1=9, k2=1, delta=-1.0)
  told = [episodic.Episode(f"e{n}", "goal key", "", True, note=f"note {n}") for n in range(9)]
  memory.memory.remember("lab", told)
  options, who = lab.Options(style="brief", turns=2), Late(place)
  trials = [Trial("lab", 5, group, index, update=3) for group in range(3) for index in range(2)]
  with pool.EnvPool(lab.FAMILY, options, isolation="inline") as envs:
    collect.collect(
      trials, memrl.make(memory.config, memory).trial, lambda trial, request: who, envs,
      lab.FAMILY.prompts(options), horizon=2, seed=(1,), concurrency=concurrency,
      memory=memory.reader,
    )  # fmt: skip
  assert not any(trial.void for trial in trials)
  return [[turn.reads for turn in t.turns if turn.phase == "play"] for t in trials]


def test_what_a_trial_draws_depends_on_nobody_else():
  whole = drawn(0, 6)
  assert whole == drawn(-1, 3) == drawn(0, 1)
  firsts = [reads[0] for reads in whole]
  assert len(set(firsts)) > 2 and any(reads[0] != reads[-1] for reads in whole)  # it does draw
