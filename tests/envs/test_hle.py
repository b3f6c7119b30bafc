"""Humanity's Last Exam: rows and images, final answers, matching, the judge, toy questions, attempts."""

import contextlib
import dataclasses
import datetime
import http.server
import importlib.util
import json
import pickle
import threading

import numpy as np
import pytest

from memrl_jax.envs import base, hle, hle_generated, hle_verdict, pool
from memrl_jax.envs import hle_tasks as tasks

OPTIONS = tasks.Options()
TOYS = tasks.questions("", "refuse")

ROW = {
  "id": "668825f8",
  "question": "What is half of one?",
  "image": "",
  "answer": r"$\frac{1}{2}$",
  "answer_type": "exactMatch",
  "category": "Math",
  "raw_subject": "Halves",
  "rationale": "One is two halves.",
  "canary": "",
}
CHOICES = ROW | {
  "id": "choose",
  "question": "Which one is it?\n\nAnswer Choices:\nA. A cat\nB. A dog (male)\nC. Neither",
  "answer": "B",
  "answer_type": "multipleChoice",
}


def written(path, *rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


# Rows.


def test_questions_with_images_are_shown_left_out_or_refused_with_their_file(tmp_path):
  pictured = tasks.question(ROW | {"id": "seen", "image": "data:image/png;base64,AA=="})
  assert pictured.image == "data:image/png;base64,AA=="
  data = written(
    tmp_path / "hle.jsonl", ROW, ROW | {"id": "seen", "image": pictured.image}, CHOICES
  )
  with pytest.raises(ValueError, match=r"1 of the 3 questions of .* set images to show"):
    tasks.draw(tasks.Options(data=data, images="refuse"), 0)
  showing = tasks.Options(data=data, split="all")
  assert {tasks.draw(showing, seed).id for seed in range(9)} == {"668825f8", "choose", "seen"}
  assert tasks.find(showing, "seen") == pictured
  skipping = tasks.Options(data=data, images="skip", split="all")
  assert {tasks.draw(skipping, seed).id for seed in range(6)} == {"668825f8", "choose"}
  assert tasks.question(ROW | {"image": None}).image == ""  # parquet files may write it so


def test_a_parquet_file_is_read_like_jsonl_or_says_what_it_needs(tmp_path):
  path = tmp_path / "hle.parquet"
  if importlib.util.find_spec("pyarrow") is None:
    path.touch()
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install pyarrow, or give JSONL"):
      tasks.questions(str(path), "refuse")
    return
  pyarrow, parquet = (importlib.import_module(n) for n in ("pyarrow", "pyarrow.parquet"))
  parquet.write_table(pyarrow.Table.from_pylist([ROW, CHOICES]), path)
  same = written(tmp_path / "hle.jsonl", ROW, CHOICES)
  assert tasks.questions(str(path), "refuse") == tasks.questions(same, "refuse")


@pytest.mark.parametrize(
  ("change", "match"),
  [
    ({"answer": None}, "task 668825f8 has no text as answer; give rows in Humanity's"),
    ({"answer_type": "essay"}, "answer type 'essay'; it must be one of exactMatch, multipleChoice"),
    ({"image": {"bytes": "AA"}}, "image of task 668825f8 is no text"),
    ({"image": "iVBORw0KGgo="}, "begins with 'iVBORw0KGgo='; give a data URL, data:image/png"),
  ],
)
def test_rows_that_are_not_what_they_should_be_are_refused(change, match):
  with pytest.raises(ValueError, match=match):
    tasks.question(ROW | change)


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"style": "brief"}, "no tiny model"),
    ({"images": "look"}, "choose one of show, skip, refuse"),
    ({"judge_url": "http://a/v1"}, "give both or neither"),
    ({"judge_url": "a.b/v1", "judge_model": "m"}, "'a.b/v1' is no server's address"),
    ({"judge_s": 0.0}, "no judge answers in 0 s"),
    ({"reward_scale": 0.0}, "turns the task around"),
  ],
)
def test_options_check_themselves(options, match):
  with pytest.raises(ValueError, match=match):
    tasks.Options(**options)


# Answers.


@pytest.mark.parametrize(
  ("response", "wanted"),
  [
    ("<think><action>1</action></think>I say <action> 42 </action>.", "42"),
    ("<action>1</action> no, <action>2</action>", "2"),
    ("Work.\n**Final Answer:** 42", "42"),
    ("Answer: 1\nAnswer: 2\nConfidence: 90%", "2"),
    ("So, the answer is $x^2$", "$x^2$"),
    (r"Hence \boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
    ("<think>\nAnswer: 3\n</think>", ""),
    ("It is unclear whether the answer matters", ""),
    ("<action></action>", ""),
    ("", ""),
  ],
)
def test_the_final_answer_of_a_response(response, wanted):
  assert hle_verdict.final(response) == wanted


@pytest.mark.parametrize(
  ("answer", "wanted", "same"),
  [
    ("1/2", r"$\frac{1}{2}$", True),
    (r"\dfrac{1}{2}", "0.5", True),
    ("2/4", ".5", True),
    ("1,000", "1000.0", True),
    ("1e3", "1000", True),
    ("−3", "-3", True),
    (r"\text{Paris}", " paris. ", True),
    ('"Paris"', "Paris", True),
    ("( 1 , 2 )", "(1,2)", True),
    ("x^{2} + 1", "$x^2+1$", True),
    ("0.333", "1/3", False),
    ("12", "1 2", False),
    ("1,2", "12", False),
    ("-3", "3", False),
    ("1/0", "1/0.0", False),
    ("Paris or London", "Paris", False),
    ("Par is", "Paris", False),
    ("", "", False),
    ("$$", ".", False),
  ],
)
def test_matching_forgives_how_an_answer_is_written_and_nothing_else(answer, wanted, same):
  assert hle_verdict.matches(answer, wanted) is same
  assert hle_verdict.matches(wanted, answer) is same


@pytest.mark.parametrize(
  ("answer", "right"),
  [
    ("B", True),
    ("b", True),
    ("(B)", True),
    ("**B**", True),
    ("B. A dog (male)", True),
    ("B) no matter what", True),
    ("a dog (male)", True),
    ("A", False),
    ("A cat", False),
    ("C", False),
    ("B and C", False),
    ("Z", False),
    ("neither", False),
  ],
)
def test_a_choice_is_its_letter_or_its_text(answer, right):
  one = tasks.question(CHOICES)
  assert tasks.correct(one, answer, None) is right
  wordy = one._replace(answer="A dog (male)")  # the reference may be the text
  assert tasks.correct(wordy, answer, None) is right


def test_a_long_response_is_read_in_no_time():
  begun = datetime.datetime.now()
  for junk in ("\n" * 200_000, "answer" + " " * 200_000, r"\boxed{" * 50_000, "answer:" * 50_000):
    hle_verdict.matches(hle_verdict.final(junk) or junk, "1")
  assert (datetime.datetime.now() - begun).total_seconds() < 10


# The judge.


@contextlib.contextmanager
def server(*replies):
  """A server that gives these (status, text) one after the other, the last one for ever; yields URL and requests."""
  asked, left = [], list(replies)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      asked.append((self.path, self.headers.get("Authorization"), body))
      status, text = left.pop(0) if len(left) > 1 else left[0]
      reply = json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}}]}
      ).encode()
      self.send_response(status)
      self.send_header("Content-Length", str(len(reply)))
      self.end_headers()
      self.wfile.write(reply)

    def log_message(self, *given):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    try:
      yield f"http://127.0.0.1:{running.server_port}/v1", asked
    finally:
      running.shutdown()
      thread.join()


RIGHT, WRONG = (200, "The same.\nverdict: correct"), (200, "**Verdict:** incorrect")


def test_the_judge_is_asked_about_what_does_not_match_once_and_with_its_key(monkeypatch):
  monkeypatch.setenv("JUDGE_KEY", "sesame")
  one = tasks.question(ROW | {"image": "data:image/png;base64,AA=="})
  pick = tasks.question(CHOICES)
  with server(RIGHT, WRONG) as (url, asked):
    judge = tasks.Options(judge_url=url, judge_model="m", judge_key_env="JUDGE_KEY").judge
    assert tasks.correct(one, "0.5", judge) and tasks.correct(pick, "B", judge)
    assert not tasks.correct(pick, "A", judge) and not tasks.correct(one, "", judge)
    assert asked == []  # all of these are settled without it
    for _ in range(2):
      assert tasks.correct(one, "fifty per cent", judge)
    assert not tasks.correct(one, "a third", judge)
    assert len(asked) == 2
  path, key, body = asked[0]
  assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer sesame", "m")
  assert "base64" not in json.dumps(body)  # a judge compares texts
  (message,) = body["messages"]
  assert all(
    part in message["content"] for part in (ROW["question"], ROW["answer"], "fifty per cent")
  )


def test_a_busy_judge_is_asked_again_and_one_without_a_verdict_gives_none():
  def ask(url, answer):
    judge = hle_verdict.Judge(url, "m", retries=2, backoff_s=0.01)
    return judge.agrees("What?", "this", answer)

  with server((503, ""), (200, "Hard to say."), RIGHT) as (url, asked):
    assert ask(url, "that") and len(asked) == 3
  with server((200, "verdict: maybe")) as (url, asked):
    with pytest.raises(ConnectionError, match=r"after 3 attempts \(its reply has no verdict"):
      ask(url, "that")
    with pytest.raises(ConnectionError):  # and is asked anew the next time
      ask(url, "that")
    assert len(asked) == 6
  with (
    server((401, "")) as (url, _),
    pytest.raises(ConnectionError, match=r"after 1 attempts \(HTTP 401.*judge_key_env"),
  ):
    ask(url, "that")
  with pytest.raises(ConnectionError, match="ConnectError"):
    ask(url, "another")  # the server is gone


def test_a_trial_without_a_verdict_has_failed_and_is_not_a_wrong_answer():
  with server((400, "")) as (url, _):
    options = tasks.Options(judge_url=url, judge_model="m")
    with pool.EnvPool(hle.FAMILY, options, workers=1, timeout_s=30) as environments:
      handle = environments.open()
      environments.run([pool.Call(handle, "reset", 0)])
      (answer,) = environments.run([pool.Call(handle, "step", "<action>a guess</action>")])
  assert isinstance(answer, pool.Failure) and "no verdict of model 'm'" in answer.text


# Toy questions.


def test_toy_questions_have_the_answers_that_were_worked_out_another_way():
  by_kind = {kind: [q for q in TOYS if q.raw_subject == kind] for kind in hle_generated.KINDS}
  assert all(len(found) == hle_generated.EACH for found in by_kind.values())
  assert len({one.question for one in TOYS}) == len(TOYS) == 100

  def numbers(text):
    return [int(word) for word in "".join(c if c.isdigit() else " " for c in text).split()]

  for one in by_kind["power"]:
    base_, power, modulus = numbers(one.question)
    assert (base_**power - int(one.answer)) % modulus == 0 and int(one.answer) < modulus
  for one in by_kind["digits"]:
    number, base_ = numbers(one.question)
    assert int(one.answer, base_) == number
  for one in by_kind["series"]:
    count = numbers(one.question)[-1]
    first, second = map(int, one.question.split("begins ")[1].split(", ")[:2])
    assert int(one.answer) == sum(range(first, first + count * (second - first), second - first))
  for one in by_kind["prime"]:
    shown = dict(hle_verdict.choices(one.question))
    prime = [k for k, text in shown.items() if all(int(text) % d for d in range(2, int(text)))]
    assert prime == [one.answer] and len(shown) == 5
  for one in by_kind["lamps"]:
    count, shown = numbers(one.question)[0], dict(hle_verdict.choices(one.question))
    lit = sum(sum(lamp % k == 0 for k in range(1, count + 1)) % 2 for lamp in range(1, count + 1))
    assert int(shown[one.answer]) == lit
  for one in by_kind["weekday"]:
    shown = dict(hle_verdict.choices(one.question))
    day = datetime.date.fromisoformat(one.question.split("does ")[1][:10])
    assert shown[one.answer] == f"{day:%A}" and len(shown) == 7


def test_training_and_evaluation_seeds_open_different_questions_of_the_same_kinds():
  first = base.EVAL_SEEDS[0]
  train = {tasks.draw(OPTIONS, seed) for seed in range(len(TOYS))}
  held_out = {tasks.draw(OPTIONS, first + n) for n in range(len(TOYS))}
  assert train | held_out == set(TOYS) and not train & held_out
  assert {q.raw_subject for q in train} == {q.raw_subject for q in held_out}


# Attempts.


def test_an_attempt_is_one_answer_and_never_shows_the_right_one():
  options = tasks.Options(reward_scale=2.0)
  environment = hle.FAMILY.make(options)
  first = environment.open(tasks.question(ROW))
  assert (first.text, first.goal, first.task) == (ROW["question"], ROW["question"], ROW["id"])
  right = environment.step("<think>easy</think><action>1/2</action>")
  assert (right.reward, right.success, right.score, right.done) == (2.0, True, 1.0, True)
  assert (right.valid, right.action, right.note) == (True, "1/2", "correct")
  assert environment.retry() == first
  wrong = environment.step("<action>2</action>")
  assert (wrong.reward, wrong.success, wrong.score, wrong.done) == (0.0, False, 0.0, True)
  assert "frac" not in wrong.observation.text and "0.5" not in wrong.observation.text
  environment.retry()
  silent = environment.step("I pass.")
  assert (silent.valid, silent.action, silent.reward, silent.note) == (False, "", 0.0, "no answer")
  assert len({r.observation.anchor for r in (right, wrong, silent)} | {first.anchor}) == 4


@pytest.mark.parametrize("style", tasks.STYLES)
def test_an_image_goes_with_the_message_that_shows_its_question_and_changes_no_text(style):
  image = "data:image/png;base64,AA=="
  prompts, environment = hle.FAMILY.prompts(tasks.Options(style=style)), hle.FAMILY.make(OPTIONS)
  logs = []
  for row in (ROW, ROW | {"image": image}):
    log = base.AttemptLog(0, pickle.loads(pickle.dumps(environment.open(tasks.question(row)))))
    view = base.View((), log)
    opening = prompts.play(view)
    result = environment.step("<action>2</action>")
    log.steps.append(base.Step(result.action, result))
    logs.append([opening, prompts.reflect(view), prompts.tip(view)])
  for bare, pictured in zip(*logs, strict=True):
    assert [m.images for m in pictured] == [(image,), *[()] * (len(pictured) - 1)]
    assert [m._replace(images=()) for m in pictured] == bare  # no line of text says more or less


@pytest.mark.parametrize("style", tasks.STYLES)
def test_prompts_show_the_question_memories_and_no_answer(style):
  prompts = hle.FAMILY.prompts(tasks.Options(style=style))
  log = base.AttemptLog(0, hle.FAMILY.make(OPTIONS).open(tasks.question(ROW)))
  text = "\n".join(m.content for m in prompts.play(base.View((), log)))
  assert ROW["question"] in text and "<action>" in text and "frac" not in text
  past = dataclasses.replace(log, reflection="mind the halves")
  told = "\n".join(m.content for m in prompts.play(base.View((past,), log)))
  assert "mind the halves" in told


def test_the_solver_is_right_and_the_random_player_seldom():
  environment, wins = hle.FAMILY.make(OPTIONS), {}
  for name in ("solver", "random"):
    wins[name] = 0
    for seed in range(60):
      log = base.AttemptLog(0, environment.reset(seed))
      player = hle.FAMILY.players[name](OPTIONS, np.random.default_rng([seed, 1]))
      result = environment.step(player.play(base.View((), log)))
      assert result.valid
      log.steps.append(base.Step(result.action, result))
      wins[name] += log.success
      assert hle.FAMILY.prompts(OPTIONS).parse_reflection(player.reflect(base.View((), log)))[1]
  assert wins["solver"] == 60 and wins["random"] <= 15
