"""WebShop's pages, actions, splits, prompts and players."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from memrl_jax.envs import base

pytest.importorskip("bm25s", reason="WebShop searches with bm25s")
pytest.importorskip("rapidfuzz", reason="WebShop compares texts with rapidfuzz")

from memrl_jax.envs import webshop, webshop_tasks
from memrl_jax.envs import webshop_data as data

FAMILY, OPTIONS = webshop.FAMILY, webshop.Options()
SMALL = dataclasses.replace(OPTIONS, products=60, catalogue_seed=2)


def texts(observation):
  return observation.text.split(" [SEP] ")


def play(player, options, seed):
  environment = FAMILY.make(options)
  log = base.AttemptLog(0, environment.reset(seed))
  agent = FAMILY.players[player](options, np.random.default_rng(seed))
  while not log.done:
    result = environment.step(agent.play(base.View((), log)))
    assert result.valid
    log.steps.append(base.Step(result.action, result))
  return log


def test_a_walk_through_every_page():
  environment = FAMILY.make(dataclasses.replace(OPTIONS, turns=40))
  first = environment.reset(5)
  task = environment._task
  shop, opening = webshop_tasks.shop(OPTIONS), ["Instruction:", task.instruction]
  assert texts(first) == ["WebShop", *opening, "Search"]
  assert (first.anchor, first.admissible, first.goal) == ("search", (), task.instruction)
  assert first.task == task.goal.id

  def go(action):
    result = environment.step(f"<think>click[Buy Now]</think> so <action>{action}</action>")
    assert result.valid and not result.done and result.reward == 0
    return result

  query = task.wanted.title.upper()
  page = go(f"search[{query}]").observation
  hits = [shop.product(hit) for hit in shop.search(query)]
  rows = [text for product in hits[:10] for text in (product.asin, product.title, product.tag)]
  total = "Page {} (Total results: 50)"
  back, previous = "Back to Search", "< Prev"
  assert texts(page) == [*opening, back, total.format(1), "Next >", *rows]
  assert page.admissible[:3] == (f"click[{back}]", "click[Next >]", f"click[{hits[0].asin}]")
  assert page.anchor == f"results | {query.lower()!r} | page 1"

  page = go("click[Next >]").observation
  assert texts(page)[2:6] == [back, total.format(2), previous, "Next >"]
  assert texts(page)[6] == hits[10].asin
  for _ in range(3):
    page = go("click[next >]").observation  # names are found without regard to case
  assert texts(page)[2:6] == [back, total.format(5), previous, hits[40].asin]  # the last of 50
  for _ in range(4):
    page = go("click[< Prev]").observation
  assert texts(page)[3] == total.format(1)

  wanted = task.wanted
  options = [text for name, values in wanted.options.items() for text in (name, *values)]
  about = [wanted.title, f"Price: {wanted.tag}", "Rating: N.A."]
  subs = ["Description", "Features", "Reviews"]
  item = go(f"CLICK[ {wanted.asin.lower()} ]").observation
  assert texts(item) == [*opening, back, previous, *options, *about, *subs, "Buy Now"]
  assert f"page 1 | {wanted.asin} | []" in item.anchor

  name, values = next(iter(wanted.options.items()))
  assert go(f"click[{values[0]}]").note == f"{name}: {values[0]} chosen"
  chosen = go(f"click[{values[1]}]").observation  # replaces the other of its group
  assert chosen.text == item.text and chosen.anchor.endswith(f"{[(name, values[1])]}")
  contents = {"Description": [wanted.description], "Features": list(wanted.bullets), "Reviews": []}
  for sub, content in contents.items():
    page = go(f"click[{sub}]").observation
    assert texts(page) == [*opening, back, previous, *content]
    assert page.anchor.startswith(sub.lower()) and page.anchor.endswith(f"{[(name, values[1])]}")
    assert go("click[< Prev]").observation == chosen
  go("click[< Prev]")
  assert go(f"click[{wanted.asin}]").observation == item  # results drop what was chosen
  go(f"click[{values[1]}]")
  assert go(f"click[{back}]").observation == first


def test_turns_are_limited():
  environment = FAMILY.make(dataclasses.replace(OPTIONS, turns=2))
  environment.reset(0)
  assert not environment.step("search[boots]").done
  result = environment.step("search[boots]")
  assert result.done and not result.success and result.score == result.reward == 0


def test_buying_pays_the_formula_times_the_scale():
  options = dataclasses.replace(OPTIONS, reward_scale=4.0)
  environment = FAMILY.make(options)
  environment.reset(5)
  goal, wanted, limit = environment._task
  assert goal.options and data.price(wanted, 0) <= limit
  environment.step(f"search[{wanted.title}]")
  environment.step(f"click[{wanted.asin}]")
  result = environment.step("<action>click[Buy Now]</action>")
  # every attribute and the price, none of the options
  share = (len(goal.attributes) + 1) / (len(goal.attributes) + len(goal.options) + 1)
  assert result.score == pytest.approx(share) and result.reward == pytest.approx(4 * share)
  assert result.done and not result.success and result.note == "bought"
  assert texts(result.observation)[-1] == f"{share:.4g}" and result.observation.admissible == ()


@pytest.mark.parametrize(
  "response",
  [
    "<action>click[no such thing]</action>",
    "<action>click[Search]</action>",
    "<action>press[Next >]</action>",
    "<action>search[]</action>",
    "<action>next</action> search[boots]",  # tags count, and hold no action
    "<think>search[boots]</think>",
    "click[Buy Now]",  # not on this page
  ],
)
def test_what_is_no_action_here_changes_nothing_but_the_turn(response):
  environment = FAMILY.make(SMALL)
  environment.reset(0)
  before = environment.step("search[boots]").observation
  result = environment.step(response)
  assert not result.valid and result.observation == before and result.reward == 0
  assert result.note == webshop.INVALID


@pytest.mark.parametrize(
  ("response", "action"),
  [
    ("<action>search[a]</action> or <action>Search[Red  Boots]</action>", ("search", "red boots")),
    ("click[b] then search[red boots].", ("search", "red boots")),
    ("<action>click[b]", ("click", "b")),  # the end was cut off
    ("<action> click [ 8 [wide] ] </action>", ("click", "8 [wide]")),
    ("<think><action>click[a]</action></think><action>click[b]</action>", ("click", "b")),
    ("research[boots]", None),
    ("", None),
  ],
)
def test_the_last_action_counts(response, action):
  assert webshop.parse(response) == action


def test_retry_is_the_same_goal_at_the_same_price_and_nothing_is_left_of_the_attempt():
  environment = FAMILY.make(OPTIONS)
  first = environment.reset(9)
  task, wanted = environment._task, environment._task.wanted
  value = next(iter(wanted.options.values()))[0]
  taken = [f"search[{wanted.title}]", f"click[{wanted.asin}]", f"click[{value}]", "click[Buy Now]"]
  seen = [environment.step(action) for action in taken]
  assert environment.retry() == first and environment._task == task
  assert [environment.step(action) for action in taken] == seen
  other = FAMILY.make(dataclasses.replace(OPTIONS, price_seed=1))
  goals = {environment.reset(seed).goal == other.reset(seed).goal for seed in range(20)}
  assert environment.reset(9).task == other.reset(9).task and False in goals  # other limits


# What a worker sees: the goals of some seeds under both rules, and whether it had to load jax for them.
WORKER = """
import json, sys
from memrl_jax.envs import panel, webshop
seeds = {"train": range(2000), "test": panel.draw("webshop", 1)[:512], "dev": panel.draw("webshop", 1)[512:]}
print(json.dumps({
  rule: {
    split: [webshop.draw(webshop.Options(split_rule=rule), seed).goal.id for seed in drawn]
    for split, drawn in seeds.items()
  }
  for rule in ("id", "published")
} | {"jax": any(name.split(".")[0] in ("jax", "jaxlib") for name in sys.modules)}))
"""


def test_workers_agree_on_disjoint_splits():
  workers = [
    subprocess.Popen(
      [sys.executable, "-c", WORKER],
      env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
      stdout=subprocess.PIPE,
    )
    for hash_seed in ("1", "2")
  ]
  one, other = (json.loads(worker.communicate()[0]) for worker in workers)
  assert one == other and one.pop("jax") is False
  for tasks in one.values():
    train, dev, test = (set(tasks[split]) for split in data.SPLITS)
    assert not train & dev and not train & test and not dev & test
    assert len(train) > 800 and len(dev) > 200 and len(test) > 200
  for split in data.SPLITS:
    assert {data.split_of(goal) for goal in one["id"][split]} == {split}
    assert len({data.split_of(goal) for goal in one["published"][split]}) == 3


@pytest.mark.parametrize("kind", data.GOAL_KINDS)
def test_the_solver_buys_the_right_thing_for_every_goal(kind):
  options = dataclasses.replace(OPTIONS, goals=kind, products=1200 if kind == "human" else 60)
  for split in data.SPLITS:
    chosen = dataclasses.replace(options, split=split)
    number_G = webshop_tasks.shop(chosen).goal_numbers(split, "id")
    tasks = set()
    for seed in range(len(number_G)):
      log = play("solver", chosen, seed)
      assert log.success and log.steps[-1].result.score == 1
      tasks.add(log.initial.task)
    assert len(tasks) == len(number_G)  # consecutive seeds play all goals


def test_players_differ_as_they_should():
  mean = {
    name: np.mean([play(name, OPTIONS, seed).steps[-1].result.score for seed in range(60)])
    for name in FAMILY.players
  }
  assert mean["random"] < 0.3 < mean["greedy"] < 0.8 < mean["solver"] == 1


def test_prompts_name_what_can_be_clicked_and_a_conversation_only_grows():
  options = dataclasses.replace(OPTIONS, style="chat")
  log, said = play("solver", options, 3), []
  for count in range(len(log.steps)):
    now = dataclasses.replace(log, steps=log.steps[:count])
    messages = FAMILY.prompts(options).play(base.View((), now))
    assert messages[: len(said)] == said
    said = messages
  assert "\nClickable: Back to Search | < Prev | " in said[-1].content
  full = FAMILY.prompts(OPTIONS).play(base.View((), now))[0].content
  assert log.initial.goal in full and "Clickable: Back" in full and "Action 1: search[" in full
  bare = dataclasses.replace(OPTIONS, list_actions=False)
  assert "Clickable" not in FAMILY.prompts(bare).play(base.View((), now))[0].content
  answer = FAMILY.players["greedy"](options, None).reflect(base.View((), log))
  assert FAMILY.prompts(options).parse_reflection(answer)[1]


def test_a_task_is_described_whole():
  text = FAMILY.describe(OPTIONS, 3)
  task = webshop.draw(OPTIONS, 3)
  assert task.wanted.asin in text and "nouns by rule" in text and str(task.limit) in text


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"style": "brief"}, "prompt style 'brief' is not known .there is no tiny model of WebShop"),
    ({"goals": "mine"}, "choose one of human, synthetic .config.env.goals"),
    ({"split": "eval"}, "choose one of auto, train, dev, test"),
    ({"split_rule": "x"}, "choose one of id, published"),
    ({"tagger": "x"}, "choose one of auto, rule, spacy"),
    ({"data_dir": "d", "products": 5}, "describe the generated shop, and data_dir names another"),
    ({"cache_dir": "d"}, "the generated shop is kept in memory"),
    ({"turns": 0}, "leave nothing to do"),
    ({"reward_scale": 0.0}, "choose one above 0"),
  ],
)
def test_options_check_themselves(change, said):
  with pytest.raises(ValueError, match=said):
    webshop.Options(**change)


def test_a_split_without_goals_is_refused():
  options = dataclasses.replace(
    SMALL, split_rule="published"
  )  # 120 goals: all of them are test goals
  with pytest.raises(ValueError, match="there are no train goals by the published rule"):
    webshop.draw(options, 0)


def test_published_files_make_an_environment(tmp_path):
  from memrl_jax.envs import webshop_generated as generated

  generated.write(tmp_path, 4, 60)
  options = webshop.Options(
    data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), tagger="rule"
  )
  assert play("solver", options, 0).success
  assert (
    json.loads(next((tmp_path / "cache").glob("*/manifest.json")).read_text())["goals"] == "human"
  )
